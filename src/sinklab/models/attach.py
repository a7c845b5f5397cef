"""attach(): give any transformers model on the seam another attention operation, with parameters that train, save and load."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import (
    model_inside,
    off_seam_modules,
    on_seam_modules,
    require_module,
    transformers_model,
    unwrapped,
)
from sinklab.attention.folding import find_source, watch
from sinklab.attention.modules import bare_parts, input_device, named_modules, of_peft
from sinklab.attention.operation import ATTRIBUTE, HeadShape, Operation, OperationState, bind
from sinklab.attention.paths.table import set_attention_path
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError, first_line
from sinklab.models.checkpoint import weight_files
from sinklab.models.language_model import SinkLMConfig
from sinklab.models.quiet import without_bars
from sinklab.registry import operations
from sinklab.results.progress import warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class WithTokenizer(Protocol):
    """What :func:`~sinklab.models.loading.load_model` gives, as far as it is saved."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer, if it has one."""


CONFIG_FIELD = "sinklab"
"""Field of a foreign model's config that carries the operation: transformers does not save the name of an implementation."""


def attach(
    model: PreTrainedModel,
    operation: Operation | Mapping[str, object] | str,
    *,
    path: str = "auto",
    example: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Replace the attention of every layer of ``model`` by ``operation``; in place, and returned for convenience.

    Of a model in ``torch.compile``, data parallelism or the adapters of PEFT it is that of the model inside. Attached to a part
    (the text tower of CLIP) it is kept with that part, and ``save_model`` refuses the whole. Of a gate that starts half open a
    warning says so: a pre-trained model loses half of its attention outputs at once.

    Learned parameters appear as ``<attention module>.operation_state.<name>``, in the dtype of the model, and belong to
    ``model.parameters()``, so make the optimiser afterwards. Save with :func:`save_model`; :func:`sinklab.load_model` brings
    the operation back.

    Args:
        operation: an instance, ``{"name": …, settings}``, or the name of a registered operation.
        path: see :data:`sinklab.attention.paths.table.PATHS`.
        example: keyword arguments of one forward call, from which the shapes of the heads are read; the model's own
            ``dummy_inputs`` by default, which are token ids: models of pictures or of sound need an example.

    Raises:
        InputError: what is no model of transformers.
        UnsupportedModelError: no attention module on the seam, learned sink logits of its own, or a sink token.
        ConfigurationError: a SinkLM, whose operation is a field of its config, or a second operation on top of another.
    """
    given, model = model, transformers_model(model)
    if isinstance(model.config, SinkLMConfig):
        raise ConfigurationError("the operation of a SinkLM is a field of its config: SinkLMConfig(operation={'name': …})")
    if getattr(model.config, CONFIG_FIELD, None) is not None:
        raise ConfigurationError(
            f"this {type(model).__name__} already has operation {getattr(model.config, CONFIG_FIELD)['operation']['name']!r}"
        )
    chosen: Operation = operations.make(operation)
    _attached(model, chosen, path, example)
    if chosen.at_start:
        warn(f"attach: operation {chosen.name!r}: {chosen.at_start}")
    return given


def _attached(
    model: PreTrainedModel,
    chosen: Operation,
    path: str = "auto",
    example: Mapping[str, Tensor] | None = None,
    known: Mapping[str, HeadShape] | None = None,
) -> PreTrainedModel:
    if chosen.tokens_in_front:
        raise UnsupportedModelError(
            f"operation {chosen.name!r} puts learned tokens in front, which only SinkLM does by itself; for a "
            f"{type(model).__name__} add a token to the vocabulary and put it in front of every sample"
        )
    modules = on_seam_modules(model)
    shapes = known if known and known.keys() == modules.keys() else head_shapes(model, example, sources=chosen.folds)
    _own_config(model)
    name = seam.register_operation(chosen)
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise UnsupportedModelError(f"{type(model).__name__} takes no other attention: {error}") from error
    for path_of_module, module in modules.items():
        bind(module, chosen, shapes[path_of_module])
        state = getattr(module, ATTRIBUTE, None)
        if isinstance(state, OperationState):
            state.to(next(module.parameters()).device, model.dtype)
            if chosen.needs_layer_input:
                module.register_forward_pre_hook(_keep_layer_input, with_kwargs=True)
                module.register_forward_hook(_drop_layer_input, always_call=True)
            if chosen.folds:
                watch(module, state)
    setattr(model.config, CONFIG_FIELD, {"operation": chosen.to_dict(), "heads": _written(shapes)})
    set_attention_path(model, path)
    return model


def attach_folded(
    model: PreTrainedModel,
    operation: Operation,
    shapes: Mapping[str, HeadShape],
    parameters: Mapping[str, Mapping[str, Tensor]],
) -> PreTrainedModel:
    """Give a model an operation that folds sinks, with the parameters of every module by their names, in place.

    A :class:`~sinklab.models.language_model.SinkLM` is built anew around its weights: its operation is a field of its config.
    """
    if isinstance(model.config, SinkLMConfig):
        config = copy.deepcopy(model.config)
        config.operation = operation.to_dict()
        config.folded = [list(shape.folded or ()) for shape in shapes.values()]
        config._attn_implementation = seam.implementation_name(operation.name)
        anew = type(model)(config).to(input_device(model), model.dtype).train(model.training)
        anew.load_state_dict(model.state_dict(), strict=False)
        model = anew
    else:
        _attached(model, operation, known=shapes)
    with torch.no_grad():
        for name, values in parameters.items():
            state = getattr(model.get_submodule(name), ATTRIBUTE)
            for key, value in values.items():
                getattr(state, key).copy_(value)
    return model


def save_model(
    model: PreTrainedModel | WithTokenizer, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Save a model, with the operation that was attached to it, as an ordinary transformers checkpoint.

    ``model.save_pretrained`` writes the same files; loaded by transformers alone, such a checkpoint is a softmax model again,
    and its operation's parameters are dropped. :func:`sinklab.load_model` reads it back whole.

    Args:
        model: or what :func:`sinklab.load_model` gave, whose tokenizer is then saved too.
        folder: of the checkpoint; a file there is an :class:`InputError`.
        tokenizer: saved beside the model.

    Raises:
        ConfigurationError: adapters of PEFT are in the model; or it, or a part of it, runs an operation that its config does
            not carry: by name alone, or attached to the part (the text tower of CLIP). It would come back as softmax.
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        if not hasattr(model, "save_pretrained"):
            raise InputError(f"{type(model).__name__} is no model of transformers; give {model_inside(model)}")
    else:
        if not isinstance(getattr(model, "model", None), nn.Module):
            require_module(model)
        model, tokenizer = model.model, tokenizer or model.tokenizer
    adapted_part = next((name for name, module in model.named_modules() if of_peft(module)), None)
    if adapted_part is not None:
        # transformers would save the adapters alone, or the maps under the names of what is round them.
        where = f", first {adapted_part}," if adapted_part else ""
        raise ConfigurationError(
            f"this {type(model).__name__} has adapters of PEFT{where} which an ordinary checkpoint does not hold: put them "
            "into its weights with merge_and_unload() of the PEFT model and save what that gives"
        )
    _require_recorded(model)
    if Path(folder).is_file():  # which transformers says in a log, and saves nothing
        raise InputError(f"{folder} is a file; give the directory that the checkpoint goes to")
    with bare_parts(model), without_bars():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _require_recorded(model: PreTrainedModel) -> None:
    """Refuse a model of which transformers would not save that its attention, or that of a part of it, is another."""
    if isinstance(model.config, SinkLMConfig) or getattr(model.config, CONFIG_FIELD, None) is not None:
        return
    for path, part in named_modules(model):
        if not isinstance(part, PreTrainedModel):
            continue
        implementation, recorded = part.config._attn_implementation, getattr(part.config, CONFIG_FIELD, None)
        if recorded is not None:
            raise ConfigurationError(
                f"operation {recorded['operation']['name']!r} is attached to {path} alone, which the config of this "
                f"{type(model).__name__} does not say: it would be loaded as softmax. Save the part by itself, "
                f"save_model(model.{path}, …), or attach the operation to the whole model (`example` has what all of it reads)"
            )
        if isinstance(implementation, str) and implementation.startswith(seam.implementation_name("")):
            of = f", in {path}," if path else ""
            raise ConfigurationError(
                f"this {type(model).__name__} runs {implementation!r}{of} by name alone, which a checkpoint does not keep; "
                "use sinklab.attach(model, operation)"
            )


def restore(model: PreTrainedModel, folder: Path, name: str) -> PreTrainedModel:
    """Attach the operation that a checkpoint's config names, and read its parameters; missing or misshapen ones are refused."""
    recorded = getattr(model.config, CONFIG_FIELD, None)
    if recorded is None:
        return model
    delattr(model.config, CONFIG_FIELD)
    before = set(model.state_dict())
    _attached(model, operations.make(recorded["operation"]), known=_read(recorded.get("heads"), name))
    wanted = {_saved_name(model, key): tensor for key, tensor in model.state_dict().items() if key not in before}
    for file in weight_files(folder, name):
        with safe_open(os.fspath(file), "pt") as tensors:
            for key in wanted.keys() & set(tensors.keys()):
                parameter, saved = wanted.pop(key), tensors.get_tensor(key)
                if parameter.shape != saved.shape:
                    raise InputError(
                        f"{key} is of shape {tuple(saved.shape)} in the weights and {tuple(parameter.shape)} by config.json"
                    )
                with torch.no_grad():
                    parameter.copy_(saved)
    if wanted:
        raise InputError(
            f"{name} says that its attention is {recorded['operation']['name']!r} and lacks {len(wanted)} of its parameters, "
            f"first {min(wanted)}; was it saved by another program?"
        )
    return model


def _saved_name(model: PreTrainedModel, key: str) -> str:
    """How the checkpoint that a model was loaded from calls a parameter: some are kept under names of an older class (ViT)."""
    names = list(revert_weight_conversion(model, {key: torch.empty(0)}))
    return names[0] if len(names) == 1 else key


def recorded_heads(model: PreTrainedModel) -> list[dict[str, object]]:
    """What a config says of the heads of a model whose operation is attached, as they are now."""
    return _written({name: getattr(module, ATTRIBUTE).shape for name, module in on_seam_modules(model).items()})


def _written(shapes: Mapping[str, HeadShape]) -> list[dict[str, object]]:
    """Shapes of heads for a config: each once, with the modules that have it."""
    modules: dict[HeadShape, list[str]] = {}
    for name, shape in shapes.items():
        modules.setdefault(shape, []).append(name)
    plain = {field.name: field.default for field in dataclasses.fields(HeadShape)}
    return [
        {"modules": names, **{key: value for key, value in dataclasses.asdict(shape).items() if value != plain[key]}}
        for shape, names in modules.items()
    ]


def _read(written: Any, name: str) -> dict[str, HeadShape] | None:
    """Shapes of heads out of a config; ``None`` where it has none, as before they were kept."""
    if written is None:
        return None
    try:
        settings: list[dict[str, Any]] = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()} for entry in written
        ]
        entries = [(entry.pop("modules"), HeadShape(**entry)) for entry in settings]
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"config.json of {name} cannot be used: sinklab.heads holds no shapes of heads ({error})") from None
    return {module: shape for modules, shape in entries for module in modules}


# Hooks that find the state on the module that they are called with: those of a copied model are of the copy, and they pickle.


def _keep_layer_input(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    getattr(module, ATTRIBUTE).passing.layer_input = args[0] if args else kwargs["hidden_states"]


def _drop_layer_input(module: nn.Module, args: tuple[object, ...], output: object) -> None:
    getattr(module, ATTRIBUTE).passing.layer_input = None  # it keeps the graph of the whole forward alive until the next one


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a config of its own: two models made from one config object would otherwise switch together."""
    copies: dict[int, object] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            copies.setdefault(id(config), copy.deepcopy(config) if config is not model.config else None)
    copies[id(model.config)] = copy.deepcopy(model.config)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            module.config = copies[id(config)]


class _Shapes(seam.Observer):
    """Notes the head shapes of every attention module."""

    running = True

    def __init__(self, modules: dict[str, nn.Module], sources: bool) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.outputs: dict[str, dict[str, Tensor]] | None = {name: {} for name in modules} if sources else None
        self.shapes: dict[str, HeadShape] = {}
        self.widths: dict[str, int] = {}

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self.names

    def on_attention(
        self, native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:  # fmt: skip
        name = self.names[id(module)]
        if host_arguments.read_sink_scores(kwargs) is not None:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) has learned sink logits of its own; no other operation can take their place"
            )
        usual, scaling = query.shape[3] ** -0.5, kwargs.get("scaling")
        self.shapes[name] = HeadShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            hidden_size=self.widths.get(name, query.shape[1] * query.shape[3]),
            scaling=None if scaling is None or math.isclose(scaling, usual, rel_tol=1e-6) else scaling,
            queries_from=self._source(name, query),
            keys_from=self._source(name, key),
        )
        return native(module, query, key, value, *args, **kwargs)

    def _source(self, name: str, received: Tensor) -> str:
        """Where the module makes its queries or keys, if that is asked."""
        if self.outputs is None:
            return ""
        if (source := find_source(received, self.outputs[name])) is None:
            raise UnsupportedModelError(f"{name} makes its queries or keys in no part of its own, before it rotates them")
        return source

    def note_output(self, name: str, part: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if isinstance(output, Tensor) and self.outputs is not None:
                self.outputs[name][part] = output

        return hook

    def note_width(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, Tensor):
                self.widths[name] = hidden.shape[-1]

        return hook


def head_shapes(model: PreTrainedModel, example: Mapping[str, Tensor] | None, *, sources: bool = False) -> dict[str, HeadShape]:
    """Shapes of the heads of every attention module, from one forward pass over an example or the model's own dummy inputs.

    Modules that are not on the seam, do not run, or, where ``sources`` asks for the parts that make queries and keys, make them
    in no part of their own, are an :class:`UnsupportedModelError`.
    """
    modules = on_seam_modules(model)
    if not modules and not off_seam_modules(model):
        raise UnsupportedModelError(f"{type(model).__name__} has no attention; no operation can be attached")
    if not modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention in its own code, so that no operation can be attached"
        )
    observer = _Shapes(modules, sources)
    device = input_device(model)
    inputs = {name: value.to(device) for name, value in (model.dummy_inputs if example is None else example).items()}
    handles = [
        module.register_forward_pre_hook(observer.note_width(name), with_kwargs=True) for name, module in modules.items()
    ]
    if sources:
        handles += [
            part.register_forward_hook(observer.note_output(name, inner))
            for name, module in modules.items()
            for inner, part in module.named_modules()
            if inner
        ]
    training = model.training
    try:
        with torch.no_grad(), seam.shadow(observer):
            model.eval()(**inputs)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        if example is not None:
            raise
        raise ConfigurationError(
            f"{type(model).__name__} does not run on transformers' dummy inputs, which are token ids ({type(error).__name__}: "
            f"{first_line(error)}); pass example={{…}} with the arguments of one forward call"
        ) from error
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    silent = [name for name in modules if name not in observer.shapes]
    if silent:
        raise UnsupportedModelError(
            f"{silent[0]} did not run, or not on the attention interface ({len(silent)} modules); "
            "pass example={…} with inputs that reach every layer"
        )
    return observer.shapes
