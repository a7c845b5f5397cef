"""``sinklab cache``: policies compared on a text, caches of integers, budgets per head, and exports of a policy."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from sinklab.results.summaries.shared import Difference

__all__ = [
    "Comparison",
    "ExportEntry",
    "ExportPart",
    "HeadCost",
    "HowExported",
    "IntegerChoice",
    "LeftOut",
    "PerHeadEntry",
    "PolicyEntry",
    "QuantizedEntry",
    "Size",
]


class Size(TypedDict):
    """What a cache policy is recommended to hold; ``pinned`` are the sinks' positions where they are not the first ones."""

    num_sinks: int
    window: int
    pinned: NotRequired[list[int]]


class LeftOut(TypedDict):
    """A policy that was not measured."""

    policy: str
    label: str
    reason: str


class PolicyEntry(TypedDict):
    """One policy of a comparison."""

    policy: str
    label: str
    num_sinks: int | None
    window: int | None
    held: int
    budget: int | None
    settings: dict[str, object]
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


class QuantizedEntry(TypedDict):
    """One cache of integers of a comparison, against the same cache in the model's dtype."""

    quantized: str
    whole: str
    positions: list[int]
    window: int | None
    tokens: int
    gap: Difference
    bytes_ratio: float


HowExported = Literal["expressed", "approximated", "not expressible"]
IntegerChoice = Literal["auto", "none", "int8", "int4"]
"""Integers of a cache, as they are asked for: those that were measured to cost little, or none, or these."""


class ExportPart(TypedDict):
    """One part of a policy, and what an engine makes of it by which setting, or why it cannot."""

    part: str
    wanted: str
    how: HowExported
    says: str


class ExportEntry(TypedDict):
    """A policy for one engine: its file and the line that uses it, empty where ``refused`` says why there is none."""

    engine: str
    policy: str
    checked: str
    parts: list[ExportPart]
    refused: str
    file: str
    command: str
    text: str


class HeadCost(TypedDict):
    """What it costs to give a window to one key-value head alone, in nats a token, on the texts of the choice."""

    layer: int
    head: int
    window: int
    cost: float


class PerHeadEntry(TypedDict):
    """Budgets per key-value head against the same budget for all of them, in the same bytes."""

    source: str
    window: int
    num_sinks: int
    cut: list[list[int]]
    shorter: list[int]
    others: list[int]
    budgets: list[list[list[int]]]
    costs: list[HeadCost]
    loss: float
    uniform_loss: float
    gap: Difference
    selection_gap: Difference
    bytes_ratio: float
    scored_tokens: int
    selection_tokens: int
    fingerprint: str


class Comparison(TypedDict):
    """``summary.json`` of ``sinklab cache``, and the entry ``cache`` of that of an audit."""

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
    better_pinned: NotRequired[str | None]
    recommended: Size | None
    recommendation: str
    quantized: NotRequired[list[QuantizedEntry]]
    exports: NotRequired[list[ExportEntry]]
    per_head: NotRequired[list[PerHeadEntry]]
