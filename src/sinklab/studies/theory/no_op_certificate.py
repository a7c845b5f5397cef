"""The no-op certificate of heads: on a model, as a probe, and as the section of an audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.operation import repeat_groups
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnsupportedModelError
from sinklab.results.intervals import just_above
from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.results.sections import Context, to_json
from sinklab.results.table import make_table
from sinklab.sinks import Sink, SinkPlace, Sinks
from sinklab.studies.measure.probing import labelled, run_probes
from sinklab.studies.theory.found import LEAST_QUERIES, LEAST_SHARE_OF_QUERIES, Certificate, CertifiedHead
from sinklab.studies.theory.hull_certificate import Certificate as HullBounds
from sinklab.studies.theory.hull_certificate import certify_hulls


@dataclasses.dataclass(frozen=True)
class LayerCertificate:
    """The certificate of one call of one attention module, on the CPU, ``(batch, heads, queries)``: bounds, and measured
    weight on the sink and norm of what the head writes, in front of a gate. ``queries`` are the indices of those asked."""

    site: Site
    queries: Tensor
    certificate: HullBounds
    sink_weight: Tensor
    output_norm: Tensor

    @property
    def unit(self) -> Tensor:
        """Largest norm of a visible projected value; 1 where all are 0."""
        return self.certificate.scale.where(self.certificate.scale > 0, 1.0)


VALUES: dict[Metric, Callable[[LayerCertificate], Tensor | None]] = {
    Metric(
        "least_output", "ratio",
        "Mean over queries of the least norm that any weights on the visible keys could give to what the head writes "
        "(upper bound), divided by the largest norm of a visible projected value.", range=(0.0, 1.0),
    ): lambda layer: layer.certificate.with_upper / layer.unit,
    Metric(
        "least_output_without_sink", "ratio",
        "The same with the sink left out (lower bound): a head that is more silent than this uses the sink.", range=(0.0, 1.0),
    ): lambda layer: layer.certificate.without_lower / layer.unit,
    Metric(
        "no_op_gap", "ratio",
        "Mean of least_output_without_sink minus least_output: what the sink alone makes possible. Near 0: the head does "
        "not need the sink to be silent, or cannot be silent at all.", range=(-1.0, 1.0),
    ): lambda layer: layer.certificate.gap / layer.unit,
    Metric(
        "output", "ratio", "Mean over the same queries of the norm of what the head does write, in the same unit.",
        range=(0.0, float("inf")),
    ): lambda layer: layer.output_norm / layer.unit,
    Metric(
        "certified_sink_weight", "weight", "Mean over the same queries of the measured weight on the sink.",
    ): lambda layer: layer.sink_weight,
    Metric(
        "needed_sink_weight", "weight",
        "Mean over the queries for which any weight is enough of the least weight on the sink with which the output can "
        "be as small as asked (lower bound).", range=(0.0, 1.0),
    ): lambda layer: layer.certificate.needed_lower,
}  # fmt: skip
"""Metrics, and their values at every query; none where no need was asked about."""


class NoOpCertificate(Probe):
    """Certifies the heads of every self-attention call; rows are means over queries, :attr:`found` has every query.

    Values are those of the key-value heads, repeated for grouped queries; ``W_O`` is cut into the columns of each head. All is
    float64 and on the CPU. Queries that are padding, or see no other key than the sink, are left out.

    Attributes:
        found: one :class:`LayerCertificate` for every call, in the order of the calls.

    Args:
        sink_position: 0-based position of the sink in the document; a sink that was found; or ``"null"``: the sink is the
            operation's null, and modules without one are passed over.
        max_queries: so many queries of a call, evenly spread, the last among them.
        delta: also the weight on the sink needed for outputs of this norm, in units of the largest norm of a visible ``u_k``;
            ``"measured"`` for the output norm that the head has, which its measured weight must allow.
        tolerance: as for :func:`certify_hulls`.

    Raises:
        ConfigurationError: an argument out of its range.
    """

    name: ClassVar[str] = "no_op_certificate"
    needs: ClassVar[frozenset[str]] = frozenset({"head_outputs"})
    metrics: ClassVar[tuple[Metric, ...]] = tuple(VALUES)

    def __init__(
        self,
        sink_position: SinkPlace = 0,
        *,
        max_queries: int = 64,
        delta: float | Literal["measured"] | None = None,
        tolerance: float = 1e-4,
    ) -> None:
        known = isinstance(sink_position, Sink) or sink_position == "null"
        if not known and not (isinstance(sink_position, int) and sink_position >= 0):
            raise ConfigurationError(f"sink_position {sink_position!r} must be a position, 0 or more, or 'null'")
        if max_queries < 1:
            raise ConfigurationError(f"max_queries {max_queries} must be at least 1")
        if delta is not None and delta != "measured" and not delta >= 0:
            raise ConfigurationError(f"delta {delta} must be at least 0, or 'measured': it is the norm of an output")
        self.sink_position, self.max_queries, self.delta, self.tolerance = sink_position, max_queries, delta, tolerance
        self.sinks = Sinks.at(sink_position)
        self._null = self.sinks.require().kind == "null"
        self.found: list[LayerCertificate] = []

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind == "self" and (not self._null or call.sink_scores is not None):
            self.found.append(self._certify(call))

    def _certify(self, call: AttentionCall) -> LayerCertificate:
        where = call.site.module
        if call.projection is None:
            raise UnsupportedModelError(
                f"{where}: no output projection of the heads was found: no one linear map of {call.num_heads} heads × "
                f"{call.values.shape[-1]} inputs that takes them as they are, without a norm in between. So what a head writes "
                "is not known and not certified"
            )
        steps = min(self.max_queries, call.q_len)
        queries = torch.linspace(call.q_len - 1, 0, steps, dtype=torch.float64).round().long().flip(0)
        blocks = (
            [_rows(call, int(query), int(query) + 1) for query in queries] if steps < call.q_len else [_rows(call, 0, steps)]
        )
        visible, weights, mass = (torch.cat([block[part] for block in blocks], dim=2) for part in range(3))
        with_null = torch.cat((weights, mass), dim=-1)
        sinks = self._sinks(call, queries)  # -1 where there is none
        known = torch.cat((visible, torch.full_like(visible[..., :1], call.sink_scores is not None)), dim=-1)
        counted = call.counted.cpu()[:, None, queries]
        sees = known.gather(3, sinks.clamp(min=0)[..., None])[..., 0] & (sinks >= 0)
        certified = sees & (known.sum(-1) >= 2) & counted
        # What no token sees, such as padding, may be anything, also not a number.
        visible_to_some = (torch.cat((visible, torch.ones_like(visible[..., :1])), dim=-1) & counted[..., None]).any(2)
        gram, outputs = _projected(call, _vectors(call).masked_fill(~visible_to_some[..., None], 0.0), with_null)
        scale = gram.diagonal(dim1=-2, dim2=-1)[:, :, None].masked_fill(~known, 0.0).amax(-1).clamp(min=0).sqrt()
        delta = None if self.delta is None else outputs if self.delta == "measured" else scale * float(self.delta)
        try:
            certificate = certify_hulls(
                gram.flatten(0, 1),
                known.flatten(0, 1),
                sinks.clamp(min=0).flatten(0, 1),
                delta=None if delta is None else delta.flatten(0, 1),
                tolerance=self.tolerance,
                asked=certified.flatten(0, 1),
            )
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        shape = call.queries.shape[:2]
        by_sample = {name: field.unflatten(0, shape) for name, field in vars(certificate).items() if field is not None}
        certificate = dataclasses.replace(certificate, **by_sample)
        weight = with_null.gather(3, sinks.clamp(min=0)[..., None])[..., 0]
        return LayerCertificate(call.site, queries, certificate, weight, outputs)

    def _sinks(self, call: AttentionCall, queries: Tensor) -> Tensor:
        """Index of the sink of every query, ``(batch, heads, queries)``; -1 where its document has none."""
        shape = (call.queries.shape[0], call.num_heads, len(queries))
        if self._null:
            return torch.full(shape, call.kv_len)
        return self.sinks.keys(call).cpu()[:, None, queries].expand(shape)

    def rows(self) -> Iterator[Row]:
        sites = {layer.site.module: layer.site for layer in self.found}
        whole: dict[Metric, list[Tensor]] = {}
        for module, site in sites.items():
            for metric, values, counted in self._metrics(module):
                whole.setdefault(metric, []).append(values[counted])
                counts = counted.sum(1)
                means = values.masked_fill(~counted, 0.0).sum(1) / counts.clamp(min=1)
                for head in torch.nonzero(counts).flatten().tolist():
                    cell: Coordinates = {"module": module, "layer": site.layer, "head": head}
                    yield {"metric": metric, "value": float(means[head]), "count": int(counts[head]), **cell}
        for metric, parts in whole.items():
            values = torch.cat(parts)
            if len(values):
                yield {"metric": metric, "value": float(values.mean()), "count": len(values)}

    def _metrics(self, module: str) -> Iterator[tuple[Metric, Tensor, Tensor]]:
        """Metric, values ``(heads, observations)`` and which of them count."""

        def lined(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([own.transpose(0, 1).flatten(1) for own in values], dim=1)

        layers = [layer for layer in self.found if layer.site.module == module]
        counted = lined([layer.certificate.counted for layer in layers])
        for metric, value_of in VALUES.items():
            found = [values for layer in layers if (values := value_of(layer)) is not None]
            if found:
                values = lined(found)
                yield metric, values, counted & torch.isfinite(values)


@torch.no_grad()
def certify(model: nn.Module, batch: Tensor | Mapping[str, Tensor], **options: Any) -> NoOpCertificate:
    """Run a model on a batch, token ids ``(batch, seq_len)`` or inputs by name, and certify every head of its self-attention.

    Args:
        options: those of :class:`NoOpCertificate`, which is returned.

    Raises:
        InputError: values that are not finite, or no query that sees the sink and another key.
        UnsupportedModelError: a model whose attention or output projection cannot be seen.
        ConfigurationError: an option out of its range.
    """
    probe = NoOpCertificate(**options)
    with attend(model, [probe]):
        model(**lean_arguments(model, {"input_ids": batch} if isinstance(batch, Tensor) else batch))
    if not probe.found:
        needed = "null score (a learned sink logit, a key bias)" if probe.sink_position == "null" else "self-attention"
        raise ConfigurationError(f"{type(model).__name__} has no module with {needed}, so there is no head to certify")
    if not any(bool(layer.certificate.counted.any()) for layer in probe.found):
        raise InputError(
            f"no query of the batch sees its sink ({probe.sinks.require().name}) and another key; a certificate needs at "
            "least two visible keys. Give longer texts or another sink_position"
        )
    return probe


def _rows(call: AttentionCall, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Visibility and weights of some queries, ``(batch, heads, queries, kv_len)``, and their null mass, ``(…, 1)``."""
    scores = call.scores(start, stop)
    visible = call.visible.block(start, stop, 0, call.kv_len)
    # Not call.weights(), which takes absolute values of signed operations.
    weights = call.operation.weights(scores, visible, call.sink_rows(start, stop))
    return visible.expand_as(scores).cpu(), _wide(weights), _wide(call.null_mass(start, stop, scores))[..., None]


def _vectors(call: AttentionCall) -> Tensor:
    """What each key adds to a head output, and then the null: ``(batch, heads, kv_len + 1, value_dim)``."""
    values = repeat_groups(_wide(call.values), call.groups)
    batch, heads, _, dim = values.shape
    null = values.new_zeros(heads, dim) if call.null_value is None else _wide(call.null_value).expand(heads, dim)
    return torch.cat((values, null[:, None].expand(batch, -1, -1, -1)), dim=2) + _bias(call, values)


def _projected(call: AttentionCall, vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices of the projected vectors, and norms of the outputs with the given weights."""
    assert call.projection is not None
    columns = _wide(call.projection).unflatten(1, (vectors.shape[1], vectors.shape[3]))
    metric = torch.einsum("dhv,dhw->hvw", columns, columns)
    # The operation's bias is in every vector, and is written once whatever the weights sum to.
    outputs = weights @ vectors + (1 - weights.sum(-1, keepdim=True)) * _bias(call, vectors)
    return vectors @ metric @ vectors.mT, ((outputs @ metric) * outputs).sum(-1).clamp(min=0).sqrt()


def _bias(call: AttentionCall, like: Tensor) -> Tensor:
    """The operation's bias on head outputs, ``(heads, 1, value_dim)``."""
    heads, dim = like.shape[1], like.shape[3]
    bias = like.new_zeros(heads, dim) if call.output_bias is None else _wide(call.output_bias).expand(heads, dim)
    return bias[:, None]


def _wide(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


SAMPLES, QUERIES, DELTA = 4, 32, 0.2
"""Samples, queries of each, and the output norm asked about, in units of the largest norm of a visible projected value."""

_FIELDS = {"no_op_gap": "gap", "certified_sink_weight": "sink_weight"}
"""Metrics of the probe whose field of a head is called otherwise."""


def certified(context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
    """Certify all heads on the first samples of an audit's main condition: its entry ``certificate``, and rows of the long
    table.

    A head is *forced* to have its sink if it gives it more than the threshold of the audit on average, and would have to, by
    its values alone, in order to write at most :data:`DELTA`. The need is known at the queries where any weights write so
    little, which must be half of them, and :data:`~sinklab.studies.theory.found.LEAST_QUERIES`. Weights that need not sum to
    one force nothing."""
    summary, loaded = context.summary, context.loaded
    if summary.get("parts"):
        why = "an encoder–decoder has three kinds of attention with sinks of their own, and a certificate is about one sink"
        return {"refused": why}, make_table([])
    sink = context.sinks.main or Sink(kind="position", position=0)
    name = "the null (learned sink logit, key bias)" if sink.kind == "null" else sink.name
    probe = NoOpCertificate(sink, max_queries=QUERIES, delta=DELTA)
    tokens = context.samples.tokens[:SAMPLES]
    try:
        probed = run_probes(loaded.model, tokens, [probe], batch_size=1, progress=context.progress, stage="no-op certificate")
        table = labelled(
            probed.session, loaded, run_id=context.run_id, corpus=summary["corpus"], bos=int(context.bos), seed=context.seed
        )
        heads = _heads(table, summary["threshold"], summary["normalized"])
        if not heads:
            raise InputError(f"no query of the samples sees its sink ({name}) and another key; give longer samples (`seq_len`)")
    except (ConfigurationError, InputError, MeasurementError, UnsupportedModelError) as error:
        return {"refused": str(error)}, make_table([])
    context.probes.append(probe)
    found = Certificate(
        sink_position=sink.place,
        sink=name,
        sink_found=context.sinks.main is not None,
        delta=DELTA,
        threshold=summary["threshold"],
        samples=len(tokens),
        normalized=summary["normalized"],
        sink_heads=sum(head.sink_weight > just_above(summary["threshold"]) for head in heads),
        forced_heads=sum(head.forced for head in heads),
        heads=heads,
    )
    return to_json(found), table


def _heads(table: pd.DataFrame, threshold: float, normalized: bool) -> list[CertifiedHead]:
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    for row in table[table["head"].notna()].itertuples():
        module, number = str(row.module), int(row.head)
        head = measured.setdefault((module, number), {"module": module, "layer": int(row.layer), "head": number})
        head[_FIELDS.get(row.metric, row.metric)] = float(row.value)
        head["needed_queries" if row.metric == "needed_sink_weight" else "queries"] = int(row.count)
    heads = [CertifiedHead(**head) for head in measured.values()]
    heads = [dataclasses.replace(head, forced=normalized and _is_forced(head, threshold)) for head in heads]
    return sorted(heads, key=lambda head: (head.layer, head.module, head.head))


def _is_forced(head: CertifiedHead, threshold: float) -> bool:
    """Whether a head gives its sink more than the threshold and needs to, known at enough queries."""
    # Strictly more, as everywhere; None is a head that no weights make that silent, with its sink or without.
    needed = head.needed_sink_weight
    enough = head.needed_queries >= max(LEAST_QUERIES, LEAST_SHARE_OF_QUERIES * head.queries)
    return enough and needed is not None and min(needed, head.sink_weight) > just_above(threshold)
