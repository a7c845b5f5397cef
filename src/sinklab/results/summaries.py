"""Summaries: the keys of ``summary.json`` and of the records that are made by one part of sinklab and read by another.

What each key means stands in docs/results.md and in the documentation of the command; here is of which type it is.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

__all__ = [
    "CausesSummary",
    "Certificate",
    "CertifiedHead",
    "ClaimOfModel",
    "ClaimPart",
    "ClaimRecord",
    "Comparison",
    "CureEntry",
    "Difference",
    "ExaminedGroup",
    "ExaminedHead",
    "ExportEntry",
    "ExportPart",
    "FoundSink",
    "HeadCost",
    "HowExported",
    "IntegerChoice",
    "Judged",
    "Labelled",
    "MinimalEffect",
    "OriginEdit",
    "OriginFound",
    "OriginHead",
    "OriginSummary",
    "OriginUnit",
    "PerHeadEntry",
    "PolicyEntry",
    "QuantizeRecipe",
    "QuantizeSummary",
    "QuantizedEntry",
    "Refused",
    "SchemeEntry",
    "SiteEntry",
    "Size",
    "TokenRise",
    "Undecided",
    "WorstChannel",
]


class Refused(TypedDict):
    """What stands in place of a section that could not be had."""

    refused: str


class Difference(TypedDict):
    """A mean, and its interval where one can be had."""

    mean: float
    low: float | None
    high: float | None


class Size(TypedDict):
    """What a cache policy is recommended to hold."""

    num_sinks: int
    window: int


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
    left_out: list[dict[str, str]]
    sinks_needed: str | None
    recommended: Size | None
    recommendation: str
    quantized: NotRequired[list[QuantizedEntry]]
    exports: NotRequired[list[ExportEntry]]
    per_head: NotRequired[list[PerHeadEntry]]


class CertifiedHead(TypedDict):
    """One head of a no-op certificate; a number that no query has is null."""

    module: str
    layer: int
    head: int
    sink_weight: float
    needed_sink_weight: float | None
    least_output: float
    least_output_without_sink: float
    gap: float
    output: float
    queries: int
    needed_queries: int
    forced: bool


class Certificate(TypedDict):
    """The entry ``certificate`` of an audit's ``summary.json``."""

    sink_position: int | str
    sink: NotRequired[str]
    sink_found: NotRequired[bool]
    delta: float
    threshold: float
    samples: int
    normalized: bool
    sink_heads: int
    forced_heads: int
    heads: list[CertifiedHead]
    text: NotRequired[str]


class Undecided(TypedDict):
    """Why a head has no label in a domain: the label that comes nearest, what is not shown, and texts that would show it."""

    nearest: str
    why: str
    texts: int | None


class Labelled(TypedDict):
    """What is known of a head, or of a group; effects and divergences by intervention and domain."""

    label: str
    domains: dict[str, str]
    needs_sink: dict[str, str]
    undecided: dict[str, Undecided]
    sink_weight: float | None
    value_ratio: float | None
    sink_weights: dict[str, float | None]
    value_ratios: dict[str, float | None]
    effects: dict[str, dict[str, dict[str, float]]]
    divergence: dict[str, dict[str, float | None]]


class ExaminedHead(Labelled):
    """One head of ``sinklab causes``."""

    layer: int
    head: int
    module: str
    within: dict[str, dict[str, str]]


class ExaminedGroup(Labelled):
    """Heads of ``sinklab causes`` that were edited at once; numbers of the sink are means over its members.

    ``called`` is the layer or the label of a group that was not named by its heads. ``alone`` counts the labels of its members,
    and ``beyond_alone`` is, by intervention and domain, what the group costs less what its members cost one by one, summed.
    """

    name: str
    called: str
    members: list[str]
    alone: dict[str, int]
    beyond_alone: dict[str, dict[str, Difference]]


class MinimalEffect(TypedDict):
    """The minimal effect of ``sinklab causes`` and where it is from: ``auto``, or ``given``.

    ``worth`` is what all attention costs by domain, with outputs of ``zero`` and with those of another text (``resample``);
    ``domain`` the one that counts, ``null`` where none is shown to be worth enough, or nothing was measured.
    """

    value: float
    by: str
    heads: int
    domain: str | None
    worth: dict[str, dict[str, Difference]]
    text: str


class FoundSink(TypedDict):
    """Where the sink of a model is, what else was tried, and what every head gives to it."""

    place: int | str | None
    name: str
    tried: list[dict[str, int | str | float]]
    secondary: list[int]
    heads: dict[str, dict[str, float | None]]


class CausesSummary(TypedDict):
    """``summary.json`` of ``sinklab causes``, and the entry ``causes`` of that of an audit; experiments add sections."""

    heads: list[ExaminedHead]
    counts: dict[str, int]
    sink: FoundSink
    texts: int
    texts_needed: int | None
    mirrored: dict[str, int]
    domains: list[str]
    unit: str
    clean_loss: dict[str, float]
    level: float
    minimal_effect: float
    minimal_effect_from: NotRequired[MinimalEffect]
    groups: NotRequired[list[ExaminedGroup]]
    budget: str
    variants: list[str]
    text: NotRequired[str]


class OriginUnit(TypedDict):
    """One neuron, head or neuron of an expert that writes a sink's norm."""

    unit: int
    name: str
    along: float
    size: float
    in_channel: float


class OriginEdit(TypedDict):
    """What one edit does, on ``units``, ``controls`` (random units, mean over draws), the ``write`` or ``channels``."""

    edit: str
    on: str
    what: str
    loss: Difference | None
    weight: float | None
    weight_kept: Difference | None
    spike: float
    spike_kept: Difference


class OriginHead(TypedDict):
    """What one head gives to the place: as the model is, if attention were uniform, and under edits by their names."""

    layer: int
    head: int
    module: str
    own: bool
    weight: float | None
    uniform: float | None
    edited: dict[str, float | None]


class OriginFound(TypedDict):
    """Where one sink, or a spike that is no sink of its own, is born; ``null`` where that is not known."""

    place: str
    kind: str
    positions: list[int]
    description: str
    by: str
    stage: int | None
    block: int | None
    module: str | None
    sublayer: str | None
    before: float
    after: float
    peak: float
    pull: float | None
    pull_lost: Difference | None
    norms: dict[str, list[float]]
    norm: float | None
    rest: float | None
    error: float | None
    against_others: bool
    not_split: str
    channels: list[dict[str, float]]
    unit_kind: str | None
    num_units: int | None
    units: list[OriginUnit]
    weights: list[dict[str, object]]
    weight: float | None
    uniform: float | None
    weight_by_block: list[float | None]
    spike: float
    edits: list[OriginEdit]
    heads: list[OriginHead]
    verdict: str


class OriginSummary(TypedDict):
    """``summary.json`` of ``sinklab origin`` besides what the model is, and the entry ``origin`` of that of an audit."""

    samples: int
    positions: int
    blocks: int
    loss: float | None
    controls: int
    seed: int
    origins: list[OriginFound]
    notes: list[str]
    text: NotRequired[str]


class ClaimPart(TypedDict):
    """What was found about one part of a claim."""

    says: str
    effect: str
    needs: list[list[str]]
    expected: str
    more_than: float | None
    less_than: float | None
    unit: str
    mean: float | None
    interval: list[float] | None
    method: NotRequired[str | None]
    standardized: float | None
    by_seed: dict[str, float | None]
    verdict: str


class Judged(TypedDict):
    """A verdict and the parts that it is made of."""

    verdict: str
    parts: list[ClaimPart]


class ClaimOfModel(Judged):
    """What was found about a claim on one checkpoint; ``by_seed`` of its parts is by draw of texts."""

    name: str
    revision: str
    kind: str
    operation: str
    parameters: int
    text: str
    reason: str
    effect: float | None
    interval: list[float] | None
    unit: str | None
    presupposes: list[ClaimPart]


class ClaimRecord(Judged):
    """``run.json`` of a claim; of one on checkpoints ``by_seed`` is by name of the model, and ``models`` has each by itself."""

    kind: str
    claim: str
    statement: str
    source: str
    reference: str
    published: str
    scale: str
    base: NotRequired[str | None]
    cost: str
    reason: str
    created: str
    seeds: list[int]
    presupposes: list[ClaimPart]
    conditions: dict[str, object]
    environment: dict[str, dict[str, object]]
    evidence: NotRequired[str]
    one_model: NotRequired[str | None]
    models: NotRequired[list[ClaimOfModel]]


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
    """A linear map, or the residual stream at one place, and the channel with the largest range."""

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
    gap_by_position: list[float]
    tokens_that_rise: list[TokenRise]
    cures: list[CureEntry]
    recommended: str | None
    recipe: QuantizeRecipe | None
    text: str
