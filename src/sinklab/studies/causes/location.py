"""Role against location: where the sink goes when its place is hidden, or another token stands there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.intervention import Place
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.results.intervals import Interval
from sinklab.sinks import Sinks
from sinklab.sinks.finder import SinkFinder
from sinklab.studies.causes.effects import Edits, change, no_edits, number, of_all, runs
from sinklab.studies.causes.found import Number
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import Samples


@dataclasses.dataclass(frozen=True)
class Strong:
    """A key position, the head that gives it most, and its mean share of a row (over the queries that see the key, not it)."""

    weight: float
    head: str
    position: int


@dataclasses.dataclass(frozen=True)
class Condition:
    """Where the attention went.

    Attributes:
        first_token_at: where the first token of the texts now stands; ``None`` if nowhere.
        at_place, at_first_token: by head, mean share on the place that the sink has in the texts as they are, and on the first
            token, where it now stands; ``None`` where half of the queries do not see it.
        strongest: the position that a head gives most.
        loss: change over texts, on the targets that both conditions have; ``None`` for the texts as they are.
    """

    first_token_at: int | None
    at_place: list[Number]
    at_first_token: list[Number]
    strongest: Strong | None
    loss: Interval | None


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the sink goes when it is hidden or its token moved.

    Attributes:
        head: the one that gives the sink most; ``heads`` are in the order of all shares.
        conditions: ``as it is``; ``hidden``, the sink hidden from all heads; ``removed``, the first token taken away;
            ``duplicated``; ``replaced``, a random token in its stead; ``moved``, to a quarter of the text, those before it one
            earlier; ``random prefix``, four random tokens in front.
        follows: what the sink of ``head`` went with when the first token was moved, half of its share or more: ``token``,
            ``position``, ``both``, ``neither``; ``None`` where it has no sink at position 0.
    """

    head: str
    heads: list[str]
    conditions: dict[str, Condition]
    follows: str | None


PREFIX = 4
"""Random tokens in front."""


def location(
    model: nn.Module, samples: Samples, sinks: Sinks, *, threshold: float = 0.3, batch_size: int = 16, seed: int = 0
) -> Location:
    """Does the sink follow place or token? Hide the sink, and take away, double, replace, move and precede the first token.

    Whether a sink is bound to the first position, or to the token that always stands there, differs from model to model (Gu et
    al. 2024, arXiv 2410.10781; Barbero et al. 2025, arXiv 2504.02732). The loss is compared on the targets that follow the
    same token in both conditions; of texts that grow the end is cut off.

    Args:
        samples: two texts or more of a language model, without padding and with one first token.
        threshold: mean share from which on the place is a sink.

    Raises:
        ConfigurationError: no sink, or samples that are not such texts.
        UnsupportedModelError: ``"null"`` where an attention has no null score.
    """
    tokens = samples.inputs.get("input_ids")
    place = sinks.place_in(tokens, samples.inputs.get("attention_mask"))
    if place is None or isinstance(place, Tensor):
        why = "none was found; name a position, find_sinks(…, place=0)"
        why = why if place is None else f"{sinks.require().name} stands elsewhere in every text: it goes with the token"
        raise ConfigurationError(f"the location of a sink needs one at a place, and {why}")
    if tokens is None or bool((samples.lengths(0) < tokens.shape[1]).any()) or bool((tokens[:, 0] != tokens[0, 0]).any()):
        raise ConfigurationError(
            "the location of a sink needs texts without padding that begin with the same token, to move it"
        )
    if tokens.shape[1] < 2 * PREFIX:
        raise ConfigurationError(f"the location of a sink needs texts of {2 * PREFIX} tokens or more, got {tokens.shape[1]}")
    as_it_is = _Text("as it is", samples, torch.arange(tokens.shape[1]))
    hidden = dataclasses.replace(as_it_is, name="hidden", edits=of_all(HideKey(place=place)))
    clean, heads, conditions = torch.zeros(0), list[str](), dict[str, Condition]()
    for text in [as_it_is, hidden, *_edited(samples, tokens.shape[1] // 4, torch.Generator().manual_seed(seed))]:
        new, finder = text.run(model, batch_size)
        found, shares, null = finder.shares()
        loss: Interval | None = None
        if not conditions:
            clean, heads = new, list(map(str, found))
        else:
            before, after = text.pairs(clean, new)
            loss = change(after.nanmean(1).numpy(), before.nanmean(1).numpy(), f"the sink, {text.name}")
        front = max(0, shares.shape[1] - text.samples.inputs["input_ids"].shape[1])  # learned tokens, which have no ids
        first = int(text.kept[0]) + front if text.kept[0] >= 0 else None
        at_place = list(map(number, null)) if isinstance(place, str) else _at(shares, place)
        at_first = _at(shares, [] if first is None else first)
        conditions[text.name] = Condition(first, at_place, at_first, _strongest(shares, heads), loss)
    given = [-1.0 if share is None else share for share in conditions["as it is"].at_place]
    head = given.index(max(given))
    return Location(heads[head], heads, conditions, _follows(conditions, head, place, threshold))


def _at(shares: np.ndarray, place: object) -> list[float | None]:
    """Mean share on positions, by head; ``None`` where half of the queries do not see them."""
    positions = [position for position in torch.as_tensor(place).long().flatten().tolist() if position < shares.shape[1]]
    return [number(row.mean()) if len(row) else None for row in shares[:, positions]]


def _strongest(shares: np.ndarray, heads: Sequence[str]) -> Strong | None:
    """The position that a head gives most, and the head; ``None`` where none is given anything."""
    head, position = np.unravel_index(np.nan_to_num(shares).argmax(), shares.shape)
    weight = number(shares[head, position])
    return Strong(weight, heads[int(head)], int(position)) if weight else None


def _follows(conditions: Mapping[str, Condition], head: int, place: Place, threshold: float) -> str | None:
    """What the sink of a head went with when the first token was moved."""
    whole, moved = conditions["as it is"].at_place[head], conditions["moved"]
    if place != conditions["as it is"].first_token_at or whole is None or whole < threshold:
        return None
    token, position = (2 * (share[head] or 0.0) >= whole for share in (moved.at_first_token, moved.at_place))
    return "both" if token and position else "token" if token else "position" if position else "neither"


@dataclasses.dataclass(frozen=True)
class _Text:
    """The texts of one condition, and where the old tokens stand in them: int64 ``(seq_len,)``, -1 for one that is gone."""

    name: str
    samples: Samples
    kept: Tensor
    edits: Edits = no_edits

    def run(self, model: nn.Module, batch_size: int) -> tuple[Tensor, SinkFinder]:
        """Losses ``(samples, seq_len)``, and the attention that positions get."""
        finder = SinkFinder()
        probes, size = (lambda start, stop: [finder]), batch_size
        batches = runs(model, self.samples, NextToken(), self.edits, probes=probes, batch_size=size)
        return torch.cat([run.losses for run in batches]), finder

    def pairs(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``(samples, n)`` of the targets that follow the same token in both."""
        followed = torch.roll(self.kept, -1) == self.kept + 1
        followed[-1] = self.kept[-1] >= 0  # nothing follows the last one; it is scored only where no target is the next token
        old = ((self.kept >= 0) & followed).nonzero()[:, 0]
        left, right = before[:, old], after[:, self.kept[old]]
        both = left.isnan() | right.isnan()
        return left.masked_fill(both, torch.nan), right.masked_fill(both, torch.nan)


def _edited(samples: Samples, move_to: int, generator: torch.Generator) -> list[_Text]:
    """The conditions that edit tokens; domains move with the tokens, and new tokens are not scored."""
    tokens = samples.inputs["input_ids"]
    count, seq_len = tokens.shape
    pool = tokens[:, 1:].flatten()

    def drawn(size: int) -> Tensor:
        return pool[torch.randint(len(pool), (count, size), generator=generator).to(pool.device)]

    first, rest, where = tokens[:, :1], tokens[:, 1:], torch.arange(seq_len)
    moved = torch.where(where <= move_to, where - 1, where)
    moved[0] = move_to
    replaced = torch.where(where == 0, -1, where)
    orders = {
        "removed": (rest, where - 1),
        "duplicated": (torch.cat((first, tokens), 1), where + 1),
        "replaced": (torch.cat((drawn(1), rest), 1), replaced),
        "moved": (torch.cat((rest[:, :move_to], first, rest[:, move_to:]), 1), moved),
        "random prefix": (torch.cat((drawn(PREFIX), tokens), 1), where + PREFIX),
    }
    texts = []
    for name, (new, kept) in orders.items():
        new = new[:, :seq_len]
        kept = torch.where(kept < new.shape[1], kept, -1)
        domains = torch.full(new.shape, -1)
        alive = kept >= 0
        domains[:, kept[alive]] = samples.domains[:, alive]
        domains[:, -1] = -1
        inputs = {key: new if key == "input_ids" else torch.ones_like(new) for key in samples.inputs}
        texts.append(_Text(name, Samples(inputs, domains, new, samples.domain_names), kept))
    return texts
