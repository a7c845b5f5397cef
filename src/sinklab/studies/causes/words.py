"""The causes of a model's sinks in sentences: counts of labels, what is undecided, and how long a run will take."""

from __future__ import annotations

from collections.abc import Mapping

from sinklab.results.intervals import CHANCE
from sinklab.results.summaries.causes import CausesSummary, ExaminedGroup
from sinklab.studies.causes.head_group import joined

__all__ = ["place_name", "sentences"]

GROUPS = 6
"""Groups that the sentences name."""

_MEANING = {
    "semantic": "{say} something about the text that the model misses, on every domain (semantic)",
    "constant": "{have} a constant output that the model misses (constant)",
    "dormant": "{is} silent through {its} sink and {need} it to be silent (dormant)",
    "broadcast": "{pass} on the value at {its} sink (broadcast)",
    "unneeded": "{is} not missed (unneeded)",
    "switch": "{is} semantic on some domains and dormant on others (switch)",
    "broadcast-switch": "{is} semantic on some domains and {pass} on the value at {its} sink on others (broadcast-switch)",
    "mixed": "{have} labels that differ by domain (mixed)",
}


def sentences(summary: CausesSummary) -> str:
    """What was found, in plain words.

    Args:
        summary: with ``counts``, ``heads``, ``sink``, ``texts``, ``texts_needed``, ``mirrored`` and ``level``, and with
            ``groups`` if there are any.
    """
    parts = (
        _of_sink(summary),
        _of_labels(summary),
        _of_needs(summary),
        *(_of_mirrored(summary, domain) for domain, count in summary["mirrored"].items() if count),
        _of_groups(summary),
        _of_undecided(summary),
    )
    return " ".join(part for part in parts if part)


def _of_sink(summary: CausesSummary) -> str:
    where = summary["sink"].get("name") or place_name(summary["sink"]["place"])
    return f"The sink is {where}." if where else "The model is read as one without a sink."


def _of_labels(summary: CausesSummary) -> str:
    """How many heads have each label, and which labels none has."""
    counts, total = summary["counts"], len(summary["heads"])
    heads = "1 head" if total == 1 else f"{total} heads"
    kinds = [f"{count} {_agree(name, count)}" for name, count in counts.items() if count and name in _MEANING]
    if not kinds:
        return f"No label can be given to any of {heads}."
    none = [name for name in _MEANING if not counts[name]]
    return f"Of {heads}, {_listed(kinds)}." + (f" None is {_listed(none, 'or')}." if none else "")


def _of_needs(summary: CausesSummary) -> str:
    needing = [
        f"{head['layer']}.{head['head']}{_where(head['needs_sink'])}"
        for head in summary["heads"]
        if "yes" in head["needs_sink"].values()
    ]
    if not needing:
        return ""
    label, need = ("its label", "needs its") if len(needing) == 1 else ("their labels", "need their")
    return (
        f"Whatever {label}, {_listed(needing)} {need} sink: the attention that it takes costs more on other keys than on none."
    )


def _of_mirrored(summary: CausesSummary, domain: str) -> str:
    """Of a domain with heads whose every silencing lowers the loss."""
    count = summary["mirrored"][domain]
    semantic = sum(head["domains"][domain] == "semantic" for head in summary["heads"])
    where = f" on {domain}" if len(summary["mirrored"]) > 1 else ""
    return (
        f"For {count}, every way of silencing {'it' if count == 1 else 'them'} lowers the loss{where}, and"
        f" {semantic or 'none'} {'is' if semantic < 2 else 'are'} semantic there. With random weights both kinds of"
        " head are equally common, and so they may be on texts that the model does not know."
    )


def _of_groups(summary: CausesSummary) -> str:
    groups = summary.get("groups", [])
    if not groups:
        return ""
    more = f"; {len(groups) - GROUPS} more groups are in the table" if len(groups) > GROUPS else ""
    return f"Edited at once, {_listed([_of_group(group) for group in groups[:GROUPS]])}{more}."


def _of_undecided(summary: CausesSummary) -> str:
    """How many heads have no label with these texts, and how many texts would decide them."""
    undecided = summary["counts"]["undecided"]
    if not undecided:
        return ""
    needed = summary["texts_needed"]
    together = f" of {len(summary['mirrored'])} domains together" if len(summary["mirrored"]) > 1 else ""
    text = f"{undecided} {'is' if undecided == 1 else 'are'} undecided with {summary['texts']} texts{together}"
    text += f" at a false discovery rate of {summary['level']:g}; "
    if needed is None:
        return text + (
            "how many texts would decide them cannot be estimated: their effects fit no label, or are too near the "
            "minimal effect."
        )
    return text + (
        f"about {needed:,} texts of a domain would decide half of those for which this can be estimated, each with a "
        f"probability of {100 * CHANCE:.0f} %."
    )


def _where(needs: Mapping[str, str]) -> str:
    """The domains on which a head needs its sink, where they are not all."""
    domains = [name for name, need in needs.items() if need == "yes"]
    return "" if len(domains) == len(needs) else f" (on {_listed(domains)})"


def _of_group(group: ExaminedGroup) -> str:
    called = f" ({group['called']})" if group["called"] else ""
    return f"{joined(group['members'])}{called} {'is' if len(group['members']) == 1 else 'are'} {group['label']}"


def place_name(place: int | str | None) -> str:
    """Where a sink is, in words: ``position 0``, ``the null score``, nothing for none."""
    if place is None:
        return ""
    return "the null score" if place == "null" else f"position {place}"


def _agree(name: str, count: int) -> str:
    single = count == 1
    return _MEANING[name].format(
        say="says" if single else "say", need="needs" if single else "need",
        have="has" if single else "have",
        **{"is": "is" if single else "are", "its": "its" if single else "their", "pass": "passes" if single else "pass"},
    )  # fmt: skip


def _listed(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
