"""What the tests of read-outs share: one short real run, and random models of any shape in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sinklab.configuration import with_overrides
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.training.train import run_training
from sinklab_claims.contract.trained import TrainedModel

SHORT = (
    *("training.steps=12", "training.save_every=12", "training.log_every=2", "training.evaluate_every=12"),
    *("schedule.warmup_steps=2", "watch.every=3", "watch.samples=4", "data.max_tokens=100000", "data.held_out_rows=24"),
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> TrainedModel:
    """Twelve steps of the smallest scale. Shared: read-outs must not change it, and a test says so."""
    folder, cache = tmp_path_factory.mktemp("read_outs") / "run", tmp_path_factory.mktemp("encoded")
    run_training(with_overrides(backcopy_tiny(), SHORT), folder, cache=cache, progress=False)
    return TrainedModel(folder, cache)


@pytest.fixture
def random_model(trained):
    """``random_model(operation={…})``: the data of the run with a random model in which some heads have a sink.

    Tokens share a direction, BOS and learned tokens in front have others: by chance a head is drawn to them or repelled.
    """

    def make(sharpness: float = 20.0, **architecture: Any) -> TrainedModel:
        shape = {
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "position": {"name": "no_position"}},
            **architecture,
        }
        torch.manual_seed(0)
        model = SinkLM(SinkLMConfig(vocab_size=258, **shape)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in ("q_proj.weight", "k_proj.weight", "key")):
                    parameter.mul_(sharpness)
                elif "token" in name:
                    parameter.copy_(torch.randn(parameter.shape) + 2 * torch.randn(parameter.shape[1]))
            bos = trained.data.tokenizer.bos_token_id
            model.embed_tokens.weight[bos] = torch.randn(model.config.hidden_size) + 2 * torch.randn(model.config.hidden_size)
        other = TrainedModel(trained.folder, trained.cache)
        # Cached properties, so what is set here is what the read-outs get.
        vars(other).update(
            config=trained.config.model_copy(update={"model": trained.config.model.model_copy(update=shape)}),
            loaded=SimpleNamespace(model=model, device=torch.device("cpu")),
            data=trained.data,
        )
        return other

    return make
