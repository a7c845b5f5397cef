"""The shape of a SinkLM: every axis of the architecture as one validated field."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError
from sinklab.registry import operations, positions

BYTES_OF_LAYER = 25_000
"""Of the Python objects of one layer, whatever its sizes, in round numbers."""


class Architecture(Section):
    """A decoder of fields that go together. The defaults are LLaMA style: rotary positions, pre-norm RMSNorm, SwiGLU, no
    biases."""

    vocab_size: int = Field(2048, ge=2, description="number of token ids; 'sinklab pretrain' sets it from the tokenizer")
    hidden_size: int = Field(128, ge=1, description="width of the residual stream")
    intermediate_size: int = Field(352, ge=1, description="width of the feed-forward layer")
    num_hidden_layers: int = Field(6, ge=1, description="blocks")
    num_attention_heads: int = Field(2, ge=1, description="query heads")
    num_key_value_heads: int | None = Field(None, ge=1, description="key-value heads; as many as query heads by default")
    head_dim: int | None = Field(None, ge=1, description="size of a head; hidden_size / num_attention_heads by default")
    head_merge: Literal["concatenate", "add"] = Field(
        "concatenate", description="how heads meet before the output map: side by side, or summed"
    )
    max_position_embeddings: int = Field(256, ge=1, description="context length of the training, in tokens")
    operation: dict[str, Any] = Field(
        default_factory=lambda: {"name": "softmax"}, description="attention operation: name and its settings"
    )
    position: dict[str, Any] = Field(
        default_factory=lambda: {"name": "rotary"}, description="position scheme: name and its settings"
    )
    norm: Literal["rms_norm", "layer_norm"] = Field("rms_norm", description="what normalises")
    norm_placement: Literal["pre", "post", "sandwich"] = Field(
        "pre", description="before each sublayer, after each residual sum, or before and after each sublayer"
    )
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square (or variance) before the root")
    feed_forward: Literal["relu", "gelu", "swish", "reglu", "geglu", "swiglu"] = Field(
        "swiglu", description="activation of the feed-forward layer; the last three have a gate"
    )
    window: int | None = Field(None, ge=1, description="token t sees t-window+1 … t; all of the past by default")
    prefix: int = Field(0, ge=0, description="prefix LM: the first tokens see each other both ways and carry no loss")
    initialization: Literal["depth_scaled", "normal", "released"] = Field(
        "depth_scaled",
        description="normal with initializer_range, maps into the residual stream divided by sqrt(2·layers); normal with "
        "initializer_range throughout; or as released by Gu et al.: std sqrt(0.4/fan_in), feed-forward output "
        "1/(sqrt(fan_in)·layers)",
    )
    initializer_range: float = Field(0.02, gt=0, description="standard deviation, except as released")
    tie_word_embeddings: bool = Field(True, description="one matrix for the embedding and the head")

    @model_validator(mode="after")
    def _check(self) -> Architecture:
        if self.num_key_value_heads is not None and self.num_attention_heads % self.num_key_value_heads:
            raise ConfigurationError(
                f"num_key_value_heads {self.num_key_value_heads} must divide num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigurationError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; set "
                "head_dim"
            )
        if self.prefix >= self.max_position_embeddings:
            raise ConfigurationError(
                f"prefix {self.prefix} leaves no token with a loss in max_position_embeddings {self.max_position_embeddings}"
            )
        if self.prefix and self.window is not None:
            raise ConfigurationError(
                "prefix and window cannot be combined: inside the prefix both ways are open, which a window would close again"
            )
        operations.make(self.operation)
        settings = dict(self.position)
        scheme = positions[settings.pop("name", "rotary")]
        scheme.check(self, settings)
        return self

    @property
    def head_size(self) -> int:
        """Size of a head, resolved."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def tokens_in_front(self) -> int:
        """Learned tokens that the operation puts in front of every sequence."""
        return operations.make(self.operation).tokens_in_front

    @property
    def num_positions(self) -> int:
        """Positions that training uses: the context and the tokens in front of it."""
        return self.max_position_embeddings + self.tokens_in_front

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the embeddings at the start."""
        return (0.4 / self.hidden_size) ** 0.5 if self.initialization == "released" else self.initializer_range

    @property
    def kv_heads(self) -> int:
        """Key-value heads, resolved."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads
