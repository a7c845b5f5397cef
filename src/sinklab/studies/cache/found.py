"""What ``sinklab cache`` found: what a model loses under each policy and how fast it is, and which policy to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklab.results.metric import LOSS, Coordinates, Metric, Row
from sinklab.studies.export.found import ExportEntry

__all__ = ["Comparison", "Difference", "LeftOut", "PolicyEntry", "QuantizedEntry", "Size", "policy_rows", "quantized_rows"]

LOSS_BY_POSITION = Metric(
    "loss_by_position", "nats", "Mean next-token loss over the texts of the tokens predicted from here on, up to the next row."
)
DECODING_SPEED = Metric("decoding_tokens_per_second", "tokens/s", "Tokens decoded one by one over the time that this took.")
READING_SPEED = Metric("reading_tokens_per_second", "tokens/s", "Tokens of a text read at once over the time that this took.")
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
    """What a cache policy is recommended to hold; ``pinned`` are the sinks' positions where they are not the first ones."""

    num_sinks: int
    window: int
    pinned: list[int] | None = None


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
        tokens_per_second, reading_tokens_per_second: of single-token steps, and of a text read at once.
            The second is of tokens from the first scored one on.
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
    reading_tokens_per_second: float
    bytes_held: float
    loss_by_position: list[float | None]
    loss_errors: list[float | None] | None = None


@dataclass(frozen=True)
class QuantizedEntry:
    """One cache of integers, against the same cache in the model's dtype.

    Attributes:
        quantized: ``int8`` or ``int4``.
        whole, positions: what stays in full precision, in words and by position.
        window: tokens held besides; ``None`` where all are.
        tokens: of a text.
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

    Attributes:
        scored_from: position of the first token that is scored.
        positions: first token and end of every point of the curves.
        sinks_needed: ``yes``, ``no`` or ``undecided``; ``None`` where it was not asked.
        better_pinned: label of the policy that keeps other tokens than the first ones, where that is what to use.
        recommendation: the finding in a sentence.
        notes: what to know of it.
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
    better_pinned: str | None = None
    notes: list[str] = field(default_factory=list)
    quantized: list[QuantizedEntry] = field(default_factory=list)
    exports: list[ExportEntry] = field(default_factory=list)


def policy_rows(found: Comparison, counts: Sequence[Sequence[int]]) -> Iterator[Row]:
    """Rows of the long table; ``counts``: tokens of every point of the curve that were scored, for each policy."""
    for entry, by_point in zip(found.policies, counts, strict=True):
        of_policy: Coordinates = {"policy": entry.label, "probe": "cache_policies"}
        for metric, value, count in (
            (LOSS, entry.loss, entry.scored_tokens),
            (DECODING_SPEED, entry.tokens_per_second, entry.decoded_tokens),
            (READING_SPEED, entry.reading_tokens_per_second, 1),
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
