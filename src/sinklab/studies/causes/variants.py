"""Variants: what is done to every head, and the controls beside that."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.mean_head import MeanHead
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.rotate_head import RotateHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.sinks import Sinks
from sinklab.studies.causes._runs import lengths
from sinklab.studies.causes.effects import HeadEdit
from sinklab.studies.causes.samples import Samples

__all__ = ["TEXTS", "Budget", "make_variants"]

Budget: TypeAlias = Literal["fast", "full"]


TEXTS: dict[str, int] = {"fast": 64, "full": 384}
"""Texts of each domain, by budget. That something costs is shown by a few dozen; that it costs nothing by some 250 at the least
(:mod:`~sinklab.studies.causes.evidence`), and by more where effects vary."""

KEYS, ROTATED = 2, 4
"""Other keys, and rotated copies, of the full budget."""

EARLY = 4
"""Control keys are drawn from the first quarter of the positions, which three quarters of causal queries see."""


def make_variants(sinks: Sinks, samples: Samples, *, budget: Budget = "fast", seed: int = 0) -> list[HeadEdit]:
    """All variants of a measurement, by the names that :func:`~sinklab.studies.causes.labels.label_heads` looks for.

    - ``redirect``, ``hide``, ``zero_value``: with the sink; ``zero``: the whole head; ``resample``: its output of the next text
      of the same domains, where these have different lengths the next longer one of the batch. On these labels rest.
    - in a full budget also ``mean``; ``redirect control K``, all mass to another key, drawn for each text, neither the sink nor
      a secondary one; and ``rotated K``: the head's output, rotated by a random orthogonal matrix, one for all texts. Norms are
      kept, and all that the output says is lost (:class:`~sinklab.interventions.rotate_head.RotateHead`).

    Without a sink there are only ``zero``, ``resample``, and in a full budget ``mean`` and ``rotated K``.

    Args:
        seed: of keys and directions.

    Raises:
        ConfigurationError: an unknown budget, or no key left for controls.
    """
    if budget not in TEXTS:
        raise ConfigurationError(f"budget {budget!r} must be one of {', '.join(TEXTS)}")
    variants = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
    inputs = samples.inputs
    place = sinks.place_in(inputs.get("input_ids"), inputs.get("attention_mask"))
    if place is not None:
        variants += [
            HeadEdit("redirect", (Redirect(place=place),)),
            HeadEdit("hide", (HideKey(place=place),)),
            HeadEdit("zero_value", (ZeroValue(place=place),)),
        ]
    if budget == "full":
        variants.append(HeadEdit("mean", (MeanHead(),)))
        seeds = range(seed * 1000, (seed + 1) * 1000)  # runs with other seeds have other directions
        variants += [HeadEdit(f"rotated {number}", (RotateHead(seed=seeds[number]),)) for number in range(ROTATED)]
        if place is not None:
            keys = _control_keys(sinks, place, samples, KEYS, seed)
            variants += [HeadEdit(f"redirect control {number}", (Redirect(place=key),)) for number, key in enumerate(keys)]
    return variants


def _control_keys(sinks: Sinks, place: int | Tensor | str, samples: Samples, number: int, seed: int) -> list[Tensor]:
    """Keys for controls, int64 ``(samples, 1)`` each, none behind the end of its text.

    A text's keys are all different, but those of a text that has fewer keys while others have enough.
    """
    count = len(samples)
    own = torch.full((count, 1), -1) if isinstance(place, str) else torch.as_tensor(place).expand(count, 1)
    tokens = lengths(samples, sinks.length)
    # The longest text is as long as the model was found to see; learned tokens in front are in every text.
    sizes = (tokens + (sinks.length - tokens.max()).clamp_min(0)).clamp_max(sinks.length).tolist()
    generator, drawn, longest = torch.Generator().manual_seed(seed), [], max(sizes)
    for sink, size in zip(own[:, 0].tolist(), sizes, strict=True):
        early = max(size // EARLY, number + 1 + len(sinks.secondary))
        pool = [position for position in range(min(early, size)) if position not in {sink, *sinks.secondary}]
        if size < longest and len(pool) < number:
            pool = pool or [position for position in range(size) if position != sink]
            pool *= number
        if len(pool) < number:
            raise ConfigurationError(
                f"controls need {number} keys besides the sink, and texts of {sinks.length:,} tokens leave {len(pool)}; "
                "take longer texts"
            )
        drawn.append(torch.tensor(pool)[torch.randperm(len(pool), generator=generator)[:number]])
    return list(torch.stack(drawn).T[..., None])
