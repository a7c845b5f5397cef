"""Optimisers and schedules: what each parameter gets, against torch's own arithmetic, and rates by hand."""

import copy

import pytest
import torch
from tests.conftest import make_sinklm
from torch import nn

from sinklab.errors import ConfigurationError
from sinklab.training.config import OptimizerConfig, ScheduleConfig
from sinklab.training.trainer import MuonWithAdamW, learning_rate_factor, make_optimizer, make_schedule


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
        ("rmsprop", lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, weight_decay=0.1)),
        ("adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1)),
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


def test_every_parameter_is_trained_once():
    model = make_sinklm({"name": "sink_logit"})
    for name in ("adamw", "muon"):
        for decay in ("all", "matrices"):
            groups = make_optimizer(model, OptimizerConfig(name=name, decay=decay)).param_groups
            trained = [id(parameter) for group in groups for parameter in group["params"]]
            assert sorted(trained) == sorted(id(parameter) for parameter in model.parameters())


def test_decay_of_matrices_spares_norms_biases_and_the_parameters_of_operations():
    model = make_sinklm({"name": "key_bias"})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = make_optimizer(model, OptimizerConfig(decay="matrices", weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert all("norm" in (name := names[id(p)]) or "operation_state" in name for p in spared["params"])
    assert {names[id(parameter)].split(".")[-2] for parameter in decayed["params"]} == {
        *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    (everything,) = make_optimizer(model, OptimizerConfig(decay="all", weight_decay=0.3)).param_groups
    assert everything["weight_decay"] == 0.3


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    config = OptimizerConfig(name="muon", learning_rate=1e-2, muon_learning_rate=2e-2, momentum=0.9)
    model, reference = make_sinklm(), make_sinklm()
    optimizer = make_optimizer(model, config)
    got = stepped(model, optimizer)

    matrices = [p for name, p in reference.named_parameters() if "proj" in name]
    rest = [p for name, p in reference.named_parameters() if "proj" not in name]
    muon = torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, momentum=0.9)
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(3):
        reference.zero_grad()
        reference(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
        muon.step()
        adamw.step()
    for name, parameter in reference.named_parameters():
        assert torch.equal(got[name], parameter), name

    # Its state is one state dict of the usual form, and goes on from there bit by bit.
    state = copy.deepcopy(optimizer.state_dict())
    assert set(state) == {"state", "param_groups"}
    twin = make_sinklm()
    twin.load_state_dict(model.state_dict())
    resumed = make_optimizer(twin, config)
    resumed.load_state_dict(state)
    after, twin_after = stepped(model, optimizer), stepped(twin, resumed)
    assert all(torch.equal(after[name], twin_after[name]) for name in after)


def test_muon_needs_matrices():
    with pytest.raises(ConfigurationError, match="muon: Embedding has no linear maps inside its blocks; use adamw"):
        MuonWithAdamW(nn.Embedding(4, 4), OptimizerConfig(name="muon"))


def test_rates_by_hand():
    def factors(steps, **fields):
        return [round(learning_rate_factor(step, ScheduleConfig(**fields), steps), 4) for step in range(steps)]

    assert factors(4, name="constant", warmup_steps=2) == [0.0, 0.5, 1.0, 1.0]
    # Half a cosine over six steps: 1, cos² of 15°, 30°, 45°, 60°, 75°; with a floor of a tenth.
    assert factors(6, name="cosine", warmup_steps=0, min_ratio=0.0) == [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    assert factors(3, name="cosine", warmup_steps=1, min_ratio=0.1) == [0.0, 1.0, 0.55]
    assert factors(7, name="warmup_stable_decay", warmup_steps=1, decay_steps=4, min_ratio=0.2) == [
        *(0.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4)
    ]
    assert learning_rate_factor(99, ScheduleConfig(warmup_steps=0, min_ratio=0.1), 10) == pytest.approx(0.1)


def test_a_schedule_scales_every_group_by_its_own_rate():
    model = make_sinklm()
    optimizer = make_optimizer(model, OptimizerConfig(name="muon", learning_rate=1e-2, muon_learning_rate=4e-2))
    schedule = make_schedule(optimizer, ScheduleConfig(name="constant", warmup_steps=2), steps=4)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [2e-2, 0.5e-2]
    assert schedule.state_dict()["last_epoch"] == 1
