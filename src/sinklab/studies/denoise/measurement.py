"""The measurement behind denoise(): forwards from masked texts to whole ones, the sinks of each, and what hiding them costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.intervention import Intervention
from sinklab.attention.placement import input_device
from sinklab.attention.probe import Probe
from sinklab.attention.session import Session, attend
from sinklab.interventions.hide_key import HideKey
from sinklab.models.losses import IGNORED, cross_entropies
from sinklab.results.intervals import just_above
from sinklab.results.metric import Row
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.denoise import DenoiseSummary
from sinklab.studies.denoise.filling import Fill, Filling, Order
from sinklab.studies.denoise.places import KeyShares, changes
from sinklab.studies.denoise.tally import StateTally, TextTallies, rows_of
from sinklab.studies.measure.probing import TOKENS_PER_BATCH

__all__ = ["Followed", "follow"]

LOGITS_AT_ONCE = 2**26
"""Of one forward, 256 MiB in float32."""

SHOWN = 4
"""Texts that the figure shows."""


@dataclasses.dataclass(frozen=True)
class Followed:
    """What was found.

    Attributes:
        summary: for ``summary.json``; docs/denoising.md.
        rows: of the long table.
        shown: of the first texts, the largest share over heads of every key in every state, float32
            ``(texts, states, length)``, and which tokens were masked.
        session: the last one, for what it saw of the model.
    """

    summary: DenoiseSummary
    rows: list[Row]
    shown: tuple[Tensor, Tensor]
    session: Session


@torch.inference_mode()
def follow(
    model: PreTrainedModel,
    tokens: Tensor,
    free: Tensor,
    mask_token: int,
    *,
    steps: int = 16,
    order: Order = "confidence",
    fill: Fill = "text",
    threshold: float = 0.3,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = silent,
) -> Followed:
    """Fill in masked texts step by step, and look at the sinks before every step and after the last.

    Args:
        model: whose logits at a position are of the token there, and which sees both ways.
        tokens: int64 ``(texts, length)``; two or more texts.
        free: boolean of the same shape: which tokens are masked at the start; some of every text.
        mask_token: what stands in the place of a masked token.
        steps: between the state in which all free tokens are masked and the one in which none is.
        threshold: mean share above which a key is a sink of a head.
        seed: of the random order, and of the keys that are hidden as a control.
        batch_size: texts a forward; by default as many as have a few thousand tokens.

    Raises:
        SinklabError: see the errors of sessions.
    """
    generator = torch.Generator().manual_seed(seed)
    draws, others = (torch.rand(tokens.shape, generator=generator) for _ in range(2))
    length, vocabulary = tokens.shape[1], model.get_input_embeddings().weight.shape[0]
    size = batch_size or max(1, min(TOKENS_PER_BATCH // length, LOGITS_AT_ONCE // (length * vocabulary)))
    states, texts, fixed = [StateTally() for _ in range(steps + 1)], TextTallies(len(tokens)), _Fixed()
    heads: list[tuple[int, int]] = []
    shown: list[tuple[Tensor, Tensor]] = []
    session: Session | None = None
    for start in range(0, len(tokens), size):
        part = slice(start, start + size)
        filling = Filling(tokens[part], free[part], mask_token, steps=steps, order=order, fill=fill, draws=draws[part])
        before: Tensor | None = None
        for number, state in enumerate(states):
            watcher = KeyShares()
            logits, session = _forward(model, filling.ids, [watcher])
            shares, heads = watcher.shares, watcher.heads
            hits = shares > just_above(threshold)
            state.add(filling, ~free[part], hits)
            fixed.add(hits, first=before is None)
            if before is not None:
                moves = changes(before, hits)
                states[number - 1].add_changes(moves)
                texts.add_changes(part, moves)
            if start == 0:
                shown.append((shares[:SHOWN].amax(1), filling.masked[:SHOWN]))
            if fill == "text" and bool(filling.masked.any()):
                losses = _losses(logits, filling)
                state.loss, state.scored = state.loss + float(losses.sum()), state.scored + int(filling.masked.sum())
                priced = _price(model, filling, losses, shares.mean(1), hits.any(1), others[part])
                texts.add(part, **priced)
            if number < steps:
                filling.take_step(logits)
            before = hits
            progress("denoising", start * (steps + 1) + (number + 1) * len(hits), len(tokens) * (steps + 1))
    by_step = [state.record(number) for number, state in enumerate(states)]
    summary: DenoiseSummary = {
        "positions": length,
        "heads": len(heads),
        "sink_rate": sum(state["sink_rate"] for state in by_step) / len(by_step),
        "moves": texts.share("moves", "both"),
        "vanishes": texts.share("vanishes", "before"),
        "wanders": fixed.without,
        "cost": texts.cost(),
        "by_step": by_step,
    }
    assert session is not None
    stacked = torch.stack([one for one, _ in shown], 1), torch.stack([one for _, one in shown], 1)
    return Followed(summary, list(rows_of(states, heads)), stacked, session)


class _Fixed:
    """Whether there is a key that is a sink of a head of a text in every state in which the head has one."""

    def __init__(self) -> None:
        self._done: list[tuple[Tensor, Tensor]] = []

    def add(self, hits: Tensor, *, first: bool) -> None:
        """Take in a state of some texts, the first one or the next.

        Args:
            hits: boolean ``(texts, heads, length)``.
        """
        has_sink = hits.any(-1)
        candidates = hits | ~has_sink[..., None]
        if first:
            self._done.append((has_sink, candidates))
        else:
            ever, fixed = self._done[-1]
            self._done[-1] = (ever | has_sink, fixed & candidates)

    @property
    def without(self) -> float | None:
        """Share without one among the (text, head) with a sink in some state, in percent."""
        ever = sum(int(had_sink.sum()) for had_sink, _ in self._done)
        return 100 * sum(int((had_sink & ~fixed.any(-1)).sum()) for had_sink, fixed in self._done) / ever if ever else None


def _forward(
    model: PreTrainedModel, ids: Tensor, probes: Sequence[Probe] = (), interventions: Sequence[Intervention] = ()
) -> tuple[Tensor, Session]:
    """Logits ``(texts, length, vocabulary)``, and the session."""
    with attend(model, probes, interventions) as session:
        logits: Tensor = model(input_ids=ids.to(input_device(model))).logits
    return logits, session


def _losses(logits: Tensor, filling: Filling) -> Tensor:
    """Loss of the text's tokens at masked positions, summed over each text, float64 ``(texts,)``."""
    targets = filling.tokens.masked_fill(~filling.masked, IGNORED)
    return cross_entropies(logits, targets).double().sum(1).cpu()


def _price(
    model: PreTrainedModel, filling: Filling, losses: Tensor, mass: Tensor, sinks: Tensor, draws: Tensor
) -> dict[str, Tensor]:
    """Hide the strongest sink of each text from every head, and instead of it random other keys of as much mass.

    Args:
        losses: as it is, summed over each text.
        mass: mean share of each key over heads ``(texts, length)``.
        sinks: boolean of the same shape, keys that are a sink of some head.
        draws: of the same shape; keys are taken as a control in their order until they have the mass of the sink.

    Returns:
        What :class:`TextTallies` adds up, ``(texts,)`` each; 0 for texts without a sink.
    """
    having = (sinks.any(1) & filling.masked.any(1)).double()
    if not bool(having.any()):
        return {}
    strongest = mass.masked_fill(~sinks, -1.0).argmax(1, keepdim=True)
    # The sink comes last, and a key is taken as long as those before it have less mass than the sink.
    order = draws.scatter(1, strongest, 2.0).argsort(1)
    ordered, of_sink = mass.gather(1, order), mass.gather(1, strongest)
    taken = (ordered.cumsum(1) - ordered < of_sink) & (order != strongest)
    hidden, control = (
        _losses(_forward(model, filling.ids, interventions=[HideKey(place=place)])[0], filling) - losses
        for place in (strongest, order.masked_fill(~taken, -1))
    )
    return {
        "states": having,
        "scored": filling.masked.sum(1) * having,
        "hidden": hidden * having,
        "control": control * having,
        "mass": of_sink[:, 0] * having,
        "control_mass": (ordered * taken).sum(1) * having,
    }
