"""A model that does not follow the masks or positions of a cache is refused before it is read with."""

from __future__ import annotations

import pytest
import torch
from tests.architectures.zoo import ZOO, build

from sinklab.errors import UnsupportedModelError
from sinklab.streaming.verify import verify_model


def model_of(backend: str = "sdpa"):
    return build(ZOO["llama"], backend).eval()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_model_that_follows_passes(backend):
    verify_model(model_of(backend))


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        ("attention_mask", "does not follow the masks of a bounded cache: 12 tokens read at once and one by one give logits"),
        ("position_ids", "layer 0 of LlamaForCausalLM does not rotate its keys by the position_ids that it is given"),
    ],
)
def test_a_model_that_ignores_what_the_cache_says_is_refused(ignored, said):
    verify_model(model_of())  # another model says nothing about this one
    model = model_of()
    native = model.model.forward

    def forward(*args, position_ids=None, attention_mask=None, **kwargs):
        given = {"position_ids": position_ids, "attention_mask": attention_mask}
        given[ignored] = None
        return native(*args, **given, **kwargs)

    model.model.forward = forward
    with pytest.raises(UnsupportedModelError, match=said):
        verify_model(model)


def test_the_mode_of_the_model_is_left_alone():
    model = model_of().train()
    verify_model(model)
    assert model.training
    assert torch.is_grad_enabled()
