"""The engine: effects of many variants on many heads, equal to those of ``effects.one_by_one`` and much faster.

The unedited model runs once a batch; what a variant does to the heads of a module follows from the recorded attention call,
and of the model only what lies behind the module runs again, several edits at a time (``replay.py``). Every module is tried
first on two samples: replays must give the outputs of the model, unedited and edited. One that fails goes one head at a time,
and :attr:`Effects.record` says why. Of a module that runs several times in one forward (ALBERT), each run counts as a module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall
from sinklab.attention.editing import Editing, edited_outputs, of_heads
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.session import attend
from sinklab.errors import MeasurementError
from sinklab.models.losses import LogitMap, tokens_at_once
from sinklab.results.run import Progress, silent
from sinklab.sinks import Head
from sinklab.studies.causes.effects import CLEAN, Edited, Effects, HeadEdit, HeadGroup, members_of, one_by_one
from sinklab.studies.causes.readout import PlainChanges, Readout, TokenChanges
from sinklab.studies.causes.replay import HeadsEdit, Recording, Replay
from sinklab.studies.causes.samples import Samples

REPLAYED = "replayed"
"""What :attr:`Effects.record` says of a module whose heads did not go one by one."""
COARSELY = "replayed, changes multiplied in bfloat16"
COARSE = 1 / 32
"""Largest error of that, as a share of the change that an edit makes of the outputs, in root mean squares: rounding input and
weight of a product errs by a quarter of a percent at random, and some sixty stand one behind the other."""
ROOM = 3 * 2**29
"""Bytes that recordings may take: of 18 texts of 64 tokens, all that a model of 135 million parameters gave unedited."""
STACK = 2**21
"""Bytes of the head outputs of one stack of edits: about what a processor's caches hold, more is slower. While a layer runs it
needs some ten times as many; the logits of a readout that asks for them, and the weights of attention that forms them, may be
eight times as large."""
AT_ONCE = 2**26
"""Bytes of hidden states whose logits are compared with those of the unedited model at once."""
TOKENS = 512
"""Of a batch at most, where changes are multiplied in bfloat16."""
TRIAL = 2
"""Samples of the trial of a module."""
ROUNDING = 32
"""Largest root mean square error of a replay, in units of the last place of the root mean square output. Batches of another
size are rounded in another order, some units in a model of some layers; a replay that lacks a term is wrong in the first
digits."""


def measure_effects(
    model: nn.Module, samples: Samples, readout: Readout, variants: Sequence[HeadEdit], heads: Sequence[Edited], *,
    batch_size: int = 16, progress: Progress = silent,
) -> Effects[Edited]:  # fmt: skip
    """The same as :func:`~sinklab.studies.causes.effects.one_by_one`, up to rounding; see :class:`Engine`."""
    return Engine(model, samples, readout, variants, batch_size=batch_size).measure(heads, progress=progress)


def multiplies_coarsely(model: nn.Module) -> bool:
    """Whether a model computes in float32 on a processor that multiplies bfloat16 by instructions of its own."""
    tensors = [tensor for tensor in model.parameters() if tensor.is_floating_point()]
    here = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)
    return here and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def all_heads_edited(call: AttentionCall, edits: Sequence[HeadIntervention]) -> Tensor:
    """Outputs of every head of a call when it alone is edited: ``(batch, q_len, num_heads, value_dim)``, float32 or wider."""
    assert call.head_outputs is not None
    active = [edit for edit in edits if not edit.changes_nothing]
    return edited_outputs(call, active)[1].transpose(1, 2) if active else call.head_outputs


@dataclasses.dataclass(eq=False)
class _Batch:
    """What is kept of the unedited model on some samples: the readout, and a recording while there is room for it."""

    changes: PlainChanges | TokenChanges
    clean_loss: np.ndarray
    recording: Recording | None = None


class Engine:
    """Effects on heads, and on groups of heads, of one model on the same samples; no other code may run the model meanwhile.

    Args:
        batch_size: samples of the unedited run; edits are stacked on top of it as far as there is room.
        coarse: multiply changes in bfloat16, where the trial of a module shows that this errs by rounding alone.
    """

    def __init__(
        self, model: nn.Module, samples: Samples, readout: Readout, variants: Sequence[HeadEdit], *, batch_size: int = 16,
        coarse: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.samples, self.readout, self.variants = model, samples, readout, list(variants)
        # What linear maps gave unedited is kept of a batch: some 30 KB a token and layer.
        few = max(2, TOKENS // max(1, int(samples.lengths(samples.domains.shape[1]).max())))
        self.batch_size = min(batch_size, few) if coarse else batch_size
        self.coarse = coarse
        self.record: dict[str, str] = {}
        self._replay: Replay | None = None
        self._trial: tuple[Recording, Tensor] | None = None
        self._module_of: dict[int, str] = {}
        self._batches: dict[int, _Batch] = {}

    @torch.no_grad()
    def measure(
        self, edited: Sequence[Edited], chosen: Sequence[str] | None = None, *, progress: Progress = silent
    ) -> Effects[Edited]:
        """The effects of the ``chosen`` variants (all by default; NaN of others) on heads or groups; those that no module
        replays, and groups of several modules, go one by one. ``progress`` is told how many of variants × heads × batches are
        done, and their number.

        Raises:
            ConfigurationError: a layer or head that the model has not.
            UnsupportedModelError: an intervention that the attention of the model cannot express.
            MeasurementError: a loss at a scored position that is NaN or infinite.
        """
        names = [variant.name for variant in self.variants]
        numbers = [number for number, name in enumerate(names) if chosen is None or name in chosen]
        shape = (len(names), len(edited), len(self.samples), len(self.samples.domain_names))
        loss, clean_loss = np.full(shape, np.nan), np.full(shape[2:], np.nan)
        total, done = len(numbers) * len(edited) * len(self.samples.bounds(self.batch_size)), 0
        progress("effects", 0, total)
        by_module, slow = self._by_module(edited, numbers)
        for start, part in self.samples.parts(self.batch_size) if by_module else ():
            rows = slice(start, start + len(part))
            for module, indices in by_module.items():
                batch, recording = self._recorded(start, part, module)
                clean_loss[rows] = batch.clean_loss
                pairs = [(variant, index) for variant in numbers for index in indices]
                waiting, hidden = list[tuple[int, int]](), list[Tensor]()
                for stack, edits in self._stacks(recording, module, pairs, edited, start):
                    hidden.append(self._outputs(self.replay.run(recording, module, edits), recording))
                    waiting += stack
                    done += len(stack)
                    progress("effects", done, total)
                    if self.coarse and waiting[-1] != pairs[-1] and sum(map(_bytes, hidden)) < AT_ONCE:
                        continue  # logits of the unedited model serve as many as there are
                    of_loss = batch.changes.changes(torch.cat(hidden))
                    for row, (variant, index) in enumerate(waiting):
                        loss[variant, index, rows] = self.variants[variant].means(edited[index], part, of_loss[row])
                    waiting, hidden = [], []  # logits of a large vocabulary, beside which the next ones would be made
                recording.forget_repeats()
        if slow:
            one = one_by_one(
                self.model, self.samples, self.readout, [self.variants[number] for number in numbers],
                [edited[index] for index in slow], batch_size=self.batch_size,
                progress=lambda stage, step, of: progress("effects", done + step, total),
            )  # fmt: skip
            where = np.ix_(numbers, slow)
            loss[where], clean_loss = one.loss, one.clean_loss
        seen = {module: self.record[module] for module in self._modules_of(edited) if module in self.record}
        return Effects(names, list(edited), self.samples.domain_names, loss, clean_loss, self.readout.unit, seen)

    @property
    def replay(self) -> Replay:
        """The replay of the model, with or without its logits; made when it is first needed."""
        if self._replay is None:
            part = self.samples.part(0, min(TRIAL, len(self.samples)))
            self._replay = Replay(self.model)
            recording = self._replay.record(part)
            expected = self._outputs(recording.outputs, recording)
            bare = self._without_logits(recording, expected)
            if bare is not None:
                self._replay, recording = bare, bare.record(part)
            self._trial = recording, expected
            self._module_of = {site.layer: name for name, site in recording.sites.items() if site.kind == "self"}
        return self._replay

    def _outputs(self, found: object, recording: Recording) -> Tensor:
        """What the readout compares, or hidden states in its place."""
        return self.readout.outputs(found, recording.part)

    def _name(self, head: Head) -> str:
        return head.module or self._module_of.get(head.layer, f"layer {head.layer}")

    def _modules_of(self, edited: Sequence[Head | HeadGroup]) -> list[str]:
        return list(dict.fromkeys(self._name(head) for one in edited for head in members_of(one)))

    def _by_module(self, edited: Sequence[Edited], numbers: Sequence[int]) -> tuple[dict[str, list[int]], list[int]]:
        """Numbers of what is edited by the module that is replayed for it, in the order of the model; and the others."""
        replay = self.replay
        assert self._trial is not None  # with the replay
        stop = len(self._trial[0].part)
        for one in edited:
            for number in numbers:  # the checks of a session, before hours are spent on other heads
                Editing(self.variants[number].on(one, 0, stop), replay.anatomy)
        found: dict[str, list[int]] = {}
        slow = []
        for index, one in enumerate(edited):
            names = self._modules_of([one])
            call = self._trial[0].calls.get(names[0])
            if call is not None:
                for number in numbers[:1]:  # every head is there
                    Editing(self.variants[number].on(one, 0, stop), replay.anatomy).groups(call.site, call.num_heads)
            if len(names) > 1:
                slow.append(index)
            elif self._tried(names[0], members_of(one), numbers):
                found.setdefault(names[0], []).append(index)
            else:
                slow.append(index)
        order = list(self._trial[0].calls)
        return dict(sorted(found.items(), key=lambda item: order.index(item[0]))), slow

    # --- the trial ---------------------------------------------------------------------------------------------------------

    def _tried(self, module: str, heads: Sequence[Head], numbers: Sequence[int]) -> bool:
        """Whether a module is replayed; it is tried when it is first asked for."""
        if module not in self.record:
            assert self._trial is not None
            self.record[module] = self._why_not(*self._trial, module, heads[0].head, numbers) or REPLAYED
            if self.record[module] == REPLAYED and self.coarse:
                self.record[module] = self._coarsely(*self._trial, module, heads[0].head, numbers)
        return self.record[module] in (REPLAYED, COARSELY)

    def _coarsely(self, recording: Recording, expected: Tensor, module: str, head: int, numbers: Sequence[int]) -> str:
        """Whether a module is replayed with changes in bfloat16; if that errs by more than rounding, all is exact from here
        on."""
        edits, exact = self._edits_of_trial(recording, module, head, numbers), self.replay
        exactly = self._outputs(exact.run(recording, module, edits[1:]), recording)
        exact.coarse = True
        coarse = self.replay.record(recording.part, [module])
        rounded = self._outputs(exact.run(coarse, module, edits[1:]), recording)
        plain = self._outputs(recording.outputs, recording)
        error, change = ((one.double() - exactly.double()).square().mean().sqrt() for one in (rounded, plain))
        least = ROUNDING * torch.finfo(exactly.dtype).eps * plain.double().square().mean().sqrt()
        if bool(error <= torch.maximum(COARSE * change, least)):
            return COARSELY
        self.coarse = exact.coarse = False
        self._batches.clear()
        return REPLAYED

    def _without_logits(self, recording: Recording, expected: Tensor) -> Replay | None:
        """A replay without the vocabulary projection, if the readout can do without logits and that is proved to be all behind
        it."""
        projection = getattr(self.model, "get_output_embeddings", lambda: None)()
        overridden = type(self.readout).compare_hidden is not Readout.compare_hidden
        if not overridden or type(projection) is not nn.Linear or "labels" in recording.part.inputs:
            return None
        replay = Replay(self.model, projection)
        hidden = self._outputs(replay.record(recording.part, ()).outputs, recording)
        logits = replay.logit_map()
        if logits is None or hidden.shape[-1] != logits.weight.shape[1] or hidden.shape[:-1] != expected.shape[:-1]:
            return None
        proved = _error(hidden, expected, logits) <= ROUNDING
        return replay if proved and self.readout.compare_hidden(hidden, logits, recording.part) is not None else None

    def _why_not(self, recording: Recording, expected: Tensor, module: str, head: int, numbers: Sequence[int]) -> str | None:
        """Why the heads of a module cannot be replayed, or ``None`` when they can."""
        if recording.times[module] != 1:
            return f"it calls the attention function {recording.times[module]} times in one run"
        call, stop, replay = recording.calls[module], len(recording.part), self.replay
        variant, edits = self._variant_of_trial(numbers, stop), self._edits_of_trial(recording, module, head, numbers)
        site_head = Head(call.site.layer, head, module)
        with attend(self.model, interventions=variant.on(site_head, 0, stop), verify=False):
            expected_outputs = self._outputs(
                self.model(**lean_arguments(self.model, recording.part.inputs, logits=True)), recording
            )
        try:
            replayed = self._outputs(replay.run(recording, module, edits), recording)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, MeasurementError) as error:
            return f"the model does not run with layers left out: {type(error).__name__}: {error}"
        pairs = zip(replayed.split(len(expected)), (expected, expected_outputs), strict=True)
        plain, edited = (_error(own, other, replay.logit_map()) for own, other in pairs)
        if max(plain, edited) <= ROUNDING:
            return None
        which = "without an edit" if plain > ROUNDING else f"under {variant.name!r}"
        return f"a replay {which} is {max(plain, edited):.2g} units in the last place off the model, more than {ROUNDING}"

    def _variant_of_trial(self, numbers: Sequence[int], stop: int) -> HeadEdit:
        """The first that changes something."""
        active = [n for n in numbers if any(not edit.changes_nothing for edit in self.variants[n].of_all(0, stop))]
        return self.variants[(active or list(numbers))[0]]

    def _edits_of_trial(self, recording: Recording, module: str, head: int, numbers: Sequence[int]) -> list[HeadsEdit]:
        """A head as it is, and edited."""
        own, stop = of_heads(recording.calls[module], [head]), len(recording.part)
        assert own.head_outputs is not None
        edited = all_heads_edited(own, self._variant_of_trial(numbers, stop).of_all(0, stop))
        return [((head,), own.head_outputs), ((head,), edited)]

    # --- the work ----------------------------------------------------------------------------------------------------------

    def _recorded(self, start: int, part: Samples, module: str) -> tuple[_Batch, Recording]:
        """The unedited model on a batch, with the call of a module: kept if there is room, or run again whenever asked for.
        Batches are asked for in turns, so those that are kept stay."""
        batch = self._batches.get(start)
        if batch is not None and batch.recording is not None:
            if module in batch.recording.calls:
                return batch, batch.recording
            batch.recording = None
        kept = [other.recording.size for other in self._batches.values() if other.recording is not None]
        room, following = ROOM - sum(kept), self._following(module)
        # In a long run every module has its turn, the first ones late: one recording of all instead of ever larger ones.
        whole = self.coarse and room >= max(kept, default=0)
        recording = self.replay.record(part, None if whole else following, room)
        if module not in recording.calls:
            recording = self.replay.record(part, following, room)
        if batch is None:
            outputs, logits = self._outputs(recording.outputs, recording), self.replay.logit_map()
            hidden = None if logits is None else self.readout.compare_hidden(outputs, logits, part)
            changes: PlainChanges | TokenChanges = self.readout.compare(outputs, part) if hidden is None else hidden
            batch = self._batches[start] = _Batch(changes, part.by_domain(changes.clean_loss, CLEAN).cpu().numpy())
        if recording.size <= room:
            batch.recording = recording
        return batch, recording

    def _following(self, module: str) -> list[str]:
        """A module and those behind it."""
        assert self._trial is not None
        order = list(self._trial[0].calls)
        return order[order.index(module) :]

    def _stacks(
        self,
        recording: Recording,
        module: str,
        pairs: Sequence[tuple[int, int]],
        edited: Sequence[Head | HeadGroup],
        start: int,
    ) -> Iterator[tuple[Sequence[tuple[int, int]], list[HeadsEdit]]]:
        """Edits of one module, as many at a time as there is room for: numbers of variant and of what is edited; and edits."""
        call, stop = recording.calls[module], start + len(recording.part)
        clean = self._outputs(recording.outputs, recording)
        assert call.head_outputs is not None
        scores = call.queries.shape[0] * call.num_heads * call.q_len * call.kv_len * call.queries.element_size()
        size = max(1, int(STACK / max(_bytes(call.head_outputs), _bytes(clean) / 8, scores / 8)))
        wanted = sorted({head.head for _, index in pairs for head in members_of(edited[index])})
        own, made = of_heads(call, wanted), dict[int, Tensor]()
        for first in range(0, len(pairs), size):
            stack, edits = pairs[first : first + size], list[HeadsEdit]()
            for variant, index in stack:
                if variant not in made:
                    made = {variant: all_heads_edited(own, self.variants[variant].of_all(start, stop))}
                heads = [head.head for head in members_of(edited[index])]
                edits.append((heads, made[variant][:, :, [wanted.index(head) for head in heads]]))
            yield stack, edits


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _error(found: Tensor, expected: Tensor, logits: LogitMap | None = None) -> float:
    """Root mean square difference over that of what is expected, in units of the last place; ``logits`` makes the outputs
    found."""
    if found.shape[:-1] != expected.shape[:-1] or (logits is None and found.shape != expected.shape):
        return float("inf")
    error, size, at_once = 0.0, 0.0, tokens_at_once(expected)
    for own, other in zip(found.flatten(0, -2).split(at_once), expected.flatten(0, -2).split(at_once), strict=True):
        made = own if logits is None else nn.functional.linear(own, logits.weight, logits.bias)
        error += float((made.double() - other.double()).square().sum())
        size += float(other.double().square().sum())
    unit = torch.finfo(expected.dtype).eps * max(size, torch.finfo(torch.float64).tiny) ** 0.5
    return error**0.5 / unit if math.isfinite(error) else float("inf")
