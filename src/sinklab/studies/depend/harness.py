"""A task of lm-evaluation-harness under every condition, judged like our own: ``sinklab depend MODEL --task lm_eval:TASK``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.policies.base import Policy
from sinklab.policies.full import Full
from sinklab.registry import policies
from sinklab.results.metric import Metric, Row
from sinklab.results.store import Store
from sinklab.results.version import __version__
from sinklab.studies.depend.clock import Clock
from sinklab.studies.depend.conditions import Condition, ConditionPlan
from sinklab.studies.depend.lm_eval import PolicyLM, TaskManager, evaluate, read_greedy
from sinklab.studies.depend.outcome import Measured, outcome

__all__ = ["PreparedHarness", "prepare_harness", "run_harness"]

HARNESS_SCORE = Metric(
    "lm_eval_score", "fraction", "Mean over documents of the metric of lm-evaluation-harness that rows are named by."
)

SCORES = ("acc", "exact_match")
"""Per-document numbers of the harness that a verdict can be about, in the order in which they are looked for."""
MINIMAL_EFFECT = 0.05


@dataclasses.dataclass(frozen=True)
class _Document:
    """What is known of a document before anything is read.

    Attributes:
        longest: tokens of its longest text, without beginning-of-sequence tokens.
        texts: of each, tokens without beginning-of-sequence tokens, and how many of them are scored, the last ones.
        choices: how many answers are chosen among.
    """

    longest: int
    texts: tuple[tuple[int, int], ...]
    choices: int


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedHarness:
    """A task of the harness that is there, and whose texts fill the cache.

    Attributes:
        name: as the harness has it.
        tasks: what :func:`lm_eval.evaluate` takes.
        documents: in the order of their scores.
        counted: indices of those that are longer than the window.
        generated: most tokens that are generated behind a text; 0 where texts are scored as they are.
        texts: hash of all texts.
    """

    name: str
    tasks: dict[str, Any]
    items: int
    documents: list[_Document]
    counted: list[int]
    generated: int
    texts: str

    @property
    def label(self) -> str:
        """What the task is called in the summary."""
        return f"lm_eval:{self.name}"

    def tokens(self, condition: Condition) -> int:
        """How many the model computes under one condition, those that it generates not counted: nobody knows how many."""
        ends = ((length + condition.bos, scored) for document in self.documents for length, scored in document.texts)
        return sum(condition.policy.computed([range(max(0, end - 1 - scored), end - 1)]) for end, scored in ends)


def prepare_harness(loaded: LoadedModel, task: str, plan: ConditionPlan, items: int, seed: int) -> PreparedHarness:
    """Load a task and look at its texts.

    Only documents that are longer than the window are counted: in the others nothing is evicted, and all policies agree.

    Args:
        task: a name of the harness, or ``FOLDER:NAME`` for YAML files of one's own.
        items: documents, from the first one on.

    Raises:
        InputError: no such task, or one whose texts cannot be had.
        ConfigurationError: no two documents are longer than the window; or sampling or beams are asked for.
    """
    folder, _, name = task.rpartition(":")
    tasks = _load(folder, name, seed)
    lm = PolicyLM(loaded, Full(), bos=0 if loaded.encoder.bos_token_id is not None else None)
    requests: dict[tuple[str, int], list[list[str]]] = {}
    rolling, generated = set(), 0
    for key, part in sorted(tasks["tasks"].items()):
        part.build_all_requests(limit=items, rank=0, world_size=1)
        for instance in part.instances:
            strings = [text for text in instance.args if isinstance(text, str)]
            requests.setdefault((key, int(instance.doc_id)), []).append(strings)
            if instance.request_type == "loglikelihood_rolling":
                rolling.add(key)
            elif instance.request_type == "generate_until":
                generated = max(generated, read_greedy(instance.args[1])[1])
    documents = [_document(lm, texts, rolling=key in rolling) for (key, _), texts in sorted(requests.items())]
    budget = plan.contenders.budget
    counted = [index for index, document in enumerate(documents) if document.longest + min(plan.bos) >= budget + 2]
    if len(counted) < 2:
        longest = max((document.longest for document in documents), default=0)
        raise ConfigurationError(
            f"task {name!r}: {len(counted)} of {len(documents)} documents are longer than the window of "
            f"{budget:,} tokens, the longest has {longest:,}; choose a smaller `window` or more "
            "`items`"
        )
    known = json.dumps([[*key, *texts] for key, texts in sorted(requests.items())])
    texts_known = hashlib.sha256(known.encode()).hexdigest()
    return PreparedHarness(name, tasks, items, documents, counted, generated, texts_known)


def _load(folder: str, name: str, seed: int) -> dict[str, Any]:
    """The task of a name, and its parts, without examples in front unless it says how many.

    Raises:
        InputError: no such task, or one whose texts cannot be had.
    """
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


def _document(lm: PolicyLM, texts: Sequence[list[str]], *, rolling: bool) -> _Document:
    """A document of which these texts are read, each in one string or more.

    Args:
        rolling: the whole of each text is scored.
    """
    lengths = [len(lm.fronted(lm.tok_encode("".join(strings)))) for strings in texts]
    # What is scored is the second string, the whole of a text that is alone, or of a prompt what is generated behind it.
    before = [1 if rolling else len(lm.fronted(lm.tok_encode(strings[0]))) for strings in texts]
    scored = [max(1, length - begin) for length, begin in zip(lengths, before, strict=True)]
    # For acc_mutual_info the harness reads every choice once more, behind nothing.
    choices = sum(len(strings) < 2 or bool(strings[0]) for strings in texts) or len(texts)
    return _Document(max(lengths), tuple(zip(lengths, scored, strict=True)), choices)


def run_harness(
    loaded: LoadedModel,
    prepared: PreparedHarness,
    plan: ConditionPlan,
    level: float,
    store: Store,
    identity: Mapping[str, object],
    clock: Clock,
) -> tuple[dict[str, Any], list[Row], dict[str, Any]]:
    """The summary, the rows of the table and the record of one task, as ``depend()`` takes them.

    The score is the harness's own ``acc`` (or ``exact_match``) of each document, under the first filter of the task.

    Args:
        store, identity, clock: as for :func:`~sinklab.studies.depend.runner.run_task`.

    Raises:
        InputError: a task without a score for each document.
    """
    scored = _score_conditions(loaded, prepared, plan, store, identity, clock)
    counted = prepared.counted
    choices = [prepared.documents[index].choices for index in counted]
    of_policies = {name: plan.of_policy(name) for name in plan.contenders.policies}
    summary = outcome(
        {
            "task": prepared.label, "metric": scored.metric, "unit": HARNESS_SCORE.unit, "axis": None,
            "documents": len(prepared.documents),
        },
        Measured(
            {condition: values[counted] for condition, values in scored.scores.items()},
            scored.refused,
            chance=float(np.mean([1.0 / number for number in choices])) if min(choices) > 1 else None,
            minimal_effect=MINIMAL_EFFECT,
            scale=1.0,
            level=level,
        ),
        plan,
        means={
            name: {"all_documents": float(scored.scores[condition].mean())}
            for name, condition in of_policies.items()
            if condition in scored.scores
        },
        curves={},
        lengths={},
    )  # fmt: skip
    rows: list[Row] = [
        {
            "policy": condition.label,
            "bos": condition.bos,
            "metric": HARNESS_SCORE.named(scored.metric),
            "value": float(values.mean()),
            "count": len(values),
        }
        for condition, values in scored.scores.items()
    ]
    record = {
        "name": prepared.label,
        "lm_eval": importlib.metadata.version("lm_eval"),
        "filter": scored.filter,
        "bos": scored.bos,
        "refused": {condition.label_beside(plan.reference): reason for condition, reason in scored.refused.items()},
    }
    return summary, rows, record


@dataclasses.dataclass(eq=False)
class _Scored:
    """All scores of one task of the harness.

    Attributes:
        scores: by condition, one number for each document.
        bos: by the label of a condition, what stood in front.
        refused: conditions that the model cannot be read under, with the reason.
        metric, filter: of the harness, that the scores are of.
    """

    scores: dict[Condition, np.ndarray] = dataclasses.field(default_factory=dict)
    bos: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: dict[Condition, str] = dataclasses.field(default_factory=dict)
    metric: str = ""
    filter: str = ""


def _score_conditions(
    loaded: LoadedModel,
    prepared: PreparedHarness,
    plan: ConditionPlan,
    store: Store,
    identity: Mapping[str, object],
    clock: Clock,
) -> _Scored:
    """Score the documents under every condition; one that the model refuses is noted, unless the verdict needs it."""
    scored = _Scored()
    longest = max(document.longest for document in prepared.documents) + prepared.generated
    # In tokens, not in conditions: re-computation takes many times what a cache takes of the same texts.
    steps, done = sum(prepared.tokens(condition) for condition in plan.conditions), 0
    for condition in plan.conditions:
        tokens = prepared.tokens(condition)
        done += tokens
        policy = condition.fitted(longest + condition.bos)
        settings = {
            **identity, "task": prepared.name, "texts": prepared.texts, "bos": condition.bos,
            "policy": policies.settings(policy), "quantized": condition.quantized,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }  # fmt: skip
        sources = __version__
        stored = store.get("lm_eval-scores", settings, sources)
        if stored is not None:
            evaluation = stored.record
            clock.skip(condition.kind, tokens)
        else:
            try:
                with clock.cell(condition.kind, tokens):
                    evaluation = _evaluate(loaded, prepared, condition, policy)
            except (ConfigurationError, UnsupportedModelError) as error:
                if condition in plan.needed:
                    raise
                scored.refused[condition] = " ".join(str(error).split())
                continue
            store.put("lm_eval-scores", settings, sources, evaluation)
        scored.metric, scored.filter = str(evaluation["metric"]), str(evaluation["filter"])
        scored.scores[condition] = np.array(evaluation["scores"])
        scored.bos[condition.label_beside(plan.reference)] = evaluation["bos"]
        clock.progress(prepared.label, done, steps)
    return scored


def _evaluate(loaded: LoadedModel, prepared: PreparedHarness, condition: Condition, policy: Policy) -> dict[str, Any]:
    """The scores of all documents under one condition, the names of metric and filter, and what stood in front."""
    bos = condition.bos if loaded.encoder.bos_token_id is not None else None
    lm = PolicyLM(loaded, policy, bos=bos, quantized=condition.quantized)
    results = evaluate(lm, task_dict=prepared.tasks, limit=prepared.items, bootstrap_iters=0)
    samples, filters = [], []
    for _, of_part in sorted(results["samples"].items()):
        # The harness lists every document under each filter of a task, such as two ways to read a number out of an answer.
        first = of_part[0]["filter"] if of_part else ""
        filters.append(first)
        samples += sorted((sample for sample in of_part if sample["filter"] == first), key=lambda sample: int(sample["doc_id"]))
    metric = next((score for score in SCORES if samples and all(score in sample for sample in samples)), "")
    if not metric:
        raise InputError(f"task {prepared.name!r} has none of {', '.join(SCORES)} for each document, and the verdict needs one")
    return {
        "metric": metric,
        "filter": ", ".join(dict.fromkeys(filters)),
        "scores": [float(sample[metric]) for sample in samples],
        "bos": lm.bos_record(),
    }
