"""What a model does with positions and with its cache, as far as keys must be moved: traits, and rotations of keys."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention import seam
from sinklab.attention.anatomy import EMPTY_KINDS, HYBRID, RECURRENT_KINDS, Anatomy
from sinklab.attention.folding import unmarked
from sinklab.attention.host_arguments import cache_argument
from sinklab.attention.modules import held, input_device
from sinklab.attention.operation import ATTRIBUTE, HeadShape, Operation, state_of
from sinklab.errors import UnsupportedModelError

_STATE_MARGIN = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Largest distance from the state of a text read at once, over the state, in half precision 2e-2. States that are gone on from
are within 5e-5 in seven families, those of Jamba with two kinds of random weights off by 0.10 and 0.15."""

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of a config that do not change what a model computes, or that the tensors tell better."""

_SAMPLED = 8
"""Tensors of a model that its fingerprint reads: enough to tell checkpoints of one training apart, in milliseconds."""

_continues: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def fingerprint(model: PreTrainedModel) -> str:
    """16 hexadecimal digits of a hash over config and both ends of eight weights: whose a saved cache is."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    weights = sorted(model.named_parameters())
    for name, weight in weights[:: max(1, len(weights) // _SAMPLED)]:
        flat = held(model, name).flatten()
        ends = torch.cat((flat[:256], flat[-256:])).cpu().contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {ends.dtype}".encode())
        digest.update(ends.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# --- tokens that are not of the text -------------------------------------------------------------------


def tokens_in_front(model: PreTrainedModel) -> int:
    """Learned tokens that a model puts in front of every text, which its cache counts and its arguments do not."""
    return int(getattr(model, "tokens_in_front", 0))  # SinkLM


def tokens_of_prefix(model: PreTrainedModel) -> int:
    """How many of the first tokens of a text see each other both ways."""
    return int(getattr(model.config.get_text_config(), "prefix_length", 0) or 0)  # SinkLM


def _has_ordered_bias(model: PreTrainedModel) -> bool:
    """Whether the scores of a model depend on the order of the keys in its cache."""
    if getattr(getattr(model, "position", None), "biased", False):  # SinkLM
        return True
    config = model.config.get_text_config()
    # Nothing in a config says so in general: these are the families of transformers that build ALiBi from columns.
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


# --- states ---------------------------------------------------------------------------------------------------------------


def keyless_layers(model: PreTrainedModel) -> dict[int, int]:
    """Index of every layer that writes no keys of its own, as the config says, and how many states it keeps, 0 if none."""
    config = model.config.get_text_config(decoder=True)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    counts = _states_by_layer(config, RECURRENT_KINDS) | dict.fromkeys(_states_by_layer(config, EMPTY_KINDS), 0)
    return counts | dict.fromkeys(range(config.num_hidden_layers - shared, config.num_hidden_layers), 0)


def hybrid_layers(model: PreTrainedModel) -> dict[int, int]:
    """Index of every layer that keeps states beside keys of its own, and how many."""
    return _states_by_layer(model.config.get_text_config(decoder=True), frozenset({HYBRID}))


def _states_by_layer(config: PreTrainedConfig, wanted: frozenset[str]) -> dict[int, int]:
    """Index of every layer of these kinds, and how many states a cache of transformers keeps of it."""
    kinds = getattr(config, "layer_types", None) or []
    if wanted.isdisjoint(kinds):
        return {}
    layers = enumerate(zip(DynamicCache(config=config).layers, kinds, strict=False))
    return {index: getattr(layer, "number_of_states", 0) for index, (layer, kind) in layers if kind in wanted}


def has_states(model: PreTrainedModel) -> bool:
    """Whether a layer of ``model`` keeps a state of the whole text."""
    return any(keyless_layers(model).values()) or bool(hybrid_layers(model))


def fresh_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of transformers for one forward of ``model``."""
    return DynamicCache(config=model.config.get_text_config(decoder=True)) if has_states(model) else DynamicCache()


@torch.no_grad()
def continues_in_chunks(model: PreTrainedModel) -> bool:
    """Whether several tokens at once go on from the state of the tokens before, tried once a model.

    Some models begin partly anew there, without an error (Jamba, in transformers 5.24).
    """
    if model not in _continues:
        tokens = (torch.arange(12, device=input_device(model)) * 7 + 5).remainder(model.config.get_text_config().vocab_size)
        training = model.training
        model.eval()
        whole, pieces = (_states_behind(model, tokens[None].split(length, 1)) for length in (12, 3))
        model.train(training)
        margin = _STATE_MARGIN.get(model.dtype, 2e-2)
        pairs = zip(whole, pieces, strict=True)
        _continues[model] = all(bool((one - other).abs().max() <= margin * one.abs().max()) for one, other in pairs)
    return _continues[model]


def _states_behind(model: PreTrainedModel, pieces: Sequence[Tensor]) -> list[Tensor]:
    """All states after forwards of these token ids, ``(1, length)`` each."""
    cache = fresh_cache(model)
    for piece in pieces:
        model(input_ids=piece, **cache_argument(model, cache), use_cache=True)
    return [state for layer in cache.layers for state in states_of(layer).values()]


def states_of(layer: object) -> dict[str, Tensor]:
    """The states of a layer of a cache by name; none before its first forward, and of a layer that has only keys."""
    return {
        f"{kind}_states.{index}": state
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states", {}).items()
        if isinstance(state, Tensor)
    }


def restore_states(layer: LinearAttentionLayer, buffers: dict[str, Tensor]) -> None:
    """Give a layer the states among ``buffers``, as :func:`states_of` gave them."""
    for name, state in buffers.items():
        kind, _, index = name.partition("_states.")
        if not index:
            continue
        getattr(layer, f"{kind}_states")[int(index)] = state
        getattr(layer, f"is_{kind}_states_initialized")[int(index)] = True
        layer.has_previous_state[int(index)] = True
        layer.device, layer.dtype = state.device, state.dtype
        if kind == "conv" and hasattr(layer, "conv_kernel_size"):
            layer.conv_kernel_size[int(index)] = state.shape[-1]


_ROUNDED = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest distance, relative to the root mean square of a key, at which two keys count as the same: rounding of the angles,
float32 in any model, at the positions of the probe, and of the products. A wrong layout is off by about 1."""


ANEW = ". The policy 'recompute' encodes the window anew and works"


class FixedPositions(UnsupportedModelError):
    """What is cached cannot be moved to another position, as every cache of a window does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of the keys of one layer."""

    frequencies: Tensor  # float64 (pairs,), radians for each step of the position
    first: Tensor  # coordinates of each pair, int64 (pairs,); the others are not rotated
    second: Tensor
    head_dim: int

    def matrices(self, steps: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices ``(*steps.shape, head_dim, head_dim)`` by which a key, as a row, is moved by ``steps`` positions.

        Angles are float64 and reduced before they are rounded, so a million steps are as exact as one.
        """
        cosines, sines = self.cosines_and_sines(steps, dtype)
        result = torch.eye(self.head_dim, dtype=dtype, device=steps.device).repeat(*steps.shape, 1, 1)
        result[..., self.first, self.first] = cosines
        result[..., self.second, self.second] = cosines
        result[..., self.first, self.second] = sines
        result[..., self.second, self.first] = -sines
        return result

    def rotated(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Keys ``(…, head_dim)``, each moved by its own number of positions, ``(…)``."""
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        return self.turned(wide, *self.waves(steps, wide.dtype)).to(keys.dtype)

    def turned(self, keys: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Keys, moved by what :meth:`waves` gives; both broadcast."""
        other = torch.arange(self.head_dim, device=keys.device)
        other[self.first], other[self.second] = self.second.to(keys.device), self.first.to(keys.device)
        return keys * cosines + keys[..., other] * sines

    def waves(self, steps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What a coordinate and the other one of its pair are multiplied by, ``(*steps.shape, head_dim)`` each."""
        cosines = torch.ones(*steps.shape, self.head_dim, dtype=dtype, device=steps.device)
        sines = torch.zeros_like(cosines)
        cosines[..., self.first], sines[..., self.second] = self.cosines_and_sines(steps, dtype)
        cosines[..., self.second], sines[..., self.first] = cosines[..., self.first], -sines[..., self.second]
        return cosines, sines

    def cosines_and_sines(self, steps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of the angles of these steps, ``(*steps.shape, pairs)`` each."""
        angles = (steps.to(torch.float64)[..., None] * self.frequencies.to(steps.device)).remainder(2 * torch.pi)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def same_as(self, other: Rotation) -> bool:
        """Whether both rotate alike, so that they can share matrices."""
        mine, others = (self.frequencies, self.first, self.second), (other.frequencies, other.first, other.second)
        return self.head_dim == other.head_dim and all(
            torch.equal(left, right) for left, right in zip(mine, others, strict=True)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class KeyRotations:
    """What the keys of a model do with positions.

    Attributes:
        layers: index of every layer that writes keys to a cache, and its rotation; ``None`` where keys are not rotated. Layers
            that rotate alike share the object.
        limit: positions below which the model computes its angles from the same frequencies, or has a table of them; ``None``
            if there is no end.
        kv_heads: how many heads each of these layers writes keys of, in their order.
        latent: layers of multi-head latent attention: they cache a latent, and in second place what is rotated of the keys.
    """

    layers: dict[int, Rotation | None]
    limit: int | None
    kv_heads: tuple[int, ...]
    latent: frozenset[int] = frozenset()


def without_autocast(model: PreTrainedModel) -> AbstractContextManager[object]:
    """For looking at what a model does in its own precision, to which margins of rounding belong."""
    return torch.autocast(input_device(model).type, enabled=False)


_rotations: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], KeyRotations]] = weakref.WeakKeyDictionary()


def read_rotations(model: PreTrainedModel) -> KeyRotations:
    """Rotations of the keys of every layer; one forward of one token at a few positions, once for a model, and again when its
    frequencies have changed (``model.to(torch.bfloat16)`` rounds them).

    Raises:
        UnsupportedModelError: positions enter the hidden states (learned or sinusoidal embeddings, weights that depend on
            positions themselves) or the scores by order, or keys rotate in a way that none of the model's frequencies explains.
    """
    fingerprint = _fingerprint(model)
    if model not in _rotations or _rotations[model][0] != fingerprint:
        with without_autocast(model):
            rotations = _read(model)  # a model may change its frequencies in its first forward
        _rotations[model] = _fingerprint(model), rotations
    return _rotations[model][1]


def _fingerprint(model: PreTrainedModel) -> tuple[object, ...]:
    """What the rotations of a model depend on and may change: its frequencies, their dtype, and that of the keys."""
    buffers = (buffer for name, buffer in model.named_buffers() if "inv_freq" in name)
    return model.dtype, input_device(model), *((buffer.dtype, buffer.device, buffer.tolist()) for buffer in buffers)


def _read(model: PreTrainedModel) -> KeyRotations:
    limit, name = _limit(model), type(model).__name__
    if _has_ordered_bias(model):
        raise FixedPositions(
            f"{name} adds a bias that counts the keys between key and query (ALiBi and its kin), and those that have left "
            f"cannot be counted{ANEW}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes no position_ids, so the positions of its keys are not known; a cache of this kind "
            "needs rotary positions or none"
        )
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        raise UnsupportedModelError(
            f"{name} scales queries by the number of tokens seen (attn_temperature_tuning), which grows without end in a stream"
        )
    made_for = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 256  # a learned table may end there
    # Short of the limit: a model that has read a longer text returns to its own frequencies in a forward that ends before it.
    last = min(256, (limit or 257) - 1, made_for) - 1
    positions = torch.tensor([0, 1, min(31, last), last])
    seen = _keys_at(model, positions)
    layers: dict[int, Rotation | None] = {}
    latent: set[int] = set()
    for index, (keys, values) in sorted(seen.items()):
        margin = _ROUNDED.get(keys.dtype, 6e-2)
        if not _alike(values, values[:1], margin):
            if not _alike(keys, keys[:1], margin):
                raise FixedPositions(
                    f"the first layer of {name} has values without positions and layer {index} has not: a token alone gives "
                    "itself a weight that depends on its position, so scores are those of positions and not of their "
                    f"differences, and keys cannot keep their places{ANEW}"
                    if layers
                    else f"{name} adds positions to its hidden states (learned or sinusoidal embeddings, a state that begins "
                    "at position 0): what is cached cannot be moved to another position, and with its original positions a "
                    f"stream soon has more than the model was made for{ANEW}"
                )
            latent.add(index)
            keys, values = values, keys
        if _alike(keys, keys[:1], margin):
            layers[index] = None
            continue
        rotation = _explain(model, positions, keys, margin)
        if rotation is None:
            raise UnsupportedModelError(
                f"layer {index} of {name} rotates its keys with the position in a way that none of the model's "
                "frequencies explains, in halves or interleaved; its cached keys cannot be moved"
            )
        shared = (other for other in layers.values() if other is not None and other.same_as(rotation))
        layers[index] = next(shared, rotation)
    if not layers:
        raise UnsupportedModelError(f"{name} writes no keys to a cache; there is nothing to bound")
    _require_position_ids(model, layers, latent)
    return KeyRotations(layers, limit, tuple(seen[index][0].shape[1] for index in layers), frozenset(latent))


def _require_position_ids(model: PreTrainedModel, layers: dict[int, Rotation | None], latent: set[int]) -> None:
    """Refuse a model that counts positions itself: without position_ids it must rotate the second token by one step."""
    first, rotation = next(iter(layers.items()))
    counts_itself = UnsupportedModelError(
        f"layer {first} of {type(model).__name__} does not rotate its keys by the position_ids that it is given; a cache "
        "cannot set their positions"
    )
    if has_states(model):  # the second token also differs by the first, which is in the state of the layers below
        if rotation is None and any("inv_freq" in name for name, _ in model.named_buffers()):
            raise counts_itself
        return
    keys = _keys_at(model, None)[first][1 if first in latent else 0]
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    before, after = wide[:, :, :1], wide[:, :, 1:]
    if rotation is not None:
        before = before @ rotation.matrices(torch.tensor(1, device=keys.device), wide.dtype)
    if not _alike(before, after, _ROUNDED.get(keys.dtype, 6e-2)):
        raise counts_itself


def _alike(some: Tensor, others: Tensor, margin: float) -> bool:
    scale = others.float().pow(2).mean().sqrt().clamp(min=1e-12)
    return bool((some - others).abs().max() <= margin * scale)


def _explain(model: PreTrainedModel, positions: Tensor, keys: Tensor, margin: float) -> Rotation | None:
    """The rotation that takes ``keys`` of the first position into those of the others, of those that the model may use."""
    head_dim = keys.shape[-1]
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    for frequencies in _frequencies(model, head_dim):
        pairs = len(frequencies)
        for start in dict.fromkeys((0, head_dim - 2 * pairs)):
            index = torch.arange(pairs, device=keys.device)
            layouts = (index, index + pairs), (2 * index, 2 * index + 1)
            reversed_layouts = tuple((second, first) for first, second in layouts)  # by minus the angle (NanoChat)
            for first, second in layouts + reversed_layouts:
                rotation = Rotation(frequencies.to(keys.device, torch.float64), start + first, start + second, head_dim)
                moved = wide[:1] @ rotation.matrices(positions.to(keys.device), wide.dtype)[:, None]
                if _alike(moved, wide, margin):
                    return rotation
    return None


def _frequencies(model: PreTrainedModel, head_dim: int) -> Iterator[Tensor]:
    """Frequencies that the model may use: its own buffers, then the common formula for models that keep a table instead."""
    for name, buffer in model.named_buffers():
        if "inv_freq" in name and buffer.ndim == 1 and 2 * len(buffer) <= head_dim:
            yield buffer
    config = model.config.get_text_config()
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", None) or 1e4
    position = getattr(model, "position", None)  # SinkLM
    for base in dict.fromkeys((getattr(position, "theta", None) or theta, 1e4)):
        for size in dict.fromkeys((getattr(config, "rotary_dim", None) or head_dim, head_dim)):
            exponents = torch.arange(0, size, 2, dtype=torch.promote_types(model.dtype, torch.float32)) / size
            yield float(base) ** -exponents


def _limit(model: PreTrainedModel) -> int | None:
    """Positions below which a model computes alike: those of ``dynamic`` and ``longrope``, the length of a table."""
    limits = []
    has_frequencies = False
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            has_frequencies = True
            kind = str(getattr(module, "rope_type", "default"))
            if "dynamic" in kind or "longrope" in kind:
                config = getattr(module, "config", model.config)
                scaling = getattr(config, "rope_parameters", None) or {}
                original = scaling.get("original_max_position_embeddings") or getattr(
                    config, "original_max_position_embeddings", None
                )
                limits.append(int(original or config.max_position_embeddings))
    config = model.config.get_text_config()
    # Ministral scales its queries by a step function of the position, which is 1 up to the first step.
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        limits.append(int(rope["original_max_position_embeddings"]))
    if not has_frequencies and not hasattr(model, "position"):
        table = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        if table:
            limits.append(int(table))
    return min(limits) if limits else None


@torch.no_grad()
def _keys_at(model: PreTrainedModel, positions: Tensor | None) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values ``(positions, num_kv_heads, 1, head_dim)`` that a single token leaves in every layer."""
    cache, config, front = fresh_cache(model), model.config.get_text_config(), tokens_in_front(model)
    tokens = torch.full(
        (1, 2) if positions is None else (len(positions), 1), min(7, config.vocab_size - 1), device=input_device(model)
    )
    where = None if positions is None else positions[:, None].to(input_device(model))
    masks = {}
    if front:  # what the tokens see must not depend on their positions
        size = front + tokens.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril()
        mask[front:, :front] = False
        masks["attention_mask"] = mask.expand(len(tokens), 1, -1, -1)
    training, token = model.training, unmarked.set(True)
    model.eval()
    try:
        model(input_ids=tokens, position_ids=where, **cache_argument(model, cache), use_cache=True, **masks)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run one token with a cache of keys and values: {error}. A bounded cache needs a "
            "decoder whose layers of attention cache keys and values"
        ) from error
    finally:
        unmarked.reset(token)
        model.train(training)
    layers = {
        index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and layer.is_initialized
    }
    return {index: (layer.keys[:, :, front:], layer.values[:, :, front:]) for index, layer in layers.items()}


# --- scores see differences of positions alone ---------------------------------------------------------------------------


_STEPS = 31
"""By so many positions queries and keys are moved, which turns all but the slowest pairs by a good part of a circle."""

_SAMPLES = 8
"""Queries and keys that are looked at."""

_CHANGE = 1e-3
"""Largest change of a score, over the lengths of what is multiplied. Rounding of float32 is below 1e-5 for heads of up to 1,024
coordinates; by a map that does not go with the rotation scores change by a good part of their size."""


def require_differences(model: PreTrainedModel, rotations: KeyRotations) -> None:
    """Refuse a model whose operation maps rotated queries and keys to scores of the positions themselves."""
    distinct = [rotation for rotation in dict.fromkeys(rotations.layers.values()) if rotation is not None]
    function = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    for module in Anatomy(model).attention.values() if distinct else ():
        operation = seam.operation_of(module, function)
        if type(operation).features is Operation.features:
            continue
        if not all(_sees_differences(module, operation, rotation) for rotation in distinct):
            raise FixedPositions(
                f"{type(model).__name__} has scores of positions themselves and not of their differences: operation "
                f"{operation.name!r} maps queries and keys after they are rotated. Keys that keep their places would give "
                f"other scores with every token from which positions are counted{ANEW}"
            )


@torch.no_grad()
def _sees_differences(module: nn.Module, operation: Operation, rotation: Rotation) -> bool:
    """Whether scores stay what they are when queries and keys are moved by equally many positions."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    shape = getattr(getattr(module, ATTRIBUTE, None), "shape", None)
    heads, kv_heads = (shape.num_heads, shape.num_kv_heads) if isinstance(shape, HeadShape) else (1, 1)
    made = torch.randn(heads + kv_heads, _SAMPLES, rotation.head_dim, generator=torch.Generator().manual_seed(0)).to(device)
    state = state_of(module, operation, made.new_zeros(1, _SAMPLES, shape.hidden_size if isinstance(shape, HeadShape) else 1))

    def scores(states: Tensor) -> Tensor:
        queries, keys = operation.features(states[None, :heads], states[None, heads:], state)
        unit = [torch.nn.functional.normalize(mapped.flatten(0, 2), dim=-1) for mapped in (queries, keys)]
        return unit[0] @ unit[1].T

    moved = rotation.rotated(made, torch.full(made.shape[:2], _STEPS, device=device))
    return bool((scores(moved) - scores(made)).abs().max() <= _CHANGE)
