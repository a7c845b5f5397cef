"""A session leaves no trace and sees only its own model: exceptions, shared configs, nesting, recomputation, threads."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.session import attend
from sinklab.errors import SessionError
from sinklab.probes.hidden_norm import HiddenNorm

from .harness import Recorder, assert_identical, forward
from .zoo import ZOO, batch_of, build, model_of

BATCH = batch_of(ZOO["llama"])


def state(*models: torch.nn.Module) -> dict[str, Any]:
    """Everything that a session might forget to put back."""
    return {
        "tables": [dict(table._local_mapping) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)],
        "entries": [{name: table[name] for name in table} for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)],
        "attributes": [sorted(vars(table)) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)],
        "hooks": [
            (name, list(module._forward_hooks), list(module._forward_pre_hooks), list(module._backward_hooks))
            for model in models
            for name, module in model.named_modules()
        ],
        "implementations": [model.config._attn_implementation for model in models],
        "forwards": ["forward" in vars(module) for model in models for module in model.modules()],
    }


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_model_that_is_looked_at_is_not_copied(copied: Any) -> None:
    """A copy would keep the hooks for good, and what it computes would be counted for the model."""
    model = build(ZOO["llama"], "sdpa")
    before = state(model)
    with attend(model, probes=[HiddenNorm()]) as session:
        forward(model, BATCH)
        with pytest.raises(SessionError, match=r"^a LlamaForCausalLM cannot be copied or pickled while a session looks at it"):
            copied(model)
        model.state_dict()
        calls = session.calls.total()
    assert state(model) == before
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
    assert_identical(forward(twin, BATCH), forward(model, BATCH))
    assert session.calls.total() == calls


class Trouble(Exception):
    """Nothing that sinklab knows."""


class Breaking(Recorder):
    def update(self, call: Any, statistics: Any) -> None:
        raise Trouble


@pytest.mark.parametrize("where", ["before a forward", "after a forward", "inside the model"])
@pytest.mark.parametrize(("family", "backend"), [("llama", "eager"), ("llama", "sdpa"), ("gemma3", "sdpa")])
def test_state_is_restored_after_an_exception(family: str, backend: str, where: str) -> None:
    model = model_of(family, backend)
    before, logits = state(model), forward(model, BATCH)
    with (  # noqa: PT012  the state at the raise is the point
        pytest.raises(Trouble),
        attend(model, probes=[Breaking() if where == "inside the model" else Recorder()]),
    ):
        if where != "before a forward":
            forward(model, BATCH)
        raise Trouble
    assert state(model) == before
    assert_identical(forward(model, BATCH), logits)
    with attend(model, probes=[], verify=True) as session:
        forward(model, BATCH)
        assert state(model) != before
    assert session.calls.total() == 2
    assert state(model) == before


def test_models_that_share_a_config_are_told_apart() -> None:
    first = build(ZOO["llama"])
    second = type(first)(first.config).eval()
    assert second.config is first.config
    expected, recorder = forward(second, BATCH), Recorder()
    with attend(first, probes=[recorder]) as session:
        assert_identical(forward(second, BATCH), expected)
        assert recorder.records == []
        forward(first, BATCH)
    assert session.calls.total() == len(recorder.records) == 2


def test_sessions_on_two_models_nest() -> None:
    outer_model, inner_model = model_of("llama"), model_of("qwen2", "sdpa")
    before = state(outer_model, inner_model)
    expected = forward(outer_model, BATCH), forward(inner_model, BATCH)
    outer, inner = Recorder(), Recorder()
    with attend(outer_model, probes=[outer]):
        with attend(inner_model, probes=[inner]):
            assert_identical(forward(outer_model, BATCH), expected[0])
            assert_identical(forward(inner_model, BATCH), expected[1])
            assert (len(outer.records), len(inner.records)) == (2, 2)
        forward(outer_model, BATCH)  # the outer session goes on when the inner one has ended
    assert len(outer.records) == 4
    assert outer.records[0].call.groups == 2
    assert not torch.equal(outer.records[0].weights, inner.records[0].weights)
    assert state(outer_model, inner_model) == before


def test_a_second_session_on_the_same_model_or_a_part_of_it_is_refused() -> None:
    model = model_of("llama")
    before = state(model)
    with attend(model) as outer:
        for other in (model, model.model.layers[1]):
            with pytest.raises(SessionError, match=r"is already active; pass all probes to one attend\(\)"), attend(other):
                pass
        forward(model, BATCH)
    assert outer.calls.total() == 2
    assert state(model) == before


def recompute_activations(model: PreTrainedModel, settings: dict[str, Any] | None = None) -> None:
    """Switch gradient checkpointing on, which transformers 5.23 has renamed."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(settings)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_refused(reentrant: bool) -> None:
    model = build(ZOO["llama"]).train()
    recompute_activations(model, {"use_reentrant": reentrant})
    before = state(model)
    with pytest.raises(SessionError, match="gradient checkpointing"), attend(model, probes=[Recorder()]):
        model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
    assert state(model) == before


def test_recomputation_during_backward_is_refused() -> None:
    # Checkpointing that transformers does not know of: somebody wraps a layer by hand.
    model = build(ZOO["llama"]).train()
    layer = model.model.layers[1]
    native = layer.forward

    def checkpointed(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(native, hidden_states, use_reentrant=False, **kwargs)

    layer.forward = checkpointed
    with pytest.raises(SessionError, match=r"recompute"), attend(model, probes=[Recorder()]):
        model(**BATCH, labels=BATCH["input_ids"]).loss.backward()


def test_training_without_checkpointing_has_the_same_gradients() -> None:
    model = build(ZOO["gpt2"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with attend(model, probes=[Recorder()], verify=True) as session:
        found = gradients()
    assert_identical(found, expected)
    assert session.calls.total() == 2


def test_checkpointing_that_is_not_used_is_allowed() -> None:
    model = build(ZOO["llama"])
    recompute_activations(model)
    model.eval()
    with attend(model) as session:
        forward(model, BATCH)
    assert session.calls.total() == 2


def run_threads(*bodies: Any) -> None:
    """Run the bodies at the same time and raise what they raised."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        for done in [pool.submit(body) for body in bodies]:
            done.result(timeout=60)


def test_one_model_in_two_threads_each_with_a_session() -> None:
    model = model_of("llama")
    expected = forward(model, BATCH)
    barrier = threading.Barrier(2, timeout=60)
    totals: list[int] = []

    def body() -> None:
        with attend(model, probes=[Recorder()]) as session:
            barrier.wait()
            for _ in range(5):
                assert_identical(forward(model, BATCH), expected)
        totals.append(session.calls.total())

    run_threads(body, body)
    assert totals == [10, 10]
