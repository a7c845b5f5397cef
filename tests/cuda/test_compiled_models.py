"""A model compiled as a whole, forward and backward, against the plain definition without a compiler."""

import copy

import pytest
import torch

from sinklab.attention.paths.table import set_attention_path
from sinklab.models.language_model import SinkLM, SinkLMConfig

OPERATIONS = [
    {"name": "softmax"},
    {"name": "softmax_plus_one"},
    {"name": "sink_logit"},
    {"name": "key_bias"},
    {"name": "key_value_bias"},
    {"name": "sigmoid", "bias": -2.0},
    {"name": "relu"},
    {"name": "softpick"},
    {"name": "gated"},
    {"name": "elu_kernel"},
]
LENGTH = 200
"""Beyond one block of 128 keys, from which on FlexAttention is worth it, and no multiple of it."""


def a_model(operation, device):
    torch.manual_seed(0)
    config = SinkLMConfig(
        vocab_size=100, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, operation=operation,
    )  # fmt: skip
    model = SinkLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ".operation_state." in name:
                parameter.add_(noise, alpha=0.3)
            elif parameter.ndim > 1:  # scores of about 1, so that attention is not even
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model.to(device)


def loss_and_gradients(model, tokens, forward):
    model.zero_grad()
    loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad.double().clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def relative(found, expected):
    assert found.keys() == expected.keys()
    return {name: float((found[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in expected.items()}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation["name"])
def test_forward_and_backward(device, operation):
    """In float32, then under autocast in bfloat16, of two lengths."""
    plain = a_model(operation, device)
    model = copy.deepcopy(plain)
    set_attention_path(plain, "plain")
    exact = copy.deepcopy(plain).double()
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(100, (2, length), generator=generator).to(device) for length in (LENGTH, LENGTH - 60)]
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(model, backend=backend)
    for tokens in texts:
        loss, gradients = loss_and_gradients(exact, tokens, exact)
        own_loss, own = loss_and_gradients(plain, tokens, plain)
        found_loss, found = loss_and_gradients(model, tokens, compiled)
        # Roundings of float32 through two layers; the plain path in float32 has its share of them, and fused code others.
        assert abs(found_loss - loss) <= 3 * abs(own_loss - loss) + 256 * 2.0**-24 * loss
        allowed = relative(own, gradients)
        for name, error in relative(found, gradients).items():
            assert error <= 3 * allowed[name] + 1024 * 2.0**-24, name
    # Not compiled: the same kernels, by the path that auto takes.
    found_loss, found = loss_and_gradients(model, texts[0], model)
    loss, gradients = loss_and_gradients(exact, texts[0], exact)
    allowed = relative(loss_and_gradients(plain, texts[0], plain)[1], gradients)
    for name, error in relative(found, gradients).items():
        assert error <= 3 * allowed[name] + 1024 * 2.0**-24, name
    with torch.autocast(device.type, torch.bfloat16):
        own = relative(loss_and_gradients(plain, texts[0], plain)[1], gradients)
        found = relative(loss_and_gradients(model, texts[0], compiled)[1], gradients)
    for name, error in found.items():
        # A dozen roundings of 2⁻⁸ besides those of the plain path, which rounds scores too.
        assert error <= 3 * own[name] + 12 * 2.0**-8, name


@pytest.mark.parametrize("operation", [{"name": "sigmoid", "bias": -2.0}, {"name": "sink_logit"}], ids=str)
def test_one_graph(cuda, operation):
    """No break: a wrong question to the compiler would cost the speed, and not be noticed otherwise."""
    model = a_model(operation, cuda).eval()
    tokens = torch.randint(100, (2, LENGTH), generator=torch.Generator().manual_seed(2)).to(cuda)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = torch.compile(model, fullgraph=True)(input_ids=tokens).logits
    # As above, of logits.
    assert float((found - expected).norm() / expected.norm()) <= 1024 * 2.0**-24
