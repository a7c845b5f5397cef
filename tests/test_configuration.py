"""Sections of a configuration: one sentence per mistake, the nearest field, dotted paths with YAML values."""

from __future__ import annotations

import pytest

from sinklab.configuration import Section, check_numbers, with_overrides
from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.registry import operations
from sinklab.training.config import PretrainingConfig


def test_dotted_paths_take_yaml():
    config = with_overrides(
        PretrainingConfig(),
        ["model.window=64", "optimizer.betas=[0.8,0.99]", "training.compile=false", "data.corpus=./texts", "name=windowed"],
    )
    assert config.model.window == 64
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.training.compile is False
    assert (config.data.corpus, config.name) == ("./texts", "windowed")


def test_a_number_in_exponent_notation_is_a_number():
    assert with_overrides(PretrainingConfig(), ["optimizer.learning_rate=1e-3"]).optimizer.learning_rate == 0.001


def test_a_field_may_be_said_by_another():
    assert with_overrides(PretrainingConfig(), ["name=windowed", "data.corpus=${name}"]).data.corpus == "windowed"


def test_null_clears_a_field():
    config = PretrainingConfig(model=Architecture(window=8))
    assert with_overrides(config, ["model.window=null"]).model.window is None


def test_another_operation_drops_the_settings_of_the_former():
    config = PretrainingConfig(model=Architecture(operation={"name": "sigmoid", "bias": -2.0}))
    assert with_overrides(config, ["model.operation.name=softmax"]).model.operation == {"name": "softmax"}
    kept = with_overrides(config, ["model.operation.bias=-3"]).model.operation
    assert kept == {"name": "sigmoid", "bias": -3}
    at_the_top = Architecture(operation={"name": "sigmoid", "bias": -2.0})
    assert with_overrides(at_the_top, ["operation.name=softmax"]).operation == {"name": "softmax"}
    both = with_overrides(config, ["model.operation.name=sink_logit", "model.operation.initial=1.5"])
    assert both.model.operation == {"name": "sink_logit", "initial": 1.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.windw=3", r"there is no field 'model\.windw'\. Did you mean 'window'\? Known: "),
        ("modle.window=3", r"there is no field 'modle'\. Did you mean 'model'\?"),
        ("model.window", r"`changes` 'model\.window': expected path=value, such as optimizer\.learning_rate=1e-3"),
        ("training.steps=many", r"training\.steps = 'many': input should be a valid integer"),
        ("model.window=0", r"model\.window = 0: input should be greater than or equal to 1"),
        ("training.dtype=float16", r"training\.dtype = 'float16': input should be 'auto', 'bfloat16' or 'float32'"),
        ("model.window.size.name=3", r"model\.window = \{'size': \{'name': 3\}\}: input should be a valid integer"),
        ("model.operation.slope=2", r"operation 'softmax' has no setting 'slope'"),
        ("model.num_key_value_heads=3", r"num_key_value_heads 3 must divide num_attention_heads 2"),
        ("optimizer.betas=[0.9,1.0]", r"optimizer\.betas\.1 = 1\.0: input should be less than 1"),
        ("training.seed=-1", r"training\.seed = -1: input should be greater than or equal to 0"),
        ("training.seed=4294967296", r"training\.seed = 4294967296: input should be less than 4294967296"),
        (
            "training.snapshots=[0,3000]",
            r"training\.snapshots has step 3000, and the run has steps 0 to 2000",
        ),
        ("training.micro_batch_size=3", r"batch_size 8 must be a multiple of micro_batch_size 3"),
    ],
)
def test_mistakes(override, message):
    with pytest.raises(ConfigurationError, match=message):
        with_overrides(PretrainingConfig(), [override])


def test_assignment_is_checked_too():
    config = PretrainingConfig()
    with pytest.raises(ConfigurationError, match=r"warmup_steps = -1: input should be greater than or equal to 0"):
        config.schedule.warmup_steps = -1
    with pytest.raises(ConfigurationError, match=r"there is no field 'warmup'\. Did you mean 'warmup_steps'\?"):
        config.schedule.warmup = 3


def test_it_survives_a_round_trip():
    config = with_overrides(PretrainingConfig(), ["model.operation.name=sigmoid", "data.random_positions=[1,3]"])
    assert PretrainingConfig.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "value", ["]", "1" + "0" * 5000, "[" * 3000, "{[1]: 2}", "!!python/object:os.system", ".nan", ".inf", str(2**63)]
)
def test_values_that_are_none_are_refused(value):
    """In an override and in a setting of a plug-in alike: what is not YAML, is not finite, or does not fit in 64 bits."""
    for ask in (
        lambda: with_overrides(PretrainingConfig(), [f"data.seed={value}"]),
        lambda: operations.make(f"relu:uncounted={value}"),
    ):
        with pytest.raises(ConfigurationError):
            ask()


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 0.0, True, "text", None])
def test_numbers_of_64_bits_pass(value):
    check_numbers("`x`", [value, {"y": (value,)}])


@pytest.mark.parametrize("value", [-(2**63) - 1, 2**63, float("nan"), -float("inf")])
def test_other_numbers_are_refused_wherever_they_stand(value):
    for inside in (value, [value], {"y": value}, {"y": [0, (value,)]}):
        with pytest.raises(ConfigurationError, match=r"^`x`.*(expected a finite number|has 64 bits; expected a whole number)"):
            check_numbers("`x`", inside)


def test_a_default_is_checked_like_a_value():
    class Wrong(Section):
        number: int = "none"  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match="number"):
        Wrong()


def test_a_field_said_by_one_that_is_not_there():
    with pytest.raises(ConfigurationError, match=r"^`changes` data\.corpus=\$\{nowhere\}: .*nowhere"):
        with_overrides(PretrainingConfig(), ["data.corpus=${nowhere}"])
