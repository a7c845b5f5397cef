"""Spread: how far the change of one token reaches over positions and layers, with the sink and without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import LayerOutput
from sinklab.attention.forward_arguments import lean_arguments
from sinklab.attention.intervention import Place
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.results.intervals import Interval
from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.sinks import Sinks
from sinklab.studies.causes._runs import Edits, change, known_place, lengths, no_edits, of_all, random_places, text_losses
from sinklab.studies.causes.finding import LOSS_CHANGE, ExperimentResult, interval_rows, number
from sinklab.studies.causes.readout import Readout, readout_for
from sinklab.studies.causes.samples import Samples

__all__ = ["Spread", "spread"]

SPREAD_TOTAL = Metric(
    "spread_total", "ratio", "Mean relative change |h' - h| / |h| over texts and the tokens after the replaced one."
)
SPREAD_AT_DISTANCE = Metric("spread_at_distance", "ratio", "Mean relative change at this distance from the replaced token.")
SPREAD_RATIO = Metric(
    "spread_ratio", "ratio", "Geometric mean over texts of spread_total after the last layer over that of the model as it is."
)


@dataclasses.dataclass(frozen=True)
class Spread(ExperimentResult):
    """What :func:`spread` found. A *relative change* is |h' - h| / |h|, h the hidden state of one token after one layer.

    Attributes:
        conditions: ``sink``, the model as it is; ``no sink``, the sink hidden from every query; ``control``, one random other
            key of each text, from its first quarter, hidden from every query instead.
        layers: numbers of the layers, -1 for the embeddings; the second axis.
        distances: first and last of each bin, in tokens after the replaced one; the third axis. Negative before it, where a
            model looks ahead.
        curves: float64 ``(conditions, layers, distances)``, mean relative change over texts and replaced tokens.
        totals: float64 ``(conditions, layers, samples)``, mean relative change over the tokens after it (over all others,
            where a model looks ahead).
        ratios: for ``no sink`` and ``control`` the geometric mean over texts of the total after the last layer over that of the
            model as it is, with its interval; above 1 if hiding lets the change spread. ``None`` if nothing spreads at all.
        losses: what hiding costs, in the unit of the readout.
    """

    conditions: tuple[str, ...]
    layers: list[int]
    distances: list[tuple[int, int]]
    curves: np.ndarray
    totals: np.ndarray
    ratios: dict[str, Interval | None]
    losses: dict[str, Interval]
    replaced: int
    texts: int
    unit: str

    @property
    def statement(self) -> str:
        """What the ratios say, in a sentence."""
        ratio, control = self.ratios["no sink"], self.ratios["control"]
        if ratio is None or control is None:
            return "A replaced token changes no other one, with the sink or without it."
        if ratio.low > 1 / 1.05 and ratio.high < 1.05:
            verdict = "the sink makes no difference of 5 % or more"
        elif ratio.low > 1 and ratio.low > 1.05 * control.high:
            verdict = "the sink holds changes back, more than a random other key does"
        elif ratio.low > 1:
            verdict = "changes spread farther without the sink, but not clearly more than without a random other key"
        elif ratio.high < 1 and 1.05 * ratio.high < control.low:
            verdict = "changes spread less without the sink, against what over-mixing would have"
        elif ratio.high < 1:
            verdict = "changes spread less without the sink, but not clearly less than without a random other key"
        else:
            verdict = "whether the sink holds changes back stays open"
        return (
            f"Hiding the sink multiplies the spread of a change by {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}], "
            f"hiding a random other key by {control.mean:.2f} [{control.low:.2f}, {control.high:.2f}]: {verdict}."
        )

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            **super().to_dict(),
            "curves": {
                name: [[number(value) for value in row] for row in rows]
                for name, rows in zip(self.conditions, self.curves.tolist(), strict=True)
            },
            "totals": {
                name: [number(np.nanmean(row)) for row in rows] for name, rows in zip(self.conditions, self.totals, strict=True)
            },
        }

    def rows(self) -> Iterator[Row]:
        """Rows of the long table; of a curve, the column ``key_position`` holds the first distance of a bin."""
        common: Coordinates = {"probe": "causes_spread", "count": self.texts}
        for name, curves, totals in zip(self.conditions, self.curves, self.totals, strict=True):
            for layer, curve, total in zip(self.layers, curves, totals, strict=True):
                at: Coordinates = {**common, "intervention": f"token replaced: {name}", "layer": layer}
                yield {**at, "metric": SPREAD_TOTAL, "value": float(np.nanmean(total))}
                for (distance, _), value in zip(self.distances, curve.tolist(), strict=True):
                    if number(value) is not None:
                        yield {**at, "metric": SPREAD_AT_DISTANCE, "key_position": distance, "value": value}
        for name in self.ratios:
            of_token: Coordinates = {**common, "intervention": f"token replaced: {name}"}
            yield from interval_rows(SPREAD_RATIO, self.ratios[name], **of_token)
            yield from interval_rows(LOSS_CHANGE.of(self.unit), self.losses[name], **of_token)


@torch.no_grad()
def spread(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    *,
    readout: Readout | None = None,
    replaced: int = 2,
    batch_size: int = 16,
    seed: int = 0,
) -> Spread:
    """Replace one token and trace the relative change of all hidden states, with the sink and with the sink hidden.

    Sinks keep tokens from mixing too much (Barbero et al. 2025, arXiv 2504.02732): without one the change should spread
    farther. Hiding a key also takes the model off its ground, so one random other key of each text, hidden in the same way,
    stands beside it; and what hiding costs is reported.

    Args:
        samples: two texts or more, with ``input_ids`` ``(samples, seq_len)``.
        sinks: its ``place``, a position or ``"null"``, is what is hidden.
        readout: the loss for what hiding costs; that of the model's task by default.
        replaced: tokens to replace in each text, one at a time; drawn from its second quarter, the new token from the tokens
            of all texts.

    Raises:
        ConfigurationError: no sink, no ``input_ids``, padding, fewer than two texts, texts of fewer than 8 tokens, or all of
            one token.
        UnsupportedModelError: ``"null"`` where an attention has no null score, or an encoder-decoder.
    """
    readout = readout_for(model) if readout is None else readout
    place = known_place(sinks, samples, "the spread of a change")
    tokens = _whole_texts(samples, sinks.length)
    if replaced < 1:
        raise ConfigurationError(f"replaced must be 1 or more, got {replaced}")
    generator = torch.Generator().manual_seed(seed)
    other = random_places(samples, place, sinks, generator, share=4)
    edits: dict[str, Edits] = {
        "sink": no_edits,
        "no sink": of_all(HideKey(place=place)),
        "control": of_all(HideKey(place=other)),
    }
    seq_len = tokens.shape[1]
    where = _replaced_positions(samples, place, replaced, generator)
    new = _other_tokens(tokens.cpu(), where, generator)
    changes = np.stack([_traced(model, samples, edit, where, new, batch_size) for edit in edits.values()])
    # (conditions, layers, samples, replaced, seq_len) by position; now by distance from the replaced token.
    distance = np.arange(seq_len) - where.numpy()[..., None]
    ahead = bool((changes[0] > 0)[:, distance < 0].any())
    bins = [(2**power // 2 + 1, 2**power) for power in range((seq_len - 1).bit_length() + 1)]
    bins = ([(-last, -first) for first, last in reversed(bins)] if ahead else []) + bins
    masks = {lag_bin: (distance >= lag_bin[0]) & (distance <= lag_bin[1]) for lag_bin in bins}
    masks = {lag_bin: mask for lag_bin, mask in masks.items() if mask.any()}
    curves = np.stack([changes[:, :, mask].mean(-1) for mask in masks.values()], axis=-1)
    others = (distance != 0) if ahead else (distance > 0)
    totals = (changes * others).sum((3, 4)) / others.sum((1, 2))
    clean = text_losses(model, samples, readout, batch_size=batch_size)
    return Spread(
        conditions=tuple(edits),
        layers=list(range(-1, changes.shape[1] - 1)),
        distances=list(masks),
        curves=curves,
        totals=totals,
        ratios={name: _ratio(totals[number, -1], totals[0, -1]) for number, name in enumerate(edits) if number},
        losses={
            name: change(text_losses(model, samples, readout, edit, batch_size=batch_size), clean, name)
            for name, edit in edits.items()
            if edit is not no_edits
        },
        replaced=replaced,
        texts=len(samples),
        unit=readout.unit,
    )


class _Hidden(Watcher):
    """Keeps the hidden states of every layer, embeddings first, ``(batch, seq_len, hidden_size)`` each."""

    name, needs = "hidden", frozenset({"hidden_states"})

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "layer":
            self.layers.append(output.hidden_states.clone())


def _whole_texts(samples: Samples, length: int) -> Tensor:
    """The token ids of texts of one length.

    Raises:
        ConfigurationError: no token ids, padding, or texts of fewer than 8 tokens.
    """
    tokens = samples.inputs.get("input_ids")
    if tokens is None:
        raise ConfigurationError("the spread of a change replaces tokens, and these samples have no input_ids")
    shortest = int(lengths(samples, length).min())
    if shortest < tokens.shape[1] or shortest < 8:
        raise ConfigurationError(
            f"the spread of a change needs texts of one length, 8 tokens or more, without padding; got "
            f"{tuple(tokens.shape)}, the shortest of {shortest} tokens"
        )
    return tokens


def _traced(model: nn.Module, samples: Samples, edits: Edits, where: Tensor, new: Tensor, batch_size: int) -> np.ndarray:
    """Relative changes ``(layers, samples, replaced, seq_len)``."""
    changes = []
    for start, part in samples.parts(batch_size):
        stop = start + len(part)

        def hidden(tokens: Tensor, part: Samples = part, start: int = start, stop: int = stop) -> Tensor:
            probe = _Hidden()
            with attend(model, [probe], edits(start, stop), verify=False):
                model(**lean_arguments(model, {**part.inputs, "input_ids": tokens}))
            if len({layer.shape[1] for layer in probe.layers}) != 1:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: its layers are about sequences of several lengths, between which no distance is "
                    "defined; the spread of a change is for models of one sequence"
                )
            # Learned tokens in front are not of the text.
            return torch.stack([layer[:, -tokens.shape[1] :] for layer in probe.layers]).double()

        clean = hidden(part.inputs["input_ids"])
        sizes = clean.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        rows = torch.arange(len(part))
        changed = []
        for column in range(where.shape[1]):
            tokens = part.inputs["input_ids"].clone()
            tokens[rows, where[start:stop, column]] = new[start:stop, column].to(tokens)
            changed.append(((hidden(tokens) - clean).norm(dim=-1) / sizes).cpu().numpy())
        changes.append(np.stack(changed, axis=2))
    return np.concatenate(changes, axis=1)


def _replaced_positions(samples: Samples, place: Place, count: int, generator: torch.Generator) -> Tensor:
    """Positions ``(samples, count)`` from the second quarter of the texts, and not the sink."""
    seq_len = samples.domains.shape[1]
    sinks = set() if isinstance(place, str) else set(torch.as_tensor(place).flatten().tolist())
    quarter = range(seq_len // 4, seq_len // 2)
    free = torch.tensor([position for position in quarter if position not in sinks] or quarter)
    return free[torch.randint(len(free), (len(samples), count), generator=generator)]


def _other_tokens(tokens: Tensor, where: Tensor, generator: torch.Generator) -> Tensor:
    """For each position a token of some text that is not the one there; frequent ones are drawn more often."""
    pool = tokens.flatten()
    if int(pool.min()) == int(pool.max()):
        raise ConfigurationError("all texts are made of one token, so none can be replaced by another; give other texts")
    old = tokens.gather(1, where)
    new = old.clone()
    while bool((same := new == old).any()):
        new[same] = pool[torch.randint(len(pool), (int(same.sum()),), generator=generator)]
    return new


def _ratio(totals: np.ndarray, reference: np.ndarray) -> Interval | None:
    """Geometric mean over texts of a ratio; ``None`` where fewer than two texts have both sides above 0."""
    both = (totals > 0) & (reference > 0)
    if both.sum() < 2:
        return None
    log_ratio = change(np.log(totals[both]), np.log(reference[both]), "the spread of a change")
    return Interval(*(float(np.exp(value)) for value in (log_ratio.mean, log_ratio.low, log_ratio.high)))
