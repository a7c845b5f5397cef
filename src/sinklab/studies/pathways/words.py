"""The comparison in words that follow from the numbers by rules: a paragraph on the open question, and what else they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sinklab.jobs.scale import Base, Scale, is_natural
from sinklab.results.naming import counted
from sinklab.studies.pathways.judging import BOUNDS, MARGIN, Beside, Row, replacement, sink_to_replace
from sinklab.studies.pathways.operations import REFERENCE, is_explicit
from sinklab.studies.reproduce.scales import DESCRIPTIONS

__all__ = ["DEFINITION", "Words", "definition", "figure_title", "in_words"]

OWN_RATE = "at its own best of five learning rates"

WINDOW = "a window of a quarter of the context without sinks costs less than 0.02 nats"
WORTH = "of what a window of a quarter of the context costs, the first four tokens give back less than 0.02 nats"

DEFINITION = (
    "A pathway is low-distortion if, in a model trained with it on the same data for the same number of steps, with as many"
    f" parameters as softmax's and {OWN_RATE}, the held-out loss is less than 0.02 nats above "
    "that of softmax with the same seed; fewer than 5 % of heads sink on the first token, both by weight times gate "
    "and by the share of a row; the first hidden state is less than 2 times as long as others; "
    f"{WINDOW}; and 8-bit weights and activations cost less than 0.02 nats. "
    "Each holds if its 95 % interval over seeds"
    " lies inside the bound, fails if it lies outside, and is undecided otherwise. Its loss is equivalent to softmax's if "
    "the 90 % interval of the differences at the same seed lies within 0.02 nats of 0 (two one-sided tests at 5 %), better "
    "or worse if it lies wholly beyond, and undecided otherwise."
)
"""The definitions of :mod:`sinklab.studies.pathways.judging`, in a paragraph."""

OF_BASE: Mapping[Base, str] = {"bos": "BOS in front of every row", "no-bos": "no BOS"}


def definition(rate: float | None, *, natural: bool = False) -> str:
    """What low-distortion means where each operation has a learning rate of its own, or all have one; and on natural text."""
    text = DEFINITION.replace(WINDOW, WORTH) if natural else DEFINITION
    return text if rate is None else text.replace(OWN_RATE, f"at {_one_rate(rate)}")


def figure_title(scale: str, base: Base, seeds: int, rate: float | None = None) -> str:
    """What stands above the figure."""
    at_rate = "" if rate is None else f", learning rate ×{rate:g}"
    return f"Ways to do nothing, scale {scale}, {OF_BASE[base]}{at_rate}, {counted(seeds, 'seed')}, 95 % intervals"


@dataclasses.dataclass(frozen=True)
class Words:
    """What the numbers say.

    Attributes:
        paragraph: on the open question, an explicit way to do nothing that leaves little distortion.
        statements: the rest, each with what it is about.
    """

    paragraph: str
    statements: Mapping[str, str]

    def to_dict(self) -> dict[str, object]:
        """For ``summary`` and ``run.json``."""
        return {"paragraph": self.paragraph, "statements": dict(self.statements)}


def in_words(
    rows: Sequence[Row], cannot: Mapping[str, str], *, scale: Scale, base: Base, seeds: int, rate: float | None = None
) -> Words:
    """Which pathway is low-distortion, as far as the numbers say; every sentence is there only if they do.

    Args:
        rows: of :func:`~sinklab.studies.pathways.judging.judged`, the reference among them.
        cannot: operations that provably cannot do the trigger task.
        rate: the one learning rate of all trainings, over that of the scale; ``None`` where each operation has its own.
    """
    reference = next(row for row in rows if row.label == REFERENCE)
    others = [row for row in rows if row is not reference]
    setting = f"At the scale {scale} ({DESCRIPTIONS[scale]}), here with {OF_BASE[base]}, over {_of_seeds(others, seeds)}:"
    natural = is_natural(scale)
    replaced, question = _of_what_replaces(rows, rate, natural), _of_the_question(rows, rate)
    answer = [setting, *_of_reference(reference, natural), *replaced, *question, _limits(scale)]
    statements = {
        "Loss": _of_loss(others, rate),
        "Learning rates": _of_rates(rows) if rate is None else _of_one_rate(rate),
        "Sinks at one rate": _of_sinks_at_one_rate(rows, rate),
        "Bounds at the own rates" if rate is None else "Bounds": _of_bounds(others),
        "Loss and distortion together": _of_front(rows),
        "Text that it was not trained for": _of_robustness(rows),
        "Trigger task": _of_trigger(rows, cannot),
        "Time": _of_cost(others),
    }
    return Words(" ".join(answer), {about: " ".join(found) for about, found in statements.items() if found})


def _of_seeds(others: Sequence[Row], seeds: int) -> str:
    """How many seeds there are, and how many each operation has where it has not all."""
    own = sorted({len(row.seeds) for row in others}) or [seeds]
    if own == [seeds]:
        return counted(seeds, "seed")
    span = f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}"
    return f"{counted(seeds, 'seed')}, each operation on {span} of them beside {REFERENCE}"


def _of_bounds(others: Sequence[Row]) -> list[str]:
    """Which are inside all bounds, which outside of one, and which may be either."""
    inside = [row.label for row in others if row.answer == "yes"]
    failing = [f"{row.label} ({', '.join(row.named('not reproduced'))})" for row in others if row.answer == "no"]
    still_open = [f"{row.label} ({', '.join(row.named('inconclusive'))})" for row in others if row.answer == "undecided"]
    sentences = [f"Inside all of them: {_list(inside)}."] if inside else []
    sentences += [f"Not low-distortion, with what fails in brackets: {_list(failing)}."] if failing else []
    sentences += [f"Undecided, with what is open in brackets: {_list(still_open)}."] if still_open else []
    return sentences


def _of_front(rows: Sequence[Row]) -> list[str]:
    """Those that no other one beats."""
    best = [row.label for row in rows if row.best]
    if not best:
        return []
    return [
        f"By the means, no other operation has both a lower loss and a lower distortion than {_list(best)}; neighbours on the "
        "plot may change places with other seeds."
    ]


def _of_loss(others: Sequence[Row], rate: float | None) -> list[str]:
    """What the two one-sided tests say."""
    answers: list[tuple[Beside, str]] = [
        ("better", "is lower than softmax's by 0.02 nats or more with"),
        ("worse", "is higher by 0.02 nats or more with"),
        ("equivalent", "is equivalent to softmax's, within 0.02 nats, with"),
        ("undecided", "leaves it open with"),
    ]
    named = {
        answer: [row.label for row in others if row.beside is not None and row.beside.answer == answer] for answer, _ in answers
    }
    parts = [f"it {words} {_list(named[answer])}" for answer, words in answers if named[answer]]
    if not parts:
        return []
    count = sum(map(len, named.values()))
    tests = f" ({count} comparisons, each by two tests at 5 %, not corrected for their number)" if count > 1 else ""
    return [f"Of the loss at {'the own rates' if rate is None else _one_rate(rate)}{tests}: {'; '.join(parts)}."]


def _of_one_rate(rate: float) -> list[str]:
    """What a comparison without a search of rates can say, and what not."""
    return [
        f"All operations are trained at {_one_rate(rate)}, and no rate is searched for: one that is inside the bounds is so "
        "without having been tuned, and one that is outside may be inside at a rate of its own."
    ]


def _of_rates(rows: Sequence[Row]) -> list[str]:
    """How much the learning rate matters to the comparison."""
    sentences = []
    gains = {row.label: row.numbers["tuning_gain"].mean for row in rows if "tuning_gain" in row.numbers}
    if gains and max(gains.values()) > MARGIN:
        most = max(gains, key=gains.__getitem__)
        own = f" and softmax {gains[REFERENCE]:z.3f}" if REFERENCE in gains and most != REFERENCE else ""
        sentences.append(
            f"A rate of its own, chosen on other seeds, gives {most} {gains[most]:z.3f} nats{own}, so that one rate for all "
            "would misjudge it."
        )
    elif gains:
        sentences.append(f"A rate of its own gives no operation more than {MARGIN} nats.")
    ends = [f"{row.label} ({row.choice.end})" for row in rows if row.choice is not None and row.choice.end]
    if ends:
        sentences.append(f"The best rate is the end of the range, and one outside may be better, with {_list(ends)}.")
    none = [row.label for row in rows if row.choice is not None and row.choice.factor is None]
    if none:
        sentences.append(f"No learning rate could be chosen for {_list(none)}.")
    ranges = {row.label: row.numbers["rate_range"].mean for row in rows if "rate_range" in row.numbers}
    if len(ranges) > 1:
        least, most = min(ranges, key=ranges.__getitem__), max(ranges, key=ranges.__getitem__)
        sentences.append(
            f"Over the rates the loss spans least with {least} ({ranges[least]:.3f} nats) and most with {most} "
            f"({ranges[most]:.3f})."
        )
    broken = [row.label for row in rows if (_mean(row, "rate_diverged") or 0.0) > 0.0]
    if broken:
        sentences.append(f"Some trainings of the selection diverged with {_list(broken)}.")
    return sentences


def _of_sinks_at_one_rate(rows: Sequence[Row], rate: float | None) -> list[str]:
    """Which operations have a sink at the learning rate that all were trained at."""
    found = [row for row in rows if row.at_one_rate]
    if len(found) < 2 or not any(row.label == REFERENCE for row in found):
        return []
    groups = {"not reproduced": "a sink is there", "reproduced": "there is none", "inconclusive": "it is open"}
    parts = []
    for verdict, said in groups.items():
        named = [
            f"{row.label} ({'not measured' if (mean := row.at_one_rate['sink'].mean) is None else f'{mean:.1f} %'})"
            for row in found
            if row.at_one_rate["sink"].verdict == verdict
        ]
        parts += [f"{said} with {_list(named)}"] if named else []
    # Of a search that is scale_rate_sink, and else the bound itself, on the smaller of two rates of the first token.
    by = "carry a first token" if rate is None else "sink on the first token by weight times gate and by share"
    return [f"At {_one_rate(rate)} for all, by the heads that {by}: {'; '.join(parts)}."]


def _of_what_replaces(rows: Sequence[Row], rate: float | None, natural: bool) -> list[str]:
    """Which operations have neither the sink of softmax nor its loss in a window, at no more loss, all at one rate."""
    reference = next(row for row in rows if row.label == REFERENCE)
    others = [row for row in rows if row is not reference and row.at_one_rate]
    if not sink_to_replace(rows) or not others:
        return []
    by_answer: dict[str, list[str]] = {"yes": [], "no": [], "undecided": []}
    for row in others:
        answer, what = replacement(row)
        by_answer[answer].append(f"{row.label} ({', '.join(what)})" if what else row.label)
    sink, lost = (reference.at_one_rate[name].mean for name in ("sink", "window"))
    parts = [
        f"At one rate for all, {_times(rate)}that of the scale, {REFERENCE} has a sink to replace, in {sink:.1f} % of heads, "
        + (f"worth {lost:z.3f} nats in a window" if natural else f"and loses {lost:z.3f} nats in a window without it")
    ]
    parts.append(
        f"it is replaced, with loss, sink and window inside the bounds, by {_list(by_answer['yes'])}"
        if by_answer["yes"]
        else "it is shown to be replaced, with loss, sink and window inside the bounds, by none"
    )
    parts += [f"not by {_list(by_answer['no'])}, with what fails in brackets"] if by_answer["no"] else []
    parts += [f"open is {_list(by_answer['undecided'])}"] if by_answer["undecided"] else []
    too = "" if rate else " (That these bounds are asked at one rate too was decided with results at that rate in view.)"
    return [f"{'; '.join(parts)}.{too}"]


ROBUSTNESS = {
    "noise_gap": "a tenth of the tokens replaced",
    "other_language_gap": "another language",
    "false_sink_gap": "a false sink",
}
"""Column to what was done to the text."""


def _of_robustness(rows: Sequence[Row]) -> list[str]:
    """Operations that bear a change of the text worse or better than softmax by more than the margin, by mean differences."""
    reference = next(row for row in rows if row.label == REFERENCE)
    parts = []
    for column, words in ROBUSTNESS.items():
        usual = _mean(reference, column)
        if usual is None:
            continue
        less = {row.label: row.beyond[column] for row in rows if row is not reference and column in row.beyond}
        worse = [label for label, more in less.items() if more > MARGIN]
        better = [label for label, more in less.items() if more < -MARGIN]
        beyond = [f"more with {_list(worse)}"] if worse else []
        beyond += [f"less with {_list(better)}"] if better else []
        parts.append(f"{words} costs softmax {usual:z.3f} nats{', and ' + ', '.join(beyond) if beyond else ''}")
    return (
        [f"Out of what was trained (means, a difference being more than {MARGIN} nats): {'; '.join(parts)}."] if parts else []
    )


def _of_the_question(rows: Sequence[Row], rate: float | None) -> list[str]:
    """Whether there is an explicit low-distortion way to do nothing, as far as this can say.

    Where softmax has no distortion either, a pathway without any has replaced nothing, and the question was not asked.
    """
    reference = next(row for row in rows if row.label == REFERENCE)
    others = [row for row in rows if row is not reference]
    at_rate = "at its own rate" if rate is None else f"at {_one_rate(rate)}"
    explicit = [row for row in others if is_explicit(row.label)]
    if not explicit:
        return []
    if reference.answer == "yes":
        inside = [row.label for row in explicit if row.answer == "yes"]
        words = (
            f"{at_rate[0].upper()}{at_rate[1:]} {REFERENCE} itself is inside every bound, so there is no sink to replace, and "
            "whether an explicit way to do nothing would replace one is not tested at such "
            f"{'rates' if rate is None else 'a rate'}"
        )
        words += f": that {_list(inside)} {'is' if len(inside) == 1 else 'are'} inside too says little" if inside else ""
        return [f"{words}."]
    good = [row.label for row in explicit if row.answer == "yes"]
    without = [row.label for row in others if row.answer == "yes" and not is_explicit(row.label)]
    left = [row.label for row in explicit if row.answer == "undecided"]
    if good:
        better = [
            row.label for row in explicit if row.answer == "yes" and row.beside is not None and row.beside.answer == "better"
        ]
        also = f"; {_list(better)} {'has' if len(better) == 1 else 'have'} a lower loss too" if better else ""
        words = f"An explicit way to do nothing that leaves little distortion exists here: {_list(good)}{also}."
    elif left:
        words = (
            "Whether an explicit way to do nothing leaves little distortion stays open here: it is shown of none, and refuted "
            f"of {len(explicit) - len(left)} of {len(explicit)}."
        )
    else:
        ways = f"None of the {len(explicit)} explicit ways to do nothing leaves"
        if len(explicit) == 1:
            ways = "The one explicit way to do nothing does not leave"
        words = f"{ways} little distortion here."
    if reference.findings["sink"].verdict == "inconclusive":
        words += f" Whether {REFERENCE} itself has a sink {at_rate} is open, so that "
        words += (
            "an operation which has one at another rate may have it by that rate."
            if rate is None
            else "it is not shown that there is one to replace."
        )
    if without:
        words += f" Without one, {_list(without)} {'is' if len(without) == 1 else 'are'} low-distortion."
    return [words]


def _of_reference(row: Row, natural: bool) -> list[str]:
    wanted = ("held_out_loss", "effective_sink_rate", "sink_worth" if natural else "window_gap", "int8_gap")
    if not all(name in row.numbers for name in wanted):
        return [f"{row.label} could not be measured in full, so that nothing is compared with it."]
    loss, rate, window, int8 = (row.numbers[name].mean for name in wanted)
    reached = f"{row.label} reaches a loss of {loss:z.3f} nats with a sink rate of {rate:.1f} %"
    if natural:
        return [f"{reached}; in a window its first four tokens give back {window:z.3f} nats, and 8 bits cost {int8:z.4f}."]
    return [f"{reached}, and loses {window:z.3f} nats in a window without sinks and {int8:z.4f} by 8 bits."]


def _of_trigger(rows: Sequence[Row], cannot: Mapping[str, str]) -> list[str]:
    shares = {row.label: _mean(row, "trigger_solved") for row in rows if row.label not in cannot}
    solved = [label for label, share in shares.items() if share == 1.0]
    partly = [label for label, share in shares.items() if share is not None and share < 1.0]
    sentences = [f"The trigger task is learned with every seed by {_list(solved)}."] if solved else []
    sentences += [f"Not with every seed within the cap: {_list(partly)}."] if partly else []
    if cannot:
        sentences.append(
            f"That {_list(list(cannot))} cannot do it is provable, and says that the task wants a mean, not that such heads "
            "cannot be silent."
        )
    return sentences


def _of_cost(others: Sequence[Row]) -> list[str]:
    times = {row.label: row.numbers["train_time_long"] for row in others if "train_time_long" in row.numbers}
    if not times:
        return []
    least, most = (choose(times, key=lambda label: times[label].mean) for choose in (min, max))
    also = "" if least == most else f" and {times[most].mean:.2f} times with {most}"
    medians = "medians" if also else "median"
    return [
        f"In long rows a training step takes {times[least].mean:.2f} times as long as with softmax with {least}{also} "
        f"({medians}, in turns on one machine; it is this code that is timed)."
    ]


def _limits(scale: Scale) -> str:
    bounds = ", ".join(f"{bound.name} < {bound.less_than:g} {bound.unit}" for bound in BOUNDS)
    small = " Models this small have few heads and no massive activations to speak of; large ones may rank otherwise."
    fixed = f"The bounds ({bounds}) and the margin were fixed before the runs."
    if is_natural(scale):
        fixed += (
            " That the one on the window is on what the first four tokens give back of its loss, since a window of natural "
            "text loses context besides, was decided with results in view."
        )
    return f"{fixed}{small if scale in ('tiny', 'small') else ''}"


def _one_rate(rate: float | None) -> str:
    return f"{_times(rate)}the rate of the scale"


def _times(rate: float | None) -> str:
    return "" if rate is None or rate == 1 else f"{rate:g} times "


def _mean(row: Row, column: str) -> float | None:
    return row.numbers[column].mean if column in row.numbers else None


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
