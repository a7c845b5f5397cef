"""``sinklab quantize``: schemes, what they cost and where, and cures."""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "CureEntry",
    "QuantizeRecipe",
    "QuantizeSummary",
    "SchemeEntry",
    "SiteEntry",
    "TokenRise",
    "WorstChannel",
]


class SchemeEntry(TypedDict):
    """One scheme of ``sinklab quantize``, with static or per-token scales of the activations."""

    scheme: str
    per_token: bool
    products: str
    loss: float
    gap: float
    low: float
    high: float
    verdict: str
    texts_needed: int | None
    weight_bytes: int


class WorstChannel(TypedDict):
    """A linear map, or the residual stream at one place, and the channel with the largest range.

    ``everywhere`` is a spike at more than a quarter of the positions, which then are not listed; ``at_sink`` says that every
    position of the spike is a sink.
    """

    site: str
    kind: str
    layer: int | None
    channel: int
    range_ratio: float
    spike: bool
    everywhere: bool
    positions: list[int]
    tokens: list[str]
    at_sink: bool | None


class SiteEntry(WorstChannel):
    """The same with what it costs alone."""

    gap: float
    low: float
    high: float


class CureEntry(TypedDict):
    """A cure: the gap that it leaves and what it gains, with intervals, and what it costs."""

    cure: str
    label: str
    left: dict[str, float]
    gain: dict[str, float]
    share_whole: float
    activations_whole: float
    extra_bytes: int
    modules: list[str]
    positions: list[int]
    configurable: bool


class TokenRise(TypedDict):
    """A predicted token whose loss rises."""

    text: int
    position: int
    token: str
    before: float
    after: float


class QuantizeRecipe(TypedDict):
    """What is written for quantisation libraries; a file that could not be written says why."""

    scheme: str
    per_token: bool
    ignored: list[str]
    left: dict[str, float] | None
    files: list[str]
    refused: dict[str, str]


class QuantizeSummary(TypedDict):
    """``summary.json`` of ``sinklab quantize``."""

    summary_version: int
    model: str
    revision: str | None
    operation: str
    corpus: str
    bos: int
    kind: str
    texts: int
    calibration: int
    tokens: int | None
    loss_of: str
    unit: str
    residual: bool
    minimal_effect: float
    clean_loss: dict[str, float]
    quantized_share: float
    float_bytes: int
    integer_check: float | None
    loss_difference: float | None
    schemes: list[SchemeEntry]
    examined: str
    activation_bits: int
    level_of_sites: float
    level_of_cures: float
    sinks: list[int] | None
    sinks_refused: str | None
    sites: list[SiteEntry]
    largest_spike: WorstChannel | None
    gap_by_position: list[float | None]
    tokens_that_rise: list[TokenRise]
    cures: list[CureEntry]
    recommended: str | None
    recipe: QuantizeRecipe | None
    text: str
