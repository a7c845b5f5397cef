"""Role against location: where the sink goes when its place is hidden, or another token stands there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.intervention import Place
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.results.intervals import Interval
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes._received import Received, Strong, Sums
from sinklab.studies.causes._runs import Edits, change, known_place, lengths, no_edits, of_all, runs
from sinklab.studies.causes.finding import LOSS_CHANGE, ExperimentResult, head_rows, interval_rows, plain, signed
from sinklab.studies.causes.readout import NextToken, Readout, readout_for
from sinklab.studies.causes.samples import Samples

__all__ = ["Location", "Strong", "TextCondition", "location"]

AT_PLACE = Metric(
    "weight_at_place",
    "fraction",
    "Mean share of a row on the place that the sink has in the texts as they are, over the queries that see it and do not "
    "stand on it.",
    range=FRACTION,
)
AT_FIRST_TOKEN = Metric(
    "weight_at_first_token",
    "fraction",
    "Mean share of a row on the first token, where it now stands, over the queries that see it and do not stand on it.",
    range=FRACTION,
)
STRONG_POSITION = Metric(
    "strong_position",
    "fraction",
    "Mean share of a row on a position, over the queries that see it and do not stand on it, of the head that gives it most.",
    range=FRACTION,
)


@dataclasses.dataclass(frozen=True)
class TextCondition:
    """What was changed, and where the attention went.

    Attributes:
        name: ``as it is``; ``hidden``, the sink hidden from all heads; ``removed``, the first token taken away;
            ``duplicated``, the first token twice; ``replaced``, a random token in its stead; ``moved``, the first token at a
            later position, those before it one earlier; ``random prefix``, random tokens in front.
        first_token_at: where the first token of the texts now stands; ``None`` if nowhere.
        at_place: ``(heads,)`` mean share on the place that the sink has in the texts as they are.
        at_first_token: ``(heads,)`` the same on the first token, where it now stands.
        strongest: positions, by the head that gives them most, in falling order.
        tokens: ids wherever they stand, position 0 apart, likewise; of those seen often enough.
        loss: change over texts, on the targets that both conditions have; ``None`` for the texts as they are.
        scored: targets behind it.
    """

    name: str
    first_token_at: int | None
    at_place: np.ndarray
    at_first_token: np.ndarray
    strongest: list[Strong]
    tokens: list[Strong]
    loss: Interval | None
    scored: int


@dataclasses.dataclass(frozen=True)
class Location(ExperimentResult):
    """What :func:`location` found.

    Attributes:
        head: the one that gives the sink most; sentences are about it.
        conditions: the texts as they are first.
        left_out: conditions that these samples cannot have, and why.
        secondary: further positions with the threshold or more, as the texts are.
    """

    place: Place
    head: Head
    heads: list[Head]
    conditions: list[TextCondition]
    left_out: dict[str, str]
    secondary: list[int]
    threshold: float
    texts: int
    unit: str

    @property
    def follows(self) -> str | None:
        """What the sink of the strongest head went with when the first token was moved: ``token``, ``position``, ``both``,
        ``neither``; ``None`` where that cannot be said: the head has no sink at position 0, or nothing was moved.

        It went with one if at least half of its share did.
        """
        index = self.heads.index(self.head)
        moved = next((condition for condition in self.conditions if condition.name == "moved"), None)
        whole = self.conditions[0].at_place[index]
        if moved is None or self.place != self.conditions[0].first_token_at or not whole >= self.threshold:
            return None
        token, position = (2 * share[index] >= whole for share in (moved.at_first_token, moved.at_place))
        return "both" if token and position else "token" if token else "position" if position else "neither"

    @property
    def statement(self) -> str:
        """Where the attention of the sink's strongest head goes, condition by condition."""
        index = self.heads.index(self.head)
        parts = [] if self.follows is None else [f"Moved, the sink of head {self.head} goes with the {self.follows}"]
        for state in self.conditions:
            share = state.at_place[index]
            words = (
                f"{state.name}: head {self.head} gives the place {share:.3f}"
                if share == share
                else f"{state.name}: out of sight"
            )
            if state.first_token_at is not None and state.first_token_at != self.conditions[0].first_token_at:
                words += f", the first token, now at {state.first_token_at}, {state.at_first_token[index]:.3f}"
            if state.strongest:
                top = state.strongest[0]
                words += f"; the strongest position is {top.position} with {top.weight:.3f} from head {top.head}"
            parts.append(words + (f"; loss {signed(state.loss)} {self.unit}" if state.loss is not None else ""))
        return ". ".join(parts) + "."

    def to_dict(self) -> dict[str, object]:
        conditions = {condition.name: plain(condition) for condition in self.conditions}
        return {**super().to_dict(), "conditions": conditions, "follows": self.follows}

    def rows(self) -> Iterator[Row]:
        """Rows of the long table."""
        for condition in self.conditions:
            common: Coordinates = {"probe": "causes_location", "count": self.texts}
            common["intervention"] = f"sink: {condition.name}"
            yield from head_rows(AT_PLACE, self.heads, condition.at_place, **common)
            yield from head_rows(AT_FIRST_TOKEN, self.heads, condition.at_first_token, **common)
            for strong in condition.strongest:
                at: Coordinates = {**common, "key_position": strong.position}
                yield from head_rows(STRONG_POSITION, [strong.head], [strong.weight], **at)
            yield from interval_rows(LOSS_CHANGE.of(self.unit), condition.loss, **common)


def location(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    *,
    readout: Readout | None = None,
    threshold: float = 0.3,
    prefix: int = 4,
    move_to: int | None = None,
    top: int = 3,
    batch_size: int = 16,
    seed: int = 0,
) -> Location:
    """Hide the sink, and take away, double, replace, move and precede the first token: does the sink follow place or token?

    Whether a sink is bound to the first position, or to the token that always stands there, differs from model to model (Gu
    et al. 2024, arXiv 2410.10781; Barbero et al. 2025, arXiv 2504.02732, take BOS away at test time). The loss is compared on
    the targets that follow the same token in both conditions; of texts that grow the end is cut off, so that no new position
    is seen.

    Args:
        samples: two texts or more. Conditions that edit tokens need ``input_ids`` without padding, the loss of the next token,
            and one first token in all texts; otherwise they are left out, and the reason is in the result.
        sinks: its ``place``, a position or ``"null"``.
        readout: the loss; that of the model's task by default.
        threshold: mean share from which on a position is a sink.
        prefix: random tokens of the random prefix.
        move_to: where the moved first token stands; a quarter of the texts' length by default.
        top: how many positions and tokens are kept for each condition.

    Raises:
        ConfigurationError: no sink, fewer than two texts, or ``prefix`` and ``move_to`` outside the texts.
        UnsupportedModelError: ``"null"`` where an attention has no null score.
    """
    readout = readout_for(model) if readout is None else readout
    place = known_place(sinks, samples, "the location of the sink")
    if isinstance(place, Tensor):
        raise ConfigurationError(
            f"the sink is {sinks.require().name}, which stands elsewhere in every text: it goes with the token, wherever it is"
        )
    seq_len = samples.domains.shape[1]
    plain = _Text("as it is", samples, torch.arange(seq_len))
    texts = [plain, dataclasses.replace(plain, name="hidden", edits=of_all(HideKey(place=place)))]
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
    conditions, heads, secondary = [], [], []
    for text in texts:
        losses, received = [], Sums(text.samples)
        for run in runs(
            model, text.samples, readout, text.edits, probes=lambda start, stop: [Received()], batch_size=batch_size
        ):
            losses.append(run.losses)
            received.add(run.start, run.probes[0].modules)  # type: ignore[attr-defined]
        new = torch.cat(losses)
        heads = received.heads
        loss, scored = None, int((~new.isnan()).sum())
        if clean is None:
            clean = new
            secondary = received.positions_above(threshold, place)
        else:
            before, after = text.pairs(clean, new)
            scored = int((~before.isnan()).sum())
            loss = change(after.nanmean(1).numpy(), before.nanmean(1).numpy(), f"the sink, {text.name}")
        first = int(text.kept[0]) if text.kept[0] >= 0 else None
        nothing = np.full(len(heads), np.nan)
        conditions.append(
            TextCondition(
                name=text.name,
                first_token_at=None if first is None else first + received.front,
                at_place=received.null() if isinstance(place, str) else received.at(place),
                at_first_token=nothing if first is None else received.at(first + received.front),
                strongest=received.strongest(top),
                tokens=received.tokens(top),
                loss=loss,
                scored=scored,
            )
        )
    strongest = heads[int(np.nanargmax(np.nan_to_num(conditions[0].at_place, nan=-1.0)))]
    return Location(place, strongest, heads, conditions, left_out, secondary, threshold, len(samples), readout.unit)


@dataclasses.dataclass(frozen=True)
class _Text:
    """The texts of one condition, and where the old tokens stand in them: int64 ``(seq_len,)``, -1 for one that is gone."""

    name: str
    samples: Samples
    kept: Tensor
    edits: Edits = no_edits

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
    if bool((lengths(samples, 0) < tokens.shape[1]).any()):
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
