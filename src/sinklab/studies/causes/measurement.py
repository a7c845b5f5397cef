"""The measurement behind find_causes(): sink, screen, groups, effects, labels; in pieces that a killed run keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.anatomy import attending_layers
from sinklab.attention.modules import input_device
from sinklab.errors import ConfigurationError, SinklabError
from sinklab.models.loading import LoadedModel, hash_weights
from sinklab.models.losses import guess_warning, loss_kind
from sinklab.models.positions import length_warning
from sinklab.results.blocks import head_numbering
from sinklab.results.metric import Row
from sinklab.results.progress import plan
from sinklab.results.run import Progress, silent
from sinklab.results.sections import Context, to_json
from sinklab.results.store import Store
from sinklab.results.table import make_table
from sinklab.results.version import __version__
from sinklab.sinks import Head, Sinks, find_sinks
from sinklab.sinks.value import SinkPlace
from sinklab.streaming.traits import fingerprint
from sinklab.studies.causes import entries
from sinklab.studies.causes.domains import Texts, default_texts
from sinklab.studies.causes.effects import Edited, Effects, HeadEdit, HeadGroup, make_variants
from sinklab.studies.causes.engine import Engine, multiplies_coarsely
from sinklab.studies.causes.found import LABELS, Causes, MinimalEffect
from sinklab.studies.causes.labels import MANY, SHARE, SILENCED, asked_for, label_heads, minimal_effect_of, require_texts
from sinklab.studies.causes.readout import READOUTS
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import Samples
from sinklab.studies.causes.screen import Screened, screen

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


WORK = 2.5e11
"""Multiplications and additions of one pass over the texts of the screen, beyond which it has fewer: some 3 s of a core."""
LEAST = 8
"""Texts that it has all the same."""


@dataclasses.dataclass(frozen=True)
class Examined:
    """What was found; rows of the long table; and attention module to how its heads were measured, or why one by one."""

    found: Causes
    rows: list[Row]
    record: dict[str, str]


def examine(
    model: nn.Module,
    texts: Texts,
    request: Request,
    *,
    identity: Mapping[str, object],
    sinks: Sinks | None = None,
    store: Store | None = None,
    progress: Progress = silent,
) -> Examined:
    """Find the sink, measure every variant on every head, and label; then groups of heads at once.

    With a budget, and of more than :data:`~sinklab.studies.causes.labels.MANY` heads, in stages: a screen of all heads;
    groups, the heads of each layer that sink and those that do not; then heads, those that sink first and
    most informative first. Of both :data:`FIRST`, then what is missing for a label that these allow, at once where these cost
    an even share.

    Args:
        sinks: where the sinks are, if that is known; found on these texts otherwise.
        identity: what the model is, besides its weights.
        store: of effects measured so far, an entry for a few attention modules.
    """
    began = time.monotonic()
    level, size = request.level, request.batch_size
    texts = _on_device(texts, input_device(model))
    samples = texts.samples
    progress("sinks", 0, 1)
    sinks = _sinks_of(model, samples, request, sinks)
    progress("sinks", 1, 1)
    heads, groups = entries.chosen_heads(request.chosen, sinks.heads)
    with _named("`texts`, `heads`, `level`"):
        staged = request.budget is not None or len(heads) > MANY
        require_texts(samples, sinks, len(heads), level=level, many=staged)
        require_texts(samples, sinks, max(len(groups), 1), level=level, many=staged)
    budget = request.budget if isinstance(request.budget, float) else float("inf")
    variants = make_variants(model, sinks, samples, batch_size=size)
    few = samples.spread(_affordable(model, samples))
    kinds = entries.kinds_of_layers(heads, sinks, request.threshold) if staged else []
    there = {frozenset(group.members) for group in groups}
    groups += [kind for kind in kinds if len(kind.members) > 1 and frozenset(kind.members) not in there]
    seconds = (time.monotonic() - began) / 3  # find_sinks makes two passes, the means of the sink one
    coarse = staged and multiplies_coarsely(model)
    costs = _costs(seconds, len(few) / len(samples), len(heads), len(groups), len(variants), request, budget, staged, coarse)
    plan(progress, costs, began + budget - time.monotonic())
    identity = {**identity, "main_sink": sinks.describe(), "other_sinks": sinks.secondary}
    measured = Resumable(model, texts, request, variants, identity, store or Store(None), progress, began + budget, coarse)
    if isinstance(request.minimal_effect, str):
        everything = [HeadGroup(tuple(sinks.heads))]
        minimal = minimal_effect_of(measured.measured("all heads at once", [(everything, SILENCED)], everything))
    else:
        minimal = MinimalEffect(request.minimal_effect, "given", len(sinks.heads), None, {})
    least = minimal.value
    estimates: Screened | None = None
    if staged:
        estimates = screen(
            model, few, texts.readout, make_variants(model, sinks, few, batch_size=size), heads,
            batch_size=_at_once(model, few, size), progress=progress,
        )  # fmt: skip
        rounds: dict[str, Any] = {"sinks": sinks, "level": level, "minimal_effect": least}
        groups.sort(key=lambda group: -max(map(estimates.worth, group.members)))
        each = [[group] for group in groups]
        of_groups = _in_rounds(measured, "groups", each, groups, began + budget / 2, **rounds) if groups else None
        worth = {kind: sum(map(estimates.worth, kind.members)) / len(kind.members) for kind in kinds}
        kinds.sort(key=lambda kind: (kind.called.endswith(entries.OTHERS), -worth[kind]))
        effects = _in_rounds(measured, "heads", [kind.members for kind in kinds], heads, began + budget, **rounds)
    else:
        effects = measured.of_heads(heads)
        of_groups = None
    labels = label_heads(effects, sinks, level=level, minimal_effect=least, many=staged)
    by_domain = entries.sinks_by_domain(model, samples, sinks, size)
    listed = entries.examined_heads(labels, sinks, by_domain, estimates)
    table_rows = [*entries.effect_rows(effects), *entries.head_rows(listed)]
    if groups and not staged:
        of_groups = measured.measured("groups", [([group], measured.names) for group in groups], groups)
    together = []
    if of_groups is not None:
        judged = label_heads(of_groups, sinks, level=level, minimal_effect=least, many=staged)
        together = entries.examined_groups(judged, listed)
        table_rows += entries.group_rows(of_groups)
    clean_loss = dict(zip(samples.domain_names, np.nanmean(effects.clean_loss, axis=0).tolist(), strict=True))
    found = Causes(
        heads=listed, groups=together, counts={name: Counter(head.label for head in listed)[name] for name in LABELS},
        sink=entries.found_sink(sinks), texts=len(samples),
        domains=list(samples.domain_names),
        loss_of=loss_kind(model), unit=effects.unit, clean_loss=clean_loss, level=level, minimal_effect=least,
        minimal_effect_from=minimal, budget=request.budget if isinstance(request.budget, float) else None,
        variants=effects.variants,
        notes=_notes(model, samples, clean_loss if effects.unit == "nats" else {}),
    )  # fmt: skip
    return Examined(found, table_rows, effects.record)


def _costs(
    seconds: float, few: float, heads: int, groups: int, edits: int, request: Request, budget: float, staged: bool,
    coarse: bool,
) -> dict[str, float]:  # fmt: skip
    """Seconds of every stage, as far as they are known, from those of a pass: an edit of one layer is half a pass, or less
    where changes are multiplied in bfloat16. ``few`` is the share of the texts that the screen reads."""
    costs = {"all heads at once": 4 * seconds} if request.minimal_effect == "auto" else {}
    each = (0.3 if coarse else 0.5) * seconds
    if staged:
        costs |= {"screen": 8 * few * seconds, "groups": min(each * len(FIRST) * groups, budget / 2)}
    left = max(budget - sum(costs.values()), seconds)
    if not staged:
        return costs | {"effects": min(each * edits * heads, left)}
    return costs | {"heads": min(each * len(FIRST) * heads, left), "heads again": 0.1 * each * heads}


LOGITS = 2**23
"""Logits that the screen holds at once, of which there are some five copies beside what all layers keep for its gradients."""


def _at_once(model: nn.Module, samples: Samples, most: int) -> int:
    """Texts of a batch of :data:`LOGITS`, as far as their number is known: two or more, and at most what is asked for."""
    projection = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(projection, "weight", None)
    classes = 1 if weight is None else len(weight)
    return max(2, min(most, LOGITS // max(1, samples.domains.shape[1] * classes)))


def _affordable(model: nn.Module, samples: Samples) -> int:
    """How many of the texts a pass of :data:`WORK` reads."""
    tokens = max(1, samples.lengths(samples.domains.shape[1]).max().item())
    return max(LEAST, int(WORK / (2 * sum(parameter.numel() for parameter in model.parameters()) * tokens)))


def _in_rounds(
    measured: Resumable,
    stage: str,
    kinds: Sequence[Sequence[Edited]],
    everything: Sequence[Edited],
    deadline: float,
    *,
    sinks: Sinks,
    level: float,
    minimal_effect: float,
) -> Effects[Edited]:
    """Effects of :data:`FIRST` on heads or groups, a few of one module at a time; then of what these ask for: where a first
    edit costs an even share or more, before the first edits of others, since the time may end among these."""
    first = [name for name in FIRST if name in measured.names] or [measured.names[0]]

    def asked(found: Effects[Edited], kinds: Sequence[Sequence[Edited]], least: float) -> list[Task[Edited]]:
        """What is missing for labels of those whose first edits cost at least so much, dearest first."""
        means = np.abs(np.nan_to_num(found.loss[[found.variants.index(name) for name in first]]).mean(2))
        cost = dict(zip(everything, means.max((0, 2)).tolist(), strict=True))
        wanted = dict(zip(everything, asked_for(found, sinks, level=level, minimal_effect=minimal_effect), strict=True))
        tasks: list[Task[Edited]] = []
        for kind in kinds:
            together: dict[tuple[str, ...], list[Edited]] = {}
            for one in kind:
                if wanted[one] and cost[one] >= least:
                    together.setdefault(tuple(wanted[one]), []).append(one)
            tasks += [(members, names) for names, members in together.items()]
        return sorted(tasks, key=lambda task: -max(cost[one] for one in task[0]))

    effects = measured.measured(
        stage, [(kind, first) for kind in kinds], everything, deadline,
        then=lambda found, edited: asked(found, [edited], minimal_effect / SHARE),
    )  # fmt: skip
    while (tasks := asked(effects, kinds, 0.0)) and time.monotonic() <= deadline:
        effects = measured.measured(f"{stage} again", tasks, everything, deadline, effects)
    return effects


FIRST = ("redirect", "hide")
"""What is done to every head. Where neither costs anything that is seen, the others seldom do: an output of 0 is silence too,
and a hidden sink has no value either. Where one does, it is known which of them would make a label."""


def _on_device(texts: Texts, device: torch.device) -> Texts:
    inputs = {name: tensor.to(device) for name, tensor in texts.samples.inputs.items()}
    return dataclasses.replace(texts, samples=dataclasses.replace(texts.samples, inputs=inputs))


def _sinks_of(model: nn.Module, samples: Samples, request: Request, known: Sinks | None) -> Sinks:
    """The sinks on these samples, the main one as it is requested, or that of sinks that are known."""
    words: dict[int | str, Literal["find", "null"] | None] = {"auto": "find", "null": "null", "none": None}
    place: SinkPlace | Literal["find"] | None = request.sink if isinstance(request.sink, int) else words[request.sink]
    if known is not None:
        place = known.main
    with _named("`threshold`, `sink` as a position, null or none"):
        sinks = find_sinks(
            model, samples.inputs, threshold=request.threshold, place=place, groups=samples.groups(),
            batch_size=request.batch_size,
        )  # fmt: skip
        if place == "find":
            sinks.require()
    return sinks


def _notes(model: nn.Module, samples: Samples, losses: Mapping[str, float]) -> list[str]:
    """How heads are numbered where not all layers attend; losses above that of a guess; texts longer than trained on."""
    notes = [guess_warning(model, loss, text=name) for name, loss in losses.items()]
    tokens = samples.inputs.get("input_ids")
    if tokens is not None and isinstance(model, PreTrainedModel):
        notes = [head_numbering(*attending_layers(model.config)), *notes, length_warning(model, tokens.shape[1])]
    return [note for note in notes if note]


def causes_section(context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
    """The causes as a section of an audit: the fast budget on texts of its corpus, with its threshold, seed and BOS."""
    loaded: LoadedModel = context.loaded
    request = Request(threshold=context.summary["threshold"], seed=context.seed)
    try:
        texts = default_texts(loaded, [context.corpus], seed=context.seed, bos=context.bos)
        facts = facts_of(loaded.model, loaded)
        examined = examine(loaded.model, texts, request, identity=facts, sinks=context.sinks, progress=context.progress)
    except SinklabError as error:
        return {"refused": str(error)}, make_table([])
    table = make_table(examined.rows, run_id=context.run_id, seed=context.seed, bos=int(context.bos), **facts)
    return to_json(examined.found), table


def facts_of(module: nn.Module, loaded: LoadedModel | None) -> dict[str, object]:
    """Columns of the table that say what was examined; a model that is not of transformers has its class alone."""
    if loaded is not None:
        return {"model": loaded.name, "revision": loaded.revision, "operation": loaded.operation}
    return {"model": type(module).__name__, "revision": None, "operation": None}


@contextlib.contextmanager
def _named(parameters: str) -> Iterator[None]:
    """Say by which parameters a setting that cannot be is changed."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (see {parameters})") from error
