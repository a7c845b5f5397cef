"""The operations that are compared, each as its paper proposed it, in models with as many parameters as softmax's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import operations
from sinklab.training.config import PretrainingConfig
from sinklab_claims.pathways.judging import REFERENCE

__all__ = ["DEFAULT", "PUBLISHED", "TOLERANCE", "Pathway", "matched_widths", "parameters_of", "pathways_of"]


class Published(NamedTuple):
    """How an operation is used if nothing else is said: how a head does nothing, where that is from, and the settings that are
    not the operation's defaults, by the tokens of the context."""

    no_op: str
    source: str
    settings: Callable[[int], Mapping[str, object]] | None = None


PUBLISHED: Mapping[str, Published] = {
    "softmax": Published("a sink: a token whose value is small", "the reference"),
    "softmax_plus_one": Published("a 1 in the denominator", "Miller 2023; Zero Sink of Xiao et al. 2023 (arXiv 2309.17453)"),
    "sink_logit": Published("a learned score for nothing", "OpenAI 2025, gpt-oss (arXiv 2508.10925); starts at 0"),
    "key_bias": Published("a learned key with the value 0", "Gu et al. 2024 (arXiv 2410.10781), K biases; one a head"),
    "clipped_softmax": Published(
        "small weights are cut to 0",
        "Bondarenko et al. 2023 (arXiv 2306.12929); gamma = -3.2/T for a context of T tokens, that of BERT-base at T = 128",
        lambda context: {"gamma": -3.2 / context},
    ),
    "gated": Published("a gate on each coordinate of the output", "Qiu et al. 2025 (arXiv 2505.06708), element-wise"),
    "gated_heads": Published(
        "a gate on each head",
        "Bondarenko et al. 2023 (arXiv 2306.12929); linear, a quarter open at the start, as for OPT",
        lambda context: {"opening": 0.25},
    ),
    "sigmoid": Published("every weight near 0", "Gu et al. 2024 (arXiv 2410.10781); no bias, no normalisation"),
    "relu": Published(
        "every weight exactly 0", "Ran-Milo 2026 (arXiv 2603.11487); divided by i - 1", lambda context: {"uncounted": 1}
    ),
    "softpick": Published("every weight exactly 0", "Zuhri et al. 2025 (arXiv 2504.20966)"),
    "sigma_reparam": Published("none; scores grow slowly", "Zhai et al. 2023 (arXiv 2303.06296)"),
}
"""Operation to its published use. Normalised sigmoid, the control of Gu et al., is named with its setting."""

DEFAULT: Sequence[Mapping[str, object]] = tuple(
    {"name": name, **extra} for name in PUBLISHED for extra in ([{}, {"normalize": True}] if name == "sigmoid" else [{}])
)
"""What is compared if nothing is chosen."""


@dataclasses.dataclass(frozen=True)
class Pathway:
    """One row of the comparison: the ``name`` of an operation and the settings asked for; without, the published ones hold."""

    label: str
    fields: Mapping[str, object]

    @property
    def published(self) -> Published | None:
        """The published use, if it is that."""
        return PUBLISHED.get(str(self.fields["name"])) if len(self.fields) == 1 else None

    def operation(self, context: int) -> dict[str, object]:
        """``name`` and settings for rows of so many tokens, worded as claims do: those at their defaults are left out."""
        settings = self.published.settings if self.published else None
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
