"""Operations registered by name take the place of the attention of any model: the right mathematics, or a refusal."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sinklab.attention.seam import register_operation
from sinklab.attention.session import attend
from sinklab.errors import UnsupportedModelError
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax

from .harness import Recorder, assert_identical, forward, recorded
from .zoo import MEASURED, ZOO, Entry, batch_of, build, model_of

SINKS = ("gpt_oss", "granite_swa", "mimo_v2_flash")
REPLACEABLE = [entry for entry in MEASURED if entry.replaceable]
BIAS = -1.5


def with_operation(entry: Entry, operation: Softmax | Sigmoid, **changes: object) -> PreTrainedModel:
    return build(entry, register_operation(operation), **changes)


@pytest.mark.parametrize("entry", REPLACEABLE, ids=lambda entry: entry.id)
def test_registered_softmax_is_the_models_own_attention(entry: Entry) -> None:
    """Masks, windows, grouping, caps and position biases all survive the replacement."""
    batch = batch_of(entry, padded=True)
    recorders = Recorder(), Recorder()
    own, replaced = model_of(entry.id), with_operation(entry, Softmax())
    with attend(own, probes=[recorders[0]]):
        forward(own, batch)
    with attend(replaced, probes=[recorders[1]], verify=True) as session:
        forward(replaced, batch)
    assert sum(session.calls.values()) == entry.calls
    for one, other in zip(recorders[0].records, recorders[1].records, strict=True):
        assert one.site == other.site
        counted = one.call.counted[:, None, :, None]
        # float32 in another order of summation, through two to four layers.
        assert (one.weights - other.weights).masked_fill(~counted, 0.0).abs().max() < 2e-5


@pytest.mark.parametrize("entry", REPLACEABLE, ids=lambda entry: entry.id)
def test_registered_sigmoid_is_measured_as_sigmoid(entry: Entry) -> None:
    model = with_operation(entry, Sigmoid(bias=BIAS))
    batch = batch_of(entry, padded=True)
    before = forward(model, batch)
    recorder = Recorder()
    with attend(model, probes=[recorder], verify=True) as session:
        assert_identical(forward(model, batch), before)
    assert set(session.table()["operation"]) == {"sigmoid"}
    for record in recorder.records:
        call = record.call
        assert call.operation == Sigmoid(bias=BIAS)
        expected = torch.sigmoid(call.scores(0, call.q_len) + BIAS) * record.visible
        assert torch.equal(record.weights, expected)
        assert record.statistics.null_mass is None


@pytest.mark.parametrize("family", SINKS)
def test_models_with_sink_logits_are_not_replaced(family: str) -> None:
    # Dropping the logit would silently make another model of it; only some of MiMo's layers have one, and one is enough.
    model = with_operation(ZOO[family], Sigmoid())
    with pytest.raises(UnsupportedModelError, match=r"learned sink logits.*sinklab_sigmoid"):
        forward(model, batch_of(ZOO[family]))


def test_sparse_selection_is_not_lost() -> None:
    # Under a name that it does not know, DeepSeek-V3.2 hands the selected keys over as a keyword instead of in the mask.
    model = with_operation(ZOO["deepseek_v32"], Softmax())
    with pytest.raises(UnsupportedModelError, match="indices"):
        forward(model, batch_of(ZOO["deepseek_v32"]))


def test_unknown_keywords_are_refused_without_a_session() -> None:
    model = with_operation(ZOO["llama"], Sigmoid())
    with pytest.raises(UnsupportedModelError, match="LlamaAttention is given the keyword temperature_map"):
        forward(model, {**batch_of(ZOO["llama"]), "temperature_map": torch.ones(1)})


def test_causality_survives_without_a_padding_mask() -> None:
    # A function registered without its mask function is handed no mask at all, and later tokens leak into earlier outputs.
    model = with_operation(ZOO["llama"], Sigmoid())
    tokens = batch_of(ZOO["llama"])["input_ids"]
    other = tokens.clone()
    other[:, -1] = (tokens[:, -1] + 1) % 40
    first, second = (forward(model, {"input_ids": ids})[0] for ids in (tokens, other))
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


def test_attention_dropout_takes_effect() -> None:
    model = with_operation(ZOO["llama"], Softmax(), attention_dropout=0.5).train()
    batch = batch_of(ZOO["llama"])
    torch.manual_seed(0)
    first = forward(model, batch)[0]
    torch.manual_seed(1)
    assert not torch.equal(first, forward(model, batch)[0])
    assert torch.equal(forward(model.eval(), batch)[0], forward(model, batch)[0])


def test_what_is_measured_is_what_ran_not_what_the_module_carries() -> None:
    model = build(ZOO["llama"], "sdpa")
    for layer in model.model.layers:
        assert isinstance(layer.self_attn, nn.Module)
        layer.self_attn.operation = Sigmoid()
    with attend(model, probes=[Recorder()], verify=True) as session:
        forward(model, batch_of(ZOO["llama"]))
    assert set(session.table()["operation"]) == {"softmax"}


def test_operation_of_the_module_wins_over_the_registered_default() -> None:
    model = with_operation(ZOO["llama"], Sigmoid(bias=BIAS))
    for layer in model.model.layers:
        layer.self_attn.operation = Sigmoid(bias=0.25)
    records = recorded(model, batch_of(ZOO["llama"]))
    assert [record.call.operation for record in records] == [Sigmoid(bias=0.25)] * 2


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_operations_compile_in_one_graph(family: str) -> None:
    # The graph alone is under test, so no code generator: Dynamo's "eager" backend runs what it traced.
    model = with_operation(ZOO[family], Sigmoid(bias=BIAS))
    tokens = {"input_ids": batch_of(ZOO[family])["input_ids"]}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss = compiled(**tokens, labels=tokens["input_ids"]).loss
    assert loss.item() == model(**tokens, labels=tokens["input_ids"]).loss.item()
    loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient.abs().max() > 0
    torch._dynamo.reset()
