"""Optimisers and schedules: what each parameter gets, against torch's own arithmetic, and rates by hand."""

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab.training.config import OptimizerConfig, ScheduleConfig
from sinklab.training.trainer import make_optimizer, make_schedule


def stepped(model, optimizer, steps: int = 3):
    """Weights after steps on gradients that depend on the weights."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)),
        ("adam", lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1)),
    ],
)
def test_updates_are_those_of_torch(name, reference):
    ours, theirs = make_sinklm(), make_sinklm()
    got = stepped(ours, make_optimizer(ours, OptimizerConfig(name=name, learning_rate=1e-2)))
    expected = stepped(theirs, reference(theirs.parameters()))
    for key in expected:
        # A fused kernel rounds each operation once or never; three steps of 1e-2 keep that far below 1e-6.
        torch.testing.assert_close(got[key], expected[key], rtol=0, atol=1e-6)


def test_rates_by_hand():
    optimizer = make_optimizer(make_sinklm(), OptimizerConfig())

    def factors(steps, **fields):
        (factor,) = make_schedule(optimizer, ScheduleConfig(**fields), steps).lr_lambdas
        return [round(factor(step), 4) for step in range(steps)]

    assert factors(4, name="constant", warmup_steps=2) == [0.0, 0.5, 1.0, 1.0]
    # Half a cosine over six steps: 1, cos² of 15°, 30°, 45°, 60°, 75°; with a floor of a tenth.
    assert factors(6, name="cosine", warmup_steps=0, min_ratio=0.0) == [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    assert factors(3, name="cosine", warmup_steps=1, min_ratio=0.1) == [0.0, 1.0, 0.55]


def test_a_schedule_scales_the_rate():
    optimizer = make_optimizer(make_sinklm(), OptimizerConfig(learning_rate=1e-2))
    schedule = make_schedule(optimizer, ScheduleConfig(name="constant", warmup_steps=2), steps=4)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5e-2]
    assert schedule.state_dict()["last_epoch"] == 1
