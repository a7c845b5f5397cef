"""Matching parameters: an operation that brings some of its own gets a feed-forward layer that is as much narrower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.studies.pathways.operations import Pathway
from sinklab.training.config import PretrainingConfig

__all__ = ["TOLERANCE", "matched_widths", "parameters_of"]

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
    fields |= {
        "operation": pathway.operation(config.model.max_position_embeddings),
        "intermediate_size": width,
        "vocab_size": config.data.vocab_size,
    }
    with torch.device("meta"):
        model = SinkLM(SinkLMConfig.from_architecture(Architecture.parse(fields)))
    return sum(parameter.numel() for parameter in model.parameters())
