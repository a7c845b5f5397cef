"""Tasks of lm-evaluation-harness under cache policies of one budget, one number a document: ours, and its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.policies.base import Policy
from sinklab.policies.full import Full
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.registry import policies
from sinklab.results.store import Store
from sinklab.results.version import __version__
from sinklab.studies.depend.found import SCORES
from sinklab.studies.depend.lm_eval import Beginnings, PolicyLM, TaskManager, datasets, evaluate, harness_task, read_greedy
from sinklab.tasks.base import Document, Task


@dataclasses.dataclass(frozen=True)
class Contenders:
    """Policies by the name under which they are reported, in the order in which they are shown.

    ``without`` and ``with_sinks`` are the two whose difference is judged: both hold ``budget`` tokens before the query, of
    which
    ``num_sinks`` are sinks. ``floor`` keeps only the token before the query.
    """

    policies: dict[str, Policy]
    without: str
    with_sinks: str
    floor: str
    budget: int
    num_sinks: int


def make_contenders(budget: int, sinks: Sequence[int] = (4,)) -> Contenders:
    """The full cache, a window without sinks and with each number of them, and the floor; verdicts are about the most sinks."""
    if budget < 3:
        raise ConfigurationError(f"`window` must be at least 3 tokens, a sink included, got {budget}")
    if not sinks or min(sinks) < 1 or max(sinks) >= budget - 1:
        raise ConfigurationError(
            f"`sinks` {','.join(map(str, sinks))} must each be 1 or more and leave two tokens of the window of "
            f"{budget}; the window alone, without sinks, is always compared"
        )
    window, floor = Window(window=budget), Window(window=1)
    with_sinks = [SinkWindow(num_sinks=number, window=budget - number) for number in sorted(set(sinks))]
    named: dict[str, Policy] = {policy.describe(): policy for policy in (Full(), window, *with_sinks, floor)}
    return Contenders(named, window.describe(), with_sinks[-1].describe(), floor.describe(), budget, max(sinks))


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A task that is ready to be read, and can be: every one is made before anything is read.

    Attributes:
        own: of ours the task; ``None`` of one of the harness. ``tasks`` is what :func:`lm_eval.evaluate` takes.
        items: documents that it is to read, ``None`` for all that there are.
        item, place: of every document, in the order of their scores.
        counted: indices of those that can tell sinks from none: something is evicted, and both windows hold the fact.
        choices: of those, how many answers are chosen among.
        texts: ids of documents in which sinks are looked for, of ours alone; ``scored`` at their end are scored.
    """

    label: str
    own: Task | None
    tasks: dict[str, Any]
    items: int | None
    item: list[int]
    place: list[int]
    counted: list[int]
    choices: list[int]
    sha256: str
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    scored: list[int] = dataclasses.field(default_factory=list)


class _LocalTask(harness_task.ConfigurableTask):
    """A task of ours as the harness runs it; its documents are at hand, and nothing is downloaded."""

    def __init__(self, task: Task, documents: Sequence[Document], tokens: Sequence[int]) -> None:
        self.rows = []
        for number, (document, count) in enumerate(zip(documents, tokens, strict=True)):
            right = number % (len(document.wrong) + 1)  # no place is the right one's, since the first of equals wins
            choices = [*document.wrong[:right], document.answer, *document.wrong[right:]]
            self.rows.append(
                {"context": document.context, "choices": choices, "right": right, "answer": document.answer, "tokens": count}
            )
        config: dict[str, Any] = {"task": task.name, "test_split": "test", "num_fewshot": 0, "doc_to_text": "context"}
        metric = {"metric": task.score, "aggregation": "mean", "higher_is_better": True}
        asked: dict[str, Any]
        if task.score == "acc":
            asked = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "right"}
        else:
            asked = {"output_type": "loglikelihood", "doc_to_target": "answer", "process_results": _by_token}
        super().__init__(config={**config, **asked, "target_delimiter": "", "metric_list": [metric]})

    def download(self, *_arguments: object, **_options: object) -> None:
        self.dataset = {"test": datasets.Dataset.from_list(self.rows)}


def _by_token(document: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """The log-likelihood of an answer by its tokens, in nats."""
    return {"log_likelihood": results[0][0] / document["tokens"]}


def prepare_task(
    loaded: LoadedModel, task: Task, label: str, contenders: Contenders, items: int, seed: int, bos: int
) -> Prepared:
    """A task of ours."""
    lm = _bare(loaded)
    documents = list(task.documents(loaded.encoder, budget=contenders.budget, items=items, seed=seed))
    held = contenders.budget - contenders.num_sinks
    telling, ids, scored = [], [], []
    for document in documents:
        context, answer = lm._encode_pair(document.context, document.answer)
        context = lm.fronted(context)
        ids.append([*context, *answer])
        scored.append(len(answer))
        distance = 0
        if document.fact is not None:
            distance = len(ids[-1]) - len(lm.fronted(lm.tok_encode(document.context[: document.fact]))) - 2
        telling.append(len(context) + bos >= contenders.budget + 2 and distance <= held)
    places = {document.place for document in documents}
    places -= {document.place for document, tells in zip(documents, telling, strict=True) if not tells}
    counted = [index for index, document in enumerate(documents) if document.place in places]
    if not counted:
        raise ConfigurationError(
            f"task {task.name!r} asks nothing that tells policies apart with a window of {contenders.budget}: no question "
            f"comes after so many tokens with its fact still held by {contenders.with_sinks}; choose a larger `window` or "
            "longer texts"
        )
    last = [index for index in counted if documents[index].place == documents[counted[-1]].place]
    front = [loaded.encoder.bos_token_id] * bos if loaded.encoder.bos_token_id is not None else []
    with _quiet():
        tasks = {"tasks": {task.name: _LocalTask(task, documents, scored)}, "groups": {}, "group_map": {}}
    return Prepared(
        label, task, tasks, None,
        [document.item for document in documents], [document.place for document in documents], counted,
        [len(documents[index].wrong) + 1 for index in counted], _hash([dataclasses.astuple(one) for one in documents]),
        [[*front, *ids[index]] for index in last], [scored[index] for index in last],
    )  # fmt: skip


def prepare_harness(loaded: LoadedModel, task: str, contenders: Contenders, items: int, seed: int, bos: int) -> Prepared:
    """A task of the harness, of which every document is an item.

    Only documents that are longer than the window are counted: in the others nothing is evicted, and all policies agree.
    """
    folder, _, name = task.rpartition(":")
    tasks, lm = _load(folder, name, seed), _bare(loaded)
    requests: dict[tuple[str, int], list[list[str]]] = {}
    for key, part in sorted(tasks["tasks"].items()):
        part.build_all_requests(limit=items, rank=0, world_size=1)
        for instance in part.instances:
            strings = [text for text in instance.args if isinstance(text, str)]
            requests.setdefault((key, int(instance.doc_id)), []).append(strings)
            if instance.request_type == "generate_until":
                read_greedy(instance.args[1])
    texts = [requests[key] for key in sorted(requests)]
    lengths = [max(len(lm.fronted(lm.tok_encode("".join(strings)))) for strings in document) for document in texts]
    counted = [index for index, length in enumerate(lengths) if length + bos >= contenders.budget + 2]
    if len(counted) < 2:
        raise ConfigurationError(
            f"task {name!r}: {len(counted)} of {len(lengths)} documents are longer than the window of "
            f"{contenders.budget:,} tokens, the longest has {max(lengths, default=0):,}; choose a smaller `window` or more "
            "`items`"
        )
    # For acc_mutual_info the harness reads every choice once more, behind nothing.
    choices = [sum(len(one) < 2 or bool(one[0]) for one in texts[index]) or len(texts[index]) for index in counted]
    everything = list(range(len(texts)))
    known = _hash([[*key, *requests[key]] for key in sorted(requests)])
    return Prepared(f"lm_eval:{name}", None, tasks, items, everything, everything, counted, choices, known)


def _bare(loaded: LoadedModel) -> PolicyLM:
    """What reads texts without beginning-of-sequence tokens, to count the others."""
    return PolicyLM(loaded, Full(), bos=0 if loaded.encoder.bos_token_id is not None else None)


def _hash(texts: object) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _load(folder: str, name: str, seed: int) -> dict[str, Any]:
    """The task of a name, and its parts, without examples in front unless it says how many."""
    # The harness reads thousands of files to know its own tasks, which takes seconds; those of a folder need none of them.
    manager = TaskManager(include_path=folder or None, include_defaults=not folder)
    if name not in manager.all_tasks:
        raise InputError(
            f"lm-evaluation-harness {importlib.metadata.version('lm_eval')} has no task {name!r}"
            f"{f' in {folder}' if folder else ''}; list its tasks with 'lm-eval ls tasks', or name one of your own as "
            "lm_eval:FOLDER:TASK"
        )
    try:
        tasks: dict[str, Any] = manager.load([name])
    except (OSError, ValueError) as error:  # also what datasets raises for a text that is neither on the hub nor in its cache
        raise InputError(
            f"task {name!r} of lm-evaluation-harness cannot be loaded: {' '.join(str(error).split())}; it needs its texts, "
            "which most tasks take from the Hugging Face hub: without a network only those work that have been read before"
        ) from error
    for part in tasks["tasks"].values():
        if part.get_config("num_fewshot") is None:
            part.set_config(key="num_fewshot", value=0)
        part.set_fewshot_seed(seed=seed)
    return tasks


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's bars, and what it says of a task that is made in memory: that it has no data set."""
    logger, bar = logging.getLogger("lm_eval"), harness_task.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    harness_task.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        harness_task.tqdm = bar


@dataclasses.dataclass(eq=False)
class Scored:
    """All scores of one task: by the name of a policy one number for each document, and what stood in front.

    ``refused`` are policies that the model cannot be read under, with the reason; ``metric`` and ``filter`` are the harness's.
    """

    scores: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    bos: dict[str, Any] = dataclasses.field(default_factory=dict)
    metric: str = ""
    filter: str = ""

    @property
    def record(self) -> dict[str, object]:
        """For ``run.json``."""
        version = importlib.metadata.version("lm_eval")
        return {"lm_eval": version, "filter": self.filter, "bos": self.bos, "refused": self.refused}


def run_task(
    loaded: LoadedModel, prepared: Prepared, contenders: Contenders, bos: int, store: Store, identity: Mapping[str, object],
    progress: Callable[[float], None],
) -> Scored:  # fmt: skip
    """Score the documents under every policy; one that the model refuses is noted, unless the verdict needs it."""
    scored, beginnings = Scored(), Beginnings(contenders.budget)
    needed = (contenders.with_sinks, contenders.without, contenders.floor)
    version = importlib.metadata.version("lm_eval")
    for number, (name, policy) in enumerate(contenders.policies.items()):
        progress(number)
        settings = {
            **identity, "task": prepared.label, "texts": prepared.sha256, "bos": bos, "policy": policies.settings(policy),
            "lm_eval": version,
        }  # fmt: skip
        stored = store.get("lm_eval-scores", settings, __version__)
        if stored is not None:
            evaluation = stored.record
        else:
            try:
                inside = functools.partial(_partly, progress, number)
                evaluation = _evaluate(loaded, prepared, policy, bos, beginnings, inside)
            except (ConfigurationError, UnsupportedModelError) as error:
                if name in needed:
                    raise
                scored.refused[name] = " ".join(str(error).split())
                continue
            store.put("lm_eval-scores", settings, __version__, evaluation)
        scored.metric, scored.filter = str(evaluation["metric"]), str(evaluation["filter"])
        scored.scores[name] = np.array(evaluation["scores"])
        scored.bos[name] = evaluation["bos"]
    return scored


def _partly(progress: Callable[[float], None], number: int, done: int, total: int) -> None:
    progress(number + done / total)


def _evaluate(
    loaded: LoadedModel, prepared: Prepared, policy: Policy, bos: int, beginnings: Beginnings | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """The scores of all documents under one policy, the names of metric and filter, and what stood in front."""
    front = bos if loaded.encoder.bos_token_id is not None else None
    lm = PolicyLM(loaded, policy, bos=front, progress=progress, beginnings=beginnings)
    with _quiet():
        results = evaluate(lm, task_dict=prepared.tasks, limit=prepared.items, bootstrap_iters=0)
    samples, filters = [], []
    for _, of_part in sorted(results["samples"].items()):
        # The harness lists every document under each filter of a task, such as two ways to read a number out of an answer.
        first = of_part[0]["filter"] if of_part else ""
        filters.append(first)
        samples += sorted((sample for sample in of_part if sample["filter"] == first), key=lambda sample: int(sample["doc_id"]))
    metric = next((score for score in SCORES if samples and all(score in sample for sample in samples)), "")
    if not metric:
        raise InputError(
            f"task {prepared.label!r} has none of {', '.join(SCORES)} for each document, and the verdict needs one"
        )
    return {
        "metric": metric,
        "filter": ", ".join(dict.fromkeys(filters)),
        "scores": [float(sample[metric]) for sample in samples],
        "bos": lm.bos_record(),
    }
