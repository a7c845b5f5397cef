"""The decode path equals the plain one for a single query, whatever the operation, the mask and the grouping of the heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention.path_calls import Nothing, run, state_of
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from sinklab.attention.operation import Inputs
from sinklab.attention.paths import decode as path_decode
from sinklab.attention.paths.table import choose, compute
from sinklab.attention.seam import register_operation
from sinklab.errors import ConfigurationError
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


def tensors(dtype=torch.float64, kv_heads=2, kv_len=300):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 1, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 24))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def masks(kv_len=300):
    random = torch.rand(2, 1, 1, kv_len, generator=torch.Generator().manual_seed(1)) > 0.3
    hidden = random.clone()
    hidden[1] = False  # a row that sees nothing
    by_head = torch.rand(1, 4, 1, kv_len, generator=torch.Generator().manual_seed(2)) > 0.5
    return {"none": None, "random": random, "hidden": hidden, "by head": by_head, "two dimensions": by_head[0, 0]}


@pytest.mark.parametrize("name", list(operations))
def test_every_operation_with_its_state(name):
    operation = operations[name]()
    state = state_of(operation, 1)
    for kv_heads in (2,) if state else (1, 2, 4):
        for visible in masks().values():
            given = tensors(kv_heads=kv_heads)
            plain, fast = (run(operation, given, state, way, visible, False) for way in ("plain", "decode"))
            for found, expected in zip(fast, plain, strict=True):
                # Sums of 300 terms in another order, each rounded to 2**-53, of sizes up to 1e2.
                torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


def test_null_scores_and_null_values_belong_to_their_heads():
    state = {"scores": torch.randn(2, 4, 1).double(), "value": torch.randn(4, 24).double()}
    plain, fast = (run(Nothing(), tensors(), state, way, masks()["hidden"], False) for way in ("plain", "decode"))
    for found, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(fast[0][1, :, 0], state["value"])  # a row that sees nothing is all null value


def test_bfloat16_rounds_as_the_plain_path_does():
    given = tensors(torch.bfloat16)
    exact = run(Softmax(), [tensor.double() for tensor in given], {}, "plain", None, False)[0]
    plain, fast = (run(Softmax(), given, {}, way, None, False)[0] for way in ("plain", "decode"))
    # Both round the scores, the weights and the outputs once; sums over 300 keys differ in their order alone.
    assert (fast.double() - exact).norm() <= 1.2 * (plain.double() - exact).norm()


def test_who_takes_it():
    def taken(operation=None, dtype=torch.float32, kv_heads=2, kv_len=300, **fields):
        return (
            choose(operation or Softmax(), Inputs(*tensors(dtype, kv_heads, kv_len), None, False, 0.25, **fields)) == "decode"
        )

    assert taken()
    assert taken(Sigmoid())
    assert not taken(kv_heads=4)  # nothing is repeated, and the stock kernel is as fast on what the core keeps in its cache
    assert taken(kv_heads=4, kv_len=2**20 // (2 * 4 * 16 * 4))
    queries, keys, _ = tensors()
    assert choose(Softmax(), Inputs(queries, keys, keys, None, False, 0.25)) == "flash"  # which repeats nothing either
    assert not taken(kv_len=8)
    assert not taken(dtype=torch.float16)
    assert not taken(softcap=30.0)
    assert taken(dtype=torch.bfloat16, kv_heads=4) == (not torch.cpu._is_amx_tile_supported())


def test_what_it_refuses():
    queries, keys, values = tensors()
    for fields, reason in (
        ({"queries": queries.repeat(1, 1, 2, 1)}, "it takes one query, and there are 2"),
        ({"causal": True}, "a causal mask without an offset shows the only query the first key alone"),
        ({"keys": keys[:, :, :0], "values": values[:, :, :0]}, "there is no key"),
        ({"softcap": 30.0}, "the model caps its scores"),
    ):
        inputs = dataclasses.replace(Inputs(queries, keys, values, None, False, 0.25), **fields)
        assert path_decode.obstacle(Softmax(), inputs) == reason
        with pytest.raises(ConfigurationError, match=f"path 'decode' cannot serve operation 'softmax': {reason}"):
            compute(Softmax(), inputs, "decode")


def test_a_model_decodes_with_it():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 97, (2, 301))
    found = {}
    for name in ("sdpa", register_operation(Softmax())):
        model.set_attn_implementation(name)
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(tokens[:, :-1], past_key_values=cache)
            found[name] = model(tokens[:, -1:], past_key_values=cache).logits
    # Two layers in float32: rounding of sums of 300 terms, and logits of size 1.
    torch.testing.assert_close(found["sinklab_softmax"], found["sdpa"], atol=2e-6, rtol=0)
