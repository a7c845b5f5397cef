"""Role against location: where the sink goes when its place is hidden, or another token stands there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.intervention import Place
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes import experiment
from sinklab.studies.causes.found import Condition, Location, Strong
from sinklab.studies.causes.readout import NextToken, Readout, readout_for
from sinklab.studies.causes.samples import Samples

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
    """Does the sink follow place or token? Hide the sink, and take away, double, replace, move and precede the first token.

    Whether a sink is bound to the first position, or to the token that always stands there, differs from model to model (Gu
    et al. 2024, arXiv 2410.10781; Barbero et al. 2025, arXiv 2504.02732, take BOS away at test time). The loss is compared on
    the targets that follow the same token in both conditions; of texts that grow the end is cut off, so that no new position
    is seen.

    Args:
        samples: two texts or more. Conditions that edit tokens need ``input_ids`` without padding, the loss of the next token,
            and one first token in all texts; otherwise they are left out, and the reason is in the result.
        sinks: its ``place``, a position or ``"null"``; ``readout`` is that of the model's task by default.
        threshold: mean share from which on a position is a sink.
        prefix, move_to: random tokens in front, and where the moved first token stands, by default at a quarter of the text.
        top: how many positions are kept for each condition.

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
    texts = [as_it_is, dataclasses.replace(as_it_is, name="hidden", edits=experiment.of_all(HideKey(place=place)))]
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
    conditions, heads, secondary = {}, list[str](), list[int]()
    for text in texts:
        (new, received), loss = text.run(model, readout, batch_size), None
        if clean is None:
            clean, scored = new, int((~new.isnan()).sum())
            heads = [str(head) for of_module in received.heads.values() for head in of_module]
            secondary = received.positions_above(threshold, place)
        else:
            before, after = text.pairs(clean, new)
            scored = int((~before.isnan()).sum())
            loss = experiment.change(after.nanmean(1).numpy(), before.nanmean(1).numpy(), f"the sink, {text.name}")
        first = int(text.kept[0]) + received.front if text.kept[0] >= 0 else None
        at_place = received.null() if isinstance(place, str) else received.at(place)
        at_first: list[float | None] = [None] * len(heads) if first is None else received.at(first)
        conditions[text.name] = Condition(text.name, first, at_place, at_first, received.strongest(top), loss, scored)
    shares = [-1.0 if share is None else share for share in conditions["as it is"].at_place]
    head, where = shares.index(max(shares)), place if isinstance(place, (int, str)) else list(place)
    return Location(
        where, heads[head], heads, conditions, left_out, secondary, threshold, len(samples), readout.unit,
        _follows(conditions, head, place, threshold),
    )  # fmt: skip


def _follows(conditions: Mapping[str, Condition], head: int, place: Place, threshold: float) -> str | None:
    """What the sink of a head went with when the first token was moved."""
    whole, moved = conditions["as it is"].at_place[head], conditions.get("moved")
    if moved is None or place != conditions["as it is"].first_token_at or whole is None or whole < threshold:
        return None
    token, position = (2 * (share[head] or 0.0) >= whole for share in (moved.at_first_token, moved.at_place))
    return "both" if token and position else "token" if token else "position" if position else "neither"


def rows(found: Location, heads: Mapping[str, Head]) -> Iterator[Row]:
    """Rows of the long table; ``heads`` by their names."""
    for condition in found.conditions.values():
        common: Coordinates = {"probe": "causes_location", "count": found.texts, "intervention": f"sink: {condition.name}"}
        cells: list[tuple[Metric, str, float | None, Coordinates]] = [
            (metric, name, share, {})
            for metric, shares in ((AT_PLACE, condition.at_place), (AT_FIRST_TOKEN, condition.at_first_token))
            for name, share in zip(found.heads, shares, strict=True)
        ]
        cells += [(STRONG_POSITION, one.head, one.weight, {"key_position": one.position}) for one in condition.strongest]
        for metric, name, value, at in cells:
            if value is not None:
                head = heads[name]
                where: Coordinates = {**common, **at, "module": head.module, "layer": head.layer, "head": head.head}
                yield {**where, "metric": metric, "value": value}
        of_loss = experiment.LOSS_CHANGE.of(found.unit)
        for bound, end in ({} if condition.loss is None else condition.loss.to_dict()).items():
            yield {**common, "metric": of_loss if bound == "mean" else of_loss.bound(bound), "value": end}


@dataclasses.dataclass(frozen=True)
class _Text:
    """The texts of one condition, and where the old tokens stand in them: int64 ``(seq_len,)``, -1 for one that is gone."""

    name: str
    samples: Samples
    kept: Tensor
    edits: experiment.Edits = experiment.no_edits

    def run(self, model: nn.Module, readout: Readout, batch_size: int) -> tuple[Tensor, _Received]:
        """Losses ``(samples, seq_len)``, and the attention that positions get."""
        received = _Received(self.samples)
        runs = experiment.runs(
            model, self.samples, readout, self.edits, probes=lambda start, stop: [received], batch_size=batch_size
        )
        return torch.cat([run.losses for run in runs]), received

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


# --- attention received -----------------------------------------------------------------------------------------------------


class _Received(Watcher):
    """Sums over all batches of the shares of rows that every position gets, over the queries that see it and are not it."""

    name, needs = "received", frozenset[str]()

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.heads: dict[str, list[Head]] = {}
        self._at: dict[str, Tensor] = {}  # sums and counts, (2, heads, positions)
        self._null: dict[str, Tensor] = {}  # sums of the null mass, and queries, (2, heads)
        self._width = 0

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        sums, counts = torch.zeros(2, len(call.queries), call.num_heads, call.kv_len, dtype=torch.float64)
        null = torch.zeros(2, call.num_heads, dtype=torch.float64)
        for start, stop in call.blocks():
            scores = call.scores(start, stop)
            weights, mass = call.weights(start, stop, scores).double(), call.null_mass(start, stop, scores).double()
            whole = (weights.sum(-1) + mass).clamp_min(1e-8)  # rows of zeros, which some operations have, stay zeros
            counted = call.counted[:, start:stop]
            itself = (call.query_positions[:, start:stop, None] == call.key_positions[:, None]) & (
                call.query_documents[:, start:stop, None] == call.key_documents[:, None]
            )
            seen = call.visible.block(start, stop, 0, call.kv_len) & (counted[..., None] & ~itself)[:, None]
            sums += (weights / whole[..., None]).masked_fill(~seen, 0.0).sum(2).cpu()
            counts += seen.sum(2).expand(counts.shape).cpu()
            null[0] += (mass / whole).masked_fill(~counted[:, None], 0.0).sum((0, 2)).cpu()
        null[1] = call.counted.sum()
        places = call.key_positions.cpu()
        values = torch.stack((sums, counts)).masked_fill((places < 0)[:, None], 0.0)
        at = values.new_zeros(2, call.num_heads, call.kv_len)
        at.index_add_(2, places.clamp_min(0).flatten(), values.transpose(1, 2).flatten(2))
        module = call.site.module
        self._width = self._width or call.kv_len
        self.heads[module] = [Head(call.site.layer, number, module) for number in range(call.num_heads)]
        self._at[module], self._null[module] = at + self._at.get(module, 0), null + self._null.get(module, 0)

    @property
    def front(self) -> int:
        """Learned tokens in front of the texts, which have positions and no ids."""
        tokens = self.samples.inputs.get("input_ids")
        return 0 if tokens is None else max(0, self._width - tokens.shape[1])

    def at(self, place: object) -> list[float | None]:
        """Mean share on positions, by head; ``None`` where no query sees them."""
        sums, counts = self._sums()
        positions = [position for position in torch.as_tensor(place).flatten().tolist() if position < sums.shape[1]]
        sums, counts = sums[:, positions].sum(1), counts[:, positions].sum(1)
        return [float(of / count) if count else None for of, count in zip(sums, counts, strict=True)]

    def null(self) -> list[float | None]:
        """Mean null mass by head."""
        return [float(of / count) for null in self._null.values() for of, count in null.T.numpy()]

    def _sums(self) -> np.ndarray:
        """Sums and counts of all heads, ``(2, heads, positions)``."""
        size = max(at.shape[2] for at in self._at.values())
        return torch.cat([nn.functional.pad(at, (0, size - at.shape[2])) for at in self._at.values()], dim=1).numpy()

    def _means(self) -> np.ndarray:
        """Mean share by head and position, 0 for positions that fewer than an eighth of a text's queries see."""
        sums, counts = self._sums()
        enough = counts >= max(1, len(self.samples) * sums.shape[1] / 8)
        return np.asarray(np.where(enough, sums / np.maximum(counts, 1), 0.0))

    def positions_above(self, threshold: float, place: Place) -> list[int]:
        """Positions to which a head gives the threshold or more, the place left out."""
        excluded = set() if isinstance(place, str) else set(torch.as_tensor(place).flatten().tolist())
        return [position for position in (self._means().max(0) >= threshold).nonzero()[0].tolist() if position not in excluded]

    def strongest(self, top: int) -> list[Strong]:
        """Positions by the head that gives them most, in falling order."""
        ids, means = self.samples.ids_by_position(self.front), self._means()
        best, heads = means.max(0), [str(head) for of_module in self.heads.values() for head in of_module]
        found = []
        for position in np.argsort(-best, kind="stable")[:top].tolist():
            if best[position] > 0:
                known = ids is not None and position < ids.shape[1]
                token = _most_frequent(ids[:, position]) if known and ids is not None else None
                found.append(Strong(float(best[position]), heads[int(means[:, position].argmax())], token, position))
        return found


def _most_frequent(ids: Tensor) -> int | None:
    """The id that occurs most often in ``(n,)``, -1 not counted; ``None`` where there is no other."""
    known = ids[ids >= 0]
    return int(known.mode().values) if len(known) else None
