"""Role against location: where the sink goes when its place is hidden, or another token stands there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

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
from sinklab.studies.causes.readout import NextToken, Readout, readout_for
from sinklab.studies.causes.samples import Samples

Number: TypeAlias = float | None


@dataclasses.dataclass(frozen=True)
class Strong:
    """A key position, the head that gives it most, and its mean share of a row (over the queries that see the key, not it)."""

    weight: float
    head: str
    position: int


@dataclasses.dataclass(frozen=True)
class Condition:
    """What was changed, and where the attention went.

    Attributes:
        name: ``as it is``; ``hidden``, the sink hidden from all heads; ``removed``, the first token taken away;
            ``duplicated``, the first token twice; ``replaced``, a random token in its stead; ``moved``, the first token at a
            later position, those before it one earlier; ``random prefix``, random tokens in front.
        first_token_at: where the first token of the texts now stands; ``None`` if nowhere.
        at_place, at_first_token: by head, mean share on the place that the sink has in the texts as they are, and on the first
            token, where it now stands; ``None`` where half of the queries do not see it.
        strongest: the position that a head gives most.
        loss: change over texts, on the ``scored`` targets that both conditions have; ``None`` for the texts as they are.
    """

    name: str
    first_token_at: int | None
    at_place: list[Number]
    at_first_token: list[Number]
    strongest: Strong | None
    loss: Interval | None
    scored: int


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the sink goes when it is hidden or its token moved; the texts as they are first.

    Attributes:
        head: the one that gives the sink most; ``heads`` are in the order of all shares.
        left_out: conditions that these samples cannot have, and why.
        follows: what the sink of ``head`` went with when the first token was moved, half of its share or more: ``token``,
            ``position``, ``both``, ``neither``; ``None`` where it has no sink at position 0, or nothing moved.
    """

    place: int | str | list[int]
    head: str
    heads: list[str]
    conditions: dict[str, Condition]
    left_out: dict[str, str]
    texts: int
    unit: str
    follows: str | None


def location(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    *,
    readout: Readout | None = None,
    threshold: float = 0.3,
    prefix: int = 4,
    move_to: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> Location:
    """Does the sink follow place or token? Hide the sink, and take away, double, replace, move and precede the first token.

    Whether a sink is bound to the first position, or to the token that always stands there, differs from model to model (Gu et
    al. 2024, arXiv 2410.10781; Barbero et al. 2025, arXiv 2504.02732). The loss is compared on the targets that follow the
    same token in both conditions; of texts that grow the end is cut off.

    Args:
        samples: two texts or more. Conditions that edit tokens need ``input_ids`` without padding, the loss of the next token,
            and one first token in all texts; otherwise they are left out, and the reason is in the result.
        threshold: mean share from which on the place is a sink.
        prefix, move_to: random tokens in front, and where the moved first token stands, by default at a quarter of the text.

    Raises:
        ConfigurationError: no sink, fewer than two texts, or ``prefix`` and ``move_to`` outside the texts.
        UnsupportedModelError: ``"null"`` where an attention has no null score.
    """
    readout = readout_for(model) if readout is None else readout
    place = sinks.place_in(samples.inputs.get("input_ids"), samples.inputs.get("attention_mask"))
    if place is None:
        raise ConfigurationError(
            "the location of a sink needs one, and none was found; name a position, find_sinks(…, place=0)"
        )
    if isinstance(place, Tensor):
        raise ConfigurationError(
            f"the sink is {sinks.require().name}, which stands elsewhere in every text: it goes with the token, wherever it is"
        )
    seq_len = samples.domains.shape[1]
    as_it_is = _Text("as it is", samples, torch.arange(seq_len))
    texts = [as_it_is, dataclasses.replace(as_it_is, name="hidden", edits=of_all(HideKey(place=place)))]
    reason = _why_not(samples, readout)
    left_out: dict[str, str] = {}
    if reason is None:
        move_to = seq_len // 4 if move_to is None else move_to
        if not 0 < move_to < seq_len - 1 or not 0 < prefix < seq_len - 1:
            raise ConfigurationError(
                f"prefix and move_to must lie between 1 and {seq_len - 2} in texts of {seq_len} tokens, got {prefix} and "
                f"{move_to}"
            )
        texts += _edited(samples, prefix, move_to, torch.Generator().manual_seed(seed))
    else:
        left_out = dict.fromkeys(("removed", "duplicated", "replaced", "moved", "random prefix"), reason)
    clean: Tensor | None = None
    conditions, heads = {}, list[str]()
    for text in texts:
        new, finder = text.run(model, readout, batch_size)
        found, shares, null = finder.shares()
        loss: Interval | None = None
        if clean is None:
            clean, scored, heads = new, int((~new.isnan()).sum()), list(map(str, found))
        else:
            before, after = text.pairs(clean, new)
            scored = int((~before.isnan()).sum())
            loss = change(after.nanmean(1).numpy(), before.nanmean(1).numpy(), f"the sink, {text.name}")
        tokens = text.samples.inputs.get("input_ids")
        front = 0 if tokens is None else max(0, shares.shape[1] - tokens.shape[1])  # learned tokens, which have no ids
        first = int(text.kept[0]) + front if text.kept[0] >= 0 else None
        at_place = list(map(number, null)) if isinstance(place, str) else _at(shares, place)
        at_first = _at(shares, [] if first is None else first)
        conditions[text.name] = Condition(text.name, first, at_place, at_first, _strongest(shares, heads), loss, scored)
    given = [-1.0 if share is None else share for share in conditions["as it is"].at_place]
    head, where = given.index(max(given)), place if isinstance(place, (int, str)) else list(place)
    follows = _follows(conditions, head, place, threshold)
    return Location(where, heads[head], heads, conditions, left_out, len(samples), readout.unit, follows)


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
    whole, moved = conditions["as it is"].at_place[head], conditions.get("moved")
    if moved is None or place != conditions["as it is"].first_token_at or whole is None or whole < threshold:
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

    def run(self, model: nn.Module, readout: Readout, batch_size: int) -> tuple[Tensor, SinkFinder]:
        """Losses ``(samples, seq_len)``, and the attention that positions get."""
        finder = SinkFinder()
        batches = runs(model, self.samples, readout, self.edits, probes=lambda start, stop: [finder], batch_size=batch_size)
        return torch.cat([run.losses for run in batches]), finder

    def pairs(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``(samples, n)`` of the targets that follow the same token in both."""
        followed = torch.roll(self.kept, -1) == self.kept + 1
        followed[-1] = self.kept[-1] >= 0  # nothing follows the last one; it is scored only where no target is the next token
        old = ((self.kept >= 0) & followed).nonzero()[:, 0]
        left, right = before[:, old], after[:, self.kept[old]]
        both = left.isnan() | right.isnan()
        return left.masked_fill(both, torch.nan), right.masked_fill(both, torch.nan)


def _why_not(samples: Samples, readout: Readout) -> str | None:
    """Why tokens of these samples cannot be edited, or ``None``."""
    tokens = samples.inputs.get("input_ids")
    if tokens is None:
        return "the samples have no input_ids"
    if set(samples.inputs) - {"input_ids", "attention_mask"}:
        return f"besides tokens the model is given {', '.join(sorted(set(samples.inputs) - {'input_ids', 'attention_mask'}))}"
    if bool((samples.lengths(0) < tokens.shape[1]).any()):
        return "the samples are padded"
    if not isinstance(readout, NextToken):
        return "the loss is not that of the next token, whose targets move with the tokens"
    if bool((tokens[:, 0] != tokens[0, 0]).any()):
        return "the texts begin with different tokens, so that there is no first token to move"
    return None


def _edited(samples: Samples, prefix: int, move_to: int, generator: torch.Generator) -> list[_Text]:
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
        "random prefix": (torch.cat((drawn(prefix), tokens), 1), where + prefix),
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
