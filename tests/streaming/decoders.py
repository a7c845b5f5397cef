"""The decoders that the streaming tests run on, those that are refused, and how the tests read with them."""

import dataclasses
import functools
from typing import Any

import torch
import transformers
from tests.architectures.zoo import DECODERS, OFF_SEAM, VOCAB, ZOO, build, enliven, grouped, shape
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from sinklab.attention.host_arguments import cache_argument
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.base import SlotPolicy
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.traits import Rotation, read_rotations, tokens_in_front

SINKS, WINDOW = 2, 9
"""Twelve slots with the query's own: small against the texts, so that tokens are evicted three times over."""

TOLERANCE = 2e-4
"""Largest difference of logits. The weights of the zoo give scores of standard deviation near 1 and logits of up to 10, so that
attention is far from uniform and a wrong key shows: every mistake of test_mistakes moves logits by 0.1 or more. float32 angles
at positions below 64 are off by up to 64 · 2⁻²⁴ = 4e-6; a score, a sum of products of size up to about 10 (keys of 8
coordinates; norms are learned), by up to about 4e-5; its weight by as much relatively; and logits of size 5 by 2e-4. Measured:
3e-5 at most."""

REFUSED = {
    "llama4": "layers of the kind chunked_attention",
    "deepseek_v32": "layers of the kind (indexed|deepseek_sparse)_attention",
    "gpt2": "learned or sinusoidal embeddings",
    "gpt_bigcode": "learned or sinusoidal embeddings",
    "gpt_neo": "learned or sinusoidal embeddings",
    "biogpt": "learned or sinusoidal embeddings",
    "opt": "learned or sinusoidal embeddings",
    "xglm": "learned or sinusoidal embeddings",
    "bloom": "adds a bias that counts the keys",
    "mpt": "adds a bias that counts the keys",
}
"""Decoders of the zoo that are refused, and words of the reason. Every other one must work."""

FAMILIES = tuple(entry.id for entry in (*DECODERS, *OFF_SEAM) if entry.kind == "decoder" and entry.id not in REFUSED)


def backends_of(family: str) -> tuple[str, ...]:
    return ZOO[family].backends


def build_decoder(family: str, backend: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A fresh model of the family; sliding windows are just as wide as the policy."""
    return build(ZOO[family], backend, **{**sliding(family, SINKS + WINDOW + 1), **changes})


def sliding(family: str, size: int) -> dict[str, int]:
    """The change that makes sliding layers, if the family has any, see ``size`` tokens."""
    return {"sliding_window": size} if "sliding_window" in ZOO[family].config else {}


@functools.cache
def decoder(family: str, backend: str = "sdpa") -> PreTrainedModel:
    """As :func:`build_decoder`, built once per process; tests must leave it as they found it."""
    return build_decoder(family, backend)


def sharpened(name: str = "llama", backend: str = "sdpa", factor: float = 3.0) -> PreTrainedModel:
    """With scores so far apart that attention is."""
    model = build(ZOO[name], backend).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(factor)
    return model


def text(length: int, rows: int = 2, seed: int = 0) -> Tensor:
    """Token ids ``(rows, length)``."""
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: PreTrainedModel, tokens: Tensor, cache: Any = None, *, pieces: Any = None, **arguments: Any) -> Tensor:
    """Logits of all tokens, given in calls of these lengths (all at once by default)."""
    if cache is None:
        cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    pieces = [tokens.shape[1]] if pieces is None else pieces
    outputs = [
        model(input_ids=piece, **cache_argument(model, cache), use_cache=True, **arguments).logits
        for piece in tokens.split(list(pieces), dim=1)
    ]
    return torch.cat(outputs, dim=1)


def one_by_one(model: PreTrainedModel, tokens: Tensor, cache: Any = None, **arguments: Any) -> Tensor:
    """Logits of all tokens, given one at a time."""
    return read(model, tokens, cache, pieces=[1] * tokens.shape[1], **arguments)


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference; infinite if either is not finite."""
    difference = (one - other).abs()
    return float(difference.max()) if bool(difference.isfinite().all()) else float("inf")


def small(model: PreTrainedModel | None = None, **settings: Any) -> SinkCache:
    """The cache of the tests: :data:`SINKS` and :data:`WINDOW`."""
    return SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings)


class SlowLayer(CacheLayerMixin):
    """Trims after the step, as the released code does; a key's position is its index among the keys that are held."""

    def __init__(self, rotation: Rotation | None, num_sinks: int, window: int) -> None:
        super().__init__()
        self.rotation, self.num_sinks, self.window = rotation, num_sinks, window
        self.plain: list[Tensor] = []
        self.held_values: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def rotated(self, keys: Tensor, steps: int) -> Tensor:
        if self.rotation is None:
            return keys
        return keys @ self.rotation.matrices(torch.tensor(steps), keys.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if len(self.plain) > self.num_sinks + self.window:  # the trim after the last step
            for held in (self.plain, self.held_values):
                del held[self.num_sinks]
        assert key_states.shape[2] == 1 or len(self.plain) + key_states.shape[2] <= self.num_sinks + self.window
        for key, value in zip(key_states.split(1, dim=2), value_states.split(1, dim=2), strict=True):
            self.plain.append(self.rotated(key, -len(self.plain)))
            self.held_values.append(value)
        keys = [self.rotated(key, index) for index, key in enumerate(self.plain)]
        return torch.cat(keys, dim=2), torch.cat(self.held_values, dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = min(len(self.plain), self.num_sinks + self.window)
        return held + query_length, 0

    def get_seq_length(self) -> int:
        return min(len(self.plain), self.num_sinks + self.window)

    def get_max_length(self) -> int:
        return -1


class SlowLatentLayer(SlowLayer):
    """Latent attention: the second tensor is what rotates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rotated, latent = super().update(value_states, key_states)
        return latent, rotated


class SlowHybridLayer(SlowLayer, LinearAttentionLayer):
    """Attention and linear attention side by side; the state is as transformers keeps it."""

    def __init__(self, rotation: Rotation | None, num_sinks: int, window: int) -> None:
        SlowLayer.__init__(self, rotation, num_sinks, window)
        LinearAttentionLayer.__init__(self)

    def lazy_initialization(self, **states: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, **states)


@torch.no_grad()
def slow_logits(model: PreTrainedModel, tokens: Tensor, num_sinks: int, window: int, *, front: int = 0) -> Tensor:
    """Logits ``(batch, seq_len, vocab_size)``, one token at a time.

    Args:
        front: tokens that the model itself puts in front of the first one; they stay besides the sinks.
    """
    rotations = read_rotations(model)
    layers: list[Any] = list(DynamicCache(config=model.config).layers)  # those of linear attention stay
    for index, rotation in rotations.layers.items():
        beside = isinstance(layers[index], LinearAttentionLayer) if index < len(layers) else False
        kind = SlowLatentLayer if index in rotations.latent else SlowHybridLayer if beside else SlowLayer
        layers[index : index + 1] = [kind(rotation, front + num_sinks, window)]
    cache = Cache(layers=layers)
    found = []
    for piece in torch.arange(tokens.shape[1]).split(1):
        positions = piece.clamp(max=num_sinks + window).expand(len(tokens), -1)
        given = {**cache_argument(model, cache), "use_cache": True}
        found.append(model(input_ids=tokens[:, piece], position_ids=positions, **given).logits)
    return torch.cat(found, dim=1)


PIECES = (19, 1, 1, 7, 12)
"""Calls in which a text of 40 tokens may come."""


def assert_as_published(model: PreTrainedModel) -> None:
    """It gives the logits of the published rule, computed slowly: token by token, at once, in calls of any size, and in chunks
    with positions counted anew as often as there is room for."""
    tokens, front = text(sum(PIECES)), tokens_in_front(model)
    published = slow_logits(model, tokens, SINKS, WINDOW, front=front)
    for pieces in ([1] * tokens.shape[1], None, PIECES):
        assert gap(read(model, tokens, pieces=pieces), published) < TOLERANCE
    tight = small(model, chunk=5, rebase_at=SINKS + WINDOW + 6 + front)
    assert gap(read(model, tokens, tight), published) < TOLERANCE
    assert tight.table.rebases >= 3


def assert_dense_before_it_is_full(model: PreTrainedModel) -> None:
    """As long as nothing is evicted the logits are those without a cache."""
    tokens = text(SINKS + WINDOW + 1)
    with torch.no_grad():
        dense = model(input_ids=tokens, use_cache=False).logits
    for pieces in ([1] * tokens.shape[1], None):
        assert gap(read(model, tokens, pieces=pieces), dense) < TOLERANCE


def assert_generated_as_dense(model: PreTrainedModel) -> None:
    """As long as nothing is evicted generate() gives the tokens that it gives with a cache of transformers: greedily, and by
    beams, whose rows change places, of a batch of two lengths."""
    prompt = text(9)
    prompt[1, :3] = 0
    given = {"input_ids": prompt, "attention_mask": (prompt > 0).long(), "max_new_tokens": 12, "do_sample": False}
    for beams in (1, 3):
        usual = model.generate(**given, num_beams=beams)
        cache = SinkCache(num_sinks=SINKS, window=40)
        assert torch.equal(model.generate(**given, num_beams=beams, **cache_argument(model, cache)), usual)


SHAPE = grouped(num_hidden_layers=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 1}
TURNS = ["linear_attention", "full_attention"] * 2

RECURRENT = {
    "Qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "head_dim": 8}),
    "OlmoHybrid": ("OlmoHybridConfig", {**DELTA, "layer_types": TURNS}),
    "Lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "shared_intermediate_size": 32},
    ),
    "Jamba": (
        "JambaConfig",
        {**EXPERTS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
}
HYBRID = {
    "FalconH1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "Zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            **{"n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_headdim": 16, "mamba_d_state": 8, "chunk_size": 8},
            **{"num_mem_blocks": 1, "adapter_rank": 4, "use_mem_rope": True, "num_key_value_heads": 4},
            "time_step_min": 1e-9,  # by which prompts clamp and single tokens do not
        },
    ),
}
RECURRENT |= HYBRID
SHARED = {
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["full_attention"] * 4,
            "laurel_rank": 4,
        },
    )
}


@functools.cache
def built(family: str) -> PreTrainedModel:
    """With weights large enough that attention is far from uniform."""
    config, changes = (RECURRENT | SHARED)[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model


IN_FRONT: dict[str, dict[str, Any]] = {
    "in front": {"operation": {"name": "sink_token", "count": 3}},
    "in front, no positions": {"operation": {"name": "sink_token", "count": 3}, "position": {"name": "no_position"}},
}
"""Models of our own with learned tokens in front of the text."""


@functools.cache
def build_in_front(kind: str, **fields: Any) -> SinkLM:
    """Learned tokens are of the size of other embeddings, so that one that is lost shows."""
    torch.manual_seed(0)
    model = SinkLM(SinkLMConfig(**shape(head_dim=8), **IN_FRONT[kind], **fields)).eval()
    enliven(model, seed=7)
    with torch.no_grad():
        if model.tokens_in_front:
            weight = model.front_tokens.weight
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gapped(SlotPolicy):
    """A policy with gaps: the even ones of the last ``span`` tokens, and the last two; it has two rings, and none is pinned."""

    name = "gapped"
    span: int = 8
    positions: str = "original"

    @property
    def num_slots(self) -> int:
        return self.span // 2 + 1

    @property
    def reach(self) -> int:
        return self.span

    def slots(self, tokens: Tensor) -> Tensor:
        return (tokens // 2).remainder(self.span // 2).where(tokens % 2 == 0, self.span // 2)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions - key_positions
        return (distance >= 0) & ((distance < 2) | ((distance < self.span) & (key_positions % 2 == 0)))


@torch.no_grad()
def encoded_anew(model, policy, tokens):
    """Logits of a model of one layer, whose keys depend on token and position alone: a dense reading of what is held, side by
    side or where it stood."""
    found = []
    for last in range(tokens.shape[1]):
        held = policy.visible(torch.tensor(last), torch.arange(last + 1)).nonzero().flatten()
        given = {}
        if policy.positions == "original":  # without a mask, transformers takes gaps in the positions for the ends of documents
            causal = torch.ones(len(held), len(held), dtype=torch.bool).tril().expand(len(tokens), 1, -1, -1)
            given = {"position_ids": held[None], "attention_mask": causal}
        found.append(model(input_ids=tokens[:, held], use_cache=False, **given).logits[:, -1:])
    return torch.cat(found, dim=1)
