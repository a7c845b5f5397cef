"""A task of lm-evaluation-harness under every policy, judged like our own: ``sinklab depend MODEL --task lm_eval:TASK``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import numpy as np

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.results.metric import Metric
from sinklab.results.run import Progress, silent
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.lm_eval import PolicyLM, TaskManager, evaluate
from sinklab.studies.depend.outcome import outcome

__all__ = ["run_harness"]

HARNESS_SCORE = Metric(
    "lm_eval_score", "fraction", "Mean over documents of the metric of lm-evaluation-harness that rows are named by."
)

SCORES = ("acc", "exact_match")
"""Per-document numbers of the harness that a verdict can be about, in the order in which they are looked for."""
MINIMAL_EFFECT = 0.05


@dataclasses.dataclass(frozen=True)
class _Document:
    score: float
    longest: int
    choices: int


def run_harness(
    loaded: LoadedModel,
    task: str,
    contenders: Contenders,
    items: int,
    seed: int,
    level: float,
    progress: Progress = silent,
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The summary, the rows of the table and the record of one task, as ``depend()`` takes them.

    The score is the harness's own ``acc`` (or ``exact_match``) of each document. Only documents that are longer than the
    window are
    counted: in the others nothing is evicted, and all policies agree.

    Args:
        task: a name of the harness, or ``FOLDER:NAME`` for YAML files of one's own.
        items: documents, from the first one on.

    Raises:
        InputError: no such task, one whose texts cannot be had, or one without a score for each document.
        ConfigurationError: no two documents are longer than the window.
    """
    folder, _, name = task.rpartition(":")
    # The harness reads thousands of files to know its own tasks, which takes seconds; those of a folder need none of them.
    manager = TaskManager(include_path=folder or None, include_defaults=not folder)
    if name not in manager.all_tasks:
        raise InputError(
            f"lm-evaluation-harness {importlib.metadata.version('lm_eval')} has no task {name!r}"
            f"{f' in {folder}' if folder else ''}; list its tasks with 'lm-eval ls tasks', or name one of your own as "
            "lm_eval:FOLDER:TASK"
        )
    try:
        tasks = manager.load([name])
    except (OSError, ValueError) as error:  # also what datasets raises for a text that is neither on the hub nor in its cache
        raise InputError(
            f"task {name!r} of lm-evaluation-harness cannot be loaded: {' '.join(str(error).split())}; it needs its texts, "
            "which most tasks take from the Hugging Face hub: without a network only those work that have been read before"
        ) from error
    for part in tasks["tasks"].values():
        if part.get_config("num_fewshot") is None:
            part.set_config(key="num_fewshot", value=0)
        part.set_fewshot_seed(seed=seed)
    scored: dict[str, list[_Document]] = {}
    bos: dict[str, Any] = {}
    refused: dict[str, str] = {}
    metric = ""
    for number, (label, policy) in enumerate(contenders.policies.items()):
        lm = PolicyLM(loaded, policy)
        try:
            results = evaluate(lm, task_dict=tasks, limit=items, bootstrap_iters=0)
        except UnsupportedModelError as error:
            if label in (contenders.with_sinks, contenders.without, contenders.floor):
                raise
            refused[label] = " ".join(str(error).split())
            continue
        samples = [
            sample
            for part in sorted(results["samples"])
            for sample in sorted(results["samples"][part], key=lambda sample: int(sample["doc_id"]))
        ]
        metric = next((score for score in SCORES if samples and score in samples[0]), "")
        if not metric:
            raise InputError(f"task {name!r} has none of {', '.join(SCORES)} for each document, and the verdict needs one")
        scored[label] = [_document(sample, metric, lm) for sample in samples]
        bos[label] = lm.bos_record()
        progress(f"lm_eval:{name}", number + 1, len(contenders.policies))
    documents = scored[contenders.without]
    counted = [index for index, document in enumerate(documents) if document.longest >= contenders.budget + 2]
    if len(counted) < 2:
        longest = max((document.longest for document in documents), default=0)
        raise ConfigurationError(
            f"task {name!r}: {len(counted)} of {len(documents)} documents are longer than the window of "
            f"{contenders.budget} tokens, the longest has {longest}; choose a smaller `window` or more "
            "`items`"
        )
    choices = [documents[index].choices for index in counted]
    summary = outcome(
        {"task": f"lm_eval:{name}", "metric": metric, "unit": HARNESS_SCORE.unit, "axis": None, "documents": len(documents)},
        {label: np.array([scored[label][index].score for index in counted]) for label in scored},
        contenders,
        chance=float(np.mean([1.0 / number for number in choices])) if min(choices) > 1 else None,
        minimal_effect=MINIMAL_EFFECT,
        scale=1.0,
        level=level,
        refused=refused,
        means={label: {"all_documents": float(np.mean([entry.score for entry in scored[label]]))} for label in scored},
        curves={},
        lengths={},
    )
    rows = [
        {
            "policy": label,
            "metric": dataclasses.replace(HARNESS_SCORE, name=metric),
            "value": float(np.mean([entry.score for entry in scored[label]])),
            "count": len(documents),
        }
        for label in scored
    ]
    record = {"name": f"lm_eval:{name}", "lm_eval": importlib.metadata.version("lm_eval"), "bos": bos, "refused": refused}
    return summary, rows, record


def _document(sample: dict[str, Any], metric: str, lm: PolicyLM) -> _Document:
    """Score, tokens of the longest text and number of choices of one document."""
    arguments = list(sample["arguments"].values()) if isinstance(sample["arguments"], dict) else list(sample["arguments"])
    texts = [list(argument.values()) if isinstance(argument, dict) else list(argument) for argument in arguments]
    lengths = [len(lm.tok_encode("".join(part for part in text if isinstance(part, str)))) for text in texts]
    return _Document(float(sample[metric]), max(lengths), len(texts))
