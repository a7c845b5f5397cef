"""Spread: how far the change of one token reaches over positions and layers, with the sink and without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import LayerOutput
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import NEAR, Place
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.results.intervals import Interval
from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes import experiment
from sinklab.studies.causes.found import Spread
from sinklab.studies.causes.readout import Readout, readout_for
from sinklab.studies.causes.samples import Samples

__all__ = ["rows", "spread"]

SPREAD_TOTAL = Metric(
    "spread_total", "ratio", "Mean relative change |h' - h| / |h| over texts and the tokens after the replaced one."
)
SPREAD_AT_DISTANCE = Metric("spread_at_distance", "ratio", "Mean relative change at this distance from the replaced token.")
SPREAD_RATIO = Metric(
    "spread_ratio", "ratio", "Geometric mean over texts of spread_total after the last layer over that of the model as it is."
)


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
    stands beside it; and what hiding costs is reported. Queries near a hidden key still see it, so that no other token becomes
    the sink.

    Args:
        samples: two texts or more, with ``input_ids`` ``(samples, seq_len)``.
        sinks: its ``place``, a position or ``"null"``, is what is hidden.
        readout: the loss for what hiding costs; that of the model's task by default.
        replaced: tokens to replace in each text, one at a time; drawn from its second quarter, new ones from all texts.

    Raises:
        ConfigurationError: no sink, no ``input_ids``, padding, fewer than two texts, texts of fewer than 8 tokens, or all of
            one token.
        UnsupportedModelError: ``"null"`` where an attention has no null score, or an encoder-decoder.
    """
    readout = readout_for(model) if readout is None else readout
    place = experiment.known_place(sinks, samples, "the spread of a change")
    tokens = _whole_texts(samples, sinks.length)
    generator = torch.Generator().manual_seed(seed)
    other = experiment.random_places(samples, place, sinks, generator, share=4)
    spare = 0 if isinstance(place, str) else min(NEAR, tokens.shape[1] // 4)
    edits: dict[str, experiment.Edits] = {
        "sink": experiment.no_edits,
        "no sink": experiment.of_all(HideKey(place=place, spare=spare)),
        "control": experiment.of_all(HideKey(place=other, spare=spare)),
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
    clean = experiment.text_losses(model, samples, readout, batch_size=batch_size)
    losses = {
        name: experiment.change(experiment.text_losses(model, samples, readout, edit, batch_size=batch_size), clean, name)
        for name, edit in edits.items()
        if edit is not experiment.no_edits
    }
    return Spread(
        list(edits), list(range(-1, changes.shape[1] - 1)), list(masks),
        {name: [experiment.numbers(row) for row in layers] for name, layers in zip(edits, curves, strict=True)},
        {name: [experiment.number(np.nanmean(row)) for row in layers] for name, layers in zip(edits, totals, strict=True)},
        {name: _ratio(totals[index, -1], totals[0, -1]) for index, name in enumerate(edits) if index},
        losses, replaced, len(samples), readout.unit,
    )  # fmt: skip


def rows(found: Spread, heads: Mapping[str, Head]) -> Iterator[Row]:
    """Rows of the long table; of a curve, the column ``key_position`` holds the first distance of a bin."""
    common: Coordinates = {"probe": "causes_spread", "count": found.texts}
    for name in found.conditions:
        for layer, curve, total in zip(found.layers, found.curves[name], found.totals[name], strict=True):
            at: Coordinates = {**common, "intervention": f"token replaced: {name}", "layer": layer}
            yield {**at, "metric": SPREAD_TOTAL, "value": float("nan") if total is None else total}
            for (distance, _), value in zip(found.distances, curve, strict=True):
                if value is not None:
                    yield {**at, "metric": SPREAD_AT_DISTANCE, "key_position": distance, "value": value}
    for name, ratio in found.ratios.items():
        of_token: Coordinates = {**common, "intervention": f"token replaced: {name}"}
        yield from experiment.interval_rows(SPREAD_RATIO, ratio, **of_token)
        yield from experiment.interval_rows(experiment.LOSS_CHANGE.of(found.unit), found.losses[name], **of_token)


class _Hidden(Watcher):
    """Keeps the hidden states of every layer, embeddings first, ``(batch, seq_len, hidden_size)`` each."""

    name, needs = "hidden", frozenset({"hidden_states"})

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "layer":
            self.layers.append(output.hidden_states.clone())


def _whole_texts(samples: Samples, length: int) -> Tensor:
    """The token ids of texts of one length."""
    tokens = samples.inputs.get("input_ids")
    if tokens is None:
        raise ConfigurationError("the spread of a change replaces tokens, and these samples have no input_ids")
    shortest = int(samples.lengths(length).min())
    if shortest < tokens.shape[1] or shortest < 8:
        raise ConfigurationError(
            f"the spread of a change needs texts of one length, 8 tokens or more, without padding; got "
            f"{tuple(tokens.shape)}, the shortest of {shortest} tokens"
        )
    return tokens


def _traced(
    model: nn.Module, samples: Samples, edits: experiment.Edits, where: Tensor, new: Tensor, batch_size: int
) -> np.ndarray:
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
    log_ratio = experiment.change(np.log(totals[both]), np.log(reference[both]), "the spread of a change")
    return Interval(*(float(np.exp(value)) for value in (log_ratio.mean, log_ratio.low, log_ratio.high)))
