"""Budgets per key-value head at the bytes of a uniform cache: chosen on some texts, measured on others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from sinklab.attention.placement import input_device
from sinklab.corpora.base import Corpus
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.lengths import trained_length
from sinklab.models.loading import LoadedModel
from sinklab.policies.base import Policy
from sinklab.policies.per_head import PerHead
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies as policy_registry
from sinklab.results.head_map import Budgets, HeadMap
from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.cache import PerHeadEntry
from sinklab.results.table import make_table
from sinklab.streaming.limits import narrowest
from sinklab.streaming.per_head import require_fit, verify_groups
from sinklab.streaming.perplexity import estimate, losses
from sinklab.streaming.reader import open_reader
from sinklab.streaming.rotation import read_rotations
from sinklab.streaming.traits import fingerprint
from sinklab.studies.cache.head_orders import (
    SOURCES,
    all_heads,
    attention_order,
    labels_order,
    map_name,
    random_order,
    require_labels,
)
from sinklab.studies.cache.head_windows import CUT, LONG, SHORT, Head, Windows, ladder, shared_by_cost, shared_by_order
from sinklab.studies.cache.long_texts import long_texts
from sinklab.studies.cache.policy_plan import scored_from

__all__ = [
    "head_budgets",
    "per_head_table",
    "require_head_maps",
    "require_room",
    "selection_texts",
    "sinks_with_room",
    "write_head_maps",
]

GAP = Metric(
    "per_head_gap",
    "nats",
    "Mean next-token loss with budgets per key-value head, less that with the same for all heads in the same bytes; of the "
    "same tokens, which the budgets were not chosen on.",
)
COST = Metric(
    "head_window_cost",
    "nats",
    "Mean next-token loss when one key-value head has another window than the others, less that when all have the same; on the "
    "texts that budgets are chosen on.",
)
BYTES = Metric(
    "per_head_bytes_ratio",
    "ratio",
    "Bytes of a cache with budgets per head over those of the uniform one.",
    range=(0.0, float("inf")),
)


def require_head_maps(loaded: LoadedModel, names: Sequence[str], sources: Sequence[str]) -> None:
    """Refuse head maps and labels of another model, before anything is measured.

    Raises:
        ConfigurationError: they are.
        UnsupportedModelError: heads of this model cannot have budgets of their own.
    """
    made = [policy for name in names if ":" in name and isinstance(policy := policy_registry.make(name), PerHead)]
    if not made and not sources:
        return
    kv_heads = read_rotations(loaded.model).kv_heads
    for policy in made:
        require_fit(policy, loaded.model, kv_heads)
    for source in sources:
        if source not in SOURCES:
            require_labels(Path(source), loaded, kv_heads)
    if sources and sum(kv_heads) < 2:
        raise ConfigurationError(f"{loaded.name} has one key-value head, so there is nothing to share out among heads")
    if sources:
        verify_groups(loaded.model)


def require_room(
    loaded: LoadedModel, rows: Tensor, *, sources: Sequence[str], budgets: Sequence[int], sinks: Sequence[int]
) -> None:
    """Refuse budgets that leave no choice whatever number of sinks is kept, before anything is measured.

    Raises:
        ConfigurationError: there is one.
    """
    for budget in budgets:
        if not any(_has_room(loaded, rows, sources, budget, number) for number in sinks):
            raise ConfigurationError(_no_room(budget, max(_longest_window(loaded, rows, number) for number in sinks)))


def sinks_with_room(
    loaded: LoadedModel, rows: Tensor, *, sources: Sequence[str], budgets: Sequence[int], sinks: Sequence[int], advised: int
) -> int:
    """How many first tokens every head keeps: as many as advised, or the most below that leave a choice at every budget.

    Args:
        sinks: what may be taken; :func:`require_room` has passed them, and fewer leave more room.
    """
    below = sorted({advised, *(number for number in sinks if number < advised)}, reverse=True)
    with_room = (number for number in below if all(_has_room(loaded, rows, sources, budget, number) for budget in budgets))
    return next(with_room, advised)


def _has_room(loaded: LoadedModel, rows: Tensor, sources: Sequence[str], budget: int, num_sinks: int) -> bool:
    """Whether some heads can hold less and others more; ``curves`` shares out by costs, and may leave all as they are."""
    if set(sources) <= {"curves"}:
        return True
    heads, most = all_heads(read_rotations(loaded.model).kv_heads), _longest_window(loaded, rows, num_sinks)
    return any(shared_by_order(heads, budget - num_sinks, most))


def _no_room(budget: int, most: int) -> str:
    return (
        f"a window of {budget:,} tokens leaves no room for budgets per head: a half to an eighth of it for some heads, and "
        f"what is saved, in windows of {most} at most, for the others; choose other `windows`"
    )


def selection_texts(text: Corpus, rows: Tensor, loaded: LoadedModel, *, seed: int, bos: bool) -> Tensor:
    """As many texts as ``rows``, ``(documents, tokens)``, none of which is among them.

    Raises:
        InputError: the corpus has no further texts.
    """
    documents, tokens = rows.shape
    drawn = long_texts(text, loaded.encoder, tokens=tokens, documents=2 * documents, seed=seed, bos=bos)
    apart = drawn[~(drawn[:, None] == rows).all(dim=2).any(dim=1)]
    if not len(apart):
        raise InputError(
            f"`per_head` chooses budgets on texts apart from those that it is measured on, and corpus {text.name!r} has no "
            f"more than {len(rows)} of {tokens:,} tokens; lower `documents` or `tokens`"
        )
    return apart[:documents]


def _longest_window(loaded: LoadedModel, rows: Tensor, num_sinks: int) -> int:
    """Most tokens that a head can hold besides its sinks: those that the model was trained on, and that every layer sees."""
    trained = trained_length(loaded.model) or rows.shape[1]
    return min(trained, narrowest(loaded.model) or trained) - num_sinks - 1


class _OneSize:
    """Budgets per head in the bytes of one uniform cache.

    Args:
        num_sinks: first tokens that every head keeps.
        budget: tokens held before the query, sinks included.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        rows: Tensor,
        selection: Tensor,
        num_sinks: int,
        budget: int,
        seed: int,
        done: Callable[[], None],
    ) -> None:
        self.loaded, self.rows, self.selection, self.seed, self.done = loaded, rows, selection, seed, done
        self.num_sinks, self.budget, self.window = num_sinks, budget, budget - num_sinks
        self.kv_heads = read_rotations(loaded.model).kv_heads
        self.heads = all_heads(self.kv_heads)
        self.first = scored_from(loaded, rows.shape[1], budget)
        self.trained = trained_length(loaded.model)
        self.most = _longest_window(loaded, rows, num_sinks)
        self.short = ladder(self.window, self.most)[0]
        self.uniform = SinkWindow(num_sinks=num_sinks, window=self.window)
        self.plain, self.reference = self._losses(selection, self.uniform), self._losses(rows, self.uniform)
        self._known: dict[Budgets, Tensor] = {}

    def _losses(self, texts: Tensor, policy: Policy) -> Tensor:
        return losses(self.loaded.model, texts, policy, first=self.first)

    def _budgets(self, windows: Windows) -> Budgets:
        return tuple(
            tuple((self.num_sinks, windows[layer, head]) for head in range(count)) for layer, count in enumerate(self.kv_heads)
        )

    def selected(self, windows: Windows) -> Tensor:
        """Losses less those of the uniform cache, on the texts of the selection."""
        budgets = self._budgets(windows)
        if budgets not in self._known:
            self._known[budgets] = self._losses(self.selection, PerHead(budgets=budgets)) - self.plain
        self.done()
        return self._known[budgets]

    def cost(self, head: Head, window: int) -> float:
        """What it costs to give a window to one head alone, in nats a token."""
        if window == self.window:
            return 0.0
        return estimate(self.selected({**dict.fromkeys(self.heads, self.window), head: window})).mean

    def candidates(self, source: str) -> tuple[list[Windows], dict[Head, dict[int, float]]]:
        """Windows that hold what the uniform ones do, and what each costs for one head alone, where that was measured."""
        costs: dict[Head, dict[int, float]] = {}
        if source == "curves":
            sizes = ladder(self.window, self.most)
            costs = {head: {size: self.cost(head, size) for size in sizes} for head in self.heads}
            return [shared_by_cost(costs, len(self.heads) * self.window)], costs
        if source == "measured":
            costs = {head: {self.short: self.cost(head, self.short)} for head in self.heads}
            order = sorted(self.heads, key=lambda head: (costs[head][self.short], head))
        elif source == "attention":
            texts = self.selection[:, : self.trained]
            order = attention_order(self.loaded, texts, self.kv_heads, self.num_sinks, self.short)
        elif source == "random":
            order = random_order(self.kv_heads, self.seed)
        else:
            order = labels_order(Path(source), self.loaded, self.kv_heads)
        return list(shared_by_order(order, self.window, self.most)), costs

    def entry(self, source: str) -> PerHeadEntry:
        """The best budgets of a source, measured."""
        candidates, costs = self.candidates(source)
        if not candidates:
            raise ConfigurationError(_no_room(self.budget, self.most))
        windows = min(candidates, key=lambda candidate: estimate(self.selected(candidate)).mean)
        policy = PerHead(budgets=self._budgets(windows))
        losses = self._losses(self.rows, policy)
        gap, hoped = estimate(losses - self.reference), estimate(self.selected(windows))
        cut = sorted(head for head in self.heads if windows[head] < self.window)
        return {
            "source": source,
            "window": self.budget,
            "num_sinks": self.num_sinks,
            "cut": [list(head) for head in cut],
            "shorter": sorted({windows[head] for head in cut}),
            "others": sorted({windows[head] for head in self.heads if head not in cut}),
            "budgets": [[list(budget) for budget in layer] for layer in policy.budgets],
            "costs": [
                {"layer": layer, "head": head, "window": window, "cost": cost}
                for (layer, head), sizes in costs.items()
                for window, cost in sizes.items()
            ],
            "loss": estimate(losses).mean,
            "uniform_loss": estimate(self.reference).mean,
            "gap": {"mean": gap.mean, "low": gap.low, "high": gap.high},
            "selection_gap": {"mean": hoped.mean, "low": hoped.low, "high": hoped.high},
            "bytes_ratio": _bytes(self.loaded, policy, self.rows) / _bytes(self.loaded, self.uniform, self.rows),
            "scored_tokens": losses.numel(),
            "selection_tokens": self.plain.numel(),
            "fingerprint": fingerprint(self.loaded.model, rounded=True),
        }


def head_budgets(
    loaded: LoadedModel,
    rows: Tensor,
    selection: Tensor,
    *,
    sources: Sequence[str],
    budgets: Sequence[int],
    num_sinks: int,
    seed: int = 0,
    progress: Progress = silent,
) -> list[PerHeadEntry]:
    """What budgets per key-value head gain over the same budget for all heads, in the same bytes.

    Most sources put the heads into an order. The first of it get a short window, in several numbers and of several sizes, and
    the others what is saved; of these candidates the one with the least loss on the texts of ``selection`` is measured on
    ``rows``. ``curves`` shares out by costs (:func:`~sinklab.studies.cache.head_windows.shared_by_cost`). All heads keep their
    sinks.

    Args:
        rows, selection: texts, int64 ``(documents, tokens)``.
        sources: see :data:`~sinklab.studies.cache.head_orders.SOURCES`.
        budgets: tokens held before the query, sinks included.
        num_sinks: first tokens that every head keeps.

    Raises:
        ConfigurationError: a budget without room for a short window.
    """
    heads, each = sum(read_rotations(loaded.model).kv_heads), len(CUT) * len(SHORT) + 1
    singly = heads * (("measured" in sources) + (len(SHORT) + len(LONG)) * ("curves" in sources))
    total = len(budgets) * (len(sources) * each + singly)
    counted = itertools.count(1)

    def done() -> None:
        progress("budgets per head", min(next(counted), total), total)

    entries: list[PerHeadEntry] = []
    for budget in budgets:
        size = _OneSize(loaded, rows, selection, num_sinks, budget, seed, done)
        entries += [size.entry(source) for source in sources]
    progress("budgets per head", total, total)
    return entries


@torch.no_grad()
def _bytes(loaded: LoadedModel, policy: Policy, rows: Tensor) -> int:
    """Bytes of a cache for one text, as allocated."""
    reader = open_reader(loaded.model, policy)
    reader.read(rows[:1, :1].to(input_device(loaded.model)))
    return reader.bytes_held()


def write_head_maps(entries: Sequence[PerHeadEntry], loaded: LoadedModel, folder: Path) -> None:
    """``heads-SOURCE-WINDOW.json`` for each entry, which the policy ``per_head`` reads."""
    for entry in entries:
        written = HeadMap(
            name=loaded.name, fingerprint=entry["fingerprint"], source=entry["source"],
            budgets=tuple(tuple((sinks, window) for sinks, window in layer) for layer in entry["budgets"]),
        )  # fmt: skip
        (folder / file_name(entry)).write_text(written.model_dump_json() + "\n", encoding="utf-8")


def file_name(entry: PerHeadEntry) -> str:
    """Of the head map of an entry."""
    return f"heads-{map_name(entry['source'])}-{entry['window']}.json"


def per_head_table(
    entries: Sequence[PerHeadEntry], loaded: LoadedModel, *, corpus: str, bos: bool, run_id: str, seed: int
) -> pd.DataFrame:
    """The entries in the long schema; ``policy`` says by what the budgets were chosen, and in whose bytes."""
    rows: list[Row] = []
    costs: dict[tuple[int, int, str], Row] = {}  # each once: sources of one size measure some of the same
    for entry in entries:
        of_cache: Coordinates = {"policy": f"per_head by {entry['source']}, bytes of {entry['window']} tokens"}
        rows.append({**of_cache, "metric": GAP, "value": entry["gap"]["mean"], "count": entry["scored_tokens"]})
        rows.append({**of_cache, "metric": BYTES, "value": entry["bytes_ratio"], "count": 1})
        uniform = f"{entry['num_sinks']}+{entry['window'] - entry['num_sinks']}"
        for cost in entry["costs"]:
            layer, head, policy = cost["layer"], cost["head"], f"{uniform}, 1 head with a window of {cost['window']}"
            where: Coordinates = {"layer": layer, "head": head, "policy": policy}
            costs[layer, head, policy] = {
                **where, "metric": COST, "value": cost["cost"], "count": entry["selection_tokens"],
            }  # fmt: skip
    rows += costs.values()
    return make_table(
        rows, run_id=run_id, model=loaded.name, revision=loaded.revision, operation=loaded.operation, corpus=corpus,
        bos=int(bos), seed=seed, probe="per_head_budgets",
    )  # fmt: skip
