"""Where the sinks of a model are: found once, as a value that is given to everything that speaks of a sink.

A sink is a role and not a place. It may be played by a position of the document, by a token wherever it stands first (the first
line break, the first full stop), or by a null score (a learned sink logit, a key bias, the one of softmax plus one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import first_keys, scores_of_keys, weights_of_keys, weights_on_own_keys
from sinklab.attention.operation import repeat_groups
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, SessionError

__all__ = ["Head", "Sink", "SinkFinder", "SinkPlace", "SinkWeights", "Sinks", "find_sinks"]

SinkPlace: TypeAlias = "int | Literal['null'] | Sink"
"""A position in the document, the null score, or a sink that was found elsewhere."""

LEAST_RATE = 1.0
"""Percent of (document, head) from which a place is a sink."""

LISTED = 8
"""Sinks that are listed at most."""

DEFINITION = (
    "percent of (document, head) in which the mean row-normalised weight on the key, over the queries that see it, exceeds the "
    "threshold; keys that fewer than half of the document's queries see are left out (Gu et al. 2024, arXiv 2410.10781)"
)

_PROXY = 1e-8
"""Added to row sums before dividing, as in the released code of Gu et al."""

_NULLS = {"softmax": "learned sink logit", "sink_logit": "learned sink logit"}
"""Operation to what its null score is, where that is not the operation's own name."""


@dataclasses.dataclass(frozen=True, order=True)
class Head:
    """One head of a self-attention module: running number of the module, number of the head, qualified name of the module."""

    layer: int
    head: int
    module: str = dataclasses.field(compare=False, default="")

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sink:
    """One place that plays the sink.

    Attributes:
        kind: ``position`` of the document; ``token``, where it stands first in the document; ``null`` score.
        position: of kind ``position``.
        token: id; of kind ``position`` the most frequent one among its sinks, if that is known.
        text: the token as text; of kind ``null`` what the null score is.
        token_share: of kind ``position``, how many of its sinks have that token.
        rate: percent of (document, head) that have their sink there (:data:`DEFINITION`).
        mass: mean weight on it, over all heads and the queries that see it.
        heads: those with a rate above 0, strongest first, each with its rate.
    """

    kind: Literal["position", "token", "null"]
    position: int | None = None
    token: int | None = None
    text: str | None = None
    token_share: float | None = None
    rate: float | None = None
    mass: float | None = None
    heads: tuple[tuple[Head, float], ...] = ()

    @property
    def name(self) -> str:
        """For the middle of a sentence: ``position 2``, ``the first '.'``, ``the null score``."""
        if self.kind == "null":
            return "the null score"
        if self.kind == "token":
            return f"the first {self._token}"
        return f"position {self.position}"

    def describe(self) -> str:
        """All that is known of the place: ``position 2, token '.'``, ``the first '.'``, ``null score (key bias)``."""
        if self.kind == "null":
            return f"null score ({self.text})" if self.text else "null score"
        constant = self.kind == "position" and self.token is not None and (self.token_share or 0.0) > 0.5
        return f"{self.name}, {'' if self.text is None else 'token '}{self._token}" if constant else self.name

    @property
    def _token(self) -> str:
        return f"token {self.token}" if self.text is None else repr(self.text)

    @property
    def place(self) -> int | str:
        """For records: the position, ``"null"``, or ``"token 198"`` with the id."""
        if self.kind == "position":
            assert self.position is not None
            return self.position
        return "null" if self.kind == "null" else f"token {self.token}"

    def mask(self, positions: Tensor, documents: Tensor, tokens: Tensor | None) -> Tensor:
        """Which of some tokens are the sink, boolean ``(batch, length)``.

        Args:
            positions, documents: int64 ``(batch, length)``, -1 for padding.
            tokens: ids, same shape; ``None`` where they are not known.
        """
        if self.kind == "position":
            return positions == self.position
        if self.kind == "null" or tokens is None:
            return torch.zeros_like(positions, dtype=torch.bool)
        # Where the first token of a document is gone (a sliding cache), the first one that is left may be a later one.
        return first_of_kind(positions, documents, tokens) & (tokens == self.token) & _whole(positions, documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinks:
    """The sinks of a model, strongest first, possibly none; on which texts they were found, and what heads give the main one.

    Attributes:
        sinks: what plays the sink.
        silent: places that pass the threshold only because the rows of an operation that does not normalise are divided by
            their sums, while no head gives any key that much weight; heads that attend to almost nothing are no sinks.
        threshold: of the rate.
        definition: of the rate; empty where a place was given and not found.
        corpus, bos, samples, seq_len: where they were found; ``bos`` counts the beginning-of-sequence tokens of a sample.
        heads: all self-attention heads, in the order in which the model runs them; empty where that was not measured.
        weights: float64 ``(heads,)``: mean share of a row that goes to the main sink, over the queries that see it and do not
            stand on it; NaN without a sink.
        value_ratio: float64 ``(heads,)``: norm of the sink's value over the mean norm of the values of all other keys, near 0
            for a no-op and near 1 for a broadcast (Fesser et al. 2026, arXiv 2606.08105); NaN where these are 0.
        tried: positions and the null score with the largest mean share that a head gives to them, in falling order; where texts
            have domains, in the domain in which it is largest.
        length: positions of the texts, learned tokens in front included.
        heads_by_weight: heads whose mean weight, as it is, passes the threshold at some position.
    """

    sinks: tuple[Sink, ...] = ()
    silent: tuple[Sink, ...] = ()
    threshold: float = 0.3
    definition: str = ""
    corpus: str | None = None
    bos: int | None = None
    samples: int = 0
    seq_len: int = 0
    heads: tuple[Head, ...] = ()
    weights: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), compare=False)
    value_ratio: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), compare=False)
    tried: tuple[tuple[int | Literal["null"], float], ...] = dataclasses.field(default=(), compare=False)
    length: int = 0
    heads_by_weight: int = 0

    @classmethod
    def at(cls, place: SinkPlace | None) -> Sinks:
        """A sink that is given and not looked for: a position, ``"null"``, or a sink; ``None`` for a model without one."""
        return cls() if place is None else cls(sinks=(_sink(place),))

    @property
    def main(self) -> Sink | None:
        """The strongest one."""
        return self.sinks[0] if self.sinks else None

    @property
    def positions(self) -> list[int]:
        """Positions that are sinks, ascending."""
        return sorted(sink.position for sink in self.sinks if sink.position is not None)

    @property
    def secondary(self) -> list[int]:
        """Positions that are sinks besides the main one, ascending."""
        return sorted(sink.position for sink in self.sinks[1:] if sink.position is not None)

    def describe(self) -> str:
        """The main sink in words; ``none`` without one."""
        return self.main.describe() if self.main else "none"

    def keys(self, call: AttentionCall) -> Tensor:
        """Which key of a call is the main sink, for every query: int64 ``(batch, q_len)``.

        Returns:
            Indices of keys; -1 where the document has no such key, where the sink is the null score, and without a sink.
        """
        if self.main is None or self.main.kind == "null":
            return torch.full_like(call.query_positions, -1)
        return first_keys(call, self.main.mask(call.key_positions, call.key_documents, call.key_tokens))

    def place_in(self, tokens: Tensor | None, attention_mask: Tensor | None = None) -> int | Tensor | Literal["null"] | None:
        """Where the main sink stands in some texts, in the terms of interventions.

        Args:
            tokens: int64 ``(samples, seq_len)``, one document a row.
            attention_mask: of the same shape, 0 for padding.

        Returns:
            A position; ``"null"``; for a token its positions, int64 ``(samples, 1)`` with -1 for texts that lack it; ``None``.

        Raises:
            ConfigurationError: a token, and texts without ids.
        """
        if self.main is None or self.main.kind != "token":
            return None if self.main is None else self.main.position if self.main.kind == "position" else "null"
        if tokens is None:
            raise ConfigurationError(f"the sink is {self.main.name}, and these inputs have no `input_ids` to look for it in")
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask.to(tokens.device).long()
        positions = torch.where(real > 0, real.cumsum(1) - 1, -1)
        at = self.main.mask(positions, torch.where(real > 0, 0, -1), tokens)
        return torch.where(at, positions, -1).amax(1, keepdim=True).cpu()

    def require(self) -> Sink:
        """The main sink.

        Raises:
            ConfigurationError: there is none; says what was tried.
        """
        if self.main is not None:
            return self.main
        if not any(weight for _, weight in self.tried):
            raise ConfigurationError(
                f"no sink found: in texts of {self.length} positions none is seen by half of a module's queries, so none can "
                "serve them all; where the model has a short window, take texts of about its length"
            )
        tried = ", ".join(f"{_sink(place).name} ({weight:.2f})" for place, weight in self.tried[:5])
        raise ConfigurationError(
            f"no sink found: no head gives any place a mean weight of {self.threshold:g}; tried, with the largest mean weight "
            f"of a head: {tried}. Lower the threshold, name a place, or say that there is none (place=None): heads are then "
            "judged by zeroing them"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; :meth:`from_dict` reads it. Numbers of all heads are left out."""
        found = {field: getattr(self, field) for field in _PLAIN}
        return found | {name: [_sink_dict(sink) for sink in getattr(self, name)] for name in ("sinks", "silent")}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` gave."""
        lists: dict[str, Any] = {name: tuple(map(_sink_of, record.get(name, ()))) for name in ("sinks", "silent")}
        return cls(**lists, **{field: record[field] for field in _PLAIN if field in record})


_PLAIN = ("threshold", "definition", "corpus", "bos", "samples", "seq_len", "heads_by_weight")


def _sink(place: SinkPlace) -> Sink:
    if isinstance(place, Sink):
        return place
    return Sink(kind="null") if place == "null" else Sink(kind="position", position=int(place))


def _sink_dict(sink: Sink) -> dict[str, Any]:
    plain = {field.name: getattr(sink, field.name) for field in dataclasses.fields(Sink)}
    heads = [[head.layer, head.head, head.module, rate] for head, rate in sink.heads]
    return plain | {"heads": heads, "name": sink.name, "description": sink.describe()}


def _sink_of(record: Mapping[str, Any]) -> Sink:
    heads = tuple((Head(layer, head, module), rate) for layer, head, module, rate in record.get("heads", ()))
    names = {field.name for field in dataclasses.fields(Sink)} - {"heads"}
    return Sink(**{name: value for name, value in record.items() if name in names}, heads=heads)


def first_of_kind(positions: Tensor, documents: Tensor, tokens: Tensor) -> Tensor:
    """Which tokens are the first of their id in their document, boolean ``(batch, length)``; never padding."""
    real = (positions >= 0) & (tokens >= 0)
    codes = torch.where(real, documents.clamp(min=0) * (1 << 40) + tokens, -1)
    ordered, order = codes.sort(dim=1, stable=True)
    new = torch.ones_like(real)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.zeros_like(real).scatter(1, order, new) & real


def _whole(positions: Tensor, documents: Tensor) -> Tensor:
    """Which tokens belong to a document whose first token is there, boolean ``(batch, length)``."""
    size = int(documents.max()) + 2 if documents.numel() else 1
    there = torch.zeros(len(documents), size, dtype=torch.int64, device=documents.device)
    there = there.scatter_add(1, documents + 1, (positions == 0).long())
    return there.gather(1, documents + 1) > 0


# --- finding ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def find_sinks(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Tensor],
    *,
    threshold: float = 0.3,
    place: SinkPlace | Literal["find"] | None = "find",
    groups: Sequence[Tensor] | None = None,
    batch_size: int = 16,
    decode: Callable[[int], str] | None = None,
    corpus: str | None = None,
    bos: int | None = None,
) -> Sinks:
    """Find the sinks of a model on some texts, and what every head gives to the main one.

    Args:
        inputs: token ids ``(samples, seq_len)``, or the model's inputs by name, the samples along the first axis.
        threshold: mean weight above which a head sinks in a document.
        place: what to measure instead of searching; ``None`` for a model without a sink.
        groups: numbers of the samples of each domain, looked at apart for ``tried``; all of them together by default.
        batch_size: samples per forward.
        decode: token id to text.
        corpus, bos: of the texts, for the record.

    Raises:
        ConfigurationError: a threshold outside [0, 1), or a place that these texts and this model do not have.
    """
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    number = len(next(iter(inputs.values())))
    finders: list[SinkFinder] = []
    for rows in groups or [torch.arange(number)]:
        finders.append(SinkFinder(threshold))
        with attend(model, [finders[-1]], verify=len(finders) == 1):
            _run(model, inputs, rows, batch_size)
    tried: dict[int | Literal["null"], float] = {}
    for finder in finders:
        tried |= {key: max(share, tried.get(key, 0.0)) for key, share in finder.tried().items()}
    whole = SinkFinder(threshold)
    for finder in finders:
        whole.merge(finder)
    found = whole.sinks(decode=decode, corpus=corpus, bos=bos)
    found = dataclasses.replace(found, tried=tuple(sorted(tried.items(), key=lambda pair: -pair[1])))
    if place != "find":
        found = _placed(found, place, whole, inputs)
    if found.main is None:
        unknown = np.full(len(found.heads), np.nan)
        return dataclasses.replace(found, weights=unknown, value_ratio=unknown)
    measured = SinkWeights(found)
    with attend(model, [measured], verify=False):
        _run(model, inputs, torch.arange(number), batch_size)
    return measured.completed()


def _run(model: nn.Module, inputs: Mapping[str, Tensor], rows: Tensor, batch_size: int) -> None:
    for chosen in rows.split(batch_size):
        model(**{name: tensor[chosen.to(tensor.device)] for name, tensor in inputs.items()})


def _placed(found: Sinks, place: SinkPlace | None, finder: SinkFinder, inputs: Mapping[str, Tensor]) -> Sinks:
    """The same with a given main sink; the others that were found come after it."""
    if place is None:
        return dataclasses.replace(found, sinks=(), silent=())
    given, null = _sink(place), finder.has_null
    known = {"position": 0 <= (given.position or 0) < found.length, "null": null, "token": "input_ids" in inputs}
    if not known[given.kind]:
        has = f"positions 0 to {found.length - 1} and {'a null score' if null else 'not a null score in every module'}"
        raise ConfigurationError(f"place {given.place!r}: no such place; on these texts the model has {has}")
    same = [sink for sink in found.sinks if sink.place == given.place]
    others = tuple(sink for sink in found.sinks if sink.place != given.place)
    return dataclasses.replace(found, sinks=(given if isinstance(place, Sink) or not same else same[0], *others))


class _Module:
    """Sums over the documents of one attention module, float64 by head and position ``(heads, length)`` unless said.

    Attributes:
        weight, seen: of the column, and how many queries see it.
        share, asked: the same of rows divided by their sums, without the queries that stand on the key.
        keys, early: documents that have the position, and those in which half of the queries see it ``(1, length)``.
        null, null_hits: mean null mass summed over documents, and documents in which it passes the threshold ``(heads, 1)``.
        documents: how many there are.
        codes, counts: of (head, token, position, first of its kind), each with the documents that sink there.
    """

    def __init__(self, heads: list[Head]) -> None:
        self.heads, self.documents, self.has_null, self.operation = heads, 0.0, False, ""
        self.sums: dict[str, Tensor] = {}
        self.codes, self.counts = np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=np.int64)

    def add(self, sums: Mapping[str, Tensor], documents: float, codes: np.ndarray, counts: np.ndarray) -> None:
        """Add what was seen of some more documents."""
        for name, values in sums.items():
            known = self.sums.get(name, values.new_zeros(*values.shape[:-1], 0))
            more = values.shape[-1] - known.shape[-1]
            self.sums[name] = nn.functional.pad(known, (0, max(more, 0))) + nn.functional.pad(values, (0, max(-more, 0)))
        self.documents += documents
        codes = np.concatenate((self.codes, codes))
        self.codes, index = np.unique(codes, axis=0, return_inverse=True)
        self.counts = np.bincount(index.ravel(), np.concatenate((self.counts, counts)), len(self.codes)).astype(np.int64)

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

    Raises:
        ConfigurationError: another threshold.
    """

    name, needs = "sink_finder", frozenset({"columns", "mass", "log_sum_exp"})

    def __init__(self, threshold: float = 0.3) -> None:
        if not 0.0 <= threshold < 1.0:
            raise ConfigurationError(
                f"threshold {threshold} must be in [0, 1): a mean weight is compared with it; usual is 0.3"
            )
        self.threshold = threshold
        self._modules: dict[str, _Module] = {}
        self._normalized = True
        self._samples = self._seq_len = 0

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        if call.cached_keys:
            raise SessionError(f"{call.site.module}: sinks are found on whole texts; run the model without a cache")
        known = self._modules.get(call.site.module)
        if known is None:
            heads = [Head(call.site.layer, number, call.site.module) for number in range(call.num_heads)]
            known = self._modules[call.site.module] = _Module(heads)
        known.operation = call.operation.name
        self._normalized &= call.operation.normalized
        if known is next(iter(self._modules.values())):
            self._samples, self._seq_len = self._samples + len(call.queries), max(self._seq_len, call.q_len)
        weight, share, count = statistics.column_sum, statistics.column_share, statistics.column_count
        assert weight is not None  # asked for in ``needs``
        assert share is not None
        assert count is not None
        seen, real = count.expand_as(share), call.key_positions >= 0
        queries = _by_document(call, call.counted[:, None].to(share.dtype))[:, 0]
        early = seen >= (queries // 2).clamp(min=1).gather(1, call.key_documents.clamp(min=0))[:, None]
        # In float32, like the statistics: the nearest float64 of a mean of exactly 0.3 may lie above 0.3.
        hits = self._above(share / seen.clamp_min(1.0)) & early & real[:, None]
        own = self._own(call, statistics)
        other = share - nn.functional.pad(own, (call.kv_len - call.q_len, 0))
        standing = nn.functional.pad(call.counted.to(share.dtype), (call.kv_len - call.q_len, 0))[:, None]
        sums = {
            "weight": weight, "seen": seen, "share": other, "asked": seen - standing, "keys": torch.ones_like(seen[:, :1]),
            "early": early.to(share.dtype).mean(1, keepdim=True),
        }  # fmt: skip
        found = {name: by_position(values, call.key_positions) for name, values in sums.items()}
        if call.sink_scores is not None and statistics.null_mass is not None:
            mean = _by_document(call, statistics.null_mass) / queries[:, None].clamp_min(1.0)
            found["null"] = mean.double().sum((0, 2)).cpu()[:, None]
            found["null_hits"] = self._above(mean).double().sum((0, 2)).cpu()[:, None]
            known.has_null = True
        known.add(found, float((queries > 0).sum()), *_codes(call, hits))

    def _above(self, means: Tensor) -> Tensor:
        return means.float() > torch.tensor(self.threshold, dtype=torch.float32)

    def _own(self, call: AttentionCall, statistics: Statistics) -> Tensor:
        """Share of its row that each counted query gives to its own key, ``(batch, heads, q_len)``."""
        own = weights_on_own_keys(call, statistics.log_sum_exp)
        if not call.operation.normalized:
            assert statistics.row_mass is not None
            own = own / (statistics.row_mass + _PROXY)
        return own.masked_fill(~call.counted[:, None], 0.0)

    def merge(self, other: Self) -> None:
        """Add what another one with the same threshold has seen."""
        for name, module in other._modules.items():
            mine = self._modules.setdefault(name, _Module(module.heads))
            mine.operation, mine.has_null = module.operation, module.has_null
            mine.add(module.sums, module.documents, module.codes, module.counts)
        self._normalized &= other._normalized
        self._samples, self._seq_len = self._samples + other._samples, max(self._seq_len, other._seq_len)

    @property
    def has_null(self) -> bool:
        """Whether every module has a null score."""
        return all(module.has_null for module in self._modules.values())

    @property
    def _length(self) -> int:
        return max(module.sums["keys"].shape[1] for module in self._modules.values())

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

    def sinks(self, *, decode: Callable[[int], str] | None = None, corpus: str | None = None, bos: int | None = None) -> Sinks:
        """What was found, without the numbers of all heads (:class:`SinkWeights`).

        Args:
            decode: token id to text.
            corpus, bos: of the texts, for the record.
        """
        modules = list(self._modules.values())
        heads = [head for module in modules for head in module.heads]
        codes, counts = (np.concatenate([getattr(module, name) for module in modules]) for name in ("codes", "counts"))
        before = np.cumsum([0, *(len(module.heads) for module in modules)])[:-1]
        number = codes[:, 0] + np.repeat(before, [len(module.codes) for module in modules])  # of the head, of all modules
        pairs = sum(module.documents * len(module.heads) for module in modules)
        hits = _Hits(number, codes[:, 1], codes[:, 2], codes[:, 3] > 0, counts)
        listed = [self._sink(place, hits, heads, decode) for place in _verdict(hits, LEAST_RATE / 100 * pairs)]
        if any(module.has_null for module in modules):
            null = self._null(heads)
            if null.rate is not None and null.rate >= LEAST_RATE:
                listed = sorted([*listed, null], key=lambda sink: -(sink.rate or 0.0))
        weights = [np.where(module.candidates(), module.mean("weight", "seen"), 0.0) for module in modules]
        loud = sum(int((weight > self.threshold).any(1).sum()) for weight in weights)
        real = self._normalized or loud > 0
        return Sinks(
            sinks=tuple(listed) if real else (), silent=() if real else tuple(listed), threshold=self.threshold,
            definition=DEFINITION, corpus=corpus, bos=bos, samples=self._samples, seq_len=self._seq_len, heads=tuple(heads),
            length=self._length, heads_by_weight=loud,
        )  # fmt: skip

    def by_token(self, decode: Callable[[int], str]) -> list[dict[str, Any]]:
        """Tokens that play the sink, wherever they stand, most frequent first: text, share of all sinks, positions."""
        modules = self._modules.values()
        codes, counts = (np.concatenate([getattr(module, name) for module in modules]) for name in ("codes", "counts"))
        codes, counts = codes[codes[:, 1] >= 0], counts[codes[:, 1] >= 0]
        ids, index = np.unique(codes[:, 1], return_inverse=True)
        totals = np.bincount(index, counts, len(ids))
        return [
            {
                "token": decode(int(ids[number])),
                "share_of_sinks": float(totals[number] / totals.sum()),
                "positions": np.unique(codes[index == number, 2]).tolist()[:LISTED],
            }
            for number in np.argsort(-totals, kind="stable")[:LISTED]
        ]

    def _sink(self, place: tuple[str, int], hits: _Hits, heads: Sequence[Head], decode: Callable[[int], str] | None) -> Sink:
        kind, number = place
        chosen = hits.at(place)
        by_head = np.bincount(hits.head[chosen], hits.count[chosen], len(heads))
        if kind == "token":
            cases = self._cases()
            text, rate = None if decode is None else decode(number), _percent(by_head, cases)
            return Sink(kind="token", token=number, text=text, rate=rate, heads=_rates(by_head, cases, heads))
        columns = [_column(module, number) for module in self._modules.values()]
        cases = np.concatenate([np.full(len(weight), keys) for weight, _, keys in columns])
        weight, seen = (np.concatenate([column[which] for column in columns]) for which in (0, 1))
        ids, index = np.unique(hits.token[chosen], return_inverse=True)
        share = np.bincount(index, hits.count[chosen]) / max(hits.count[chosen].sum(), 1)
        common = int(ids[share.argmax()])
        return Sink(
            kind="position", position=number, token=common if common >= 0 else None,
            text=decode(common) if decode is not None and common >= 0 else None,
            token_share=float(share.max()) if common >= 0 else None, rate=_percent(by_head, cases),
            mass=float(weight.sum() / seen.sum()), heads=_rates(by_head, cases, heads),
        )  # fmt: skip

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
            kind="null", text=_NULLS.get(operation, operation.replace("_", " ")), rate=_percent(hits, cases),
            mass=float(mass.sum() / cases.sum()), heads=_rates(hits, cases, heads),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class _Hits:
    """How often heads sink: number of the head, token id (-1 where not known), position, whether the token is the first of its
    kind in the document, and the number of documents; arrays of one length."""

    head: np.ndarray
    token: np.ndarray
    position: np.ndarray
    first: np.ndarray
    count: np.ndarray

    def at(self, place: tuple[str, int]) -> np.ndarray:
        """Which of them a place accounts for."""
        kind, number = place
        return (self.token == number) & self.first if kind == "token" else self.position == number


def _verdict(hits: _Hits, least: float) -> Iterator[tuple[str, int]]:
    """Places that are sinks, strongest first: each accounts for the most sinks that those before it do not.

    A token is a sink if its first occurrences, at two positions or more, account for more sinks than any one position.

    Args:
        least: sinks that a place must account for.
    """
    left = hits.count.astype(np.float64)
    for _ in range(LISTED):
        best, most = ("position", 0), 0.0
        for kind, numbers, counts in (
            ("position", hits.position, left),
            ("token", hits.token, np.where(hits.first & (hits.token >= 0), left, 0.0)),
        ):
            values, index = np.unique(numbers, return_inverse=True)
            totals = np.bincount(index, counts, len(values))
            if kind == "token":  # those that stand at one position alone are that position
                pairs = np.unique(np.stack((index, hits.position))[:, counts > 0], axis=1)[0]
                totals = np.where(np.bincount(pairs, minlength=len(values)) > 1, totals, 0.0)
            if totals.size and totals.max() > most:
                best, most = (kind, int(values[totals.argmax()])), float(totals.max())
        if most == 0 or most < least:
            return
        yield best
        left = np.where(hits.at(best), 0.0, left)


def _codes(call: AttentionCall, hits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Head, token, position and whether it is the first of its kind, of every sink ``(n, 4)``, and how often it occurs."""
    row, head, key = torch.where(hits)
    tokens = call.key_tokens
    if tokens is None:
        tokens = torch.full_like(call.key_positions, -1)
    first = first_of_kind(call.key_positions, call.key_documents, tokens)
    codes = torch.stack((head, tokens[row, key], call.key_positions[row, key], first[row, key].long()), dim=1)
    unique, counts = codes.cpu().unique(dim=0, return_counts=True)
    return unique.numpy(), counts.numpy()


def _by_document(call: AttentionCall, values: Tensor) -> Tensor:
    """Sums of ``(batch, heads, q_len)`` over the counted queries of each document: ``(batch, heads, documents)``."""
    documents = call.query_documents.clamp(min=0)
    size = max(int(call.query_documents.max()), int(call.key_documents.max()), 0) + 1
    sums = values.new_zeros(*values.shape[:2], size)
    return sums.scatter_add(2, documents[:, None].expand(values.shape), values.masked_fill(~call.counted[:, None], 0.0))


def _column(module: _Module, position: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Weight and queries by head at a position, and the documents that have it; 0 past the end."""
    if position >= module.sums["keys"].shape[1]:
        return np.zeros(len(module.heads)), np.zeros(len(module.heads)), 0.0
    weight, seen = (module.sums[name][:, position].numpy() for name in ("weight", "seen"))
    return weight, seen, float(module.sums["keys"][0, position])


def _percent(hits: np.ndarray, cases: np.ndarray) -> float:
    return float(100.0 * hits.sum() / max(cases.sum(), 1.0))


def _rates(hits: np.ndarray, cases: np.ndarray, heads: Sequence[Head]) -> tuple[tuple[Head, float], ...]:
    rates = 100.0 * hits / np.maximum(cases, 1.0)
    order = np.argsort(-rates, kind="stable")
    return tuple((heads[number], float(rates[number])) for number in order if rates[number] > 0)


class SinkWeights(Watcher):
    """What every self-attention head gives to the main sink, and how long its value is; for sinks that are known.

    Args:
        sinks: with a main one.
    """

    name, needs = "sink_weights", frozenset({"mass", "log_sum_exp"})

    def __init__(self, sinks: Sinks) -> None:
        self.given = sinks
        self._sums: dict[str, tuple[list[Head], Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        main = self.given.main
        if call.site.kind != "self" or main is None:
            return
        norms = repeat_groups(call.values, call.groups).double().norm(dim=-1)
        at = main.mask(call.key_positions, call.key_documents, call.key_tokens)
        real = call.key_positions >= 0
        if main.kind == "null":
            if statistics.null_mass is None:
                return
            share, asked = statistics.null_mass, call.counted[:, None]
            null = call.null_value
            own = torch.zeros(call.num_heads) if null is None else null.double().norm(dim=-1).expand(call.num_heads)
            own_count = torch.ones(call.num_heads)
        else:
            index = self.given.keys(call)
            share = weights_of_keys(call, index[..., None], statistics.log_sum_exp)[..., 0]
            if not call.operation.normalized:
                assert statistics.row_mass is not None
                share = share / statistics.row_mass.clamp_min(_PROXY)  # rows of zeros stay zeros
            standing = call.key_positions.gather(1, index.clamp(min=0)) == call.query_positions
            asked = scores_of_keys(call, index[..., None])[1][..., 0] & (call.counted & ~standing)[:, None]
            own = norms.masked_fill(~at[:, None], 0.0).sum((0, 2))
            own_count = at.sum().expand(call.num_heads)
        rest = (real & ~at)[:, None]
        numbers = torch.stack([
            part.double().cpu()
            for part in (
                share.double().masked_fill(~asked, 0.0).sum((0, 2)), asked.expand(share.shape).sum((0, 2)), own, own_count,
                norms.masked_fill(~rest, 0.0).sum((0, 2)), rest.sum().expand(call.num_heads),
            )
        ])  # fmt: skip
        heads, known = self._sums.get(call.site.module, ([], torch.zeros(6, call.num_heads, dtype=torch.float64)))
        if main.kind == "null" and heads:  # one value for all calls
            numbers[2:4] = 0.0
        heads = heads or [Head(call.site.layer, number, call.site.module) for number in range(call.num_heads)]
        self._sums[call.site.module] = (heads, known + numbers)

    def completed(self) -> Sinks:
        """The sinks with the numbers of all heads; a head none of whose queries sees the sink has NaN."""
        heads = [head for heads, _ in self._sums.values() for head in heads]
        sums = np.concatenate([sums.numpy() for _, sums in self._sums.values()], axis=1)
        share, asked, own, own_count, rest, rest_count = sums
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = share / asked
            others = rest / rest_count
            ratio = np.where(others > 0, own / np.maximum(own_count, 1.0) / others, np.nan)
        main = self.given.main
        assert main is not None
        if main.mass is None and asked.sum():
            main = dataclasses.replace(main, mass=float(share.sum() / asked.sum()))
        return dataclasses.replace(
            self.given, sinks=(main, *self.given.sinks[1:]), heads=tuple(heads), weights=weights, value_ratio=ratio
        )
