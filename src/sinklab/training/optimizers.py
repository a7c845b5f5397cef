"""Optimisers and schedules of the learning rate, by the names that a configuration has."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError
from sinklab.training.config import OptimizerConfig, ScheduleConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimiser of the configuration over the trainable parameters of a model.

    Raises:
        ConfigurationError: muon, and the model has no matrices inside its blocks.
    """
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "muon":
        return MuonWithAdamW(model, config)
    groups = _groups(_trainable(model), _matrices(model), config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, weight_decay=decay, fused=True)
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=rate, betas=config.betas, eps=config.eps, weight_decay=decay, fused=True)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=rate, eps=config.eps, momentum=config.momentum, weight_decay=decay)
    if config.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, weight_decay=decay)


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al. 2024) for the linear maps inside the blocks, fused AdamW for embeddings, norms, head and the rest.

    One optimiser to the outside: one list of parameter groups (each says by ``method`` whose it is), one state, one
    ``state_dict`` in the usual form. The updates are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``.

    Raises:
        ConfigurationError: no linear map inside a block.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        inner = _linear_inside(model)
        matrices = [parameter for parameter in _trainable(model) if parameter in inner]
        rest = [parameter for parameter in _trainable(model) if parameter not in inner]
        if not matrices:
            raise ConfigurationError(f"optimizer muon: {type(model).__name__} has no linear maps inside its blocks; use adamw")
        muon = torch.optim.Muon(
            matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay, momentum=config.momentum
        )
        adamw = torch.optim.AdamW(
            _groups(rest, _matrices(model), config),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._parts: dict[str, Optimizer] = {"muon": muon, "adamw": adamw}
        groups: list[dict[str, object]] = [
            {**group, "method": method} for method, part in self._parts.items() for group in part.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for method, part in self._parts.items():
            # Loading a state dict puts new groups and a new state in place of ours, so they are handed over at every step.
            part.param_groups = [group for group in self.param_groups if group["method"] == method]
            part.state = self.state
            part.step()
        return loss


def _trainable(model: nn.Module) -> list[Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _groups(parameters: list[Parameter], matrices: set[Parameter], config: OptimizerConfig) -> list[dict[str, object]]:
    """One group, or one that is decayed and one that is not."""
    if config.decay == "all":
        return [{"params": parameters}]
    decayed = [parameter for parameter in parameters if parameter in matrices]
    spared = [parameter for parameter in parameters if parameter not in matrices]
    groups: list[dict[str, object]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _matrices(model: nn.Module) -> set[Parameter]:
    """Weights of linear maps and of the token embedding."""
    found = {_stored(module) for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    front = getattr(model, "front_tokens", None)
    return found if front is None else found - {_stored(front)}


def _linear_inside(model: nn.Module) -> set[Parameter]:
    """Weights of the linear maps that are neither the embedding nor the head."""
    outer: set[Parameter] = set()
    if isinstance(model, PreTrainedModel):
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        outer = {end.weight for end in ends if end is not None}
    return {_stored(module) for module in model.modules() if isinstance(module, nn.Linear)} - outer


def _stored(module: nn.Linear | nn.Embedding) -> Parameter:
    """The parameter behind the weight, also where an operation has reparametrised it."""
    name = "parametrizations.weight.original" if parametrize.is_parametrized(module, "weight") else "weight"
    return module.get_parameter(name)


def learning_rate_factor(step: int, schedule: ScheduleConfig, steps: int) -> float:
    """Factor on the peak learning rate at an optimiser step, in [0, 1].

    All three rise linearly from 0, which the first step has, over ``warmup_steps``. Then ``constant`` stays at 1; ``cosine``
    falls along half a cosine towards ``min_ratio``; ``warmup_stable_decay`` stays at 1 and falls linearly towards ``min_ratio``
    over the last ``decay_steps`` (Hägele et al. 2024, arXiv 2405.18392). A step behind the last one would have ``min_ratio``:
    of four steps of decay to 0.1 the last has 0.325.

    Args:
        step: 0-based number of the step.
        steps: steps of the whole run.
    """
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    falling = schedule.decay_steps if schedule.name == "warmup_stable_decay" else steps - schedule.warmup_steps
    done = min(max((step - (steps - falling)) / max(falling, 1), 0.0), 1.0)
    height = 1.0 - done if schedule.name == "warmup_stable_decay" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * height


def make_schedule(optimizer: Optimizer, schedule: ScheduleConfig, steps: int) -> LambdaLR:
    """The scheduler that multiplies every parameter group's own rate by :func:`learning_rate_factor`."""
    return LambdaLR(optimizer, functools.partial(learning_rate_factor, schedule=schedule, steps=steps))
