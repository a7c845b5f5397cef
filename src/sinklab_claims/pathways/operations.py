"""The operations that are compared, each as its paper proposed it, in models with as many parameters as softmax's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import operations
from sinklab.training.config import PretrainingConfig
from sinklab_claims.pathways.judging import REFERENCE

__all__ = ["DEFAULT", "PUBLISHED", "TOLERANCE", "Pathway", "matched_widths", "parameters_of", "pathways_of"]


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
        if (other := next((other for other in pathways if all_settings(other) == all_settings(pathway)), None)) is not None:
            also = "" if other.label == pathway.label else f", which is {other.label},"
            raise ConfigurationError(f"the comparison has {pathway.label}{also} twice; name it once")
        pathways.append(pathway)
    return pathways


def all_settings(pathway: Pathway) -> list[dict[str, object]]:
    """All settings of the operation, those that were not asked for too; for two contexts, on which published ones rest."""
    return [operations.make(pathway.operation(context)).to_dict() for context in (64, 128)]


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
