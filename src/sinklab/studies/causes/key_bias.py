"""Key-bias evidence: is the sink missed for what it carries, does the angle make it, would a constant score do as well?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.intervention import HeadIntervention, Place, keys_at
from sinklab.attention.operation import repeat_groups
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions.zero_value import ZeroValue
from sinklab.results.intervals import Interval
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes import experiment
from sinklab.studies.causes.found import HeadScores, KeyBias
from sinklab.studies.causes.readout import Readout, readout_for
from sinklab.studies.causes.samples import Samples

__all__ = ["key_bias", "rows"]

_SCORES = {
    "cosine": Metric("sink_cosine", "cosine", "Mean cosine of the queries and the key of the sink."),
    "other_cosine": Metric("sink_other_cosine", "cosine", "Mean cosine of the same queries and the other keys that they see."),
    "norm_product": Metric("sink_norm_product", "norm", "Mean product of the norms of query and key, at the sink."),
    "other_norm_product": Metric("sink_other_norm_product", "norm", "Mean product of these norms at the other keys."),
    "gap": Metric("sink_gap", "score", "Mean over queries of the score of the sink less the mean score of the other keys."),
    "gap_deviation": Metric("sink_gap_deviation", "score", "Standard deviation of sink_gap over queries."),
    "constant_share": Metric(
        "sink_constant_share", "fraction", "How much of the mean square of sink_gap a constant is.", range=FRACTION
    ),
    "value_ratio": Metric("sink_value_ratio", "ratio", "Mean norm of the value of the sink over that of the other keys."),
}
"""Field of the scores of a head to the metric of its rows."""


def key_bias(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    *,
    readout: Readout | None = None,
    minimal_effect: float = 0.01,
    threshold: float = 0.3,
    batch_size: int = 16,
    seed: int = 0,
) -> KeyBias:
    """Test whether the sink is a key bias (Gu et al. 2024, arXiv 2410.10781): a key that takes mass and carries nothing.

    Three pieces of evidence: its values are small and setting them to 0 in all heads at once does not matter; the angle between
    queries and its key, not the norms, makes its score; and, more than the paper asks, its score hardly depends on the query,
    so that a constant (a learned sink logit) would do. Scores are those after rotary embedding, scaling and soft-cap. The
    gap to the other keys is taken query by query, because softmax does not see what is added to all scores of a query.

    Args:
        model, samples: two texts or more.
        sinks: its ``place`` is a position or ``"null"``; of the null score there is neither angle nor norm.
        readout: the loss; that of the model's task by default.
        minimal_effect: the largest change of the loss that counts as none, in the unit of the readout.
        threshold: mean share from which on a head has its sink there.

    Raises:
        ConfigurationError: no sink, a place that no query sees, or too few or too short texts.
        UnsupportedModelError: ``"null"`` where an attention has no null score.
    """
    readout = readout_for(model) if readout is None else readout
    place, sink = experiment.known_place(sinks, samples, "key-bias evidence"), sinks.require()
    other = experiment.random_places(samples, place, sinks, torch.Generator().manual_seed(seed))
    scores, other_scores, losses = _Scores(place), _Scores(other), []

    def own(start: int, stop: int) -> Place:
        return place[start:stop] if isinstance(place, Tensor) and place.ndim == 2 else place

    for run in experiment.runs(
        model, samples, readout, batch_size=batch_size,
        probes=lambda start, stop: (_Scores(own(start, stop)), _Scores(other[start:stop])),
    ):  # fmt: skip
        losses.append(run.losses.nanmean(1).numpy())
        for whole, part in zip((scores, other_scores), run.probes, strict=True):
            assert isinstance(part, _Scores)
            whole.merge(part)
    clean = np.concatenate(losses)
    heads = scores.by_head()
    if not heads or all(head.gap is None for head in heads):
        raise ConfigurationError(f"no query sees a key at the sink, {sink.name}, and another one besides; give longer texts")
    edits: dict[str, list[HeadIntervention]] = {
        "zero_value": [ZeroValue(place=place), ZeroValue(place=other)],
        "constant_score": [
            _ConstantScore(place=place, constants=scores.means()),
            _ConstantScore(place=other, constants=other_scores.means()),
        ],
    }
    sink_heads = [head for head, weight in zip(sinks.heads, sinks.weights, strict=True) if weight >= threshold]
    chosen: dict[int | str, list[int]] = {}
    for head in sink_heads:
        chosen.setdefault(head.module or head.layer, []).append(head.head)

    def measured(edit: HeadIntervention) -> np.ndarray:
        return experiment.text_losses(model, samples, readout, experiment.of_all(edit), batch_size=batch_size)

    changes: dict[str, Interval] = {}
    for name, (edit, control) in edits.items():
        edited, controlled = measured(edit), measured(control)
        changes[name] = experiment.change(edited, clean, name)
        changes[f"{name} control"] = experiment.change(controlled, clean, name)
        changes[f"{name} beyond control"] = experiment.change(edited, controlled, name)
        if chosen:
            changes[f"{name} of sink heads"] = experiment.change(measured(dataclasses.replace(edit, heads=chosen)), clean, name)
    return KeyBias(
        sink.place, changes, list(map(str, sink_heads)), heads, float(np.nanmean(clean)), minimal_effect, len(samples),
        readout.unit,
    )  # fmt: skip


def rows(found: KeyBias, heads: Mapping[str, Head]) -> Iterator[Row]:
    """Rows of the long table; ``heads`` by their names."""
    common: Coordinates = {"probe": "causes_key_bias", "count": found.texts}
    for name, loss in found.losses.items():
        at: Coordinates = {**common, "intervention": f"key bias: {name}"}
        yield from experiment.interval_rows(experiment.LOSS_CHANGE.of(found.unit), loss, **at)
    own = [heads[scores.head] for scores in found.heads]
    for field, metric in _SCORES.items():
        yield from experiment.head_rows(metric, own, [getattr(scores, field) for scores in found.heads], **common)


class _Scores(Watcher):
    """Sums over queries of what :class:`HeadScores` has means of."""

    name, needs = "sink_scores", frozenset[str]()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sums: dict[str, tuple[list[Head], dict[str, Tensor]]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        dtype = torch.promote_types(call.queries.dtype, torch.float32)
        keys = repeat_groups(call.keys.to(dtype), call.groups)
        key_norms = keys.norm(dim=-1)
        real = (call.key_positions >= 0)[:, None, None]
        null = isinstance(self.place, str)
        if null and call.sink_scores is None:
            raise UnsupportedModelError(f"{call.site.module}: its attention has no null score; give a position")
        at = torch.zeros_like(real) if null else keys_at(call, self.place)[:, None, None]
        total: dict[str, Tensor] = {}

        def add(name: str, values: Tensor, counted: Tensor) -> None:
            summed = values.double().masked_fill(~counted, 0.0).sum((0, 2)).cpu()
            total[name] = total.get(name, 0.0) + summed

        for start, stop in call.blocks():
            queries = call.queries[:, :, start:stop].to(dtype)
            visible = call.visible.block(start, stop, 0, call.kv_len) & real
            own = (call.query_positions[:, start:stop, None] == call.key_positions[:, None])[:, None]
            others, sinks = visible & ~at, visible & at
            measured = call.counted[:, None, start:stop] & others.any(-1) & ~(own & sinks).any(-1)
            if not null:
                measured = measured & sinks.any(-1)
            measured = measured.expand(queries.shape[:3])
            scores = call.scores(start, stop)
            rows = call.sink_rows(start, stop)
            score = rows.to(dtype).expand(measured.shape) if null and rows is not None else _mean(scores, sinks)
            gap = score - _mean(scores, others)
            add("count", torch.ones_like(gap), measured)
            add("score", score, measured)
            add("gap", gap, measured)
            add("gap_square", gap.double().square(), measured)
            products = queries.norm(dim=-1, keepdim=True) * key_norms[:, :, None]
            cosines = queries @ keys.mT / products.clamp_min(torch.finfo(dtype).tiny)
            for prefix, chosen in (("", sinks), ("other_", others)):
                if chosen is others or not null:
                    add(f"{prefix}cosine", _mean(cosines, chosen), measured)
                    add(f"{prefix}norm_product", _mean(products, chosen), measured)
        norms = repeat_groups(call.values.to(dtype)[..., None, :], call.groups).norm(dim=-1)[..., 0]
        for prefix, chosen in (("value", at[:, 0]), ("other_value", (real & ~at)[:, 0])):
            chosen = chosen.expand(norms.shape)
            total[prefix] = norms.double().masked_fill(~chosen, 0.0).sum((0, 2)).cpu()
            total[f"{prefix}_count"] = chosen.sum((0, 2)).double().cpu()
        if null:
            value = call.null_value
            size = torch.zeros(call.num_heads) if value is None else value.norm(dim=-1).expand(call.num_heads)
            total["value"], total["value_count"] = size.double().cpu(), torch.ones(call.num_heads, dtype=torch.float64)
        self._add(call.site.module, experiment.heads_of(call.site, call.num_heads), total)

    def _add(self, module: str, heads: list[Head], sums: dict[str, Tensor]) -> None:
        known = self.sums.get(module, (heads, {}))[1]
        self.sums[module] = (heads, {name: values + known.get(name, 0.0) for name, values in sums.items()})

    def merge(self, other: _Scores) -> None:
        """Add what another one has seen."""
        for module, (heads, sums) in other.sums.items():
            self._add(module, heads, sums)

    def means(self) -> dict[str, Tensor]:
        """Mean score on the place, ``(heads,)`` by module."""
        return {module: total["score"] / total["count"] for module, (_, total) in self.sums.items()}

    def by_head(self) -> list[HeadScores]:
        """The means, head by head."""
        return [
            _scores_of(head, {name: float(values[number]) for name, values in total.items()})
            for heads, total in self.sums.values()
            for number, head in enumerate(heads)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _ConstantScore(HeadIntervention):
    """Replace the score on some keys by a constant for each head, in the rows of queries that do not stand on them."""

    name = "constant_score"
    place: Place
    constants: dict[str, Tensor]

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        if call.site.kind != "self":
            return call
        constants = self.constants[call.site.module][list(call.head_numbers)].to(call.queries.device)
        dtype = torch.promote_types(call.queries.dtype, torch.float32)
        if isinstance(self.place, str):
            return dataclasses.replace(call, sink_scores=constants.to(dtype)[None, :, None])
        own = call.query_positions[:, :, None] == call.key_positions[:, None]
        chosen = (keys_at(call, self.place)[:, None] & ~own)[:, None]
        moved = (constants.to(dtype)[None, :, None, None] - call.scores(0, call.q_len)).masked_fill(~chosen, 0.0)
        return dataclasses.replace(call, bias=moved if call.bias is None else call.bias.to(dtype) + moved)


def _scores_of(head: Head, total: dict[str, float]) -> HeadScores:
    def ratio(name: str, count: str = "count") -> float:
        return total[name] / total[count] if name in total and total[count] else float("nan")

    gap, square = ratio("gap"), ratio("gap_square")
    return HeadScores(
        str(head),
        head.module,
        **{name: experiment.number(ratio(name)) for name in ("cosine", "other_cosine", "norm_product", "other_norm_product")},
        gap=experiment.number(gap),
        gap_deviation=experiment.number(max(square - gap**2, 0.0) ** 0.5 if square == square else float("nan")),
        constant_share=experiment.number(gap**2 / square if square else float("nan")),
        value_ratio=experiment.number(
            ratio("value", "value_count") / (ratio("other_value", "other_value_count") or float("nan"))
        ),
    )


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen keys: ``(batch, heads, block)``, 0 where there are none."""
    return values.masked_fill(~chosen, 0.0).sum(-1) / chosen.sum(-1).clamp_min(1)
