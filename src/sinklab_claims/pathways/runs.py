"""The operations that are compared, in models as large as softmax's, and their trainings in the store that claims share.

A rate that suits softmax need not suit another operation, and one rate for all compares an operation that is tuned with others
that are not. So each operation is trained at five rates, on seeds of its own, and the one with the lowest mean held-out loss is
its own; what is then evaluated was not looked at.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sinklab.errors import ConfigurationError
from sinklab.jobs.grid import Cell
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import operations
from sinklab.results.blocks import counted
from sinklab.results.progress import duration
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import SCALES, SECONDS_OF_A_TRAINING, SECONDS_ON_A_GPU, Base, Changes, Scale, Times, Variant
from sinklab_claims.pathways.judging import REFERENCE
from sinklab_claims.reproduce import store as work
from sinklab_claims.reproduce.store import make_cells

PUBLISHED: Mapping[str, Callable[[int], Mapping[str, object]]] = {
    # Bondarenko et al. 2023 (arXiv 2306.12929): that of BERT-base at 128 tokens; a quarter open at the start, as for OPT.
    "clipped_softmax": lambda context: {"gamma": -3.2 / context},
    "gated_heads": lambda context: {"opening": 0.25},
    # Ran-Milo 2026 (arXiv 2603.11487): divided by i - 1.
    "relu": lambda context: {"uncounted": 1},
}
"""Operation to the settings of its paper that are not its defaults, by the tokens of the context."""

DEFAULT: Sequence[Mapping[str, object]] = (
    *({"name": name} for name in ("softmax", "softmax_plus_one", "sink_logit", "key_bias", "clipped_softmax", "gated")),
    *({"name": "gated_heads"}, {"name": "sigmoid"}, {"name": "sigmoid", "normalize": True}),
    *({"name": name} for name in ("relu", "softpick", "sigma_reparam")),
)
"""What is compared if nothing is chosen; normalised sigmoid is the control of Gu et al. 2024 (arXiv 2410.10781)."""


@dataclasses.dataclass(frozen=True)
class Pathway:
    """One row of the comparison: the ``name`` of an operation and the settings asked for; without, the published ones hold."""

    label: str
    fields: Mapping[str, object]

    def operation(self, context: int) -> dict[str, object]:
        """``name`` and settings for rows of so many tokens, worded as claims do: those at their defaults are left out."""
        settings = PUBLISHED.get(str(self.fields["name"])) if len(self.fields) == 1 else None
        return {**self.fields, **(settings(context) if settings else {})}


def pathways_of(chosen: Sequence[Mapping[str, object]] = DEFAULT) -> list[Pathway]:
    """The rows of the comparison, the reference first, whether it is among the chosen or not.

    Args:
        chosen: ``{"name": …, setting: value}``.

    Raises:
        UnknownNameError: no such operation.
        ConfigurationError: a setting that an operation does not have, or an operation named twice.
    """
    pathways = [Pathway(REFERENCE, {"name": REFERENCE})]
    for fields in chosen:
        operations.make(dict(fields))
        pathway = Pathway(_label(fields), dict(fields))
        if pathway.label == REFERENCE:
            continue
        if pathway.label in [other.label for other in pathways]:
            raise ConfigurationError(f"the comparison has {pathway.label} twice; name it once")
        pathways.append(pathway)
    return pathways


def _label(fields: Mapping[str, object]) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in fields.items() if key != "name")
    return f"{fields['name']}({settings})" if settings else str(fields["name"])


TOLERANCE = 0.005
"""Largest difference in parameters from softmax, over those of softmax, with which models count as equally large."""


def matched_widths(pathways: Sequence[Pathway], config: PretrainingConfig) -> dict[str, int]:
    """Label to the width of the feed-forward layer with which the model has as many parameters as the first one's.

    The width of the scale stays where the difference is within :data:`TOLERANCE` anyway.

    Args:
        pathways: the reference first.
        config: of the scale.

    Raises:
        ConfigurationError: no width makes the models equally large.
    """
    width = config.model.intermediate_size
    reference = parameters_of(pathways[0], config, width)
    widths = {}
    for pathway in pathways:
        widths[pathway.label], extra = width, parameters_of(pathway, config, width) - reference
        if abs(extra) > TOLERANCE * reference:
            # The number of parameters is linear in the width.
            a_unit = reference - parameters_of(pathways[0], config, width - 1) if width > 1 else reference
            narrower = width - round(extra / a_unit)
            left = parameters_of(pathway, config, narrower) - reference if narrower >= 1 else extra
            if narrower < 1 or abs(left) > TOLERANCE * reference:
                raise ConfigurationError(
                    f"operation {pathway.label} has {extra:+,} parameters beside the {reference:,} of softmax, and no width of "
                    f"the feed-forward layer below {width} brings them within {100 * TOLERANCE:.1f} %; compare it at "
                    "another scale"
                )
            widths[pathway.label] = narrower
    return widths


def parameters_of(pathway: Pathway, config: PretrainingConfig, width: int) -> int:
    """Learned numbers of the model with an operation and a width, tied ones counted once; nothing is allocated."""
    fields: dict[str, Any] = config.model.model_dump()
    fields |= {"operation": pathway.operation(config.model.max_position_embeddings)}
    fields |= {"intermediate_size": width, "vocab_size": config.data.vocab_size}
    with torch.device("meta"):
        model = SinkLM(SinkLMConfig.from_architecture(Architecture.parse(fields)))
    return sum(parameter.numel() for parameter in model.parameters())


FACTORS: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Learning rates that are tried, over that of the scale."""

SELECTION_SEEDS: Mapping[Scale, tuple[int, ...]] = {scale: (1000, 1001) if scale == "tiny" else (1000,) for scale in SCALES}
"""Seeds on which a rate is chosen; none of them is evaluated."""

READ_OUTS = ("carried", "norms", "window", "int8")

SECONDS_OF_READING = 4.0
"""Of one core: all read-outs of one tiny model."""

Losses = Mapping[float, Mapping[int, float | None]]
"""Factor to seed to held-out loss in nats, ``None`` for a training that diverged; one that failed is absent."""


@dataclasses.dataclass(frozen=True)
class Design:
    """What is compared: the reference first, with widths of :func:`~sinklab_claims.pathways.runs.matched_widths`.

    ``rate`` is one learning rate for all, over that of the scale; ``None`` for a search that gives each operation its own.
    """

    pathways: Sequence[Pathway]
    widths: Mapping[str, int]
    scale: Scale
    base: Base
    seeds: Sequence[int]
    rate: float | None = None

    @property
    def labels(self) -> list[str]:
        """Of the operations."""
        return [pathway.label for pathway in self.pathways]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Numbers by seed, label and metric; rates and the losses behind them by label; names of cells; and what failed."""

    numbers: dict[int, dict[str, dict[str, float]]]
    rates: dict[str, float | None]
    losses: dict[str, Losses]
    cells: dict[str, dict[str, str]]
    errors: list[str]


def cells_of(design: Design, seeds: Sequence[int], factors: Mapping[str, float]) -> dict[tuple[str, int], Cell]:
    """Label and seed to the training at the multiple of the scale's rate in ``factors``."""

    def variant(pathway: Pathway) -> Variant:
        def changes(config: PretrainingConfig) -> Changes:
            return {
                "model.operation": pathway.operation(config.model.max_position_embeddings),
                "model.intermediate_size": design.widths[pathway.label],
                "optimizer.learning_rate": Times(factors[pathway.label]),
            }

        return Variant(pathway.label, changes)

    variants = [variant(pathway) for pathway in design.pathways if pathway.label in factors]
    return make_cells(variants, design.scale, seeds, design.base)


def foreseen(design: Design) -> str:
    """What the comparison takes if nothing of it is there yet, in a sentence."""
    first = 0 if design.rate is not None else len(design.pathways) * len(FACTORS) * len(SELECTION_SEEDS[design.scale])
    judged = len(design.pathways) * len(design.seeds)
    words = f"{counted(len(design.pathways), 'operation')}, base {design.base}: {counted(first + judged, 'training')}"
    words += f", {first} of them to choose learning rates" if first else ""
    seconds, on_gpu = SECONDS_OF_A_TRAINING[design.scale], SECONDS_ON_A_GPU.get(design.scale)
    words += f"; {duration((first + judged) * seconds + judged * SECONDS_OF_READING)} of one core"
    words += "" if on_gpu is None else f", or {duration((first + judged) * on_gpu)} of one data-centre GPU"
    return f"{words}; what is there already is not done again"


def best_factor(losses: Losses, seeds: Sequence[int]) -> float | None:
    """The factor of the lowest mean loss, of equal ones the lowest, without those at which a training diverged.

    ``None`` where a training of any is missing, or one diverged at every factor.
    """
    means = {}
    for factor in FACTORS:
        values = [losses.get(factor, {}).get(seed, math.nan) for seed in seeds]
        known = [value for value in values if value is not None]
        if any(map(math.isnan, known)):
            return None
        if len(known) == len(values):
            means[factor] = statistics.fmean(known)
    return min(means, key=lambda factor: (means[factor], factor), default=None)


def train_and_read(
    design: Design, *, store: Path, cache: Path, jobs: int | None, retries: int, ray: str | None, progress: bool
) -> Measured:
    """Choose a learning rate for every operation if none is given, train what is missing in the store, and read it out.

    Arguments and errors: :func:`sinklab_claims.reproduce.store.train_and_read`.
    """
    how: dict[str, Any] = {"cache": cache, "jobs": jobs, "retries": retries, "ray": ray, "progress": progress}
    how |= {"scale": design.scale, "store": store}
    rates: dict[str, float | None] = dict.fromkeys(design.labels, design.rate)
    losses: dict[str, Losses] = {}
    errors: dict[str, str] = {}
    if design.rate is None:
        seeds = SELECTION_SEEDS[design.scale]
        tried = {factor: cells_of(design, seeds, dict.fromkeys(design.labels, factor)) for factor in FACTORS}
        plan, errors = work.train_and_read({cell.name: cell for of in tried.values() for cell in of.values()}, [], **how)
        ended = {name: work.read_numbers(plan.folder / name, ()) for name in plan.cells if plan.outcome(name) is not None}
        losses = {label: _losses(label, tried, ended) for label in design.labels}
        rates = {label: best_factor(of, seeds) for label, of in losses.items()}
    cells = cells_of(design, design.seeds, {label: rate for label, rate in rates.items() if rate is not None})
    read = [(cell.name, read_out) for cell in cells.values() for read_out in READ_OUTS]
    plan, later = work.train_and_read({cell.name: cell for cell in cells.values()}, read, **how)
    numbers: dict[int, dict[str, dict[str, float]]] = {seed: {} for seed in design.seeds}
    names: dict[str, dict[str, str]] = {}
    for (label, seed), cell in cells.items():
        names.setdefault(label, {})[str(seed)] = cell.name
        if plan.outcome(cell.name) is not None:
            found = work.read_numbers(plan.folder / cell.name, READ_OUTS)
            numbers[seed][label] = {name: value for name, value in found.items() if math.isfinite(value)}
    failed = [f"{name}: {why}" for name, why in (errors | later).items()]
    failed += [
        f"{label}: no learning rate is chosen, since trainings are missing, or diverged at every one; run it again"
        for label, rate in rates.items()
        if rate is None
    ]
    return Measured(numbers, rates, losses, names, failed)


def _losses(
    label: str, tried: Mapping[float, Mapping[tuple[str, int], Cell]], ended: Mapping[str, Mapping[str, float]]
) -> Losses:
    losses: dict[float, dict[int, float | None]] = {factor: {} for factor in tried}
    for factor, cells in tried.items():
        for (of_label, seed), cell in cells.items():
            numbers = ended.get(cell.name, {}) if of_label == label else {}
            if numbers.get("diverged"):
                losses[factor][seed] = None
            elif math.isfinite(loss := numbers.get("held_out_loss", math.nan)):
                losses[factor][seed] = loss
    return losses
