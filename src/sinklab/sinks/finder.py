"""The watcher that finds sinks: hits by position, by token and on the null score, added up over forwards; one rule picks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Part, Statistics
from sinklab.attention.chosen_keys import stands_on_no_key, weights_on_own_keys
from sinklab.attention.maps import Names
from sinklab.attention.operation import repeat_groups, row_share
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Watcher, filled
from sinklab.errors import SessionError
from sinklab.results.blocks import front_name
from sinklab.results.intervals import LEAST_SHARE, just_above, least_count_above, require_threshold
from sinklab.sinks.value import DEFINITION, Head, Sink, Sinks, first_of_kind

LEAST_RATE = 1.0
"""Percent of (document, head) from which a place is listed although no head sinks there often enough."""

FIRST_ONLY = 0.9
"""Share of a token's sinks that must stand on its first occurrence in the document for that to be the place."""

Place: TypeAlias = "tuple[Literal['position', 'first', 'anywhere'], int]"
"""A position, or the id of a token: its first occurrence in a document, or any."""


@dataclasses.dataclass(frozen=True, eq=False)
class Hits:
    """How often heads sink; arrays of one length."""

    head: np.ndarray
    token: np.ndarray  # -1 where it is not known
    position: np.ndarray
    first: np.ndarray  # whether the token is the first of its id in the document
    once: np.ndarray  # whether it is the first of its id on which this head sinks in the document
    count: np.ndarray  # documents
    ratio: np.ndarray  # norms of the values there over the mean norm of the others of their document, summed
    rated: np.ndarray  # documents that have others, and so such a ratio
    loud: np.ndarray  # documents in which the weight itself passes, too, before rows are divided by their sums

    def at(self, place: Place) -> np.ndarray:
        """Which of them a place accounts for."""
        kind, number = place
        if kind == "position":
            return self.position == number
        return (self.token == number) & (self.first | (kind == "anywhere"))


def places(hits: Hits, cases: np.ndarray) -> Iterator[Place]:
    """Places that play the sink: each accounts for the most sinks that those before it do not; places where a head sinks first.

    A token at two positions or more is the place if it accounts for more sinks than any one position; where nearly all of them
    are on its first occurrence, that is the place.

    Args:
        cases: documents by head.
    """
    left = hits.count.astype(np.float64)
    enough = enough_documents(cases)
    tokens = hits.once & (hits.token >= 0)
    for _ in range(LISTED):
        totals = _totals(hits.position, left, hits.head, enough)
        best: Place = ("position", max(totals, key=totals.__getitem__, default=-1))
        most = totals.get(best[1], (False, 0.0))
        of_tokens = _totals(hits.token, np.where(tokens, left, 0.0), hits.head, enough)
        for token, total in of_tokens.items():
            # A token that stands at one position alone is that position.
            if total > most and len(np.unique(hits.position[tokens & (hits.token == token) & (left > 0)])) > 1:
                first = left[hits.at(("first", token))].sum() >= FIRST_ONLY * left[hits.at(("anywhere", token))].sum()
                best, most = ("first" if first else "anywhere", token), total
        sinks, total_count = most
        if total_count == 0 or not (sinks or total_count >= LEAST_RATE / 100 * cases.sum()):
            return
        yield best
        left = np.where(hits.at(("anywhere", best[1]) if best[0] == "first" else best), 0.0, left)


def _totals(numbers: np.ndarray, counts: np.ndarray, heads: np.ndarray, enough: np.ndarray) -> dict[int, tuple[bool, float]]:
    """Of each number, whether some head has enough of its counts, and how many there are; in the order of the numbers."""
    values, index = np.unique(numbers, return_inverse=True)
    by_head = np.zeros((len(values), len(enough)))
    np.add.at(by_head, (index, heads), counts)
    return {
        int(value): (bool((row >= enough).any()), float(row.sum())) for value, row in zip(values.tolist(), by_head, strict=True)
    }


def enough_documents(cases: np.ndarray) -> np.ndarray:
    """By head, the least number of documents in which it must sink to be a sinking head; see :attr:`Sink.sinking`."""
    return np.array([least_count_above(LEAST_SHARE, int(number)) for number in cases])


LISTED = 8
"""Places, tokens and positions that are listed at most."""

_NULLS = {"softmax": "learned sink logit", "sink_logit": "learned sink logit"}
"""Operation to what its null score is, where that is not the operation's own name."""


class _Module:
    """Sums over the documents of one attention module.

    Attributes:
        sums: float64, by position: ``weight`` of the column and how many queries see it (``seen``), ``share`` and ``asked``,
            the same of rows divided by their sums, without the queries that stand on the key, ``(heads, length)``; documents
            that have it (``keys``), and those in which half of the queries see it (``early``), ``(1, length)``; ``null``, mean
            null mass summed over documents, and ``null_hits``, those in which it passes the threshold, ``(heads, 1)``.
        codes, totals: of (head, token, position, first of its kind, first sink on this token) the last four of :class:`Hits`.
    """

    def __init__(self, heads: list[Head]) -> None:
        self.heads, self.documents, self.has_null, self.operation = heads, 0.0, False, ""
        self.sums: dict[str, Tensor] = {}
        self.codes, self.totals = np.zeros((0, 5), dtype=np.int64), np.zeros((0, 4))

    def add(self, sums: Mapping[str, Tensor], documents: float, codes: np.ndarray, totals: np.ndarray) -> None:
        """Add what was seen of some more documents."""
        for name, values in sums.items():
            before = self.sums.get(name, values.new_zeros(*values.shape[:-1], 0))
            more = values.shape[-1] - before.shape[-1]
            self.sums[name] = nn.functional.pad(before, (0, max(more, 0))) + nn.functional.pad(values, (0, max(-more, 0)))
        self.documents += documents
        self.codes, self.totals = _added_up(np.concatenate((self.codes, codes)), np.concatenate((self.totals, totals)))

    def mean(self, value: str, count: str) -> np.ndarray:
        """Mean by head and position; 0 where nothing was counted."""
        return np.asarray((self.sums[value] / self.sums[count].clamp_min(1.0)).numpy())

    def candidates(self) -> np.ndarray:
        """Boolean ``(length,)``: positions that half of the queries see, in half of the documents that have them."""
        return np.asarray(((self.sums["early"] > 0) & (2 * self.sums["early"] >= self.sums["keys"]))[0].numpy())


class SinkFinder(Watcher):
    """Finds the sinks of the self-attention that a session sees; whole documents, each in one call.

    State is a few numbers for each head and position, and for each (head, token, position) that is a sink in some document.

    Args:
        threshold: mean weight above which a head sinks in a document, in [0, 1).
        part: of an encoder–decoder, whose sinks to find, cross-attention too; all self-attention where it is empty.
        names: what each position is, where positions are no tokens of a text.
        together: positions that have a role in common, by what they are called together; their weight is added before it is
            compared. Such a group is the place if it accounts for more sinks than each of its positions by itself.

    Raises:
        ConfigurationError: another threshold.
    """

    name, needs = "sink_finder", frozenset({"columns", "mass", "log_sum_exp"})

    def __init__(
        self,
        threshold: float = 0.3,
        *,
        part: Part = "",
        names: Names | None = None,
        together: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        require_threshold(threshold)
        self.threshold, self.part = threshold, part
        self._names = names
        self._together = {called: tuple(sorted(positions)) for called, positions in (together or {}).items()}
        self._modules: dict[str, _Module] = {}
        self._samples = self._seq_len = self._front = 0

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.part != self.part if self.part else call.site.kind != "self":
            return
        if call.cached_keys:
            raise SessionError(f"{call.site.module}: sinks are found on whole texts; run the model without a cache")
        weight, share, count = filled(statistics, "column_sum", "column_share", "column_count")
        seen, real = count.expand_as(share), call.key_positions >= 0
        queries = _by_document(call, call.counted[:, None].to(share.dtype))[:, 0]
        # Only a key that half of the queries of its document see can be a sink: the mean of a late one is over few rows.
        early = seen >= (queries // 2).clamp(min=1).gather(1, call.key_documents.clamp(min=0))[:, None]
        mean_share = share / seen.clamp_min(1.0)
        mean_weight = mean_share if call.operation.normalized else weight / seen.clamp_min(1.0)
        hits = self._above(mean_share) & early & real[:, None]
        loud = hits if call.operation.normalized else hits & self._above(mean_weight)
        own, standing = self._on_own_keys(call, statistics, share)
        by_key = {
            "weight": weight, "seen": seen, "share": share - own, "asked": seen - standing,
            "keys": torch.ones_like(seen[:, :1]), "early": early.to(share.dtype).mean(1, keepdim=True),
        }  # fmt: skip
        sums = {name: by_position(values, call.key_positions) for name, values in by_key.items()}
        module = self._module_of(call)
        if call.sink_scores is not None and statistics.null_mass is not None:
            mean = _by_document(call, statistics.null_mass) / queries[:, None].clamp_min(1.0)
            sums["null"] = mean.double().sum((0, 2)).cpu()[:, None]
            sums["null_hits"] = self._above(mean).double().sum((0, 2)).cpu()[:, None]
            module.has_null = True
        for called, positions in self._together.items():
            member = torch.isin(call.key_positions, torch.tensor(positions, device=call.key_positions.device))
            candidates = early & (member & real)[:, None]
            by_share, by_weight = (
                self._above(_by_key_document(call, mean.masked_fill(~candidates, 0.0))) for mean in (mean_share, mean_weight)
            )
            sums[called] = torch.stack([part.double().sum((0, 2)).cpu() for part in (by_share, by_share & by_weight)], dim=1)
        module.add(sums, float((queries > 0).sum()), *_codes(call, hits, loud))

    def _module_of(self, call: AttentionCall) -> _Module:
        """The sums of the module that a call is of; those of the first module say how many samples there are."""
        module = self._modules.get(call.site.module)
        if module is None:
            heads = [Head(call.site.layer, number, call.site.module) for number in range(call.num_heads)]
            module = self._modules[call.site.module] = _Module(heads)
        module.operation = call.operation.name
        self._front = max(self._front, call.front)
        if module is next(iter(self._modules.values())):
            self._samples, self._seq_len = self._samples + len(call.queries), max(self._seq_len, call.q_len)
        return module

    def _on_own_keys(self, call: AttentionCall, statistics: Statistics, share: Tensor) -> tuple[Tensor, Tensor]:
        """By key, what the query that stands on it gives to it, and how many counted queries stand on it, one or none."""
        if stands_on_no_key(call):
            none = torch.zeros_like(share[:, :1])
            return none, none
        cached = call.kv_len - call.q_len
        own = weights_on_own_keys(call, statistics.log_sum_exp)
        if not call.operation.normalized:
            own = row_share(own, filled(statistics, "row_mass")[0], call.operation)
        own = nn.functional.pad(own.masked_fill(~call.counted[:, None], 0.0), (cached, 0))
        return own, nn.functional.pad(call.counted.to(share.dtype), (cached, 0))[:, None]

    def _above(self, means: Tensor) -> Tensor:
        return means.float() > just_above(self.threshold)

    def merge(self, other: Self) -> None:
        """Add what another one with the same threshold has seen."""
        for name, module in other._modules.items():
            mine = self._modules.setdefault(name, _Module(module.heads))
            mine.operation, mine.has_null = module.operation, module.has_null
            mine.add(module.sums, module.documents, module.codes, module.totals)
        self._samples, self._seq_len = self._samples + other._samples, max(self._seq_len, other._seq_len)
        self._front = max(self._front, other._front)

    @property
    def has_null(self) -> bool:
        """Whether every module has a null score."""
        return all(module.has_null for module in self._modules.values())

    @property
    def _length(self) -> int:
        return max(module.sums["keys"].shape[1] for module in self._modules.values())

    @property
    def candidates(self) -> int:
        """Positions up to the last one that half of the queries see in half of the documents: those that can be a sink."""
        return max(self.candidates_by_module.values(), default=0)

    @property
    def candidates_by_module(self) -> dict[str, int]:
        """:attr:`candidates` of each attention module; 0 where a window hides every position from half of the queries."""
        return {name: int(module.candidates().nonzero()[0].max(initial=-1)) + 1 for name, module in self._modules.items()}

    def windowed(self) -> tuple[int, int]:
        """Modules in which too few queries see position 0 for it to count as a sink, and all modules."""
        return len(self._hiding()), len(self._modules)

    @property
    def longest_sample(self) -> int | None:
        """Tokens of the longest sample in which position 0 counts in every module; ``None`` where it does in these samples.

        A causal window of w tokens shows it to w queries, one of w tokens around a query to half as many.
        """
        seen = [float(module.sums["seen"][0, 0] / module.sums["keys"][0, 0].clamp_min(1.0)) for module in self._hiding()]
        return max(2 * int(min(seen)), 2) if seen else None

    def _hiding(self) -> list[_Module]:
        return [module for module in self._modules.values() if not module.candidates()[:1].any()]

    def tried(self) -> dict[int | Literal["null"], float]:
        """Positions, and the null score where every module has one, with the largest mean share that a head gives to them."""
        best = np.zeros(self._length)
        for module in self._modules.values():
            shares = np.where(module.candidates(), module.mean("share", "asked"), 0.0).max(0)
            best[: len(shares)] = np.maximum(best[: len(shares)], shares)
        shares = {position: float(share) for position, share in enumerate(best)}
        if self.has_null:
            nulls = [float((module.sums["null"] / module.documents).max()) for module in self._modules.values()]
            return {**shares, "null": max(nulls)}
        return {**shares}

    def shares(self) -> tuple[list[Head], np.ndarray, np.ndarray]:
        """Heads; their mean share on every position, ``(heads, length)``, NaN where it can be no sink; their null mass."""
        modules, on_positions = list(self._modules.values()), []
        for module in modules:
            known = module.candidates() & (module.sums["asked"] > 0).numpy()
            shares = np.where(known, module.mean("share", "asked"), np.nan)
            on_positions.append(np.pad(shares, ((0, 0), (0, self._length - shares.shape[1])), constant_values=np.nan))
        none = [np.zeros(len(module.heads)) for module in modules]
        null = [
            (module.sums["null"] / module.documents)[:, 0].numpy() if module.has_null else zeros
            for module, zeros in zip(modules, none, strict=True)
        ]
        return [head for module in modules for head in module.heads], np.concatenate(on_positions), np.concatenate(null)

    def rates(self) -> dict[int, float]:
        """Percent of (document, head) that sink at each position, whether or not it is the place that counts as the sink."""
        hits = np.zeros(self._length)
        for module in self._modules.values():
            np.add.at(hits, module.codes[:, 2], module.totals[:, 0])
        return {position: float(100 * count / self._cases().sum()) for position, count in enumerate(hits)}

    def sinks(self, *, decode: Callable[[int], str] | None = None, corpus: str | None = None, bos: int | None = None) -> Sinks:
        """What was found, without the numbers of all heads (:class:`SinkWeights`).

        Args:
            decode: token id to text.
            corpus, bos: of the texts, for the record.
        """
        modules = list(self._modules.values())
        heads = [head for module in modules for head in module.heads]
        hits = _hits(modules)
        groups = list(self._groups(hits, heads))
        alone = ~np.isin(hits.position, [position for group, _ in groups for position in group.positions])
        hits = Hits(*(getattr(hits, field.name)[alone] for field in dataclasses.fields(Hits)))
        listed = groups + [self._sink(place, hits, heads, decode) for place in places(hits, self._cases())]
        if any(module.has_null for module in modules):
            null = self._null(heads)
            if null.sinking or (null.rate or 0.0) >= LEAST_RATE:
                listed.append((null, True))
        listed.sort(key=lambda entry: -(entry[0].rate or 0.0))
        lists: dict[str, Any] = {}
        for sink, is_loud in listed:
            kept = "followed" if sink.anywhere else "sinks"
            name = "silent" if not is_loud else kept if sink.sinking else "weak"
            lists[name] = (*lists.get(name, ()), sink)
        return Sinks(
            **lists, threshold=self.threshold, definition=DEFINITION, corpus=corpus, bos=bos, samples=self._samples,
            seq_len=self._seq_len, heads=tuple(heads), length=self._length,
            heads_by_weight=self._heads_by_weight([group for group, _ in groups]),
            front=self._front,
        )  # fmt: skip

    def _heads_by_weight(self, groups: Sequence[Sink]) -> int:
        """Heads that give a position or a group more than the threshold by weight, in the mean over all documents."""
        found = 0
        for module in self._modules.values():
            weights = np.where(module.candidates(), module.mean("weight", "seen"), 0.0)
            of_groups = [weights[:, list(group.positions)].sum(1, keepdims=True) for group in groups]
            found += int((np.concatenate([weights, *of_groups], axis=1) > just_above(self.threshold)).any(1).sum())
        return found

    def _sink(self, place: Place, hits: Hits, heads: Sequence[Head], decode: Callable[[int], str] | None) -> tuple[Sink, bool]:
        """The sink of a place, and whether the weight of its heads passes the threshold as it is."""
        kind, number = place
        chosen = hits.at(place)
        once = chosen & hits.once if kind == "anywhere" else chosen
        by_head = np.bincount(hits.head[once], hits.count[once], len(heads))
        by_weight = np.bincount(hits.head[once], hits.loud[once], len(heads))
        rated = hits.rated[chosen].sum()
        value = float(hits.ratio[chosen].sum() / rated) if rated else np.nan
        ratio = value if np.isfinite(value) else None
        if kind != "position":
            cases = self._cases()
            sink = Sink(
                kind="token", token=number, anywhere=kind == "anywhere", text=None if decode is None else decode(number),
                **_by_head(by_head, cases, heads),
                value_ratio=ratio,
            )  # fmt: skip
            return sink, _is_loud(sink, by_weight, cases)
        columns = [_column(module, number) for module in self._modules.values()]
        cases = np.concatenate([np.full(len(weight), keys) for weight, _, keys in columns])
        weight, seen = (np.concatenate([column[which] for column in columns]) for which in (0, 1))
        ids, index = np.unique(hits.token[chosen], return_inverse=True)
        share = np.bincount(index, hits.count[chosen]) / max(hits.count[chosen].sum(), 1)
        called = self._called(number)
        common = -1 if called else int(ids[share.argmax()])  # the mark of a picture says nothing beside the name of the patch
        sink = Sink(
            kind="position", position=number, token=common if common >= 0 else None,
            text=decode(common) if decode is not None and common >= 0 else None,
            token_share=float(share.max()) if common >= 0 else None,
            mass=float(weight.sum() / seen.sum()), **_by_head(by_head, cases, heads),
            value_ratio=ratio, called=called,
        )  # fmt: skip
        return sink, _is_loud(sink, by_weight, cases)

    def _called(self, position: int) -> str | None:
        if position < self._front:
            return front_name(position, self._front)
        return self._names[position] if self._names is not None and position < len(self._names) else None

    def _groups(self, hits: Hits, heads: Sequence[Head]) -> Iterator[tuple[Sink, bool]]:
        """Groups that are the place: each accounts for more sinks than any of its positions, and enough heads sink there."""
        cases = self._cases()
        for called, positions in self._together.items():
            modules = [module for module in self._modules.values() if called in module.sums]
            if len(modules) < len(self._modules) or positions[-1] >= self._length:
                continue
            by_head, by_weight = np.concatenate([module.sums[called].double().numpy() for module in modules]).T
            most = max(hits.count[hits.position == position].sum() for position in positions)
            columns = [_column(module, position) for module in modules for position in positions]
            weight, seen = (float(np.sum([part.sum() for part in parts])) for parts in list(zip(*columns, strict=True))[:2])
            sink = Sink(
                kind="group", positions=positions, called=called, mass=len(positions) * weight / max(seen, 1.0),
                **_by_head(by_head, cases, heads),
            )  # fmt: skip
            if by_head.sum() > most and (sink.sinking or (sink.rate or 0.0) >= LEAST_RATE):
                yield sink, _is_loud(sink, by_weight, cases)

    def _cases(self) -> np.ndarray:
        """Documents by head, all modules together."""
        return np.concatenate([np.full(len(module.heads), module.documents) for module in self._modules.values()])

    def _null(self, heads: Sequence[Head]) -> Sink:
        modules, cases = list(self._modules.values()), self._cases()
        none = [torch.zeros(len(module.heads), 1) for module in modules]
        hits, mass = (
            torch.cat([module.sums.get(name, zero) for module, zero in zip(modules, none, strict=True)])[:, 0].double().numpy()
            for name in ("null_hits", "null")
        )
        operation = next(module.operation for module in modules if module.has_null)
        return Sink(
            kind="null", text=_NULLS.get(operation, operation.replace("_", " ")),
            mass=float(mass.sum() / cases.sum()), **_by_head(hits, cases, heads),
        )  # fmt: skip


def _hits(modules: Sequence[_Module]) -> Hits:
    """What was seen of all modules, whose heads are numbered one after the other."""
    codes, totals = (np.concatenate([getattr(module, name) for module in modules]) for name in ("codes", "totals"))
    before = np.cumsum([0, *(len(module.heads) for module in modules)])[:-1]
    head = codes[:, 0] + np.repeat(before, [len(module.codes) for module in modules])
    return Hits(head, codes[:, 1], codes[:, 2], codes[:, 3] > 0, codes[:, 4] > 0, *totals.T)


def _is_loud(sink: Sink, by_weight: np.ndarray, cases: np.ndarray) -> bool:
    """Whether a head that sinks somewhere gives the place so much weight, and not only so much of a nearly empty row.

    ``by_weight`` and ``cases`` are documents by head in which it sinks there: where its weight itself passes, and all.
    """
    return bool((by_weight >= enough_documents(cases)).any() if sink.sinking else by_weight.any())


def _codes(call: AttentionCall, hits: Tensor, loud: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and totals, as :class:`_Module` has them, of all sinks of a call."""
    tokens = torch.full_like(call.key_positions, -1) if call.key_tokens is None else call.key_tokens
    first = first_of_kind(call.key_positions, call.key_documents, tokens)
    documents = call.key_documents.clamp(min=0)
    norms = call.values.double().norm(dim=-1)
    index = documents[:, None].expand(norms.shape)
    real = (call.key_positions >= 0)[:, None].double().expand(norms.shape)
    sums, number = (
        norms.new_zeros(*norms.shape[:2], int(documents.max()) + 1).scatter_add(2, index, part) for part in (norms * real, real)
    )
    others = (sums.gather(2, index) - norms) / (number.gather(2, index) - 1.0)
    ratio = repeat_groups(norms / others, call.groups).cpu()
    row, head, key = (index.cpu() for index in torch.where(hits))
    tokens, positions, documents, first = (part.cpu()[row, key] for part in (tokens, call.key_positions, documents, first))
    once = np.zeros(len(row), dtype=np.int64)
    once[np.unique(torch.stack((row, head, documents, tokens), 1).numpy(), axis=0, return_index=True)[1]] = 1
    codes = torch.stack((head, tokens, positions, first.long(), torch.from_numpy(once)), dim=1).numpy()
    each = ratio[row, head, key].numpy()
    known = ~np.isnan(each)  # of a text of one token, and where all values are 0
    numbers = (np.ones(len(row)), np.where(known, each, 0.0), known, loud.cpu()[row, head, key].numpy())
    return _added_up(codes, np.stack(numbers, axis=1))


def _added_up(codes: np.ndarray, totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``totals`` added up where their codes are the same."""
    unique, index = np.unique(codes, axis=0, return_inverse=True)
    return unique, np.stack([np.bincount(index.ravel(), column, len(unique)) for column in totals.T], axis=1)


def _by_document(call: AttentionCall, values: Tensor) -> Tensor:
    """Sums of ``(batch, heads, q_len)`` over the counted queries of each document: ``(batch, heads, documents)``."""
    documents = call.query_documents.clamp(min=0)
    size = max(int(call.query_documents.max()), int(call.key_documents.max()), 0) + 1
    sums = values.new_zeros(*values.shape[:2], size)
    return sums.scatter_add(2, documents[:, None].expand(values.shape), values.masked_fill(~call.counted[:, None], 0.0))


def _by_key_document(call: AttentionCall, values: Tensor) -> Tensor:
    """Sums of ``(batch, heads, kv_len)`` over the keys of each document: ``(batch, heads, documents)``."""
    sums = values.new_zeros(*values.shape[:2], int(call.key_documents.max()) + 1)
    return sums.scatter_add(2, call.key_documents.clamp(min=0)[:, None].expand(values.shape), values)


def _column(module: _Module, position: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Weight and queries by head at a position, and the documents that have it; 0 past the end."""
    if position >= module.sums["keys"].shape[1]:
        return np.zeros(len(module.heads)), np.zeros(len(module.heads)), 0.0
    weight, seen = (module.sums[name][:, position].numpy() for name in ("weight", "seen"))
    return weight, seen, float(module.sums["keys"][0, position])


class _Counted(TypedDict):
    rate: float
    heads: tuple[tuple[Head, float], ...]
    sinking: int


def _by_head(hits: np.ndarray, cases: np.ndarray, heads: Sequence[Head]) -> _Counted:
    """What a sink says of its heads, from the documents in which each sinks and those in which it could."""
    rates = 100.0 * hits / np.maximum(cases, 1.0)
    order = np.argsort(-rates, kind="stable")
    return {
        "rate": float(100.0 * hits.sum() / max(cases.sum(), 1.0)),
        "heads": tuple((heads[number], float(rates[number])) for number in order if rates[number] > 0),
        "sinking": int((hits >= enough_documents(cases)).sum()),
    }
