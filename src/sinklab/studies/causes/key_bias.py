"""Key-bias evidence: is the sink missed for what it carries, and would a constant score do as well?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.intervention import HeadIntervention, Place, keys_at
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions.zero_value import ZeroValue
from sinklab.results.intervals import Interval
from sinklab.results.metric import Coordinates, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes import experiment
from sinklab.studies.causes.found import KeyBias
from sinklab.studies.causes.readout import Readout, readout_for
from sinklab.studies.causes.samples import Samples


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

    Two edits of all heads at once, each beside the same edit of another key: its values set to 0, and its score made the mean
    that it has, which is a learned sink logit. The score is that after rotary embedding, scaling and soft-cap.

    Args:
        model, samples: two texts or more.
        sinks: its ``place`` is a position or ``"null"``; of the null score the null value is what is set to 0.
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
    if not any(bool((count > 0).any()) for _, count in scores.sums.values()):
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
        sink.place, changes, list(map(str, sink_heads)), float(np.nanmean(clean)), minimal_effect, len(samples),
        readout.unit,
    )  # fmt: skip


def rows(found: KeyBias, heads: Mapping[str, Head]) -> Iterator[Row]:
    """Rows of the long table; ``heads`` by their names."""
    common: Coordinates = {"probe": "causes_key_bias", "count": found.texts}
    for name, loss in found.losses.items():
        at: Coordinates = {**common, "intervention": f"key bias: {name}"}
        yield from experiment.interval_rows(experiment.LOSS_CHANGE.of(found.unit), loss, **at)


class _Scores(Watcher):
    """Sums over queries of every head's score on a place, and how many queries see it and do not stand on it, by module."""

    name, needs = "sink_scores", frozenset[str]()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        if isinstance(self.place, str) and call.sink_scores is None:
            raise UnsupportedModelError(f"{call.site.module}: its attention has no null score; give a position")
        total, count = torch.zeros(2, call.num_heads, dtype=torch.float64)
        for start, stop in call.blocks():
            if isinstance(self.place, str):
                rows = call.sink_rows(start, stop)
                assert rows is not None  # refused above
                scores, measured = rows.double()[..., None], call.counted[:, None, start:stop, None]
            else:
                own = call.query_positions[:, start:stop, None] == call.key_positions[:, None]
                at = keys_at(call, self.place)[:, None] & ~own & call.counted[:, start:stop, None]
                scores, measured = (
                    call.scores(start, stop).double(),
                    call.visible.block(start, stop, 0, call.kv_len) & at[:, None],
                )
            scores, measured = torch.broadcast_tensors(scores, measured)
            shape = (len(call.queries), call.num_heads, *scores.shape[2:])
            scores, measured = scores.expand(shape), measured.expand(shape)
            total += scores.masked_fill(~measured, 0.0).sum((0, 2, 3)).cpu()
            count += measured.sum((0, 2, 3)).cpu()
        self._add(call.site.module, total, count)

    def _add(self, module: str, total: Tensor, count: Tensor) -> None:
        before = self.sums.get(module, (torch.zeros_like(total), torch.zeros_like(count)))
        self.sums[module] = total + before[0], count + before[1]

    def merge(self, other: _Scores) -> None:
        """Add what another one has seen."""
        for module, sums in other.sums.items():
            self._add(module, *sums)

    def means(self) -> dict[str, Tensor]:
        """Mean score on the place, ``(heads,)`` by module."""
        return {module: total / count for module, (total, count) in self.sums.items()}


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
