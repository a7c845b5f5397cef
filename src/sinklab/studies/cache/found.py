"""What was found of cache policies, their rows, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklab.results.blocks import Block, Cell, Curves, Facts, Grid, Say, counted, interval, names, number
from sinklab.results.intervals import LEAST_PARTS, rare_cost
from sinklab.results.metric import LOSS, Coordinates, Metric, Row

INTEGER_MARGIN = 0.02
"""Nats per token by which integers may change the loss at most (the whole interval) before they are taken; as of sinks."""

LOSS_BY_POSITION = Metric(
    "loss_by_position", "nats", "Mean next-token loss over the texts of the tokens predicted from here on, up to the next row."
)
DECODING_SPEED = Metric("decoding_tokens_per_second", "tokens/s", "Tokens decoded one by one over the time that this took.")
BYTES_HELD = Metric("bytes_held", "bytes", "Bytes of keys and values that the cache of one text holds in the end.")
GAP = Metric(
    "cache_quantization_gap",
    "nats",
    "Mean next-token loss with a cache of integers, less that with the same cache in the model's dtype; of the same tokens.",
)
BYTES = Metric(
    "cache_bytes_ratio",
    "ratio",
    "Bytes of a cache of integers over those of the same cache in the model's dtype.",
    range=(0.0, float("inf")),
)


@dataclass(frozen=True)
class Difference:
    """A mean in nats, and its 95 % interval; without ends where one part alone was measured."""

    mean: float
    low: float | None
    high: float | None

    def __neg__(self) -> Difference:
        low, high = self.low, self.high
        return Difference(-self.mean, None if high is None else -high, None if low is None else -low)

    @property
    def most(self) -> float:
        """How far from 0 the interval reaches."""
        return float("inf") if self.low is None or self.high is None else max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Size:
    """What a cache policy is recommended to hold."""

    num_sinks: int
    window: int


@dataclass(frozen=True)
class LeftOut:
    """A policy that was not measured."""

    policy: str
    label: str
    reason: str


@dataclass(frozen=True)
class PolicyEntry:
    """One policy of a comparison.

    Attributes:
        held, budget: most tokens held, the query's own included, and before the query; no budget where all are held.
        loss, loss_low, loss_high: nats per token, of the tokens from ``scored_from`` on.
        against_window, against_recompute, against_full: its loss less that of the window without sinks of the same size, of
            the window computed anew for every token, and of dense attention.
        tokens_per_second: of single-token steps.
        loss_by_position: over the stretches of :attr:`Comparison.positions`; of a policy that was scored at some tokens, in the
            middle of coarser ones.
        loss_errors: half of the 95 % interval of each of those, where they are of some tokens; ``None`` where of all.
    """

    policy: str
    label: str
    num_sinks: int | None
    window: int | None
    held: int
    budget: int | None
    settings: dict[str, Any]
    loss: float
    loss_low: float | None
    loss_high: float | None
    scored_tokens: int
    against_window: Difference | None
    against_recompute: Difference | None
    against_full: Difference | None
    decoded_tokens: int
    tokens_per_second: float
    bytes_held: float
    loss_by_position: list[float | None]
    loss_errors: list[float | None] | None = None


@dataclass(frozen=True)
class QuantizedEntry:
    """One cache of integers, against the same cache in the model's dtype.

    ``whole`` says what stays in full precision, and ``positions`` where; ``window`` tokens are held besides, of all ``None``.
    """

    quantized: str
    whole: str
    positions: list[int]
    window: int | None
    tokens: int
    gap: Difference
    bytes_ratio: float


@dataclass(frozen=True)
class Comparison:
    """``summary.json`` of ``sinklab cache``, and the entry ``cache`` of that of an audit.

    Tokens are scored from ``scored_from`` on; ``positions`` are first token and end of every point of the curves.
    """

    summary_version: int
    model: str
    revision: str | None
    operation: str
    corpus: str
    bos: int
    documents: int
    tokens: int
    token_sha256: str
    scored_from: int
    trained_length: int | None
    positions: list[list[int]]
    policies: list[PolicyEntry]
    left_out: list[LeftOut]
    sinks_needed: str | None
    recommended: Size | None
    recommendation: str
    notes: list[str] = field(default_factory=list)
    quantized: list[QuantizedEntry] = field(default_factory=list)


def policy_rows(found: Comparison, counts: Sequence[Sequence[int]]) -> Iterator[Row]:
    """Rows of the long table; ``counts``: tokens of every point of the curve that were scored, for each policy."""
    for entry, by_point in zip(found.policies, counts, strict=True):
        of_policy: Coordinates = {"policy": entry.label, "probe": "cache_policies"}
        for metric, value, count in (
            (LOSS, entry.loss, entry.scored_tokens),
            (DECODING_SPEED, entry.tokens_per_second, entry.decoded_tokens),
            (BYTES_HELD, float(entry.bytes_held), 1),
        ):
            yield {**of_policy, "metric": metric, "value": value, "count": count}
        for (start, _), mean, count in zip(found.positions, entry.loss_by_position, by_point, strict=True):
            if mean is not None:
                yield {**of_policy, "metric": LOSS_BY_POSITION, "value": mean, "query_position": start - 1, "count": count}


def quantized_rows(entries: Sequence[QuantizedEntry], documents: int) -> Iterator[Row]:
    """The same of caches of integers; ``policy`` says what is held, in which bits, and what of it is whole."""
    for entry in entries:
        held = "all tokens" if entry.window is None else f"window of {entry.window}"
        of_cache: Coordinates = {
            "policy": f"{entry.quantized}, {held}, whole: {entry.whole}", "probe": "quantized_caches",
        }  # fmt: skip
        scored = documents * (entry.tokens - 1)  # nothing predicts the first token of a text
        yield {**of_cache, "metric": GAP, "value": entry.gap.mean, "count": scored}
        yield {**of_cache, "metric": BYTES, "value": entry.bytes_ratio, "count": 1}


def show(found: Comparison) -> Iterator[Block]:
    """What to use first, then every policy."""
    if found.recommended is not None:
        yield Facts(list(_advice(found)))
    yield Say(found.recommendation)
    yield from (Say(note, small=True) for note in found.notes)
    if entries := _curves(found):
        lines = {name: entry.loss_by_position for name, entry in entries.items()}
        errors = {name: entry.loss_errors for name, entry in entries.items() if entry.loss_errors}
        middles = [(start + stop - 1) / 2 for start, stop in found.positions]
        beyond = found.trained_length is not None and found.trained_length < found.tokens
        yield Curves(
            "Loss by position", lines, middles, "position in the text; the texts are the same for all, so bumps are theirs",
            "nats per token", mark=found.trained_length if beyond else None, errors=errors,
        )  # fmt: skip
    headings = ["Policy", "Loss, nats", "To window", "Computed anew", "Tokens/s", "KiB"]
    yield Grid(headings, [_row(entry) for entry in found.policies])
    yield Say(_made(found), small=True)
    if line := sampled_line(found):
        yield Say(line, small=True)
    by_reason: dict[str, list[str]] = {}
    for left in found.left_out:
        by_reason.setdefault(left.reason, []).append(left.policy)
    for reason, policies in by_reason.items():
        yield Say(f"Left out: {names(list(dict.fromkeys(policies)))}: {reason}", small=True)
    if found.quantized:
        yield from show_quantized(found.quantized, found.documents)


def recommended(found: Comparison) -> PolicyEntry | None:
    """The row of the policy that is recommended."""
    advised = found.recommended
    if advised is None:
        return None
    # Of one size with both kinds of positions, the recommendation is about the usual one.
    kinds = ("sink_window",) if advised.num_sinks else ("window", "sink_window")
    rows = [
        entry
        for entry in found.policies
        if entry.policy in kinds and (entry.num_sinks, entry.window) == (advised.num_sinks, advised.window)
    ]
    return min(rows, key=lambda entry: entry.settings.get("positions") == "original", default=None)


def _advice(found: Comparison) -> Iterator[tuple[str, str, str]]:
    """What to use and its loss, and by how much others lose more: without sinks, computed anew, with everything kept."""
    use, advised = recommended(found), found.recommended
    if use is None or advised is None:
        return
    scored = f"(tokens {number(found.scored_from)}–{number(found.tokens)})"
    yield "cache", f"keep {advised.num_sinks} + {advised.window}", f"{use.loss:.3f} nats {scored}"
    if use.against_window is not None:
        yield "", "without sinks", interval(-use.against_window, 3)
    elif rivals := [one for one in found.policies if one.num_sinks and one.budget == use.budget and one.against_window]:
        best = min(rivals, key=lambda one: one.loss)
        yield "", f"with {counted(best.num_sinks or 0, 'sink')}", interval(best.against_window, 3)
    if use.against_recompute is not None:
        yield "", "computed anew", interval(-use.against_recompute, 3)
    if use.against_full is not None:
        yield "", f"all {number(found.tokens)}", interval(-use.against_full, 3)
        if found.trained_length is not None and found.trained_length < found.tokens:
            yield "", "", f"trained on {number(found.trained_length)} tokens at once"


def _row(entry: PolicyEntry) -> list[Cell]:
    return [
        entry.label, _half(Difference(entry.loss, entry.loss_low, entry.loss_high), 2, ""), _half(entry.against_window),
        _half(entry.against_recompute), round(entry.tokens_per_second), entry.bytes_held / 1024,
    ]  # fmt: skip


def _half(value: Difference | None, places: int = 3, sign: str = "+") -> str:
    """``−0.172 ± 0.074``, which leaves a table room in a terminal; these intervals are as wide to both sides."""
    if value is None:
        return "–"
    half = "" if value.low is None or value.high is None else f" ± {(value.high - value.low) / 2:.{places}f}"
    return interval({"mean": value.mean}, 3, sign) + half


def _curves(found: Comparison) -> dict[str, PolicyEntry]:
    """Dense attention, and in the recommended size a window without and with sinks and one computed anew, a line of each."""
    use = recommended(found)
    budget = max((entry.budget for entry in found.policies if entry.budget), default=None) if use is None else use.budget
    with_sinks = [
        entry for entry in found.policies if entry.policy == "sink_window" and entry.num_sinks and entry.budget == budget
    ]
    chosen = use if use is not None and use.num_sinks else next(iter(with_sinks), None)
    lines = {} if chosen is None else {chosen.label: chosen}
    for kind, title in (("recompute", "window computed anew"), ("window", "window"), ("full", "dense")):
        of_kind = [entry for entry in found.policies if _kind(entry) == kind and entry.budget in (budget, None)]
        of_kind.sort(key=lambda entry: entry.settings.get("positions") == "original")
        if of_kind:
            lines[title] = of_kind[0]
    return lines


def _kind(entry: PolicyEntry) -> str:
    """The name of a policy; a window without sinks has two."""
    return "window" if entry.policy == "sink_window" and not entry.num_sinks else entry.policy


def parts_of(found: Comparison) -> str:
    """What the intervals of a comparison are taken over."""
    if found.documents >= LEAST_PARTS:
        return "texts"
    return f"blocks of the text{'s' if found.documents > 1 else ''}, {LEAST_PARTS} or more in all"


def _made(found: Comparison) -> str:
    bos = "with" if found.bos else "without"
    return (
        f"{counted(found.documents, 'text')} of {number(found.tokens)} tokens of {found.corpus} {bos} BOS. Loss: of the tokens "
        f"from {number(found.scored_from)} on, with half of its 95 % interval over {parts_of(found)}; differences to a window "
        "without sinks, and to one computed anew for every token, are paired. Policies of one size hold equally many tokens "
        "before the query, sinks included. Tokens/s: single-token steps at the end of a text, all policies in turn; KiB: keys "
        "and values held then, of one text."
    )


def sampled_line(found: Comparison) -> str:
    """What to know of losses that are not those of all tokens, in a sentence; empty where there are none."""
    counts = {entry.policy: entry.scored_tokens for entry in found.policies}
    if counts.get("recompute", 0) in (0, max(counts.values())):
        return ""
    share = f"{number(counts['recompute'])} of {number(max(counts.values()))}"
    return (
        f"Re-computation is scored on {share} tokens; its loss is that of the window, and the mean difference on those tokens; "
        "its curve is points with 95 % intervals."
    )


def show_quantized(entries: list[QuantizedEntry], texts: int) -> Iterator[Block]:
    """A cache of integers against the same cache in the model's dtype, and which tokens must stay in full precision."""
    yield Grid(
        ["Integers", "In full precision", "Held", "Loss added, nats", "Bytes"],
        [
            [
                entry.quantized, entry.whole, "all" if entry.window is None else f"window {entry.window}",
                interval(entry.gap), f"{entry.bytes_ratio:.2f} ×",
            ]
            for entry in entries
        ],
        "A cache of integers, against the same cache in the model's dtype", text=2,
    )  # fmt: skip
    kinds = dict.fromkeys(entry.quantized for entry in entries)
    yield from (Say(must_stay_whole(entries, kind)) for kind in kinds)
    if any(entry.gap.most <= INTEGER_MARGIN for entry in entries if entry.window is None):
        yield Say(rare_cost(texts), small=True)


def must_stay_whole(entries: list[QuantizedEntry], kind: str) -> str:
    """Which tokens must stay in full precision, for one number of bits, with all tokens held.

    The fewest tokens are named with which rounding the others moves the loss by at most ``INTEGER_MARGIN``: the whole interval,
    on either side, since a loss that falls by rounding is a change and no gain.
    """
    enough = [one for one in entries if one.quantized == kind and one.window is None and one.gap.most <= INTEGER_MARGIN]
    if not enough:
        return f"{kind}: none are shown whose full precision keeps the change below {INTEGER_MARGIN:g} nats; read more texts."
    fewest = min(enough, key=lambda entry: len(entry.positions))
    change = f"the loss changes by {fewest.gap.most:.4f} nats at most"
    if not fewest.positions:
        return f"{kind}: no token must stay in full precision; {change}."
    places = f"position{'s' if len(fewest.positions) > 1 else ''} {names(list(map(str, fewest.positions)))}"
    return f"{kind}: keep {places} ({fewest.whole}) in full precision; {change}."
