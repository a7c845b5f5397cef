"""Effects of heads and of groups as they are measured in a long run: in pieces, each kept if the run is killed."""

from __future__ import annotations

import dataclasses
import hashlib
import time
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
from sinklab.studies.causes.effects import Edited, Effects, HeadEdit, HeadGroup
from sinklab.studies.causes.engine import Engine
from sinklab.studies.causes.readout import READOUTS
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.texts import Texts

PIECES = 12
"""Into about how many pieces the work of a long run is cut: what a killed one loses."""

Task = tuple[Sequence[Edited], Sequence[str]]
"""What is measured together: heads, or groups, and the names of the edits."""


@dataclasses.dataclass(eq=False)
class Resumable:
    """What is measured, and where it is kept; not by a readout that is none of the library's, whose class says too little.

    Args:
        identity: of the model and its sinks: what effects depend on besides texts, request and weights.
        deadline: of :func:`time.monotonic`, behind which no further piece is begun.
    """

    model: nn.Module
    texts: Texts
    request: Request
    variants: Sequence[HeadEdit]
    identity: Mapping[str, object]
    store: Store
    progress: Progress
    deadline: float = float("inf")
    coarse: bool = False

    def __post_init__(self) -> None:
        if type(self.texts.readout) not in READOUTS:
            self.store = Store(None)
        self._settings = {} if self.store.folder is None else self._key()
        samples, size = self.texts.samples, self.request.batch_size
        self._engine = Engine(self.model, samples, self.texts.readout, self.variants, batch_size=size, coarse=self.coarse)

    @property
    def names(self) -> list[str]:
        """The edits."""
        return [variant.name for variant in self.variants]

    def of_heads(self, heads: Sequence[Head]) -> Effects:
        """Effects of all variants on some heads, a few at a time."""
        modules = list(dict.fromkeys(head.module for head in heads))
        most = max(1, -(-len(heads) // max(PIECES, len(modules))))
        pieces = []
        for module in modules:
            own = [head for head in heads if head.module == module]
            pieces += [own[first : first + most] for first in range(0, len(own), most)]
        return self.measured("effects", [(piece, self.names) for piece in pieces], heads)

    def measured(
        self,
        stage: str,
        tasks: Sequence[Task[Edited]],
        everything: Sequence[Edited],
        deadline: float | None = None,
        found: Effects[Edited] | None = None,
        then: Callable[[Effects[Edited], Sequence[Edited]], Sequence[Task[Edited]]] = lambda found, edited: (),
    ) -> Effects[Edited]:
        """Effects of the tasks that are begun before the deadline, the first always; NaN where nothing was measured.

        Args:
            stage: what the progress is called: of the tasks, or of the time until the deadline, whichever ends first.
            everything: heads or groups in the order of the result.
            found: effects that these are written into.
            then: from all effects so far, and what was edited last, the tasks that come before those that are left.
        """
        samples, names = self.texts.samples, self.names
        shape = (len(names), len(everything), len(samples), len(samples.domain_names))
        found = found or Effects(
            names, list(everything), samples.domain_names, np.full(shape, np.nan), np.full(shape[2:], np.nan),
            self.texts.readout.unit,
        )  # fmt: skip
        place = {one: index for index, one in enumerate(everything)}
        waiting, done, began = list(tasks), 0, time.monotonic()
        deadline = self.deadline if deadline is None else deadline

        def progress(share: float) -> None:
            spent = (time.monotonic() - began) / max(deadline - began, 1.0)
            size, left = _size(task), sum(map(_size, waiting))
            self.progress(stage, min(999, round(1000 * max((done + share * size) / (done + size + left), spent))), 1000)

        while waiting:
            task = edited, chosen = waiting.pop(0)
            progress(0)
            settings = {**self._settings, "variants": list(chosen), "edited": [_spelled(one) for one in edited]}
            stored = self.store.get("effects", settings, __version__)
            if stored is None:
                if done and time.monotonic() > deadline:
                    continue  # what is stored of later ones is taken all the same
                effects = self._engine.measure(edited, chosen, progress=lambda _, step, of: progress(step / max(1, of)))
                arrays = {"loss": effects.loss, "clean_loss": effects.clean_loss}
                self.store.put("effects", settings, __version__, effects.record, arrays)
                record = effects.record
            else:
                arrays, record = stored.arrays, stored.record
            done += _size(task)
            where = np.ix_([names.index(name) for name in chosen], [place[one] for one in edited])
            rows = np.ix_([names.index(name) for name in chosen], range(len(edited)))
            found.loss[where] = arrays["loss"][rows]
            found.clean_loss[:] = arrays["clean_loss"]
            found.record.update(record)
            waiting[:0] = then(found, edited)
        if tasks:
            self.progress(stage, 1000, 1000)
        return found

    def _key(self) -> dict[str, Any]:
        """What effects depend on besides the heads."""
        samples = self.texts.samples
        targets = () if samples.targets is None else (samples.targets,)
        matter = ("sink", "threshold", "seed", "batch_size")  # a batch is where a text gets another one's output from
        return {
            **self.identity,
            **{name: getattr(self.request, name) for name in matter},
            "coarse": self.coarse,
            "weights": hash_weights(self.model),
            # Of its configuration, which is in no weight: scaled positions, a window.
            "fingerprint": fingerprint(self.model) if isinstance(self.model, PreTrainedModel) else "",
            "readout": type(self.texts.readout).__qualname__,
            "samples": _digest(samples, *targets),
        }


def _size(task: Task[Edited]) -> int:
    return len(task[0]) * len(task[1])


def _spelled(one: Head | HeadGroup) -> str:
    """All heads, which the name of a group does not list."""
    return "+".join(map(str, one.members)) if isinstance(one, HeadGroup) else str(one)


def _digest(samples: Samples, *targets: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in (*samples.inputs.values(), samples.domains, *targets):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
