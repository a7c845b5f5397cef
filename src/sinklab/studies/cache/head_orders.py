"""Head orders: which key-value heads can do with a short window, the likeliest first, by labels, by attention or by loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.loading import LoadedModel
from sinklab.results.naming import counted
from sinklab.results.table import read_run
from sinklab.studies.cache.head_windows import Head

__all__ = [
    "RESTING",
    "SOURCES",
    "all_heads",
    "attention_order",
    "checked_sources",
    "labels_order",
    "map_name",
    "random_order",
    "require_labels",
]

SOURCES: dict[str, str] = {
    "measured": "the loss when one head at a time has the short window",
    "curves": "the loss when one head at a time has each of several windows, added up",
    "attention": "the attention that a head gives beyond its sinks and the short window",
    "random": "chance: a control",
}
"""What heads can be ordered by, besides the folder of a run of ``sinklab causes``."""

RESTING = ("dormant", "broadcast", "switch", "broadcast-switch", "unneeded")
"""Labels of heads that do not say something everywhere; see :mod:`sinklab.studies.causes.labels`."""

ROWS_AT_ONCE = 256
"""Queries whose weights are made at once."""


def checked_sources(sources: Sequence[str]) -> list[str]:
    """The sources, each once.

    Raises:
        InputError: neither a name nor the folder of a run of ``sinklab causes``, or two whose head maps would be one file.
    """
    named: dict[str, str] = {}
    for source in dict.fromkeys(sources):
        if source not in SOURCES:
            _labels(Path(source))
        name = map_name(source)
        if (other := named.setdefault(name, source)) != source:
            raise InputError(
                f"`per_head` {other!r} and {source!r} have one name, {name!r}, by which head maps are called; leave out one, "
                "or rename a folder"
            )
    return list(named.values())


def map_name(source: str) -> str:
    """What the head maps of a source are called by: the name, or that of the folder."""
    return Path(source).resolve().name


def _labels(folder: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """The model of a run of ``sinklab causes`` (its name under ``model``, and its ``revision``), and its heads."""
    if not (folder / "summary.json").is_file():
        raise InputError(
            f"`per_head` {str(folder)!r} is none of {', '.join(SOURCES)}, and there is no run of 'sinklab causes' in a "
            "folder of that name"
        )
    summary, record = read_run(folder, "summary.json"), read_run(folder)
    heads = summary.get("heads")
    if not isinstance(heads, list) or not all(isinstance(head, dict) and "label" in head for head in heads):
        raise InputError(f"{folder} is no run of 'sinklab causes': its summary.json has no labels of heads")
    return dict(record.get("model") or {}), heads


def require_labels(folder: Path, loaded: LoadedModel, kv_heads: Sequence[int]) -> None:
    """Refuse labels of another model, before anything is measured.

    Raises:
        ConfigurationError: they are.
    """
    model, heads = _labels(folder)
    name, revision = model.get("model"), model.get("revision")
    same = name == loaded.name if None in (revision, loaded.revision) else revision == loaded.revision
    most = (max(int(str(head["layer"])) for head in heads) + 1, max(int(str(head["head"])) for head in heads) + 1)
    mine = (len(kv_heads), _query_heads(loaded))
    theirs = f"{counted(most[0], 'layer')}, {counted(most[1], 'head')}"
    if not same or most[0] > mine[0] or most[1] > mine[1]:
        raise ConfigurationError(
            f"{folder} has labels of {name} ({theirs}) and this is {loaded.name} ({counted(mine[0], 'layer')}, "
            f"{counted(mine[1], 'head')}); run 'sinklab causes' on this model"
        )


def _query_heads(loaded: LoadedModel) -> int:
    return int(loaded.model.config.get_text_config().num_attention_heads)


def labels_order(folder: Path, loaded: LoadedModel, kv_heads: Sequence[int]) -> list[Head]:
    """By the labels and effects of a run of ``sinklab causes``.

    Heads that rest come first (:data:`RESTING`), those without a decided label next, semantic ones last; within each by what
    it costs to zero the head, mean over the domains. A key-value head ranks as the query head of its group that ranks last,
    and one that was not examined ranks as one without a decided label whose cost is not known.
    """
    ranks: dict[Head, tuple[int, float]] = {}
    groups = [_query_heads(loaded) // count for count in kv_heads]
    left = {head: groups[head[0]] for head in all_heads(kv_heads)}  # query heads of the group that were not examined
    for head in _labels(folder)[1]:
        label, layer = str(head["label"]), int(str(head["layer"]))
        rank = 0 if label in RESTING else 2 if label == "semantic" else 1
        of_head = (layer, int(str(head["head"])) // groups[layer])
        ranks[of_head] = max(ranks.get(of_head, (0, 0.0)), (rank, _effect(head)))
        left[of_head] -= 1
    unknown = (1, float("inf"))
    return sorted(left, key=lambda head: (max(ranks.get(head, unknown), unknown) if left[head] else ranks[head], head))


def _effect(head: dict[str, object]) -> float:
    """What it costs to zero a head, mean over the domains, in nats."""
    effects = head.get("effects")
    domains = effects.get("zero", {}) if isinstance(effects, dict) else {}
    means = [float(effect["mean"]) for effect in domains.values() if effect.get("mean") is not None]
    return sum(means) / len(means) if means else float("inf")


def random_order(kv_heads: Sequence[int], seed: int) -> list[Head]:
    """By chance."""
    heads = all_heads(kv_heads)
    random.Random(seed).shuffle(heads)
    return heads


def attention_order(loaded: LoadedModel, texts: Tensor, kv_heads: Sequence[int], num_sinks: int, window: int) -> list[Head]:
    """By the attention that queries give to keys that are neither sinks nor within ``window``: what a short window hides.

    Mean over the queries that have such keys, and over the query heads of a group; under dense attention.

    Args:
        texts: no longer than the model was trained on, int64 ``(texts, tokens)``.
    """
    watcher = _Beyond(num_sinks, window)
    with torch.no_grad(), attend(loaded.model, probes=[watcher]):
        for row in texts:
            loaded.model(input_ids=row[None].to(loaded.device), use_cache=False)
    means = [
        (watcher.sums[layer] / watcher.counts[layer]).unflatten(0, (count, -1)).mean(dim=1)
        for layer, count in enumerate(kv_heads)
    ]
    return sorted(all_heads(kv_heads), key=lambda head: (float(means[head[0]][head[1]]), head))


class _Beyond(Watcher):
    """Sums, per layer and query head, of the weights that lie beyond sinks and window."""

    name = "beyond"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, num_sinks: int, window: int) -> None:
        self.num_sinks, self.window = num_sinks, window
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, int] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        layer, q_len = call.site.layer, call.queries.shape[2]
        keys = call.key_positions[:, None]
        for start in range(0, q_len, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, q_len)
            queries = call.query_positions[:, start:stop, None]
            beyond = (queries - keys > self.window) & (keys >= self.num_sinks)
            weights = call.weights(start, stop)
            beyond = beyond.to(weights.device)
            mass = (weights * beyond[:, None]).sum(dim=(0, 2, 3)).double().cpu()
            self.sums[layer] = self.sums.get(layer, torch.zeros_like(mass)) + mass
            self.counts[layer] = self.counts.get(layer, 0) + int(beyond.any(dim=2).sum())


def all_heads(kv_heads: Sequence[int]) -> list[Head]:
    """Every key-value head, by layer."""
    return [(layer, head) for layer, count in enumerate(kv_heads) for head in range(count)]
