"""What a forward that is run to be looked at leaves out: a cache, and logits that nobody reads."""

import pytest
import torch
from tests.conftest import make_sinklm
from transformers import BertConfig, BertForMaskedLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from sinklab.attention.host_arguments import lean_arguments
from sinklab.sinks import find_sinks
from sinklab.studies.causes.location import location
from sinklab.studies.causes.samples import token_samples
from sinklab.studies.theory.no_op_certificate import certify

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def seen_of(model, look):
    """Of every forward that a look made: tokens of its logits, and whether there was a cache."""
    seen = []
    with torch.no_grad():
        handle = model.register_forward_hook(
            lambda _, __, output: seen.append((output.logits.shape[1], output.past_key_values is not None))
        )
        look()
    handle.remove()
    return seen


def test_what_is_said_stays(model):
    tokens = torch.ones(1, 4, dtype=torch.int64)
    assert lean_arguments(model, {"input_ids": tokens}) == {"input_ids": tokens, "use_cache": False, "logits_to_keep": 1}
    assert lean_arguments(model, {"input_ids": tokens}, logits=True) == {"input_ids": tokens, "use_cache": False}
    own = {"input_ids": tokens, "use_cache": True, "logits_to_keep": 2}
    assert lean_arguments(model, own) == own
    assert "use_cache" not in lean_arguments(model, {"input_ids": tokens, "past_key_values": DynamicCache()})
    assert "logits_to_keep" not in lean_arguments(model, {"input_ids": tokens, "labels": tokens})


def test_an_encoder_is_told_nothing():
    model = BertForMaskedLM(BertConfig(**SIZES))
    assert lean_arguments(model, {"input_ids": 1}) == {"input_ids": 1}


def test_ours_reads_them_too():
    assert lean_arguments(make_sinklm(), {}) == {"use_cache": False, "logits_to_keep": 1}


def test_looks_at_attention_keep_no_cache_and_make_no_logits(model):
    tokens = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    found = []
    assert set(seen_of(model, lambda: found.append(find_sinks(model, tokens, place=0)))) == {(1, False)}
    assert set(seen_of(model, lambda: certify(model, tokens))) == {(1, False)}
    samples = token_samples([("texts", tokens)])
    # What hiding the sink costs is read off all logits.
    assert set(seen_of(model, lambda: location(model, samples, found[0]))) == {(11, False), (12, False)}
