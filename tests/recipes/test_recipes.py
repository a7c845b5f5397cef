"""Recipes: they are what they say, and can be named, written down, read back and changed."""

import json

import pytest
import torch

from sinklab.configuration import with_overrides
from sinklab.errors import ConfigurationError, InputError, UnknownNameError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import recipes
from sinklab.training.config import PretrainingConfig, resolve_recipe


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_a_configuration_of_its_name_that_survives_json(name):
    config = resolve_recipe(name)
    assert config.name == name
    assert PretrainingConfig.parse(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert with_overrides(config, ["training.seed=7"]).training.seed == 7
    assert resolve_recipe(name) is not config


@pytest.mark.parametrize(
    ("name", "inner", "embeddings", "tokens_per_step", "tokens"),
    [
        # The released configurations: 10 · 5.90M and 22 · 51.4M parameters in the blocks, a million tokens a step.
        ("gu2024_60m", 59.0e6, 2 * 38.7e6, 2**20, 21.0e9),
        ("gu2024_1b", 1130.0e6, 2 * 103.3e6, 2**20, 41.9e9),
        ("emergence", 1.2e6, 0.26e6, 2048, 4.1e6),
        ("emergence_medium", 59.0e6, 3.15e6, 8192, 8.2e6),
    ],
)
def test_sizes_are_those_of_the_papers(name, inner, embeddings, tokens_per_step, tokens):
    config = resolve_recipe(name)
    gu = name.startswith("gu")
    architecture = config.model.model_copy(update={"vocab_size": 50432 if gu else config.data.vocab_size})
    with torch.device("meta"):
        model = SinkLM(SinkLMConfig.from_architecture(architecture))
    outer = {id(module.weight): module.weight.numel() for module in (model.embed_tokens, model.lm_head)}
    assert sum(outer.values()) == pytest.approx(embeddings, rel=0.01)
    assert sum(p.numel() for p in model.parameters()) - sum(outer.values()) == pytest.approx(inner, rel=0.02)
    assert config.training.batch_size * architecture.max_position_embeddings == tokens_per_step
    assert config.training.steps * tokens_per_step == pytest.approx(tokens, rel=0.01)
    if gu:
        assert -(-50277 // config.training.vocab_multiple) * config.training.vocab_multiple == 50432
        assert (config.schedule.name, config.data.bos) == ("constant", "none")


# --- where a configuration comes from ---


def test_the_record_of_a_run_or_a_written_configuration(tmp_path):
    config = with_overrides(resolve_recipe("tiny"), ["model.window=8", "optimizer.betas=[0.8,0.9]"])
    (tmp_path / "run.json").write_text(json.dumps({"kind": "pretrain", "config": config.model_dump(mode="json")}))
    assert resolve_recipe(str(tmp_path / "run.json")) == config
    assert resolve_recipe(str(tmp_path)) == config
    (tmp_path / "mine.yaml").write_text("name: mine\nmodel:\n  window: 8\noptimizer: {betas: [0.8, 0.9]}\n")
    assert resolve_recipe(str(tmp_path / "mine.yaml")).optimizer.betas == (0.8, 0.9)
    (tmp_path / "mine.yaml").write_text("model: {windw: 8}\n")
    with pytest.raises(ConfigurationError, match=r"there is no field 'model\.windw'\. Did you mean 'window'\?"):
        resolve_recipe(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("- 1\n")
    with pytest.raises(ConfigurationError, match="must hold the fields of a configuration, and holds list"):
        resolve_recipe(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("model: {\n")
    with pytest.raises(InputError, match=r"mine\.yaml cannot be read: "):
        resolve_recipe(str(tmp_path / "mine.yaml"))
    with pytest.raises(InputError, match="there is no file"):
        resolve_recipe("nowhere.json")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no recipe is called 'emergance'. Did you mean 'emergence'"):
        resolve_recipe("emergance")
