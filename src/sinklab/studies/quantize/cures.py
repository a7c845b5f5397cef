"""Cures: what can be left whole or done otherwise, as treatments of a model, and what each of them costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.corpora.samples import Samples
from sinklab.studies.quantize.scheme import WHOLE_BITS
from sinklab.studies.quantize.spikes import Spike
from sinklab.studies.quantize.twin import Ranges, Treatment, Twin

__all__ = ["Cost", "Cure", "cost_of", "modules_whole", "of_activations"]

WHOLE_BYTES = WHOLE_BITS // 8
"""Of a number that stays whole."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a cure costs over the scheme without it.

    Attributes:
        share: of the multiplications in the linear maps, how many are of whole numbers, in [0, 1].
        activations: of the numbers that the scheme alone puts on grids, how many stay whole, in [0, 1].
        bytes: that are held besides.
    """

    share: float
    activations: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class Cure:
    """One cure.

    Attributes:
        name: a word for tables.
        label: what is done, for a sentence.
        treatments: what samples are measured under: all of them, or those of even and of odd number.
        treatment: what to do: the one that is chosen on all samples.
        modules: sites that stay whole.
        configurable: whether quantisation libraries have settings for it.
    """

    name: str
    label: str
    treatments: tuple[Treatment, ...]
    treatment: Treatment
    modules: tuple[str, ...] = ()
    configurable: bool = False

    def losses(self, twin: Twin, samples: Samples) -> Tensor:
        """Losses ``(samples, positions)``, every sample under the treatment that was chosen without it."""
        if len(self.treatments) == 1 or self.treatments[0].sites == self.treatments[1].sites:
            return twin.losses(samples, self.treatments[0])
        parts = [twin.losses(samples.take(slice(half, None, 2)), treatment) for half, treatment in enumerate(self.treatments)]
        losses = parts[0].new_empty((len(samples), parts[0].shape[1]))
        for half, part in enumerate(parts):
            losses[half::2] = part
        return losses


def of_activations(
    base: Treatment,
    spikes: Mapping[str, Spike],
    sinks: Sequence[int],
    carrying: Sequence[int],
    without: Mapping[tuple[int, ...], Ranges],
) -> list[Cure]:
    """Cures that change how activations are put on grids.

    Args:
        base: the scheme without a cure.
        sinks: positions of the sinks.
        carrying: positions that carry spikes.
        without: ranges that leave some positions out, by these positions.
    """
    every = {key: spike.channels for key, spike in spikes.items() if spike.large}
    cures = [
        _cure(
            "per token",
            "a scale for each token, taken at run time,",
            dataclasses.replace(base, per_token=True),
            configurable=True,
        )
    ]
    for name, label, positions in (
        ("sinks whole", "the activations of the sinks kept whole", tuple(sinks)),
        ("spike tokens whole", "the activations of the tokens with the spike kept whole", tuple(carrying)),
    ):
        if positions and not (name == "spike tokens whole" and positions == tuple(sinks)):
            ranges = without[positions]
            cures.append(_cure(name, label, dataclasses.replace(base, positions=positions, ranges=ranges)))
    if every:
        cures.append(
            _cure(
                "channels clipped",
                "spike channels clipped to the range of the others",
                dataclasses.replace(base, clipped=every),
            )
        )
        cures.append(_cure("channels whole", "spike channels kept whole", dataclasses.replace(base, channels=every)))
    return cures


def modules_whole(base: Treatment, gaps: np.ndarray, keys: Sequence[str], count: int) -> Cure:
    """The sites that cost most stay whole.

    The most costly one of some samples looks worse on these than it is, so what is measured on the samples of even number was
    chosen on the others, and the other way round.

    Args:
        base: the scheme, perhaps with another cure.
        gaps: loss by each site alone less that of the model as it is, ``(sites, samples)``.
        keys: of the sites.
        count: how many stay whole.
    """

    def rest(samples: np.ndarray) -> tuple[list[str], Treatment]:
        worst = np.argsort(-samples.mean(axis=1), kind="stable")[:count]
        chosen = sorted(keys[number] for number in worst.tolist())
        return chosen, dataclasses.replace(base, sites=frozenset(keys) - frozenset(chosen))

    chosen, treatment = rest(gaps)
    halves = tuple(rest(gaps[:, 1 - half :: 2])[1] for half in range(2))
    single = "module" if count == 1 else f"{count} modules"
    name, label = f"{single} whole", "the module that costs most" if count == 1 else f"the {count} modules that cost most"
    if base.per_token:
        name, label = f"per token, {name}", f"a scale for each token, taken at run time, and {label}"
    scheme = base.scheme
    return Cure(
        name, f"{label} kept whole", halves, treatment, tuple(chosen),
        configurable=base.per_token or scheme.activations == WHOLE_BITS,
    )  # fmt: skip


def spike_positions(spikes: Mapping[str, Spike]) -> tuple[int, ...]:
    """Tokens that carry a spike at any site."""
    return tuple(sorted({place for spike in spikes.values() if spike.large for place in spike.positions}))


def _cure(name: str, label: str, treatment: Treatment, *, configurable: bool = False) -> Cure:
    return Cure(name, label, (treatment,), treatment, configurable=configurable)


def cost_of(twin: Twin, treatment: Treatment, positions: float | None, prefix_bytes: int | None) -> Cost:
    """What a treatment leaves whole.

    Args:
        positions: of a sample on average, padding left out.
        prefix_bytes: of the keys and values of one token in all layers of a decoder: where the tokens that stay whole come
            first, these are computed once and kept. Otherwise weights are held as they are beside their codes.
    """
    whole = total = whole_numbers = numbers = 0.0
    held, narrow = 0, treatment.scheme.weights != WHOLE_BITS
    first = treatment.positions == tuple(range(len(treatment.positions)))
    share = len(treatment.positions) / positions if positions else 0.0
    for site in twin.sites.values():
        skipped = treatment.sites is not None and site.key not in treatment.sites
        channels = len(treatment.channels.get(site.key, ()))
        part = 1.0 if skipped else share + (1 - share) * channels / site.width
        if treatment.scheme.activations != WHOLE_BITS:
            whole_numbers, numbers = whole_numbers + part * site.rows * site.width, numbers + site.rows * site.width
        if site.kind != "linear":
            continue
        whole, total = whole + part * site.products, total + site.products
        weights = site.width * site.outputs
        if skipped:
            held += WHOLE_BYTES * weights - twin.weight_bytes(site, treatment.scheme.weights)
        elif narrow:
            held += WHOLE_BYTES * channels * site.outputs
            held += WHOLE_BYTES * weights if treatment.positions and not (first and prefix_bytes is not None) else 0
    if treatment.positions and first and prefix_bytes is not None:
        held += prefix_bytes * len(treatment.positions)
    return Cost(whole / total if total else 0.0, whole_numbers / numbers if numbers else 0.0, held)


def token_bytes(model: PreTrainedModel) -> int:
    """Keys and values of one token in all layers, as whole numbers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * WHOLE_BYTES)
