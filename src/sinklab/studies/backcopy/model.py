"""The models of the bigram-backcopy task: a SinkLM initialised as released, with sublayers taken out and heads knocked out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.models.block import SinkLMAttention
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.positions.learned import Learned

__all__ = ["check_layers", "knocked_out", "make_model"]


class Nothing(nn.Module):
    """Stands where a sublayer was taken out: adds 0 to the residual stream.

    Args:
        attention: answer as an attention module does, with an update and no weights.
    """

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: object) -> object:
        """0 in the shape of the input, and ``None`` beside it for an attention."""
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.attention else nothing


def check_layers(layers: int, no_attention: Sequence[int], no_feed_forward: Sequence[int]) -> None:
    """Refuse sublayers that cannot be taken out of a model of so many layers.

    Raises:
        ConfigurationError: a layer that does not exist, or no attention at all.
    """
    for name, missing in (("attention", no_attention), ("feed-forward", no_feed_forward)):
        for layer in missing:
            if not 0 <= layer < layers:
                raise ConfigurationError(
                    f"bigram-backcopy: no layer {layer} to take the {name} out of: there are {layers}, counted from 0"
                )
    if len(set(no_attention)) == layers:
        raise ConfigurationError("bigram-backcopy: no layer would be left with attention, and nothing to read out")


def make_model(
    operation: Operation,
    vocab_size: int,
    length: int,
    *,
    width: int,
    layers: int = 1,
    heads: int = 1,
    no_attention: Sequence[int] = (),
    no_feed_forward: Sequence[int] = (),
    seed: int = 0,
) -> SinkLM:
    """The decoder of Guo et al. 2024 (arXiv 2410.13835), as released, with any operation in the place of softmax.

    Learned positions, LayerNorm before each sublayer and at the end, a ReLU feed-forward layer of four times the width, no
    biases but those of the norms, an output map of its own. The start is that of torch: embeddings and positions normal with
    standard deviation 1, linear maps uniform within ``1 / sqrt(fan_in)``.

    Args:
        vocab_size, length: token ids, and tokens of a sequence.
        width: of the residual stream and, times ``1 / heads``, of a head.
        no_attention, no_feed_forward: 0-based layers without that sublayer.

    Raises:
        ConfigurationError: sizes that do not go together, a layer that does not exist, or no attention at all.
    """
    check_layers(layers, no_attention, no_feed_forward)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SinkLM(
            SinkLMConfig(
                vocab_size=vocab_size,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                max_position_embeddings=length,
                operation=operation.to_dict(),
                position={"name": "learned"},
                norm="layer_norm",
                feed_forward="relu",
                tie_word_embeddings=False,
            )
        )
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()
            elif isinstance(module, Learned):
                nn.init.normal_(module.table)
        for module in model.modules():
            if isinstance(module, SinkLMAttention):  # what its operation takes from the maps, it takes from those just drawn
                module.operation.prepare(module)
    for layer in no_attention:
        model.layers[layer].self_attn = Nothing(attention=True)
    for layer in no_feed_forward:
        model.layers[layer].mlp = Nothing(attention=False)
    return model


@contextlib.contextmanager
def knocked_out(model: SinkLM, layer: int, head: int) -> Iterator[None]:
    """The model without one head: its output is 0 on the way into the output map, until the block ends."""
    o_proj, heads = model.get_submodule(f"layers.{layer}.self_attn.o_proj"), int(model.config.num_attention_heads)
    if not 0 <= head < heads:
        raise ConfigurationError(f"bigram-backcopy: no head {head} to knock out: layer {layer} has {heads}, counted from 0")

    def zero(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        merged = inputs[0].clone()
        merged.unflatten(-1, (heads, -1))[..., head, :] = 0
        return (merged, *inputs[1:])

    handle = o_proj.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()
