"""Tracing: how the norm of some places grows from write to write against that of other tokens, and which heads look there."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.call import AttentionCall, Statistics, run_of
from sinklab.attention.chosen_keys import scores_of_keys, weights_of_keys
from sinklab.attention.operation import row_share
from sinklab.attention.probe import Watcher
from sinklab.corpora.samples import Samples
from sinklab.errors import InputError, UnsupportedModelError
from sinklab.results.blocks import names
from sinklab.results.progress import Progress
from sinklab.sinks import Sink
from sinklab.studies.measure.probing import forward_arguments
from sinklab.studies.origin.structure import Structure, Sublayer, Tap, passing

LEAST_JUMP = 2.0
"""Times the norm of other tokens that the norm at a place must reach to be called a jump."""

SPIKE_TIMES = 4.0
"""Times the norm of other tokens above which a position counts as a spike, whether heads give it much attention or not."""

STRONG = 0.5
"""Share of the largest weight that a head behind the origin gives a place, from which on a head is one of its own."""

MEMORY = 2**30
"""Bytes of states that are kept, so that blocks in front of an edit are not run again; with more they are."""

HeadsByModule: TypeAlias = Mapping[str, Tensor]
"""Numbers of some heads, int64 ``(heads,)``, by the label of their attention module."""


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """One or several places of the same origin; ``spike`` where they were found by their norm and not by their attention."""

    sinks: tuple[Sink, ...]
    spike: bool = False

    @property
    def name(self) -> str:
        """``position 0``, ``positions 1, 14, 183 and 196``, ``the first “.”``, ``[CLS]``, ``the corner patches``."""
        plain = [sink for sink in self.sinks if sink.kind == "position" and sink.called is None]
        others = [sink.name for sink in self.sinks if sink not in plain]
        if plain:
            listed = names([str(sink.position) for sink in plain], len(plain))
            others.insert(0, f"position{'s' * (len(plain) > 1)} {listed}")
        return " and ".join(others)

    @property
    def positions(self) -> list[int]:
        """Positions of the place, ascending; of a token that stands anywhere none."""
        own = {sink.position for sink in self.sinks if sink.position is not None}
        return sorted(own.union(*(sink.positions for sink in self.sinks)))

    def mask(self, positions: Tensor, tokens: Tensor | None) -> Tensor:
        """Which tokens are the place, boolean ``(samples, length)``, from positions, -1 for padding."""
        documents = torch.where(positions >= 0, 0, -1)
        masks = [sink.mask(positions, documents, tokens) for sink in self.sinks]
        return torch.stack(masks).any(0) & (positions >= 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Growth:
    """Norms at every stage of the residual stream, 0 for what enters the first block and one for every write.

    ``norms`` are float32 ``(samples, stages, length)``, of post-norm models of the sum before the norm; ``blocks``,
    ``(samples, blocks + 1, length)``, of what enters the first block and leaves every one; ``positions`` and ``tokens`` int64
    ``(samples, length)``, -1 for padding; ``entering`` is what enters every block, ``(samples, length, width)`` each, none
    where blocks cannot be run from there."""

    norms: Tensor
    blocks: Tensor
    positions: Tensor
    tokens: Tensor | None
    entering: Sequence[Tensor] = ()

    def means(self, at: Tensor, *, blocks: bool = False) -> Tensor:
        """Mean norm over the tokens of a mask in each sample, ``(samples, stages)`` or at the blocks; NaN where it has none."""
        norms, chosen = self.blocks if blocks else self.norms, at[:, None].to(self.norms)
        return (norms * chosen).sum(2) / chosen.sum(2)

    def __getitem__(self, rows: Tensor) -> Growth:
        """Of some samples alone."""
        tokens = None if self.tokens is None else self.tokens[rows]
        entering = [hidden[rows.to(hidden.device)] for hidden in self.entering]
        return Growth(self.norms[rows], self.blocks[rows], self.positions[rows], tokens, entering)


@dataclasses.dataclass(frozen=True, eq=False)
class OriginSetting:
    """A model on its samples, and how it is measured; ``others``, boolean ``(samples, length)``, are tokens that are neither
    sinks nor spikes."""

    model: PreTrainedModel
    structure: Structure
    samples: Samples
    growth: Growth
    others: Tensor
    batch_size: int
    controls: int
    seed: int
    progress: Progress

    def forward(self, batch: Samples, *, scored: bool = True) -> object:
        """Run the model; with the logits of all tokens only where they are scored."""
        return self.model(**forward_arguments(self.model, batch, full_logits=scored))

    def entered_at(self, block: int, rows: Tensor, last: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Within it, forwards of some samples begin at a block, where what enters it is known, and end behind ``last``."""
        if not self.growth.entering:
            return contextlib.nullcontext()
        entering = self.growth.entering[block]
        last = len(self.structure.blocks) - 1 if last is None else last
        return passing(self.model, self.structure, block, last, entering[rows.to(entering.device)])

    def run(self, tap: Tap, block: int) -> None:
        """Show a tap one block of the model as it is, batch by batch."""
        with tap.on(self.model, self.structure):
            for rows in torch.arange(len(self.samples)).split(self.batch_size):
                with self.entered_at(block, rows, block):
                    self.forward(self.samples.take(rows), scored=False)

    @property
    def real(self) -> Tensor:
        """Boolean ``(samples, length)``: what is no padding."""
        return self.growth.positions >= 0

    def tokens_at(self, place: Place) -> Tensor:
        """Boolean ``(samples, length)``: the tokens of a place."""
        return place.mask(self.growth.positions, self.growth.tokens)

    def without(self, place: Place) -> OriginSetting:
        """With the tokens of a place, and no others, left out of those that it is compared with; some must be left."""
        if not place.sinks:
            return self
        others = self.real & ~self.tokens_at(place)
        if not bool(others.any(1).all()):
            raise InputError(
                f"a sample of {int(self.real.sum(1).min())} positions has no token besides {place.name} to compare with; give "
                "longer samples (`seq_len`)"
            )
        return dataclasses.replace(self, others=others)

    def having(self, rows: Tensor) -> OriginSetting:
        """On some of the samples alone, whose numbers are ``rows``."""
        return dataclasses.replace(self, samples=self.samples.take(rows), growth=self.growth[rows], others=self.others[rows])

    def block_of(self, label: str) -> int:
        """Number of the block that an attention module belongs to, from the label of its site; -1 for one of no block."""
        name, call = run_of(label)
        blocks = (block for block in self.structure.blocks if name.startswith(f"{block.module}.") and block.call == call)
        return next((block.number for block in blocks), -1)


def own_heads(setting: OriginSetting, seen: Mapping[str, Tensor], block: int, last: int | None = None) -> HeadsByModule:
    """The heads behind a block, up to a last one, that give a place most (``seen``, ``(samples, heads)`` by module); of all
    blocks where no attention comes behind it."""
    blocks = {label: setting.block_of(label) for label in seen}
    end = len(setting.structure.blocks) if last is None else last
    labels = [label for label in seen if block < blocks[label] <= end] or list(seen)
    weights = {label: seen[label].nanmean(0).nan_to_num(0.0) for label in labels}
    most = max((float(values.max()) for values in weights.values()), default=0.0)
    heads = {label: torch.nonzero(values >= STRONG * most)[:, 0] for label, values in weights.items()}
    return {label: own for label, own in heads.items() if len(own)}


def mean_over(values: Mapping[str, Tensor], heads: HeadsByModule) -> Tensor:
    """Mean over some heads, ``(samples,)``; NaN without any."""
    chosen = [values[label][:, own] for label, own in heads.items()]
    return torch.cat(chosen, 1).nanmean(1) if chosen else torch.full((1,), float("nan"), dtype=torch.float64)


class _Norms(Tap):
    def __init__(self, structure: Structure, samples: Samples, *, keeps: bool = False) -> None:
        self.structure, self.samples, self.keeps = structure, samples, keeps
        self.entering: list[Tensor] = []
        self.positions = torch.zeros(0, 0, dtype=torch.int64)
        self.stages: list[Tensor] = []
        self.blocks: list[Tensor] = []
        self._state = torch.zeros(0)

    def enter(self, block: int, hidden: Tensor) -> None:
        self._state = hidden
        if self.keeps:
            self.entering.append(hidden.detach().clone())
        if not self.stages:
            self.positions = _positions(self.samples, hidden.shape[1])
            self.stages.append(_norm(hidden))
            self.blocks.append(_norm(hidden))
        if hidden.shape[1] != self.positions.shape[1]:
            raise UnsupportedModelError(
                f"{self.structure.blocks[block].name} is given {hidden.shape[1]} positions and the first block "
                f"{self.positions.shape[1]}: a place cannot be followed through a model whose blocks have other positions"
            )

    def write(self, sublayer: Sublayer, values: Tensor) -> None:
        self._state = self._state + sublayer.scale * values.reshape(self._state.shape)
        self.stages.append(_norm(self._state))

    def normed(self, sublayer: Sublayer, values: Tensor) -> None:
        self._state = values

    def leave(self, block: int, hidden: Tensor) -> None:
        if not self.structure.blocks[block].split:
            self.stages.append(_norm(hidden))
        self.blocks.append(_norm(hidden))


def _norm(hidden: Tensor) -> Tensor:
    return hidden.float().norm(dim=-1).cpu()


def _positions(samples: Samples, length: int) -> Tensor:
    """Positions in the document, int64 ``(samples, length)``, -1 for padding."""
    mask, tokens = samples.arguments.get("attention_mask"), samples.tokens
    if mask is None or mask.ndim != 2 or tokens is None:
        return torch.arange(length).expand(len(samples), -1)
    real = nn.functional.pad(mask.cpu().long(), (length - tokens.shape[1], 0), value=1)
    return torch.where(real > 0, real.cumsum(1) - 1, -1)


@torch.no_grad()
def measure_growth(model: PreTrainedModel, structure: Structure, samples: Samples, batch_size: int) -> Growth:
    """Norms of all samples at every stage, and what enters every block, so that nothing in front of an edit runs again."""
    parts, ids = list[_Norms](), list[Tensor]()
    keeps = all(block.split and block.returns != "more" for block in structure.blocks)
    for batch in samples.batches(batch_size):
        norms = _Norms(structure, batch, keeps=keeps)
        with norms.on(model, structure):
            model(**forward_arguments(model, batch, full_logits=False))
        if batch.tokens is not None:
            front = norms.positions.shape[1] - batch.tokens.shape[1]
            ids.append(nn.functional.pad(batch.tokens.cpu(), (front, 0), value=-1).masked_fill(norms.positions < 0, -1))
        parts.append(norms)
        if sum(hidden.nbytes for hidden in norms.entering) * len(samples) > MEMORY * len(batch):
            keeps, parts[0].entering = False, []
    stages, blocks = (
        torch.cat([torch.stack(part.stages, 1) for part in parts]),
        torch.cat([torch.stack(part.blocks, 1) for part in parts]),
    )
    entering = [torch.cat(states) for states in zip(*(part.entering for part in parts), strict=True)] if keeps else []
    growth = Growth(stages, blocks, torch.cat([part.positions for part in parts]), torch.cat(ids) if ids else None, entering)
    return growth if _runs_from_inside(model, structure, samples, growth) else dataclasses.replace(growth, entering=())


def _runs_from_inside(model: PreTrainedModel, structure: Structure, samples: Samples, growth: Growth) -> bool:
    """Whether two samples come out as they did when the model begins in its middle, and at its last block."""
    few = samples.take(slice(0, 2))
    for block in sorted({len(growth.entering) // 2, len(growth.entering) - 1}) if growth.entering else ():
        again = _Norms(structure, few)
        with again.on(model, structure), passing(model, structure, block, len(growth.entering), growth.entering[block][:2]):
            model(**forward_arguments(model, few, full_logits=False))
        if not torch.allclose(again.blocks[-1], growth.blocks[:2, -1], rtol=1e-3 if model.dtype == torch.float32 else 0.1):
            return False
    return bool(growth.entering)


@dataclasses.dataclass(frozen=True)
class Birth:
    """Where the norm at a place jumps.

    ``stage`` is that of the write behind which it has jumped, 0 before the first block; ``before``, ``after`` and ``peak`` (up
    to the next birth) the mean over samples of the norm there over that of other tokens. ``until`` is the stage of the next
    birth, and ``death`` that of the write that takes half of the norm away again."""

    stage: int
    before: float
    after: float
    peak: float
    until: int | None = None
    death: int | None = None

    @property
    def jumps(self) -> bool:
        """Whether the norm stands out at any stage."""
        return self.peak >= LEAST_JUMP


def births_of(growth: Growth, at: Tensor, others: Tensor) -> list[Birth]:
    """The stages at which the norm at a place grows most against that of other tokens, one for each time that it rises.

    Growth is the step of ``max(ratio, 1)``, mean over samples: a small embedding that reaches the size of the others has not
    jumped. A place whose ratio falls to half and doubles again is born again. One that never doubles has one entry, which may
    not jump."""
    own = growth.means(at)
    ratios = own / growth.means(others)
    known = ~ratios.isnan().any(1)
    clamped, means = ratios[known].clamp_min(1.0), ratios[known].mean(0)
    logs = clamped.log().mean(0)
    steps = torch.diff(clamped.mean(0), prepend=logs.new_ones(1))
    falls = torch.diff(own[known].mean(0).log(), prepend=logs.new_zeros(1))
    rises = _rises(logs.tolist())
    rises = rises if len(rises) > 1 else [(0, len(logs) - 1)]
    stages = [first + int(steps[first : peak + 1].argmax()) for first, peak in rises]
    births = list[Birth]()
    for number, (stage, until) in enumerate(zip(stages, [*stages[1:], None], strict=True)):
        peak = float(means[slice(stage if number else 0, until)].max())
        top = stage + int(means[stage:until].argmax()) + 1
        fall = falls[top:until]
        death = top + int(fall.argmin()) if len(fall) and float(fall.min()) <= -math.log(LEAST_JUMP) else None
        before = float(means[stage - 1]) if stage else 1.0
        births.append(Birth(stage, before, float(means[stage]), peak, until, death))
    return births


def _rises(levels: Sequence[float]) -> list[tuple[int, int]]:
    """First index and peak of every rise by ``ln LEAST_JUMP`` from the level before; a fall by as much lies between two."""
    least, rises, rising = math.log(LEAST_JUMP), list[tuple[int, int]](), True
    start, low, peak, high = 0, 0.0, 0, 0.0
    for index, level in enumerate([*levels, -math.inf]):
        if rising and level > high:
            peak, high = index, level
        elif rising and high - low >= least and high - level >= least:
            rises.append((start, peak))
            rising, start, low = False, index + 1, level
        elif not rising and level <= low:
            start, low = index + 1, level
        elif not rising and level - low >= least:
            rising, peak, high = True, index, level
    return rises


def spike_places(growth: Growth, known: Sequence[Sink], names: Sequence[str | None] | None = None) -> list[Sink]:
    """Positions whose norm is :data:`SPIKE_TIMES` that of other tokens at some stage in half of the samples, none of the
    known: the median of the sample, since the spikes themselves would raise the mean. ``names`` says what positions are that
    are no tokens of a text."""
    real = (growth.positions >= 0)[:, None]
    middle = growth.norms.masked_fill(~real, float("nan")).nanmedian(2, keepdim=True).values
    high = ((growth.norms > SPIKE_TIMES * middle) & real).any(1)
    followed = Place(tuple(known))
    taken, places = followed.positions, []
    if known:  # a token is followed wherever it stands
        high &= ~followed.mask(growth.positions, growth.tokens)
    for position in range(int(growth.positions.max()) + 1):
        here = growth.positions == position
        if position not in taken and 2 * int((high & here).sum()) >= int(here.sum()) > 0:
            called = names[position] if names is not None and position < len(names) else None
            places.append(Sink(kind="position", position=position, called=called))
    return places


def largest_over_median(hidden: Tensor, at: Tensor, others: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Largest over median size of the hidden states of every sample, float64 ``(samples,)``, and whether the largest stands at
    a place.

    The largest is that of the place and of the tokens that are neither sinks nor spikes, so that a spike at one place is none
    of another; the median is that of all tokens that are no padding (``real``)."""
    sizes, real = hidden.float().abs(), real.to(hidden.device)
    if bool(real.all()):
        medians = sizes.flatten(1).median(1).values
    else:
        medians = torch.stack([row[kept].median() for row, kept in zip(sizes, real, strict=True)])
    by_token = sizes.amax(2)
    here, there = (by_token.masked_fill(~mask.to(hidden.device), 0.0).amax(1) for mask in (at, others))
    return (torch.maximum(here, there) / medians.clamp_min(1e-30)).double().cpu(), (here > there).cpu()


class PlaceWeights(Watcher):
    """What every head gives to some places of a sample together: float64 ``(samples, heads)`` by module, mean over queries,
    and ``uniform`` if every visible key had the same. Queries that stand on a place (``at``, boolean ``(samples, length)``) or
    see none are left out, and calls over other lengths; NaN for a sample without such a query."""

    name, needs = "place_weights", frozenset({"mass", "log_sum_exp"})

    def __init__(self, at: Tensor) -> None:
        self.at = at
        self.weights: dict[str, Tensor] = {}
        self.uniform: dict[str, Tensor] = {}
        self.layers: dict[str, int] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self" or call.kv_len != self.at.shape[1] or len(call.queries) != len(self.at):
            return
        at = self.at.to(call.queries.device)
        count = int(at.sum(1).max())
        order = (~at).int().argsort(dim=1, stable=True)[:, :count]
        index = order.masked_fill(~at.gather(1, order), -1)[:, None].expand(-1, call.q_len, -1)
        _, visible = scores_of_keys(call, index)
        weights = weights_of_keys(call, index, statistics.log_sum_exp).sum(-1).double()
        if not call.operation.normalized:
            assert statistics.row_mass is not None
            weights = row_share(weights, statistics.row_mass, call.operation)
        keys = torch.cat(
            [call.visible.block(start, stop, 0, call.kv_len).sum(-1).expand(len(at), call.num_heads, -1)
             for start, stop in call.blocks()], dim=2,
        )  # fmt: skip
        places = visible.sum(-1)
        counted = (places > 0) & (call.counted & ~at[:, call.kv_len - call.q_len :])[:, None] & (keys > places)
        number = counted.sum(-1)
        for by_module, values in ((self.weights, weights), (self.uniform, places / keys.clamp_min(1))):
            sums = values.double().masked_fill(~counted, 0.0).sum(-1)
            by_module[call.site.module] = (sums / number).cpu()  # 0 / 0 is NaN
        self.layers[call.site.module] = call.site.layer
