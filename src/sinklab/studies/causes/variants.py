"""Variants: what is done to every head, and the controls of equal budget beside each of them."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sinklab.attention.intervention import HeadIntervention
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.mean_head import MeanHead
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.rotate_change import RotateChange
from sinklab.interventions.rotate_head import RotateHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.sinks import Sinks
from sinklab.studies.causes.effects import HeadEdit
from sinklab.studies.causes.samples import Samples

__all__ = ["Budget", "make_variants"]

Budget: TypeAlias = Literal["fast", "full"]


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Controls of each kind."""

    keys: int
    rotated: int
    changes: int


NUMBERS = {"fast": _Numbers(keys=2, rotated=12, changes=2), "full": _Numbers(keys=4, rotated=16, changes=8)}
"""How the real output of a head does among rotated ones is what labels rest on, and the number of these limits how small a
p-value can get: twelve leave eleven degrees of freedom for their spread. Two of the others show a size and no more."""

EARLY = 4
"""Control keys are drawn from the first quarter of the positions, which three quarters of causal queries see."""


def make_variants(sinks: Sinks, samples: Samples, *, budget: Budget = "fast", seed: int = 0) -> list[HeadEdit]:
    """All variants of a measurement, by the names that :func:`~sinklab.studies.causes.labels.label_heads` looks for.

    - ``redirect``, ``hide``, ``zero_value``: with the sink; ``zero``: the whole head.
    - ``hide control K``, ``redirect control K``: the same with one other key, drawn for each text, neither the sink nor a
      secondary one.
    - ``rotated K``: the head's output itself, rotated by a random orthogonal matrix, one for all texts. Norms are kept, and all
      that the output says is lost (:class:`~sinklab.interventions.rotate_head.RotateHead`).
    - ``redirect rotated K``, ``zero_value rotated K``: the very change that these make, rotated in the same way and added to
      the output (:class:`~sinklab.interventions.rotate_change.RotateChange`): what any change of that size costs.
    - in a full budget more of the controls, and ``mean`` and ``resample``.

    Without a sink there are only ``zero``, ``rotated K``, ``zero rotated K``, and in a full budget ``mean`` and ``resample``.

    Args:
        seed: of keys and directions.

    Raises:
        ConfigurationError: an unknown budget, or no key left for controls.
    """
    if budget not in NUMBERS:
        raise ConfigurationError(f"budget {budget!r} must be one of {', '.join(NUMBERS)}")
    numbers = NUMBERS[budget]
    seeds = range(seed * 1000, (seed + 1) * 1000)  # runs with other seeds have other directions
    variants = [HeadEdit("zero", (ZeroHead(),))]
    variants += [HeadEdit(f"rotated {number}", (RotateHead(seed=seeds[number]),)) for number in range(numbers.rotated)]
    changes: dict[str, HeadIntervention] = {"zero": ZeroHead()}
    inputs = samples.inputs
    place = sinks.place_in(inputs.get("input_ids"), inputs.get("attention_mask"))
    if place is not None:
        changes = {"redirect": Redirect(place=place), "zero_value": ZeroValue(place=place)}
        variants += [HeadEdit(name, (change,)) for name, change in changes.items()]
        variants.append(HeadEdit("hide", (HideKey(place=place),)))
        for number, keys in enumerate(_control_keys(sinks, place, len(samples), numbers.keys, seed)):
            variants.append(HeadEdit(f"hide control {number}", (HideKey(place=keys),)))
            variants.append(HeadEdit(f"redirect control {number}", (Redirect(place=keys),)))
    for name, change in changes.items():
        for number in range(numbers.changes):
            variants.append(HeadEdit(f"{name} rotated {number}", (change, RotateChange(seed=seeds[number]))))
    if budget == "full":
        variants += [HeadEdit("mean", (MeanHead(),)), HeadEdit("resample", (ResampleHead(),))]
    return variants


def _control_keys(sinks: Sinks, place: int | Tensor | str, samples: int, number: int, seed: int) -> list[Tensor]:
    """Keys for controls, int64 ``(samples, 1)`` each, a text's keys all different."""
    own = torch.full((samples, 1), -1) if isinstance(place, str) else torch.as_tensor(place).expand(samples, 1)
    early = max(sinks.length // EARLY, number + 1 + len(sinks.secondary))
    generator, drawn = torch.Generator().manual_seed(seed), []
    for sink in own[:, 0].tolist():
        pool = [position for position in range(min(early, sinks.length)) if position not in {sink, *sinks.secondary}]
        if len(pool) < number:
            raise ConfigurationError(
                f"controls need {number} keys besides the sink, and texts of {sinks.length} tokens leave {len(pool)}; "
                "take longer texts"
            )
        drawn.append(torch.tensor(pool)[torch.randperm(len(pool), generator=generator)[:number]])
    return list(torch.stack(drawn).T[..., None])
