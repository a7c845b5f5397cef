"""Where the sinks of a model are: found once, as a value that is given to everything that speaks of a sink.

A sink is a role and not a place. It may be played by a position of the document, by a token wherever it stands first (the first
line break, the first full stop), or by a null score (a learned sink logit, a key bias, the one of softmax plus one).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.chosen_keys import first_keys, keys_of_document
from sinklab.attention.operation import SHARE_OF_ROW
from sinklab.errors import ConfigurationError
from sinklab.results.blocks import counted, quote
from sinklab.results.intervals import MOST

SinkPlace: TypeAlias = "int | Literal['null'] | Sink"
"""A position in the document, the null score, or a sink that was found elsewhere."""

DEFINITION = (
    "percent of (document, head) in which the mean weight on the key, over the queries that see it, exceeds the threshold; "
    f"{SHARE_OF_ROW}; keys that fewer than half of the document's queries see are left out (Gu et al. 2024, arXiv 2410.10781)"
)


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
        kind: ``position`` of the document; ``group`` of positions that have a role in common, such as the corners of a picture,
            whose weight is taken together; ``token``; ``null`` score.
        position: of kind ``position``.
        positions: of kind ``group``, ascending.
        called: what a position or a group is, where it is no token of a text: ``[CLS]``, ``patch (3, 4)``, ``the registers``,
            ``the learned token in front``.
        token: id; of kind ``position`` the most frequent one among its sinks, if that is known.
        anywhere: of kind ``token``, whether any of its occurrences in a document plays the sink, or only the first.
        text: the token as text; of kind ``null`` what the null score is.
        token_share: of kind ``position``, how many of its sinks have that token.
        rate: percent of (document, head) that have their sink there (:data:`DEFINITION`).
        mass: mean weight on it, over all heads and the queries that see it.
        heads: those with a rate above 0, strongest first, each with its rate.
        sinking: how many of them sink there: the whole 95 % interval of the share of documents in which they do is above
            :data:`~sinklab.results.intervals.LEAST_SHARE`; ``None`` where a place was given and not found.
        value_ratio: norm of the value that stands there over the mean norm of the document's other values, mean over its sinks:
            near 0 for a no-op, about 1 for a token like others; ``None`` where no value stands (null score) or all are 0, and
            of a group.
    """

    kind: Literal["position", "group", "token", "null"]
    position: int | None = None
    token: int | None = None
    anywhere: bool = False
    text: str | None = None
    token_share: float | None = None
    rate: float | None = None
    mass: float | None = None
    heads: tuple[tuple[Head, float], ...] = ()
    sinking: int | None = None
    value_ratio: float | None = None
    positions: tuple[int, ...] = ()
    called: str | None = None

    @property
    def name(self) -> str:
        """For the middle of a sentence: ``position 2``, ``the first “.”``, ``“.” wherever it stands``, ``the null score``.

        A position that has a name of its own is called so: ``[CLS]``, ``register 2``, ``the corner patches``.
        """
        if self.kind == "null":
            return "the null score"
        if self.called is not None:
            return self.called
        if self.kind == "group":
            return f"positions {', '.join(map(str, self.positions))}"
        if self.kind == "token":
            return f"{self._token} wherever it stands" if self.anywhere else f"the first {self._token}"
        return f"position {self.position}"

    def describe(self) -> str:
        """All that is known of the place: ``position 2, mostly token “.”``, ``the first “.”``, ``null score (key bias)``."""
        if self.kind == "null":
            return f"null score ({self.text})" if self.text else "null score"
        if self.called is not None:
            places = (self.position,) if self.kind == "position" else self.positions
            return f"{self.called} ({'position' if len(places) == 1 else 'positions'} {', '.join(map(str, places))})"
        constant = self.kind == "position" and self.token is not None and (self.token_share or 0.0) > MOST
        mostly = "mostly " if (self.token_share or 0.0) < 1.0 else ""
        return f"{self.name}, {mostly}{'' if self.text is None else 'token '}{self._token}" if constant else self.name

    @property
    def _token(self) -> str:
        return f"token {self.token}" if self.text is None else quote(self.text)

    @property
    def place(self) -> int | str:
        """For records: the position, ``"null"``, or ``"token 198"`` with the id."""
        if self.kind == "position":
            assert self.position is not None
            return self.position
        if self.kind == "group":
            return f"positions {','.join(map(str, self.positions))}"
        return "null" if self.kind == "null" else f"token {self.token}"

    def mask(self, positions: Tensor, documents: Tensor, tokens: Tensor | None) -> Tensor:
        """Which of some tokens are the sink, boolean ``(batch, length)``; ``tokens`` are their ids, if known."""
        if self.kind == "position":
            assert self.position is not None
            return positions == self.position
        if self.kind == "group":
            return torch.isin(positions, torch.tensor(self.positions, device=positions.device))
        if self.kind == "null" or tokens is None:
            return torch.zeros_like(positions, dtype=torch.bool)
        if self.anywhere:
            return (positions >= 0) & (tokens == self.token)
        # Where the first token of a document is gone (a sliding cache), the first one that is left may be a later one.
        return first_of_kind(positions, documents, tokens) & (tokens == self.token) & _whole(positions, documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinks:
    """The sinks of a model, strongest first, possibly none; on which texts they were found, and what heads give the main one.

    Attributes:
        sinks: what plays the sink.
        followed: tokens that heads look at wherever they stand. Such a head may rest there or read what stands there; weights
            alone do not say which, so these are not counted as sinks (``sinklab causes`` edits the head and sees).
        weak: places of some sinks, in no head often enough; strongest first.
        silent: places that pass the threshold only because the rows of an operation that does not normalise are divided by
            their sums, while no head that sinks there gives it that much weight; heads that attend to almost nothing are no
            sinks.
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
        front: learned tokens in front of every text, which have the first positions.
        heads_by_weight: heads whose mean weight, as it is, passes the threshold at some position.
    """

    sinks: tuple[Sink, ...] = ()
    followed: tuple[Sink, ...] = ()
    weak: tuple[Sink, ...] = ()
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
    front: int = 0

    def __repr__(self) -> str:
        """In a line: the heads of a large model are pages."""
        rates = (
            "" if sink.rate is None else f": {sink.rate:.3g} %, {sink.sinking} of {counted(len(self.heads), 'head')}"
            for sink in self.sinks
        )
        found = "; ".join(f"{sink.describe()}{rate}" for sink, rate in zip(self.sinks, rates, strict=True))
        read = f"{counted(self.samples, 'sample')} of {counted(self.seq_len, 'position')}, threshold {self.threshold:g}"
        return f"Sinks({found or 'none'}; {read if self.samples else 'given'})"

    @classmethod
    def at(cls, place: SinkPlace | None) -> Sinks:
        """A sink that is given and not looked for: a position, ``"null"``, or a sink; ``None`` for a model without one."""
        return cls() if place is None else cls(sinks=(sink_at(place),))

    @property
    def main(self) -> Sink | None:
        """The strongest one."""
        return self.sinks[0] if self.sinks else None

    @property
    def positions(self) -> list[int]:
        """Positions that are sinks, ascending."""
        return sorted(sink.position for sink in self.sinks if sink.position is not None)

    @property
    def positions_in_text(self) -> list[int]:
        """Tokens of the text at which sinks are, ascending, without and not counting the learned tokens in front.

        So cache policies count them, which keep the tokens in front always.
        """
        return [position - self.front for position in self.positions if position >= self.front]

    @property
    def secondary(self) -> list[int]:
        """Positions that are sinks besides the main one, ascending."""
        return sorted(sink.position for sink in self.sinks[1:] if sink.position is not None)

    def describe(self) -> str:
        """The main sink in words; ``none`` without one."""
        return self.main.describe() if self.main else "none"

    def keys(self, call: AttentionCall) -> Tensor:
        """Which key of a call is the main sink, for every query: int64 ``(batch, q_len)``.

        -1 where the document has no such key, where the sink is the null score, and without a sink. A group is refused (see
        :meth:`all_keys`), and a token where the call has cached keys.
        """
        if self.main is None or self.main.kind == "null":
            return torch.full_like(call.query_positions, -1)
        if self.main.kind == "group":
            raise ConfigurationError(f"the sink is {self.main.describe()}: several keys, where one is asked for")
        if self.main.kind == "token" and call.cached_keys and call.site.kind == "self":
            raise ConfigurationError(
                f"the sink is {self.main.name}, and which tokens the cache holds is not known; run whole texts without a cache"
            )
        return first_keys(call, self.main.mask(call.key_positions, call.key_documents, call.key_tokens))

    def all_keys(self, call: AttentionCall) -> Tensor:
        """Which keys of a call are the main sink, for every query: int64 ``(batch, q_len, keys)``; several of a group.

        -1 where the document has no such key, where the sink is the null score, and without a sink.
        """
        if self.main is None or self.main.kind != "group":
            return self.keys(call)[..., None]
        return keys_of_document(call, *self.main.positions)

    def place_in(self, tokens: Tensor | None, attention_mask: Tensor | None = None) -> int | Tensor | Literal["null"] | None:
        """Where the main sink stands in texts ``(samples, seq_len)`` of one document a row, in the terms of interventions.

        A position; ``"null"``; for a token its positions, int64 ``(samples, 1)`` with -1 for texts that lack it; ``None``. A
        group of positions is refused. ``attention_mask`` is 0 for padding.
        """
        if self.main is not None and self.main.kind == "group":
            raise ConfigurationError(f"the sink is {self.main.describe()}: several positions, where one is asked for")
        if self.main is None or self.main.kind != "token":
            return None if self.main is None else self.main.position if self.main.kind == "position" else "null"
        if tokens is None:
            raise ConfigurationError(f"the sink is {self.main.name}, and these inputs have no `input_ids` to look for it in")
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask.to(tokens.device).long()
        positions = torch.where(real > 0, real.cumsum(1) - 1, -1)
        at = self.main.mask(positions, torch.where(real > 0, 0, -1), tokens)
        return torch.where(at, positions + self.front, -1).amax(1, keepdim=True).cpu()

    def require(self) -> Sink:
        """The main sink.

        Raises:
            ConfigurationError: there is none; says what was tried.
        """
        if self.main is not None:
            return self.main
        if not any(weight for _, weight in self.tried):
            raise ConfigurationError(
                f"no sink found: in texts of {self.length:,} positions none is seen by half of a module's queries, so none can "
                "serve them all; where the model has a short window, take texts of about its length"
            )
        if self.weak or self.followed:
            listed = [f"{sink.name} in {sink.rate:.2g} % of heads and documents" for sink in (*self.followed, *self.weak)]
            raise ConfigurationError(
                f"no sink found that stays at a place: {', '.join(listed[:5])}. Name a place, or say that there is none: "
                "heads are then judged by zeroing them"
            )
        tried = ", ".join(f"{sink_at(place).name} ({weight:.2f})" for place, weight in self.tried[:5])
        raise ConfigurationError(
            f"no sink found: no head gives any place a mean weight of {self.threshold:g}; tried, with the largest mean weight "
            f"of a head: {tried}. Lower the threshold, name a place, or say that there is none: heads are then judged "
            "by zeroing them"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; numbers of all heads are left out."""
        found = {field: getattr(self, field) for field in _PLAIN}
        return found | {name: [_sink_dict(sink) for sink in getattr(self, name)] for name in _LISTS}


_LISTS = ("sinks", "followed", "weak", "silent")
_PLAIN = ("threshold", "definition", "corpus", "bos", "samples", "seq_len", "heads_by_weight", "front")


def require_sinks(sinks: object) -> None:
    """Refuse what is no :class:`Sinks` where they are given in place of being searched for."""
    if sinks is not None and not isinstance(sinks, Sinks):
        raise ConfigurationError(
            f"`sinks` is of {type(sinks).__name__}; expected what find_sinks(model, inputs) found, with place=0 for a "
            "position of your own"
        )


def sink_at(place: SinkPlace) -> Sink:
    """The sink of a place that is given and not looked for."""
    if isinstance(place, Sink):
        return place
    return Sink(kind="null") if place == "null" else Sink(kind="position", position=int(place))


def _sink_dict(sink: Sink) -> dict[str, object]:
    plain = {field.name: getattr(sink, field.name) for field in dataclasses.fields(Sink)}
    heads = [[head.layer, head.head, head.module, rate] for head, rate in sink.heads]
    return plain | {"positions": list(sink.positions), "heads": heads, "name": sink.name, "description": sink.describe()}


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
