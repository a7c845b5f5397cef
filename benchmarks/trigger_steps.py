"""Steps per second on the trigger task, against a loop that draws its sequences one by one; and how long whole runs take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch
from _timing import Bar, best_times, exit_with
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sinklab.operations.softmax import Softmax
from sinklab.studies.trigger.problem import TriggerProblem, train

LENGTH = WIDTH = 16
BATCH, STEPS, ROUNDS = 128, 60, 6


class OneByOne(IterableDataset[tuple[Tensor, Tensor]]):
    """The task as its description reads: one sequence, one target, and again; a loader puts them together."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            inputs, targets = torch.zeros(LENGTH, WIDTH), torch.zeros(LENGTH, WIDTH)
            at = random.randint(2, LENGTH - 1)
            inputs[0, 0] = 1
            inputs[1:, 2:-1].uniform_(-1, 1)
            inputs[1:, -1] = 1
            inputs[at, -1], inputs[at, 1] = 0, 1
            targets[at] = inputs[1 : at + 1].mean(0)
            yield inputs, targets


class Plain(nn.Module):
    """One softmax head, or layers of them with residual connections, written out."""

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.heads, self.residual = heads, layers > 1 or heads > 1
        shapes = [(WIDTH, heads * WIDTH)] * 3 + [(heads * WIDTH, WIDTH)]
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, states: Tensor) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
        for query, key, value, output in self.layers:
            split = [linear(states).view(-1, LENGTH, self.heads, WIDTH).transpose(1, 2) for linear in (query, key, value)]
            scores = (split[0] @ split[1].transpose(2, 3)).masked_fill(hidden, float("-inf"))
            update = output((scores.softmax(-1) @ split[2]).transpose(1, 2).reshape(-1, LENGTH, self.heads * WIDTH))
            states = states + update if self.residual else update
        return states


def our_run(layers: int, heads: int) -> Callable[[], object]:
    """Some steps, with all that comes before and after them."""
    problem = TriggerProblem(layers=layers, heads=heads, batch=BATCH, cap=STEPS)
    return lambda: train(Softmax(), problem, 0)


def plain_run(layers: int, heads: int) -> Callable[[], object]:
    """The same number of steps in a loop that somebody might write in an afternoon."""

    def run() -> None:
        model = Plain(layers, heads)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if not model.residual else 1e-4, betas=(0.9, 0.95))
        loader = iter(DataLoader(OneByOne(), batch_size=BATCH))
        for _ in range(STEPS):
            inputs, targets = next(loader)
            outputs = model(inputs)
            wanted = inputs + targets if model.residual else targets
            loss = nn.functional.mse_loss(outputs, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (outputs - wanted).abs().max().item() < 5e-3:
                return

    return run


def to_the_end(problem: TriggerProblem, limit: float) -> Bar:
    """CPU time of a whole run with seed 0."""
    begun = time.process_time()
    trained = train(Softmax(), problem, 0)
    taken = time.process_time() - begun
    assert trained.outcome == "solved"
    what = f"trigger task, softmax {problem.layers} × {problem.heads}, seed 0, to the stop rule: {trained.steps} steps"
    return Bar("trigger", what, taken, "<=", limit, "s")


def ratio(layers: int, heads: int, limit: float) -> Bar:
    """Steps per second of our loop over those of the plain one, both with a softmax model of this shape."""
    times = best_times({"ours": our_run(layers, heads), "plain": plain_run(layers, heads)}, ROUNDS)
    what = f"trigger task, softmax {layers} × {heads}: steps per second ÷ those of a loop that draws sequences one by one"
    return Bar("trigger", what, times["plain"] / times["ours"], ">=", limit)


def measure() -> list[Bar]:
    torch.set_num_threads(1)
    return [
        ratio(1, 1, 3.0),
        ratio(2, 2, 3.0),
        # Drawing is a fifth of the plain step here, and folding leaves two thirds of the products: 3 is out of reach.
        ratio(4, 4, 2.0),
        to_the_end(TriggerProblem(), 10.0),
        to_the_end(TriggerProblem(layers=2, heads=2), 120.0),
    ]


if __name__ == "__main__":
    exit_with(measure)
