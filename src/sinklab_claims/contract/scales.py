"""The scales at which claims are run: a configuration for each base, from seconds on one core to the papers' own set-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sinklab.errors import ConfigurationError
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.recipes.emergence import emergence
from sinklab.recipes.emergence_medium import emergence_medium
from sinklab.recipes.gu2024_1b import gu2024_1b
from sinklab.recipes.gu2024_60m import gu2024_60m
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import Base, Scale, bases_at

__all__ = ["CONFIGS", "SECONDS_OF_A_TRAINING", "SECONDS_ON_A_GPU", "base_called", "base_config"]


def _without_bos(base: PretrainingConfig) -> PretrainingConfig:
    """Learned positions and a random token at the first of them in training: the position says all and the token nothing."""
    return base.model_copy(
        update={
            "name": f"{base.name}_no_bos",
            "data": base.data.model_copy(update={"bos": "none", "random_positions": (0, 1)}),
            "model": base.model.model_copy(update={"position": {"name": "learned"}}),
        }
    )


CONFIGS: Mapping[Scale, Mapping[Base, Callable[[], PretrainingConfig]]] = {
    "tiny": {"bos": backcopy_tiny, "no-bos": lambda: _without_bos(backcopy_tiny())},
    "small": {"bos": emergence, "no-bos": lambda: _without_bos(emergence())},
    "medium": {"bos": emergence_medium, "no-bos": lambda: _without_bos(emergence_medium())},
    "60m": {"no-bos": gu2024_60m},
    "1b": {"no-bos": gu2024_1b},
}

SECONDS_OF_A_TRAINING: Mapping[Scale, float] = {"tiny": 17.0, "small": 560.0, "medium": 29_000.0}
"""Of one core, in round numbers. Nobody trained ``medium`` on one: a token of it takes 26 times as long as one of
``small`` (one core, float32), and there are twice as many. At the other scales it depends on the accelerator."""

SECONDS_ON_A_GPU: Mapping[Scale, float] = {"medium": 60.0}
"""Of one data-centre GPU, in round numbers, where a scale is meant for one."""


def base_config(scale: Scale, base: Base | None = None) -> PretrainingConfig:
    """The configuration in which a variant changes something, anew.

    Args:
        base: one that the scale has; by default its first.
    """
    config = CONFIGS[scale][base or bases_at(scale)[0]]()
    return config.model_copy(update={"training": config.training.model_copy(update={"snapshots": ()})})


def base_called(name: str) -> PretrainingConfig:
    """The base whose configuration has a name, which every variant of it keeps.

    Raises:
        ConfigurationError: no base has.
    """
    known = {config.name: config for bases in CONFIGS.values() for config in (make() for make in bases.values())}
    if name not in known:
        raise ConfigurationError(f"no base of a scale is called {name!r}; bases: {', '.join(known)}")
    return known[name]
