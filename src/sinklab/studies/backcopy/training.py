"""Training on the bigram-backcopy task: one model, one seed, with evaluations on the way."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM
from sinklab.models.losses import cross_entropies
from sinklab.studies.backcopy.evaluation import BackcopyNumbers, evaluate
from sinklab.studies.backcopy.model import check_layers, make_model
from sinklab.studies.backcopy.problem import BackcopyProblem

__all__ = ["SCALES", "BackcopySettings", "BackcopyTraining", "train"]

SCALES: dict[str, dict[str, Any]] = {
    "small": {},
    "paper": {
        "letters": False,
        "characters": 64,
        "length": 256,
        "width": 256,
        "batch": 512,
        "steps": 10_000,
        "adamw_rate": 3e-4,
        "relu_rate": 3e-3,
        "sgd_rate": 0.03,
    },
}
"""Fields of :class:`BackcopySettings` by name: what trains in minutes on one core, and the release: about a day a layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackcopySettings:
    """What is trained, besides operation and seed. The defaults are small; :data:`SCALES` has the paper's sizes.

    Attributes:
        layers, heads: shape of the model; 1 to 3 layers of one head in the paper.
        no_attention, no_feed_forward: 0-based layers without that sublayer.
        optimizer: ``adamw`` (betas 0.9 and 0.99) or ``sgd`` (momentum 0.9); both with weight decay 1e-4.
        learning_rate: takes the place of the next three.
        adamw_rate, relu_rate, sgd_rate: of AdamW, of AdamW where attention is ReLU, and of SGD. The paper's are 3e-4, 3e-3 and
            0.03; small models get the same rate for both operations, so that it cannot be what tells them apart.
        letters: read text as :func:`~sinklab.studies.backcopy.chain.only_letters` does; else as it stands, like the paper.
        characters, triggers: size of the chain, and how many of the most frequent characters are triggers.
        length, width, batch, steps: tokens of a sample, width of the model, samples a step, and updates.
        evaluations: how often the model is evaluated on the way, the start and the end included; at least 2.
    """

    layers: int = 1
    heads: int = 1
    no_attention: tuple[int, ...] = ()
    no_feed_forward: tuple[int, ...] = ()
    optimizer: str = "adamw"
    learning_rate: float | None = None
    adamw_rate: float = 1e-3
    relu_rate: float = 1e-3
    sgd_rate: float = 0.03
    letters: bool = True
    characters: int = 27
    triggers: int = 3
    length: int = 64
    width: int = 64
    batch: int = 32
    steps: int = 4000
    evaluations: int = 21

    def rate(self, operation: Operation) -> float:
        """The learning rate that is used."""
        if self.learning_rate is not None:
            return self.learning_rate
        return self.sgd_rate if self.optimizer == "sgd" else self.relu_rate if operation.name == "relu" else self.adamw_rate

    def check(self) -> None:
        """Raise before any training what would be wrong in it.

        Raises:
            ConfigurationError: a field out of its range, or layers that are not there.
        """
        least = {"layers": 1, "heads": 1, "batch": 1, "steps": 1, "width": 1, "evaluations": 2}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigurationError(f"bigram-backcopy: {name} {getattr(self, name)} must be at least {smallest}")
        check_layers(self.layers, self.no_attention, self.no_feed_forward)
        if self.optimizer not in ("adamw", "sgd"):
            raise ConfigurationError(f"bigram-backcopy: optimizer {self.optimizer!r} must be adamw or sgd")
        for name in ("learning_rate", "adamw_rate", "relu_rate", "sgd_rate"):
            rate = getattr(self, name)
            if rate is not None and not (rate > 0 and math.isfinite(rate)):
                raise ConfigurationError(f"bigram-backcopy: {name.replace('_', ' ')} {rate} must be a positive number")

    @property
    def evaluated_at(self) -> list[int]:
        """Steps after which the model is evaluated: 0, the last, and between them evenly on the scale of square roots.

        What happens happens early, and growth that goes on must be seen too.
        """
        count = self.evaluations - 1
        return sorted({round(self.steps * (number / count) ** 2) for number in range(self.evaluations)})

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True, eq=False)
class BackcopyTraining:
    """A trained model and how it came about.

    Attributes:
        model: in evaluation mode.
        losses: training loss of every step, nats; shorter than ``steps`` where it diverged.
        numbers: step to what was measured then.
        diverged: the loss became something that is not finite, and training stopped there.
        seconds: CPU time.
    """

    model: SinkLM
    losses: list[float]
    numbers: dict[int, BackcopyNumbers]
    diverged: bool
    seconds: float


def train(
    operation: Operation,
    settings: BackcopySettings,
    problem: BackcopyProblem,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    samples: int = 32,
) -> BackcopyTraining:
    """Train one model on fresh samples at every step. The same seed gives the same model on the same machine.

    Args:
        progress: called with steps done and their number.
        samples: that an evaluation on the way is made of.

    Raises:
        ConfigurationError: a field of the settings out of its range.
    """
    settings.check()
    begun = time.process_time()
    model = make_model(
        operation,
        problem.chain.vocab_size,
        problem.length,
        width=settings.width,
        layers=settings.layers,
        heads=settings.heads,
        no_attention=settings.no_attention,
        no_feed_forward=settings.no_feed_forward,
        seed=seed,
    ).train()
    optimizer = make_optimizer(model, settings, operation)
    generator = torch.Generator().manual_seed(seed)
    evaluated_at, losses, numbers, diverged = set(settings.evaluated_at), [], {}, False
    for step in range(settings.steps + 1):
        if step in evaluated_at:
            numbers[step] = evaluate(model, problem, samples)
            progress(step, settings.steps)
        if step == settings.steps:
            break
        tokens = problem.draw(settings.batch, generator)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = cross_entropies(logits, tokens[:, 1:]).mean()
        if not bool(torch.isfinite(loss)):
            diverged = True
            break
        losses.append(float(loss.detach()))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return BackcopyTraining(model.eval(), losses, numbers, diverged, time.process_time() - begun)


def make_optimizer(model: nn.Module, settings: BackcopySettings, operation: Operation) -> torch.optim.Optimizer:
    """The optimiser of the release, one learning rate for all parameters."""
    rate = settings.rate(operation)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
