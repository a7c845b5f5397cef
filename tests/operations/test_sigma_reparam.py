"""sigma-reparam: the spectral norm of torch, the published gradient, and functions that are unchanged at the start."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests.conftest import TINY, make_sinklm, make_tokenizer
from torch import nn

from sinklab.errors import ConfigurationError
from sinklab.models.attach import attach, save_model
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.loading import load_model
from sinklab.operations._sigma_linear import SigmaLinear
from sinklab.operations.sigma_reparam import SigmaReparam
from sinklab.registry import operations
from sinklab.training.initial import load_weights

NAME = {"name": "sigma_reparam"}
IDS = torch.arange(24).view(2, 12)


def spectral_norm(weight: torch.Tensor) -> float:
    return float(torch.linalg.svdvals(weight.detach().double())[0])


def make_pair(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[nn.Linear, SigmaLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(7, 5, bias=bias, dtype=dtype)
    return copy.deepcopy(plain), SigmaLinear(plain)


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY | {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1})
    return transformers.LlamaForCausalLM(config).eval()


# --- one projection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_function_is_unchanged_at_the_start(training):
    plain, sigma = make_pair()
    sigma.train(training)
    assert float(sigma.gamma.detach()) == pytest.approx(spectral_norm(plain.weight), rel=1e-14)
    torch.testing.assert_close(sigma.effective_weight(), plain.weight, rtol=1e-14, atol=0)
    given = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(sigma(given), plain(given), rtol=0, atol=1e-14)


def test_two_numbers_by_hand():
    plain = nn.Linear(2, 2, bias=False)
    plain.weight.data = torch.tensor([[0.0, 4.0], [3.0, 0.0]])
    sigma = SigmaLinear(plain)
    assert float(sigma.gamma.detach()) == 4.0
    assert sigma.left.abs().tolist() == [1.0, 0.0]
    assert sigma.right.abs().tolist() == [0.0, 1.0]
    sigma.gamma.data.fill_(2.0)
    assert sigma.effective_weight().tolist() == [[0.0, 2.0], [1.5, 0.0]]
    sigma.weight.data.mul_(10.0)  # the length of the weight says nothing
    assert sigma.effective_weight().tolist() == [[0.0, 2.0], [1.5, 0.0]]


def test_the_gradient_goes_through_the_norm_and_not_through_the_vectors():
    plain, sigma = make_pair()
    sigma.gamma.data.fill_(1.7)
    target = torch.randn(5, 7, dtype=torch.float64)
    (sigma.effective_weight() * target).sum().backward()
    # With exact singular vectors, the derivative of u · W v at constant u and v is that of the norm.
    gamma = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    (gamma / torch.linalg.matrix_norm(plain.weight, 2) * plain.weight * target).sum().backward()
    torch.testing.assert_close(sigma.weight.grad, plain.weight.grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(sigma.gamma.grad, gamma.grad[None], rtol=0, atol=1e-13)


def test_gradcheck():
    _, sigma = make_pair()
    sigma.eval()
    given = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        names = ("weight", "bias", "gamma")
        return torch.func.functional_call(sigma, dict(zip(names, tensors[1:], strict=True)), tensors[0])

    torch.autograd.gradcheck(forward, (given, sigma.weight, sigma.bias, sigma.gamma))


def test_power_iteration_follows_the_weight_in_training_and_rests_in_evaluation():
    _, sigma = make_pair()
    gamma = float(sigma.gamma.detach())
    with torch.no_grad():
        sigma.weight.copy_(torch.randn(5, 7, dtype=torch.float64))
    before = sigma.left.clone(), sigma.right.clone()
    sigma.eval()
    sigma(torch.randn(1, 7, dtype=torch.float64))
    assert torch.equal(sigma.left, before[0])
    assert torch.equal(sigma.right, before[1])
    sigma.train()
    right = nn.functional.normalize(sigma.weight.detach().T @ before[0], dim=0)
    left = nn.functional.normalize(sigma.weight.detach() @ right, dim=0)
    sigma(torch.randn(1, 7, dtype=torch.float64))
    torch.testing.assert_close(sigma.left, left, rtol=0, atol=1e-14)  # one step
    for _ in range(300):
        sigma(torch.randn(1, 7, dtype=torch.float64))
    assert spectral_norm(sigma.effective_weight()) == pytest.approx(gamma, rel=1e-12)
    assert float(sigma.left @ sigma.weight.detach() @ sigma.right) == pytest.approx(spectral_norm(sigma.weight), rel=1e-12)


def test_two_forwards_before_the_backward():
    _, sigma = make_pair()
    given = torch.randn(3, 7, dtype=torch.float64)
    (sigma(given) + sigma(given)).sum().backward()  # the second one moves the buffers that the first one used
    assert bool(sigma.weight.grad.isfinite().all())


def test_half_precision_and_autocast():
    plain, sigma = make_pair(torch.float32)
    given = torch.randn(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # γ / σ(W) is taken in float32, 1 to its last digits: the same weight is rounded, but for ties that fall the other way.
        torch.testing.assert_close(sigma(given), plain(given), rtol=2**-8, atol=2**-8)
    half = sigma.bfloat16()
    assert half.effective_weight().dtype == torch.bfloat16
    assert half(given.bfloat16()).dtype == torch.bfloat16
    # The weight, γ and their product are rounded, each to 8 bits.
    torch.testing.assert_close(half.effective_weight().float(), plain.weight.detach(), rtol=3.1 * 2**-8, atol=0)


def test_it_is_captured_as_one_graph_and_its_buffers_move():
    _, sigma = make_pair(torch.float32)
    with torch.no_grad():
        sigma.weight.copy_(torch.randn(5, 7))
    other, given = copy.deepcopy(sigma), torch.randn(3, 7)
    torch._dynamo.reset()
    captured = torch.compile(sigma, fullgraph=True, backend="aot_eager")(given)
    torch.testing.assert_close(captured, other(given), rtol=0, atol=1e-6)
    torch.testing.assert_close(sigma.left, other.left, rtol=0, atol=1e-6)


# --- whole models ----------------------------------------------------------------------------------------------------------


def test_a_foreign_model_is_unchanged_at_the_start_and_comes_back_from_disk(tmp_path):
    model = llama()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        attach(model, SigmaReparam())
        attention = model.model.layers[0].self_attn
        assert all(type(getattr(attention, f"{name}_proj")) is SigmaLinear for name in "qkvo")
        assert type(model.lm_head) is nn.Linear
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert float(attention.q_proj.gamma.grad.abs()) > 0.0
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with torch.no_grad():
        trained = model.eval()(input_ids=IDS).logits
        save_model(model, tmp_path, make_tokenizer())
        again = load_model(str(tmp_path)).model
        assert torch.equal(again(input_ids=IDS).logits, trained)
    loaded, kept = again.state_dict(), model.state_dict()
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)
    assert "model.layers.1.self_attn.o_proj.gamma" in kept


def test_a_sink_lm_starts_as_softmax():
    plain, sigma = make_sinklm(), make_sinklm(NAME)
    for layer in sigma.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            projection = getattr(layer.self_attn, name)
            assert float(projection.gamma.detach()) == pytest.approx(spectral_norm(projection.weight), rel=1e-6)
    with torch.no_grad():
        # The same seed draws the same weights: the projections keep their names and places.
        torch.testing.assert_close(sigma(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=1e-6)


def test_a_softmax_checkpoint_continues(tmp_path):
    plain = make_sinklm()
    plain.save_pretrained(tmp_path / "softmax")
    sigma = SinkLM.from_pretrained(tmp_path / "softmax", operation=NAME).eval()
    with torch.no_grad():
        torch.testing.assert_close(sigma(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=1e-6)
        for layer in sigma.layers:
            layer.self_attn.q_proj.gamma.mul_(1.5)
        sigma.save_pretrained(tmp_path / "sigma")
        again = SinkLM.from_pretrained(tmp_path / "sigma").eval()
        assert torch.equal(again(input_ids=IDS).logits, sigma(input_ids=IDS).logits)


@pytest.mark.parametrize("source", ["softmax", "sigma_reparam"])
def test_weights_of_another_run_give_its_function(source, tmp_path):
    """What was taken from the initial weights, γ and the singular vectors, is taken from those that are loaded."""
    theirs = make_sinklm({"name": source})
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "proj" in name:
                parameter.mul_(3.0).add_(0.1 * torch.randn_like(parameter))
    if source == "sigma_reparam":
        theirs.train()(input_ids=IDS)  # one step of power iteration, so that the vectors are no longer those of the start
        theirs.eval()
    theirs.save_pretrained(tmp_path)
    torch.manual_seed(1)
    ours = SinkLM(make_sinklm(NAME).config).eval()
    record = load_weights(ours, tmp_path)
    assert bool(record["new"]) == (source == "softmax")
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits, rtol=0, atol=2e-5)


def test_gradient_checkpointing_changes_no_gradient():
    """A forward that is run again inside the backward must not move the singular vectors once more."""

    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = make_sinklm(NAME).double().train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("proj.weight"):
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        if checkpointing:
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        # The vectors that are kept are normed once more: float64 rounding.
        torch.testing.assert_close(again, plain, rtol=1e-9, atol=1e-15)


def test_built_without_numbers():
    with torch.device("meta"):
        model = SinkLM(SinkLMConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, operation=NAME))
    assert model.layers[0].self_attn.q_proj.gamma.is_meta


# --- what cannot be --------------------------------------------------------------------------------------------------------


def test_fused_projections_of_another_kind():
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20)
    with pytest.raises(
        ConfigurationError, match=r"GPT2Attention has no nn\.Linear whose weight could be reparametrised; attach"
    ):
        SigmaReparam().prepare(transformers.GPT2LMHeadModel(config).transformer.h[0].attn)


def test_projections_of_a_derived_class():
    module = nn.Module()
    module.q_proj = nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4)
    with pytest.raises(
        ConfigurationError, match=r"q_proj of Module is a NonDynamicallyQuantizableLinear, not a plain nn\.Linear"
    ):
        SigmaReparam().prepare(module)


def test_a_weight_without_direction():
    plain = nn.Linear(4, 4)
    nn.init.zeros_(plain.weight)
    with pytest.raises(ConfigurationError, match="a projection is zero everywhere, and γ / σ"):
        SigmaLinear(plain)


def test_by_name_alone_it_is_refused():
    model = llama()
    from sinklab.attention.seam import register_operation

    model.set_attn_implementation(register_operation(SigmaReparam()))
    with pytest.raises(
        ConfigurationError, match="operation 'sigma_reparam' has learned parameters, which LlamaAttention does not"
    ):
        model(input_ids=IDS)


def test_round_trip():
    assert operations.make(NAME) == SigmaReparam()
    assert SigmaReparam().to_dict() == NAME
