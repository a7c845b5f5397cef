"""Effects of heads and of groups as they are measured in a long run: in pieces, each kept if the run is killed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.models.loading import hash_weights
from sinklab.results.run import Progress
from sinklab.results.store import Store
from sinklab.results.version import __version__
from sinklab.sinks import Head
from sinklab.streaming.traits import fingerprint
from sinklab.studies.causes.effects import Edited, Effects, HeadEdit, HeadGroup, one_by_one
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.readout import READOUTS
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.texts import Texts

__all__ = ["EDITS", "Resumable"]

EDITS = ("zero", "resample", "redirect", "hide", "zero_value")
"""What is done to a group: all that labels rest on, and no controls."""
PIECES = 12
"""Into about how many pieces the work of a long run is cut: what a killed one loses."""
HEADS_OF_A_PIECE = 4
"""Heads of a module that are measured together at least: each piece runs the unedited model once more."""


@dataclasses.dataclass(eq=False)
class Resumable:
    """What is measured, and where it is kept.

    Effects by a readout that is none of the library's are not: those by another one of its class would look the same.

    Args:
        identity: of the model and its sinks: what effects depend on besides texts, request and weights.
    """

    model: nn.Module
    texts: Texts
    request: Request
    variants: Sequence[HeadEdit]
    identity: Mapping[str, object]
    store: Store
    progress: Progress

    def __post_init__(self) -> None:
        if type(self.texts.readout) not in READOUTS:
            self.store = Store(None)
        self._settings = {} if self.store.folder is None else self._key()

    def of_heads(self, heads: Sequence[Head]) -> Effects:
        """Effects of all variants on some heads, a few at a time if what is measured is to be stored."""
        pieces = _pieces(heads)
        if self.store.folder is None and len({head.module for head in heads}) >= len(pieces):
            pieces = [list(heads)]  # no head of a module is apart from the others, by which numbers are rounded
        parts: list[Effects] = []
        for piece in pieces:
            done = sum(len(part.heads) for part in parts)
            progress = self._share("effects", done / len(heads), len(piece) / len(heads))
            parts.append(self._measured(f"layer-{piece[0].layer}", piece, self.texts.samples, progress))
        return _joined(parts)

    def of_groups(self, groups: Sequence[HeadGroup], names: Sequence[str] = EDITS) -> Effects[HeadGroup]:
        """Effects on one group of heads or more, by the whole model, each group kept when it is done.

        Args:
            names: of the variants, as far as the run has them.
        """
        variants = [variant for variant in self.variants if variant.name in names]
        samples, readout, parts = self.texts.samples, self.texts.readout, list[Effects[HeadGroup]]()
        for number, group in enumerate(groups):
            progress = self._share("groups", number / len(groups), 1 / len(groups))
            settings = {"variants": [variant.name for variant in variants], "group": list(map(str, group.members))}

            def measure(group: HeadGroup = group, progress: Progress = progress) -> Effects[HeadGroup]:
                size = self.request.batch_size
                return one_by_one(self.model, samples, readout, variants, [group], batch_size=size, progress=progress)

            parts.append(self._kept("group", settings, variants, [group], samples, measure))
        return _joined(parts)

    def of_halves(self, halves: Mapping[Head, Samples]) -> dict[Head, Effects]:
        """Effects of all variants on heads, each on samples in halves of its own, each kept when it is done.

        Args:
            halves: head to the samples of the run, with other domains.
        """
        found: dict[Head, Effects] = {}
        for head, parted in halves.items():
            progress = self._share("within texts", len(found) / len(halves), 1 / len(halves))
            found[head] = self._measured("within", [head], parted, progress, halves=_digest(parted.domains))
        return found

    def _measured(self, name: str, heads: list[Head], samples: Samples, progress: Progress, **settings: object) -> Effects:
        def measure() -> Effects:
            size = self.request.batch_size
            return measure_effects(
                self.model, samples, self.texts.readout, self.variants, heads, batch_size=size, progress=progress
            )

        return self._kept(name, {**settings, "heads": list(map(str, heads))}, self.variants, heads, samples, measure)

    def _kept(
        self,
        name: str,
        settings: Mapping[str, object],
        variants: Sequence[HeadEdit],
        heads: list[Edited],
        samples: Samples,
        measure: Callable[[], Effects[Edited]],
    ) -> Effects[Edited]:
        """The effects that an earlier run stored, or else measured and stored."""
        settings = {**self._settings, **settings}
        stored = self.store.get(name, settings, __version__)
        if stored is not None:
            names, unit = [variant.name for variant in variants], self.texts.readout.unit
            return Effects(names, heads, samples.domain_names, unit=unit, record=stored.record, **stored.arrays)
        effects = measure()
        arrays = {"loss": effects.loss, "divergence": effects.divergence, "clean_loss": effects.clean_loss}
        self.store.put(name, settings, __version__, effects.record, arrays)
        return effects

    def _share(self, stage: str, begun: float, share: float) -> Progress:
        """Shows the progress of a part of a stage, which begins at one share of it and is another, in percent of the stage."""
        return lambda _, step, total: self.progress(stage, round(100 * (begun + share * step / total)), 100)

    def _key(self) -> dict[str, Any]:
        """What effects depend on besides the heads."""
        samples = self.texts.samples
        targets = () if samples.targets is None else (samples.targets,)
        matter = ("sink", "budget", "threshold", "seed", "batch_size")  # a batch is where a text gets another one's output from
        return {
            **self.identity,
            **{name: getattr(self.request, name) for name in matter},
            "weights": hash_weights(self.model),
            # Of its configuration, which is in no weight: scaled positions, a window.
            "fingerprint": fingerprint(self.model) if isinstance(self.model, PreTrainedModel) else "",
            "variants": [variant.name for variant in self.variants],
            "readout": type(self.texts.readout).__qualname__,
            "samples": _digest(*samples.inputs.values(), samples.domains, *targets),
        }


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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


def _joined(parts: Sequence[Effects[Edited]]) -> Effects[Edited]:
    """The effects on all heads of some parts, which were measured on the same texts."""
    first = parts[0]
    return Effects(
        first.variants, [head for part in parts for head in part.heads], first.domain_names,
        np.concatenate([part.loss for part in parts], axis=1), np.concatenate([part.divergence for part in parts], axis=1),
        first.clean_loss, first.unit, {module: how for part in parts for module, how in part.record.items()},
    )  # fmt: skip
