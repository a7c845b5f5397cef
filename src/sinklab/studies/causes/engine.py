"""The engine: effects of many variants on many heads, equal to those of ``effects.one_by_one`` and much faster.

The unedited model runs once a batch; what a variant does to a head follows from the recorded attention call; and of the model
only what lies behind the edited module runs again, for several variants and heads at a time (``replay.py``). Where the readout
is a cross-entropy of tokens, logits are never held (``replay_logits.py``).

Every module is tried first, on two samples: a replay without edits must give the outputs of the model, and one with an edit
those of the edited model. A module that fails goes one head at a time, and :attr:`Effects.record` says why. Where a module runs
several times in one forward of the model (ALBERT), all that is said of modules here is said of each of its runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall
from sinklab.attention.editing import Editing, edited_outputs, of_heads
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.session import attend
from sinklab.errors import MeasurementError
from sinklab.results.run import Progress, silent
from sinklab.sinks import Head
from sinklab.studies.causes.effects import CLEAN, Effects, HeadEdit, one_by_one
from sinklab.studies.causes.readout import Changes, Readout
from sinklab.studies.causes.replay import Recording, Replay
from sinklab.studies.causes.samples import Samples

__all__ = ["REPLAYED", "measure_effects"]

REPLAYED = "replayed"
"""What :attr:`Effects.record` says of a module whose heads did not go one by one."""
ROOM = 2**30
"""Bytes that recorded calls of attention may take."""
STACK = 2**21
"""Bytes of the head outputs of one stack of edits: about what a processor's caches hold, more is slower. While a layer runs it
needs some ten times as many; the logits of a readout that asks for them, and the weights of attention that forms them, may be
eight times as large."""
TRIAL = 2
"""Samples of the trial of a module."""
ROUNDING = 32
"""Largest root mean square error of a replay, in units of the last place of the root mean square output. Batches of another
size are rounded in another order, some units in a model of some layers; a replay that lacks a term is wrong in the first
digits."""


def measure_effects(
    model: nn.Module,
    samples: Samples,
    readout: Readout,
    variants: Sequence[HeadEdit],
    heads: Sequence[Head],
    *,
    batch_size: int = 16,
    progress: Progress = silent,
) -> Effects:
    """The same as :func:`~sinklab.studies.causes.effects.one_by_one`, up to rounding.

    No other code may run the model meanwhile: some of its modules have another ``forward``.

    Args:
        heads: all of them, or some.
        batch_size: samples of the unedited run; edits are stacked on top of it as far as there is room.
        progress: called with ``"effects"``, how many of variants × heads × batches are done, and their number.

    Returns:
        Effects whose ``record`` says for every attention module that it was replayed, or why not.

    Raises:
        ConfigurationError: a layer or head that the model has not.
        UnsupportedModelError: an intervention that the attention of the model cannot express.
        MeasurementError: a loss or a divergence at a scored position that is NaN or infinite.
    """
    shape = (len(variants), len(heads), len(samples), len(samples.domain_names))
    loss, divergence = np.full(shape, np.nan), np.full(shape, np.nan)
    clean_loss = np.full(shape[2:], np.nan)
    total, done = len(variants) * len(heads) * len(samples.bounds(batch_size)), 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress("effects", done, total)

    with torch.no_grad():
        plan = _make_plan(model, samples, readout, variants, heads)
        for start, part in samples.parts(batch_size):
            rows = slice(start, start + len(part))
            for recording, changes in _recordings(plan, part):
                clean_loss[rows] = part.by_domain(changes.clean_loss, CLEAN).cpu().numpy()
                for module, pairs, edits in _stacks(plan, recording, start):
                    outputs = plan.outputs(plan.replay.run(recording, module, edits), recording)
                    of_loss, of_outputs = changes.changes(outputs)
                    del outputs  # logits of a large vocabulary, beside which the next ones would be made
                    for number, (variant, head) in enumerate(pairs):
                        means = variants[variant].means(heads[head], part, of_loss[number], of_outputs[number])
                        loss[variant, head, rows], divergence[variant, head, rows] = means
                    advance(len(pairs))
    if plan.slow or not plan.modules:
        rest = [heads[number] for number in plan.slow]
        slow = one_by_one(
            model, samples, readout, variants, rest, batch_size=batch_size, progress=lambda what, done, total: advance(1)
        )
        loss[:, plan.slow], divergence[:, plan.slow], clean_loss = slow.loss, slow.divergence, slow.clean_loss
    names = [variant.name for variant in variants]
    return Effects(names, list(heads), samples.domain_names, loss, divergence, clean_loss, readout.unit, plan.record)


@dataclasses.dataclass(eq=False)
class _Plan:
    """What is to be done, and how."""

    replay: Replay
    readout: Readout
    variants: Sequence[HeadEdit]
    heads: Sequence[Head]
    modules: list[str] = dataclasses.field(default_factory=list)
    heads_of: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    slow: list[int] = dataclasses.field(default_factory=list)
    record: dict[str, str] = dataclasses.field(default_factory=dict)

    def outputs(self, found: object, recording: Recording) -> Tensor:
        """What the readout compares, or hidden states in its place."""
        return self.readout.outputs(found, recording.part)

    def interventions(self, variant: int, head: int, call: AttentionCall, start: int, stop: int) -> list[HeadIntervention]:
        """What a variant does to a head, by their numbers; nothing if its settings make it the identity.

        Raises:
            ConfigurationError: a layer or head that the model has not.
        """
        editing = Editing(self.variants[variant].on(self.heads[head], start, stop), self.replay.anatomy)
        groups = editing.groups(call.site, call.num_heads)
        return groups[0][1] if groups else []


# --- the trial -------------------------------------------------------------------------------------------------------------


def _make_plan(
    model: nn.Module, samples: Samples, readout: Readout, variants: Sequence[HeadEdit], heads: Sequence[Head]
) -> _Plan:
    """Try every module that has heads to be edited."""
    part = samples.part(0, min(TRIAL, len(samples)))
    plan = _Plan(Replay(model), readout, variants, heads)
    for head in heads:
        for variant in variants:  # the checks of a session, before hours are spent on other heads
            Editing(variant.on(head, 0, len(part)), plan.replay.anatomy)
    recording = plan.replay.record(part)
    expected = plan.outputs(recording.outputs, recording)
    bare = _without_logits(plan, recording, expected)
    if bare is not None:
        plan.replay, recording = bare, bare.record(part)
    by_layer = {site.layer: name for name, site in recording.sites.items() if site.kind == "self"}
    for number, head in enumerate(heads):
        plan.heads_of.setdefault(head.module or by_layer.get(head.layer, f"layer {head.layer}"), []).append(number)
    for name in sorted(
        plan.heads_of, key=list(recording.calls).index if plan.heads_of.keys() <= recording.calls.keys() else None
    ):
        reason = _trial(plan, recording, expected, name)
        plan.record[name] = reason or REPLAYED
        if reason is None:
            plan.modules.append(name)
        else:
            plan.slow += plan.heads_of[name]
    return plan


def _without_logits(plan: _Plan, recording: Recording, expected: Tensor) -> Replay | None:
    """A replay that leaves the vocabulary projection out, if the readout can do without logits and that linear map is proved to
    be all that stands between the hidden states and what the readout reads."""
    projection = getattr(plan.replay.model, "get_output_embeddings", lambda: None)()
    overridden = type(plan.readout).compare_hidden is not Readout.compare_hidden
    if not overridden or type(projection) is not nn.Linear or "labels" in recording.part.inputs:
        return None
    replay = Replay(plan.replay.model, projection)
    hidden = plan.outputs(replay.record(recording.part, ()).outputs, recording)
    logits = replay.logit_map()
    if logits is None or hidden.shape[-1] != logits.weight.shape[1] or hidden.shape[:-1] != expected.shape[:-1]:
        return None
    proved = _error(nn.functional.linear(hidden, logits.weight, logits.bias), expected) <= ROUNDING
    return replay if proved and plan.readout.compare_hidden(hidden, logits, recording.part) is not None else None


def _trial(plan: _Plan, recording: Recording, expected: Tensor, name: str) -> str | None:
    """Why the heads of a module cannot be replayed, or ``None`` when they can."""
    if recording.times[name] != 1:
        return f"it calls the attention function {recording.times[name]} times in one run"
    call, number, stop = recording.calls[name], plan.heads_of[name][0], len(recording.part)
    edited_by = ((index, plan.interventions(index, number, call, 0, stop)) for index in range(len(plan.variants)))
    variant, interventions = next(((index, edits) for index, edits in edited_by if edits), (0, []))
    for head in plan.heads_of[name]:
        plan.interventions(variant, head, call, 0, stop)  # every head is there
    chosen = plan.heads[number].head
    own = _SharedCall.of(of_heads(call, [chosen]))
    edits = [(chosen, own.edited([])), (chosen, own.edited(interventions))]
    with attend(plan.replay.model, interventions=interventions, verify=False):
        expected_outputs = plan.outputs(plan.replay.model(**recording.part.inputs), recording)
    weight, reason = plan.replay.linear_map(recording, name), None
    for way in [weight, None] if weight is not None else [None]:
        plan.replay.maps.pop(name, None)
        if way is not None:
            plan.replay.maps[name] = way
        try:
            replayed = plan.outputs(plan.replay.run(recording, name, edits), recording)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, MeasurementError) as error:
            reason = f"the model does not run with layers left out: {type(error).__name__}: {error}"
            continue
        logits = plan.replay.logit_map()
        if logits is not None:
            replayed = nn.functional.linear(replayed, logits.weight, logits.bias)
        pairs = zip(replayed.split(len(expected)), (expected, expected_outputs), strict=True)
        plain, edited = (_error(index, other) for index, other in pairs)
        if max(plain, edited) <= ROUNDING:
            return None
        which = "without an edit" if plain > ROUNDING else f"under {plan.variants[variant].name!r}"
        reason = f"a replay {which} is {max(plain, edited):.2g} units in the last place off the model, more than {ROUNDING}"
    return reason


def _error(found: Tensor, expected: Tensor) -> float:
    """Root mean square difference over the root mean square of what is expected, in units of the last place."""
    if found.shape != expected.shape:
        return float("inf")
    unit = torch.finfo(expected.dtype).eps * expected.double().square().mean().sqrt()
    error = (found.double() - expected.double()).square().mean().sqrt() / unit.clamp_min(torch.finfo(torch.float64).tiny)
    return float(error.nan_to_num(float("inf")))


# --- the work --------------------------------------------------------------------------------------------------------------


def _recordings(plan: _Plan, part: Samples) -> Iterator[tuple[Recording, Changes]]:
    """Runs of the unedited model, one or, if not all calls can be held together, several."""
    modules, logits = plan.modules, plan.replay.logit_map()
    changes: Changes | None = None
    while modules:
        recording = plan.replay.record(part, modules, ROOM)
        if changes is None:
            outputs = plan.outputs(recording.outputs, recording)
            if logits is not None:
                changes = plan.readout.compare_hidden(outputs, logits, part)
            changes = plan.readout.compare(outputs, part) if changes is None else changes
        yield recording, changes
        modules = recording.left


Stack = tuple[str, list[tuple[int, int]], list[tuple[int, Tensor]]]
"""Edits of one module that run together: its name, numbers of variant and head in the result, and number of the head in its
module with its outputs ``(batch, q_len, value_dim)``."""


def _stacks(plan: _Plan, recording: Recording, start: int) -> Iterator[Stack]:
    """All edits of the modules whose calls are recorded, as many at a time as there is room for."""
    stop = start + len(recording.part)
    clean = plan.outputs(recording.outputs, recording)
    for module, call in recording.calls.items():
        pairs = [(variant, head) for head in plan.heads_of[module] for variant in range(len(plan.variants))]
        assert call.head_outputs is not None
        scores = call.queries.shape[0] * call.num_heads * call.q_len * call.kv_len * call.queries.element_size()
        size = max(1, int(STACK / max(_bytes(call.head_outputs), _bytes(clean) / 8, scores / 8)))
        shared: tuple[int, _SharedCall] | None = None
        for first in range(0, len(pairs), size):
            edits = []
            for variant, number in pairs[first : first + size]:
                head = plan.heads[number].head
                if shared is None or shared[0] != head:
                    shared = head, _SharedCall.of(of_heads(call, [head]))
                edits.append((head, shared[1].edited(plan.interventions(variant, number, call, start, stop))))
            yield module, pairs[first : first + size], edits


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


OF_SCORES = ("queries", "keys", "scaling", "softcap", "bias")
OF_WEIGHTS = (*OF_SCORES, "visible", "operation", "sink_scores")


@dataclasses.dataclass
class _SharedCall(AttentionCall):
    """A call of one head, with scores and weights computed once for all interventions that leave them alone."""

    native: AttentionCall | None = None
    memo: dict[tuple[str, int, int], tuple[Tensor, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, call: AttentionCall) -> Self:
        """The call with an empty memo."""
        return cls(**{field.name: getattr(call, field.name) for field in dataclasses.fields(AttentionCall)}, native=call)

    def edited(self, interventions: Sequence[HeadIntervention]) -> Tensor:
        """Outputs of the head ``(batch, q_len, value_dim)``."""
        assert self.head_outputs is not None
        return (edited_outputs(self, interventions)[1][:, 0]) if interventions else self.head_outputs[:, :, 0]

    def scores(self, query_start: int, query_stop: int) -> Tensor:
        return self._once("scores", OF_SCORES, query_start, query_stop, super().scores)

    def signed_weights(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        compute = functools.partial(super().signed_weights, scores=scores)
        return self._once("weights", OF_WEIGHTS, query_start, query_stop, compute)

    def null_mass(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        compute = functools.partial(super().null_mass, scores=scores)
        return self._once("null mass", OF_WEIGHTS, query_start, query_stop, compute)

    def _once(self, what: str, fields: tuple[str, ...], start: int, stop: int, compute: Callable[..., Tensor]) -> Tensor:
        if any(getattr(self, name) is not getattr(self.native, name) for name in fields):
            return compute(start, stop)
        value, version = self.memo.get((what, start, stop), (None, None))
        if value is None or value._version != version:  # written to meanwhile
            value = compute(start, stop)
            self.memo[what, start, stop] = value, value._version
        return value
