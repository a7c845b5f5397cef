"""Effects of heads and of groups as they are measured in a long run: announced, in pieces, and kept if it is killed."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.models.loading import hash_weights
from sinklab.results.progress import duration
from sinklab.results.run import Progress
from sinklab.results.store import Store
from sinklab.results.version import __version__
from sinklab.sinks import Head, Sinks
from sinklab.streaming.traits import fingerprint
from sinklab.studies.causes.effects import Edited, Effects, HeadEdit, one_by_one
from sinklab.studies.causes.engine import estimate, measure_effects
from sinklab.studies.causes.experiments import estimate_experiments
from sinklab.studies.causes.groups import EDITS
from sinklab.studies.causes.head_group import HeadGroup
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.texts import Texts
from sinklab.studies.causes.threshold import SILENCED

__all__ = ["Resumable"]

PIECES = 12
"""Into about how many pieces the work of a long run is cut: what a killed one loses."""
HEADS_OF_A_PIECE = 4
"""Heads of a module that are measured together at least: each piece runs the unedited model once more."""


@dataclasses.dataclass(eq=False)
class Resumable:
    """What is measured, and where it is kept.

    Args:
        identity: of the model and its sinks: what effects depend on besides texts, request and weights.
        say: called with a sentence: how long it will take, which is tried out for it; ``None`` if nobody asks.
    """

    model: nn.Module
    texts: Texts
    request: Request
    variants: Sequence[HeadEdit]
    sinks: Sinks
    identity: Mapping[str, object]
    store: Store
    say: Callable[[str], None] | None
    progress: Progress

    def __post_init__(self) -> None:
        state = _state(self.texts.readout)
        if state is None:  # effects by it would look like those by another one of its class
            self.store = Store(None)
        self._settings, self._sources = self._key(state) if state is not None and self.store.folder is not None else ({}, "")

    def of_heads(self, heads: Sequence[Head], groups: Sequence[HeadGroup]) -> Effects:
        """Effects of all variants on some heads, a few at a time if what is measured is to be stored.

        Args:
            groups: that will be measured later, for the time that is announced.
        """
        parted = _pieces(heads)
        if self.store.folder is None and len({head.module for head in heads}) >= len(parted):
            parted = [list(heads)]  # no head of a module is apart from the others, by which numbers are rounded
        keys = [(f"layer-{part[0].layer}", {**self._settings, "heads": list(map(str, part))}, self._sources) for part in parted]
        stored = [self.store.get(*key) for key in keys]
        waiting = [head for part, saved in zip(parted, stored, strict=True) if saved is None for head in part]
        if waiting and self.say is not None:
            self.say(self._announcement(waiting, len(heads), groups))
        parts: list[Effects] = []
        done = 0
        for part, key, saved in zip(parted, keys, stored, strict=True):
            if saved is None:

                def shown(stage: str, step: int, total: int, done: int = done, share: int = len(part)) -> None:
                    self.progress(stage, round(100 * (done + share * step / total)), 100 * len(heads))

                effects = measure_effects(
                    self.model, self.texts.samples, self.texts.readout, self.variants, part,
                    batch_size=self.request.batch_size, progress=shown,
                )  # fmt: skip
                self.store.put(*key, effects.record, _arrays(effects))
            else:
                names = [variant.name for variant in self.variants]
                effects = Effects(
                    names, part, self.texts.samples.domain_names, unit=self.texts.readout.unit, record=saved.record,
                    **saved.arrays,
                )  # fmt: skip
            parts.append(effects)
            done += len(part)
        return _joined(parts, {module: how for effects in parts for module, how in effects.record.items()})

    def of_groups(self, groups: Sequence[HeadGroup], names: Sequence[str] = EDITS) -> Effects[HeadGroup]:
        """Effects on groups of heads, by the whole model, each group kept when it is done.

        Args:
            groups: one or more.
            names: of the variants, as far as the run has them.
        """
        variants = [variant for variant in self.variants if variant.name in names]
        samples, readout, parts = self.texts.samples, self.texts.readout, list[Effects[HeadGroup]]()
        for number, group in enumerate(groups):
            settings = {
                **self._settings,
                "variants": [variant.name for variant in variants],
                "group": list(map(str, group.members)),
            }
            saved = self.store.get("group", settings, self._sources)
            if saved is None:

                def shown(stage: str, step: int, total: int, done: int = number) -> None:
                    self.progress("groups", round(100 * (done + step / total)), 100 * len(groups))

                effects = one_by_one(
                    self.model, samples, readout, variants, [group], batch_size=self.request.batch_size, progress=shown
                )
                self.store.put("group", settings, self._sources, None, _arrays(effects))
            else:
                effects = Effects(
                    [variant.name for variant in variants], [group], samples.domain_names, unit=readout.unit, record={},
                    **saved.arrays,
                )  # fmt: skip
            parts.append(effects)
        return _joined(parts, {})

    def of_halves(self, halves: Mapping[Head, Samples]) -> dict[Head, Effects]:
        """Effects of all variants on heads, each on samples in halves of its own, each kept when it is done.

        Args:
            halves: head to the samples of the run, with other domains.
        """
        names = [variant.name for variant in self.variants]
        keys = {
            head: ("within", {**self._settings, "heads": [str(head)], "halves": _digest(parted.domains)}, self._sources)
            for head, parted in halves.items()
        }
        stored = {head: self.store.get(*key) for head, key in keys.items()}
        waiting = [head for head, saved in stored.items() if saved is None]
        if waiting and self.say is not None:
            ends = list(dict.fromkeys([waiting[0], waiting[-1]]))  # the mean of which stands for all others
            batch = self.request.batch_size
            of_one = sum(
                estimate(self.model, halves[head], self.texts.readout, self.variants, [head], batch_size=batch) for head in ends
            ) / len(ends)
            heads = f"{len(waiting)} heads that rest" if len(waiting) > 1 else "1 head that rests"
            take = "take" if len(waiting) > 1 else "takes"
            self.say(f"{heads} at some positions, measured there and elsewhere, {take} {duration(of_one * len(waiting))}")
        found: dict[Head, Effects] = {}
        for head, parted in halves.items():
            if (saved := stored[head]) is None:

                def shown(stage: str, step: int, total: int, done: int = len(found)) -> None:
                    self.progress("within texts", round(100 * (done + step / total)), 100 * len(halves))

                found[head] = measure_effects(
                    self.model, parted, self.texts.readout, self.variants, [head],
                    batch_size=self.request.batch_size, progress=shown,
                )  # fmt: skip
                self.store.put(*keys[head], found[head].record, _arrays(found[head]))
            else:
                found[head] = Effects(
                    names, [head], parted.domain_names, unit=self.texts.readout.unit, record=saved.record, **saved.arrays
                )
        return found

    def _announcement(self, waiting: Sequence[Head], number: int, groups: Sequence[HeadGroup]) -> str:
        """How long it takes to measure heads, groups and experiments, in a sentence."""
        samples, readout, request = self.texts.samples, self.texts.readout, self.request
        seconds = estimate(self.model, samples, readout, self.variants, waiting, batch_size=request.batch_size)
        also: list[str] = []
        more = ""
        if groups or request.together or request.minimal_effect == "auto":
            of_one = self._seconds_of_an_edit(groups[0] if groups else HeadGroup(tuple(self.sinks.heads)))
            edits = len([variant for variant in self.variants if variant.name in EDITS])
            seconds += of_one * (len(SILENCED) * (request.minimal_effect == "auto") + edits * len(groups))
            if groups:
                also.append(f"{len(groups)} group{'s' if len(groups) > 1 else ''} of heads")
            if request.together:
                more = f", and every group of a label {duration(of_one * edits)} more"
        if request.experiments:
            seconds += estimate_experiments(
                self.model, self.texts, self.sinks, budget=request.budget, threshold=request.threshold,
                batch_size=request.batch_size,
            )  # fmt: skip
            also.append("the experiments on the sink")
        there = number - len(waiting)
        rest = f"; {there} of {number} heads are there from an earlier run" if there else ""
        heads = "1 head" if len(waiting) == 1 else f"{len(waiting)} heads"
        what = f"{heads} × {len(self.variants)} interventions × {len(samples)} texts"
        return f"{' and '.join([what, *also])} take {duration(seconds)}{more}{rest}"

    def _seconds_of_an_edit(self, group: HeadGroup) -> float:
        """Seconds that one edit of a group takes on all texts, by a trial on the first batch."""
        _, part = next(self.texts.samples.parts(self.request.batch_size))
        began = time.perf_counter()
        one_by_one(self.model, part, self.texts.readout, self.variants[:1], [group], batch_size=len(part))
        # As long as two runs of the model at least, the unedited and the edited one.
        return (time.perf_counter() - began) / 2 * len(self.texts.samples) / len(part)

    def _key(self, state: str) -> tuple[dict[str, object], str]:
        """What effects depend on besides the heads: the settings, and the release.

        Args:
            state: of the readout.
        """
        samples = self.texts.samples
        targets = () if samples.targets is None else (samples.targets,)
        matter = ("sink", "budget", "threshold", "seed", "batch_size")  # a batch is where a text gets another one's output from
        settings = {
            **self.identity,
            **{name: value for name, value in self.request.to_dict().items() if name in matter},
            "weights": hash_weights(self.model),
            # Of its configuration, which is in no weight: scaled positions, a window.
            "fingerprint": fingerprint(self.model) if isinstance(self.model, PreTrainedModel) else "",
            "variants": [variant.name for variant in self.variants],
            "readout": f"{type(self.texts.readout).__qualname__}{state}",
            "samples": _digest(*samples.inputs.values(), samples.domains, *targets),
        }
        return settings, __version__


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _state(readout: Readout) -> str | None:
    """Digest of what a readout holds, empty if it holds nothing; ``None`` where that is not known."""
    functions = [inspect.unwrap(value) for kind in type(readout).__mro__ for value in vars(kind).values() if callable(value)]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    # What dataclasses write for a class is of no file.
    enclosed = {name for code in codes if code.co_filename != "<string>" for name in code.co_freevars}
    held = object.__getstate__(readout)
    if held is None and enclosed <= {"__class__"}:
        return ""
    try:
        if not enclosed <= {"__class__"}:  # its methods read what stood round the class when it was made
            raise TypeError
        return f" {hashlib.sha256(b''.join(_described(held))).hexdigest()}"
    except TypeError:
        return None


def _described(value: object) -> Iterator[bytes]:
    """The bytes of plain values, tensors and arrays, and of collections of them.

    Raises:
        TypeError: anything else, of which it is not known what it holds.
    """
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif type(value) in (list, tuple, dict):
        parts = [part for item in value.items() for part in item] if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
        yield f"{type(value).__name__} {len(parts)}".encode()
        for part in parts:
            yield from _described(part)
    elif value is None or type(value) in (bool, int, float, complex, str, bytes):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        raise TypeError


def _arrays(effects: Effects[Edited]) -> dict[str, np.ndarray]:
    return {"loss": effects.loss, "divergence": effects.divergence, "clean_loss": effects.clean_loss}


def _pieces(heads: Sequence[Head]) -> list[list[Head]]:
    """Heads by modules, some of them together where there are many, and those of a module in parts where there are few."""
    modules = list(dict.fromkeys(head.module for head in heads))
    size = max(1, len(modules) // PIECES)
    most = max(HEADS_OF_A_PIECE, -(-len(heads) // PIECES))
    pieces: list[list[Head]] = []
    for first in range(0, len(modules), size):
        part = [head for head in heads if head.module in modules[first : first + size]]
        pieces += [part] if size > 1 else [part[start : start + most] for start in range(0, len(part), most)]
    return pieces


def _joined(parts: Sequence[Effects[Edited]], record: Mapping[str, str]) -> Effects[Edited]:
    """The effects on all heads of some parts, which were measured on the same texts."""
    first = parts[0]
    return Effects(
        first.variants, [head for part in parts for head in part.heads], first.domain_names,
        np.concatenate([part.loss for part in parts], axis=1), np.concatenate([part.divergence for part in parts], axis=1),
        first.clean_loss, first.unit, dict(record),
    )  # fmt: skip
