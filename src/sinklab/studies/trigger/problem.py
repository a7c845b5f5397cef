"""The trigger task as it is trained: the model, the problem and its stop rule; and what no choice of maps can do."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from sinklab.attention.operation import HeadShape, Inputs, Operation, bind, state_of
from sinklab.attention.paths.table import compute
from sinklab.errors import ConfigurationError
from sinklab.studies.theory.trigger_bounds import Target, TriggerBatch, trigger_batch

INITIAL_STD = 0.02
"""Standard deviation of all maps at the start, as released; parameters of an operation start as the operation says."""


class TriggerAttention(nn.Module):
    """Causal heads of the full ``width``: maps without bias, scores that are not divided by anything."""

    def __init__(self, width: int, heads: int, operation: Operation) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, heads * width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(heads * width, width, bias=False)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=INITIAL_STD)
        self.operation: Operation
        bind(self, operation, HeadShape(heads, heads, width, width, width))

    def forward(self, inputs: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Outputs ``(batch, length, width)``; where asked for, weights ``(batch, heads, length, length)``, which costs time."""
        queries, keys, values = self.projected(inputs)
        state = state_of(self, self.operation, inputs)
        call = Inputs(queries, keys, values, visible=None, causal=True, scaling=1.0, state=state)
        outputs, weights = compute(self.operation, call, need_weights=need_weights)
        return self.o_proj(outputs.transpose(1, 2).flatten(2)), weights

    def null_mass(self, inputs: Tensor) -> Tensor | None:
        """Null mass, ``(batch, heads, length)``, or ``None`` where the operation does not define one."""
        operation, state = self.operation, state_of(self, self.operation, inputs)
        queries, keys, _ = self.projected(inputs)
        queries, keys = operation.features(queries, keys, state)
        return operation.null_mass(queries @ keys.mT, causal(inputs), operation.null_scores(queries, 1.0, state))

    def value_output(self) -> Tensor:
        """``W_O W_V`` of every head, ``(heads, width, width)``, with ``output = Σ_k weight_k · W_O W_V x_k``."""
        like = self.o_proj.weight.new_ones(())
        values = self.v_proj(torch.eye(self.width).to(like)).unflatten(-1, (self.heads, self.width))  # [x, h, v]
        own = torch.eye(self.heads).to(like)[:, None, :, None] * values  # [h, x, h, v]: the other heads at 0
        return self.o_proj(own.flatten(2)).mT

    def projected(self, inputs: Tensor) -> Iterator[Tensor]:
        """Queries, keys and values, each ``(batch, heads, length, width)``."""
        split = (*inputs.shape[:-1], self.heads, self.width)
        return (linear(inputs).view(split).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj))


class TriggerModel(nn.Module):
    """The two models of Ran-Milo 2026 (arXiv 2603.11487), as released: no feed-forward, no norm, no positions.

    One layer with one head stands alone: its output is the answer. With more of either there is a residual connection round
    every layer, and the answer is the input plus the update. ``front`` are learned tokens that the operation asks for,
    ``(count, width)``, which come before all others and are not part of the output."""

    def __init__(self, operation: Operation, layers: int = 1, heads: int = 1, width: int = 16) -> None:
        super().__init__()
        self.operation, self.residual = operation, layers > 1 or heads > 1
        self.front = nn.Parameter(torch.normal(0.0, INITIAL_STD, (operation.tokens_in_front, width)))
        self.layers = nn.ModuleList(TriggerAttention(width, heads, operation) for _ in range(layers))

    @property
    def attention(self) -> Sequence[TriggerAttention]:
        """The layers."""
        return cast("Sequence[TriggerAttention]", self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Answers ``(batch, length, width)``; attention takes the fastest path that the operation has."""
        states = self.begin(inputs)
        for layer in self.attention:
            update, _ = layer(states)
            states = states + update if self.residual else update
        return states[:, len(self.front) :]

    def with_weights(self, inputs: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """Answers, and per layer the weights ``(batch, heads, front + length, front + length)`` and the null mass ``(batch,
        heads, length)``, ``None`` where the operation does not define one."""
        states, weights, masses = self.begin(inputs), [], []
        for layer in self.attention:
            update, layer_weights = layer(states, need_weights=True)
            mass = layer.null_mass(states)
            masses.append(None if mass is None else mass[..., len(self.front) :])
            weights.append(layer_weights)
            states = states + update if self.residual else update
        return states[:, len(self.front) :], weights, masses

    def begin(self, inputs: Tensor) -> Tensor:
        """The tokens, with those in front."""
        return torch.cat((self.front.expand(len(inputs), -1, -1), inputs), dim=1) if len(self.front) else inputs


def causal(inputs: Tensor) -> Tensor:
    """Boolean ``(length, length)``: every token sees itself and those before it."""
    return torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool, device=inputs.device).tril()


TRIALS = 64
ROUNDING = 1e-9
"""Of float64 weights; what is compared is computed in a few steps."""


def obstacle(operation: Operation, problem: TriggerProblem) -> tuple[str, float] | None:
    """Why no maps of one layer solve the task with this operation, and the largest error that all leave; or ``None``, which
    says that there is no proof, not that there are such maps. The error is a supremum over the sequences of the task."""
    if problem.layers > 1 or not linear_in_values(operation):
        return None
    count = operation.tokens_in_front + (3 if problem.bos else 2)
    quotient = divisor_quotient(operation, count)
    if quotient is not None:
        including = problem.target == "including"
        first, second = (2.0, 4 / 3) if including else (2.0 * 2, 2.0)
        error = abs(second * quotient - first) / (2 * quotient + 4)
        if error > problem.tolerance:
            wanted = "i - 1" if including else "i - 2"
            return (
                f"each weight depends on its own score, and none is divided by {wanted} of {'i' if problem.bos else 'i + 1'} "
                f"visible keys, so that no mean over {wanted} tokens comes out",
                error,
            )
    alone = problem.heads == 1 and not operation.tokens_in_front
    error = 0.25 if problem.target == "including" else 0.5
    without_room = not problem.bos and alone and type(operation).gain is Operation.gain and error > problem.tolerance
    if without_room and full_rows(operation):
        return "every row of weights sums to one, and without BOS there is no token that could carry nothing", error
    return None


def divisor_quotient(operation: Operation, count: int) -> float | None:
    """``d(count + 1) / d(count)`` where a weight is ``φ(score) / d(visible keys)``, tried on random rows; else ``None``."""
    generator = torch.Generator().manual_seed(0)
    rows, others = (3 * torch.randn(TRIALS, 1, 1, count + 1, generator=generator, dtype=torch.float64) for _ in range(2))
    others[..., 0] = rows[..., 0]
    of_rows, of_others = (operation.weights(scores, None) for scores in (rows, others))
    of_fewer = operation.weights(rows[..., :count], None)
    if (of_rows[..., 0] - of_others[..., 0]).abs().max() > ROUNDING:
        return None
    more, fewer = of_rows[..., :count], of_fewer
    if not bool(((more == 0) == (fewer == 0)).all()) or not bool((more != 0).any()):
        return None
    quotients = (fewer / more)[more != 0]
    quotient = float(quotients.median())
    return quotient if bool(((quotients / quotient - 1).abs() < ROUNDING).all()) else None


def full_rows(operation: Operation) -> bool:
    """Whether weights are at least 0 and every row sums to one; tried on random rows, in float64."""
    scores = 3 * torch.randn(TRIALS, 1, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = operation.weights(scores, None)
    return bool((weights >= 0).all()) and bool(((weights.sum(-1) - 1).abs() < ROUNDING).all())


def linear_in_values(operation: Operation) -> bool:
    """Whether head outputs are weights times values, perhaps with a bias and a gate that the query sets, and with no null."""
    parts = ("null_scores", "null_value", "finish", "head_outputs")
    return all(getattr(type(operation), part) is getattr(Operation, part) for part in parts)


RATE_ALONE, RATE_RESIDUAL = 1e-3, 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriggerProblem:
    """The trigger task of ``trigger()``, whose arguments the fields are; by default as released."""

    layers: int = 1
    heads: int = 1
    length: int = 16
    width: int = 16
    position: int = 7
    target: Target = "including"
    bos: bool = True
    batch: int = 128
    learning_rate: float | None = None
    cap: int = 50_000
    tolerance: float = 5e-3

    @property
    def residual(self) -> bool:
        """Whether the model has residual connections."""
        return self.layers > 1 or self.heads > 1

    @property
    def rate(self) -> float:
        """The learning rate that is used."""
        return (RATE_RESIDUAL if self.residual else RATE_ALONE) if self.learning_rate is None else self.learning_rate

    def draw(self, batch: int, generator: torch.Generator, position: int | None = None) -> TriggerBatch:
        """Samples; the trigger at ``position``, or anywhere."""
        drawn = trigger_batch(batch, self.length, self.width, generator, position, self.target)
        return drawn if self.bos else TriggerBatch(drawn.inputs[:, 1:], drawn.targets[:, 1:], drawn.positions - 1)

    def build(self, operation: Operation, seed: int) -> TriggerModel:
        """The model with which ``seed`` starts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TriggerModel(operation, self.layers, self.heads, self.width)

    def check(self) -> None:
        """Raise before any training what would be wrong in it: a field out of its range."""
        for name in ("layers", "heads", "batch", "cap"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"trigger task: {name} {getattr(self, name)} must be at least 1")
        self.draw(1, torch.Generator(), self.position)
        for name, number in (("learning rate", self.rate), ("tolerance", self.tolerance)):
            if not (number > 0 and math.isfinite(number)):
                raise ConfigurationError(f"trigger task: {name} {number} must be a positive number")

    def answers(self, batch: TriggerBatch) -> Tensor:
        """What the model is to give: the targets, on top of the inputs where there are residual connections."""
        return batch.inputs + batch.targets if self.residual else batch.targets


Outcome = Literal["solved", "cap", "diverged"]
"""``solved``: the stop rule was met; ``cap``: not within the cap of steps; ``diverged``: a loss that is not finite."""

BETAS = (0.9, 0.95)
REPORT_EVERY = 100
"""Steps between two reports of progress."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A trained model, in evaluation mode; updates that were made, and why no more; largest absolute error on the last
    training batch, not finite where it diverged; and CPU seconds."""

    model: TriggerModel
    steps: int
    outcome: Outcome
    error: float
    seconds: float


def train(
    operation: Operation, problem: TriggerProblem, seed: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Training:
    """Train one model: mean squared error, Adam, fresh samples every step. The same seed gives the same model; ``progress`` is
    called with steps done and the cap.

    Raises:
        ConfigurationError: a field of the problem out of its range.
    """
    problem.check()
    model, begun = problem.build(operation, seed), time.process_time()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.rate, betas=BETAS, fused=True)
    steps = 0
    while True:
        batch = problem.draw(problem.batch, generator)
        outputs = model(batch.inputs)
        difference = outputs.detach() - problem.answers(batch)
        error = float(difference.abs().max())
        if not math.isfinite(error) or error < problem.tolerance or steps == problem.cap:
            break
        optimizer.zero_grad(set_to_none=True)
        # The gradient of the mean square, without the loss itself, which is not used.
        outputs.backward(2 / difference.numel() * difference)
        optimizer.step()
        steps += 1
        if steps % REPORT_EVERY == 0:
            progress(steps, problem.cap)
    outcome: Outcome = "diverged" if not math.isfinite(error) else "solved" if error < problem.tolerance else "cap"
    return Training(model.eval(), steps, outcome, error, time.process_time() - begun)
