"""Anatomy of a model: what others put round it, attention modules, kinds of layers, and the maps behind its heads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from sinklab.attention.call import Part
from sinklab.attention.modules import linear_map, named_modules, out_of_peft, out_of_torch, plain_module, weight_of
from sinklab.errors import InputError

OUTPUT_NAMES = (
    "o_proj", "out_proj", "c_proj", "wo", "o", "dense", "proj", "out_lin", "o_lin", "projection", "out", "linear_out",
    "projection_layer", "output", "output_projection",
)  # fmt: skip
"""What transformers calls the map from the concatenated heads to the hidden state, in lower case."""
INPUT_NAMES = re.compile(
    r"(^|_)w?([qkv]{1,3}|g)($|_)|query|key|value|gate|attn$|(^|_)(pos|rel|relative|r)($|_)|position|^in_|bias|sink",
    re.IGNORECASE,
)
"""Linear children that read the hidden state or positions, not the heads, whatever their width."""
QUERY_MAPS = re.compile(r"(^|_)w?q[kv]{0,2}($|_)|query", re.IGNORECASE)
"""Those of them that give queries, which recurrences (RWKV) have not."""
GATE = re.compile(r"^.*gate.* \* |^.* \* .*(gate|sigmoid)", re.IGNORECASE | re.MULTILINE)
"""A line that multiplies by a gate."""
CROSS = re.compile(r"EncDecAttention|cross_?attn|cross_?attention|encoder_attn", re.IGNORECASE)


def require_module(model: object) -> nn.Module:
    """The module of torch, also out of what ``load_model`` gave; anything else is refused, with what to give in its place.

    Raises:
        InputError: a name, or anything else.
    """
    held = getattr(model, "model", None) if dataclasses.is_dataclass(model) else model
    if isinstance(held, nn.Module):
        return held
    if isinstance(model, (str, os.PathLike)):
        raise InputError(f"{os.fspath(model)!r} is the name of a model; load it first: load_model({os.fspath(model)!r}).model")
    if isinstance(getattr(model, "model", None), nn.Module):  # a pipeline, a Trainer
        raise InputError(f"{type(model).__name__} holds a model and is none itself; give its `.model`")
    raise InputError(f"{type(model).__name__} is no model; expected a module of torch")


def model_inside(module: nn.Module) -> str:
    """What to give in place of a module that is no model of transformers, in words: the model that it holds, by its name."""
    held = [(name, type(one).__name__) for name, one in named_modules(module) if name and isinstance(one, PreTrainedModel)]
    outermost = [(name, kind) for name, kind in held if not any(name.startswith(f"{other}.") for other, _ in held)]
    named = " or ".join(f"{name!r} ({kind})" for name, kind in outermost[:2])
    return "the model that is inside it" + (f", its module {named}" if named else "")


class Anatomy:
    """Names and modules found once per session; ``attention`` are the modules on the seam by default.

    Attributes:
        attention: qualified name to attention module, in the order of the model; ``names`` is the way back, by ``id``.
        layers: qualified name to layer: the members of every ``ModuleList`` whose members hold attention modules, if they are
            no sublayers; ``layer_of`` is the name of the layer of an attention module.
        models: the model and every ``PreTrainedModel`` inside it.
        depth: layers that the configuration counts, each run of a shared one (ALBERT); 0 where it does not say.
        streams: how many residual streams a hidden state has, 1 in most models (see :meth:`hidden_states`).
        encoder: of an encoder–decoder, the module that reads the source; else ``None``.
    """

    def __init__(self, model: nn.Module, attention: Mapping[str, nn.Module] | None = None) -> None:
        self.model = model
        self.modules = dict(named_modules(model))
        self.model_class = type(self.modules[""]).__name__
        self.attention = on_seam_modules(model) if attention is None else dict(attention)
        self.names = {id(module): name for name, module in self.attention.items()}
        self.layer_of = {name: layer for name in self.attention if (layer := self._layer(name)) is not None}
        lists = dict.fromkeys(layer.rpartition(".")[0] for layer in self.layer_of.values())
        members = (f"{owner}.{child}" for owner in lists for child, _ in self.modules[owner].named_children())
        self.layers = {name: self.modules[name] for name in members}
        self.encoder, self.encoder_name = self._encoder(self.modules[""])
        self.models = [module for module in model.modules() if isinstance(module, PreTrainedModel) or module is model]
        config = getattr(self.models[0], "config", None)
        self.depth = (getattr(config, "num_hidden_layers", None) or 0) * (getattr(config, "inner_group_num", None) or 1)
        self.shares_layers = 0 < len(self.layers) < self.depth
        text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
        self._leading_streams = int(getattr(text, "altup_num_inputs", None) or 1)
        self.streams = max(self._leading_streams, int(getattr(text, "hc_mult", None) or 1))

    def hidden_states(self, output: object) -> Tensor | None:
        """Hidden states ``(batch, seq_len, hidden_size)`` that a module gives, first or alone; ``None`` where it gives none.

        Several residual streams are one beside the other, ``(batch, seq_len, streams * hidden_size)``. Gemma 3n has them in its
        first axis, models with hyper-connections (DeepSeek V4, GLM-5 Next, HY V4) in the last but one.
        """
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(hidden, Tensor):
            return None
        if hidden.ndim == 4 and 1 < self.streams == hidden.shape[0 if self._leading_streams > 1 else 2]:
            hidden = (hidden.permute(1, 2, 0, 3) if self._leading_streams > 1 else hidden).flatten(2)
        return hidden if hidden.ndim == 3 else None

    def part(self, name: str, cross: bool = False) -> Part:
        """Which part of an encoder–decoder a module or layer belongs to; empty in other models."""
        if self.encoder is None:
            return ""
        if f"{name}.".startswith(f"{self.encoder_name}."):
            return "encoder"
        return "cross-attention" if cross else "decoder"

    def _encoder(self, model: nn.Module) -> tuple[nn.Module | None, str]:
        if not isinstance(model, PreTrainedModel) or not model.config.is_encoder_decoder:
            return None, ""
        encoder = plain_module(model.get_encoder())
        return next(((module, name) for name, module in self.modules.items() if module is encoder and name), (None, ""))

    def is_cross(self, name: str) -> bool:
        """Whether a module is cross-attention by its own account or by its name."""
        return bool(getattr(self.attention[name], "is_cross_attention", False)) or bool(CROSS.search(name))

    def projection_name(self, name: str, width: int | None = None) -> str | None:
        """Qualified name of the map from the concatenated heads, ``width`` numbers, to the hidden state.

        It is known by its name, in BERT in the output block beside the attention module; else it is the only linear child that
        is none of the maps to queries, keys, values and gates. ``None`` where none is found, several might be it, or a norm
        stands in front of it. A gate in front of it is no reason: what it multiplies are the heads.
        """
        # Held by the module itself, or as the first of a list, with a dropout behind it.
        held = [inner for child in self.modules[name]._modules for inner in (child, f"{child}.0")]
        named = [child for wanted in OUTPUT_NAMES for child in held if child.removesuffix(".0").lower() == wanted]
        maps = [child for child in named if linear_map(self.modules.get(f"{name}.{child}")) is not None]
        beside = f"{name.rpartition('.')[0]}.output.dense"
        known = [f"{name}.{child}" for child in maps]
        if isinstance(linear_map(self.modules.get(beside)), nn.Linear):
            known.append(beside)
        if not known and width is not None:
            unnamed = (child for child in held if not INPUT_NAMES.search(child))
            others = [child for child in unnamed if linear_map(self.modules.get(f"{name}.{child}")) is not None]
            known = [f"{name}.{child}" for child in others if len(others) == 1]
        fitting = [candidate for candidate in known if width is None or self._inputs(candidate) == width]
        return fitting[0] if fitting and not self._normed(name, fitting[0]) else None

    def gated(self, name: str) -> bool:
        """Whether the forward of a module multiplies the heads by a gate in front of their projection, as Qwen3-Next does."""
        projection = self.projection_name(name)
        return projection is not None and bool(GATE.search(self._between(name, projection)))

    def projection_weight(self, name: str, width: int) -> Tensor | None:
        """Weight ``(hidden_size, width)`` of that map; ``None`` if there is no such map, or its weight is not known."""
        projection = self.projection_name(name, width)
        return None if projection is None else weight_of(self.model, projection)

    def _inputs(self, name: str) -> int:
        module: Any = linear_map(self.modules[name])
        return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])

    def _normed(self, name: str, projection: str) -> bool:
        """Whether the forward of a module calls a norm between its attention and its projection, as BitNet does."""
        names = re.findall(r"self\.(\w+)\(", self._between(name, projection))
        return any("norm" in type(self.modules.get(f"{name}.{other}")).__name__.lower() for other in names)

    def _between(self, name: str, projection: str) -> str:
        """Source of the forward of a module from its attention to its projection; empty where that is called elsewhere."""
        behind = _source(type(self.modules[name]).forward).rpartition("ALL_ATTENTION_FUNCTIONS")[2]
        child = projection.removeprefix(f"{name}.").partition(".")[0]
        between, called, _ = behind.partition(f"self.{child}(")
        return between if called else ""

    def _layer(self, name: str) -> str | None:
        """The member of the innermost list round a module, but for lists of the sublayers of one layer (T5)."""
        parts = name.split(".")
        ends = range(len(parts), 0, -1)
        inside = [end for end in ends if isinstance(self.modules.get(".".join(parts[: end - 1])), nn.ModuleList)]
        for end in inside[:-1]:
            kinds = [type(plain_module(member)) for member in self.modules[".".join(parts[: end - 1])].children()]
            if not 1 < len(kinds) == len(set(kinds)):
                return ".".join(parts[:end])
        return ".".join(parts[: inside[-1]]) if inside else None


def on_seam_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name to module, for every module whose forward looks its attention function up in the table.

    Attention over depth, whose keys are earlier blocks and not tokens (Inkling 2), is none of them: see :func:`over_depth`.
    """
    return {name: module for name, module in named_modules(model) if _uses_table(type(module)) and _makes_keys(module)}


def without_towers(model: nn.Module) -> dict[str, nn.Module]:
    """:func:`on_seam_modules`, of a model that goes on with texts those of its language model alone: positions of a tower that
    reads pictures or sound for it are none of the text's."""
    attention, whole = on_seam_modules(model), unwrapped(model)
    if not isinstance(whole, PreTrainedModel) or not whole.can_generate() or whole.config.is_encoder_decoder:
        return attention
    towers = [PreTrainedModel.get_encoder(whole, modality=modality) for modality in ("image", "audio")]
    inside = {id(module) for tower in towers if tower is not whole for module in tower.modules()}
    return {name: module for name, module in attention.items() if id(module) not in inside} or attention


def over_depth(model: nn.Module) -> list[str]:
    """Qualified names of modules that attend over the model's blocks: they make no keys by maps of their own."""
    return [name for name, module in named_modules(model) if _uses_table(type(module)) and not _makes_keys(module)]


def off_seam_modules(model: nn.Module) -> list[str]:
    """Qualified names of attention modules that compute attention in their own code, out of reach of the table."""
    modules = dict(named_modules(model))
    own = [name for name, module in modules.items() if "attention" in type(module).__name__.lower()]
    own = [name for name in own if not _uses_table(type(modules[name])) and _has_own_attention(modules[name])]
    on_seam = {name for name, module in modules.items() if _uses_table(type(module))} if own else set()
    names = [name for name in own if not any(other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in on_seam)]
    # An outer module that only delegates to an inner one of the same kind is not a second attention.
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def uses_returned(model: nn.Module) -> bool:
    """Whether none of a model's attention goes through the attention interface and some is computed in its own code."""
    return not on_seam_modules(model) and bool(off_seam_modules(model))


def _uses_table(cls: type) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _source(cls.forward) if hasattr(cls, "forward") else False


def _makes_keys(module: nn.Module) -> bool:
    # Quantised maps of torch are none of its linear maps, and have their sizes.
    maps = (linear_map(child) or hasattr(child, "in_features") or isinstance(child, nn.Conv2d) for child in module.modules())
    return any(maps)


def _has_own_attention(module: nn.Module) -> bool:
    # What linear attention (MiniMax, Kimi) and kernels of their own (WavLM, MRA, YOSO) compute has no name in common.
    cls: type = type(module)
    maps = any(isinstance(linear_map(child), nn.Linear) and QUERY_MAPS.search(name) for name, child in module.named_children())
    return maps or bool(re.search(r"[sS]oftmax|scaled_dot_product_attention|baddbmm|torch\.bmm|einsum", _source(cls)))


@functools.cache
def _source(obj: Callable[..., object] | type) -> str:
    try:
        return inspect.getsource(inspect.unwrap(obj) if not isinstance(obj, type) else obj)
    except (OSError, TypeError):
        return ""


def unwrapped(model: Any) -> Any:
    """The model itself: out of ``torch.compile``, DataParallel, DistributedDataParallel, PEFT and sentence-transformers."""
    model = out_of_torch(model)
    inner = _out_of_sentences(out_of_peft(model))
    return model if inner is model else unwrapped(inner)


def transformers_model(model: object) -> PreTrainedModel:
    """The model of transformers itself, out of what others put round it; :class:`InputError` where there is none."""
    found = unwrapped(require_module(model))
    if not isinstance(found, PreTrainedModel):
        raise InputError(f"{type(found).__name__} is no model of transformers; give {model_inside(found)}")
    return found


def tokenizer_inside(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a model of sentence-transformers holds beside the model of transformers; ``None`` of others."""
    model = out_of_torch(model)
    tokenizer = None if _out_of_sentences(model) is model else getattr(model, "tokenizer", None)
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def _out_of_sentences(model: Any) -> Any:
    """The model of transformers in front of what sentence-transformers makes of its hidden states; another as it is."""
    inner = getattr(model, "transformers_model", None)
    return inner if isinstance(inner, PreTrainedModel) else model


RECURRENT_KINDS = frozenset({"linear_attention", "conv"})
"""Names of layers that sum a text up in a state of fixed size: linear attention of all kinds, and short convolutions."""

EMPTY_KINDS = frozenset({"mlp", "moe"})
"""Names of layers of a feed-forward block alone."""

WITHOUT_ATTENTION = RECURRENT_KINDS | EMPTY_KINDS

HYBRID = "hybrid"
"""Name of layers that attend and do linear attention, side by side."""


def layers_without_attention(config: PreTrainedConfig) -> dict[str, int]:
    """How many layers have no attention weights, by their kind in ``config.layer_types``; empty where the config names none."""
    return dict(sorted(Counter(kind for kind in _kinds(config) if kind in WITHOUT_ATTENTION).items()))


def attending_layers(config: PreTrainedConfig) -> tuple[list[int], int]:
    """Numbers of the layers that have attention weights, and how many layers the config names the kind of, 0 where of none."""
    kinds = _kinds(config)
    return [number for number, kind in enumerate(kinds) if kind not in WITHOUT_ATTENTION], len(kinds)


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or [])
