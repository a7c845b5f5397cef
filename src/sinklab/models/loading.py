"""Loading: from a name (``embedded:softmax``, a directory, a hub id) to a model that is safe to run and ready to measure."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import inspect
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from sinklab.attention.anatomy import model_inside, require_module, tokenizer_inside, unwrapped, uses_returned
from sinklab.attention.modules import bare_parts, core_module, held, input_device, weights_of
from sinklab.attention.seam import implementation_name, register_operation
from sinklab.corpora.base import Encoder
from sinklab.errors import (
    ConfigurationError,
    InputError,
    SinklabError,
    UnsupportedModelError,
    first_line,
    known_arguments,
    require_known,
)
from sinklab.models.attach import CONFIG_FIELD, restore
from sinklab.models.checkpoint import (
    hash_files,
    locate,
    read_config,
    read_gguf_config,
    read_headers,
    require_all_read,
    require_fit,
    require_numbers,
    weight_files,
)
from sinklab.models.gguf_file import parsed_once, read_gguf, unpacked
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.losses import is_causal_lm
from sinklab.models.quiet import only_errors, without_bars
from sinklab.models.tokenizer import (
    GivenTokenizer,
    Processor,
    given_tokenizer,
    kind_of,
    load_processor,
    load_tokenizer,
    tokenizer_beside,
)
from sinklab.registry import operations
from sinklab.results.environment import dtype_named, say_threads
from sinklab.results.progress import is_quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

MaxMemory: TypeAlias = str | Mapping[str | int, str | int]

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers works out itself."""


def read_spread(
    device: str, device_map: str | None, max_memory: MaxMemory | None, offload_folder: Path | str | None
) -> tuple[torch.device, dict[str, object]]:
    """Where a model goes: the device that most is computed on, and options for ``from_pretrained``; none if all goes there.

    Arguments of :func:`load_model` that exclude each other are refused; accelerate refuses sizes and places that are none.
    """
    if device_map is None:
        if lone := "max_memory" if max_memory is not None else "offload_folder" if offload_folder is not None else "":
            raise ConfigurationError(f"`{lone}` is about a model that is spread; give `device_map` too, such as auto")
        return device_named(device), {}
    if device != "auto":
        raise ConfigurationError("`device` and `device_map` each say where the model goes; give one of them")
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigurationError("`device_map` needs accelerate, which is not installed: pip install accelerate")
    if device_map not in STRATEGIES:
        raise ConfigurationError(
            f"there is no `device_map` {device_map!r}; it is {', '.join(STRATEGIES)}. One device is `device`; for a place of "
            "each module, load the model with transformers and give it to wrap_model"
        )
    options: dict[str, object] = {"device_map": device_map}
    if isinstance(max_memory, str):
        parts = (part.replace(" ", "").partition("=") for part in max_memory.split(","))
        max_memory = {place: size for place, _, size in parts}
    if max_memory is not None:
        options["max_memory"] = {int(place) if str(place).isdecimal() else place: size for place, size in max_memory.items()}
    if offload_folder is not None:
        options["offload_folder"] = str(offload_folder)
    return device_named("auto"), options


def device_named(name: str) -> torch.device:
    """The device, which must be there; ``auto`` is CUDA if there is any, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(int(name) if name.isdecimal() else name)
    except RuntimeError:
        raise ConfigurationError(f"there is no device {name!r}; `device` is auto, cpu, cuda, cuda:1, mps, …") from None
    accelerators = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    if device.type != "cpu" and not (device.type in accelerators and accelerators[device.type].is_available()):
        raise ConfigurationError(f"this machine's torch {torch.__version__} has no {device.type} device; use `device` cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigurationError(f"there is no device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


_one_at_a_time = threading.RLock()
"""Held while transformers builds a model: it takes methods of all models away for that time, and two threads at once leave them
away for good, so that no tied weight is found any more."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode and what must be known of it to report a measurement.

    Attributes:
        name: as the user wrote it.
        encoder: what a corpus needs to know of the vocabulary.
        revision: identity of the weights: ``sha256-`` and the first 16 digits of the hash of the safetensors file (of the list
            of file hashes when there are several), or the commit of the hub repository.
        operation: attention operation, such as ``softmax`` or ``softmax with sink logit``.
        num_parameters: learned numbers, tied ones counted once, and packed ones as what they stand for.
        source: directory that the files were read from; ``None`` for a model that was handed over in memory.
        processor: what makes its inputs of pictures or sound; ``None`` for a model of text, and where there is none.
        gguf: of a GGUF file its name, quantisation, types of tensors and SHA-256 digest, for the record; else ``None``.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    encoder: Encoder
    revision: str
    operation: str
    num_parameters: int
    source: Path | None = None
    processor: Processor | None = None
    gguf: Mapping[str, object] | None = None

    def __repr__(self) -> str:
        """In a line: a notebook shows what ends a cell, and the modules of a model are pages."""
        return (
            f"LoadedModel({self.name!r}, {type(self.model).__name__}, {self.operation} attention, "
            f"{self.num_parameters:,} parameters, {self.dtype}, on {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Device that inputs go to: that of the parameters, or of the first of them where the model is spread."""
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.model.dtype


GivenModel: TypeAlias = str | os.PathLike[str] | LoadedModel | PreTrainedModel
"""A model wherever one is taken: its name, its directory, or itself."""


@known_arguments
def load_model(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    tokenizer: GivenTokenizer | None = None,
    processor: Processor | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device_map: str | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: Path | str | None = None,
) -> LoadedModel:
    """Load a model, in evaluation mode, from safetensors or from a GGUF file, whose packed weights are unpacked.

    The class is the one that the checkpoint's config names, so that no layer is left out and none is made up; a checkpoint
    that lacks tensors of its class is refused, and so is one with a NaN or an infinity in its weights.

    Args:
        name: ``embedded:softmax``, ``embedded:sigmoid``, a local directory, a GGUF file, or a hub id: ``org/model`` or
            ``org/model/file.gguf``. A directory of safetensors is read as that, whatever GGUF files lie in it too.
        device: ``"auto"`` (CUDA if there is a device, else CPU), or anything that torch accepts.
        tokenizer, processor: in place of the checkpoint's own; a tokenizer also by its name.
        dtype: ``"auto"``, or one of torch or its name: float64, float32, bfloat16 (bf16), float16 (fp16). ``auto`` is the
            checkpoint's own on an accelerator and float32 on the CPU, where half precision saves no time and costs digits;
            bfloat16 is used on the CPU when asked for, float16 is refused there.
        revision: branch, tag or commit of a hub repository.
        subfolder: of the directory or the repository, in which the checkpoint is.
        token: of the hub, for repositories that ask for one; by default what ``hf auth login`` has kept.
        local_files_only: ask no hub; what is not on this machine is refused.
        trust_remote_code: run model code that comes with the checkpoint.
        attn_implementation: ``eager``, ``sdpa``, …, or ``sinklab_<operation>``; the model's own choice if ``None``.
        device_map: spread the model over devices, main memory and disk, in place of ``device``: ``"auto"``, ``"balanced"``,
            ``"balanced_low_0"`` or ``"sequential"``; see docs/measure.md#models-bigger-than-one-device.
        max_memory: the most that each place may hold: ``{0: "20GiB", "cpu": "64GiB"}`` or ``"0=20GiB,cpu=64GiB"``.
        offload_folder: directory for weights that go to the disk in another form than the checkpoint's.

    Raises:
        InputError: a directory, file or repository that cannot be used; the message says which and what to do.
        ConfigurationError: a device, dtype or attention implementation that cannot take effect.
        UnsupportedModelError: an architecture that this transformers version does not know.
    """
    if not isinstance(name, (str, os.PathLike)):
        in_memory = "; wrap_model(model) takes one that is in memory" if isinstance(name, nn.Module) else ""
        raise InputError(f"the name of a model is a text or a path, and this is of {type(name).__name__}{in_memory}")
    name, device, dtype = os.fspath(name), str(device), dtype_named(dtype)  # a torch.device by its name
    place, spread = read_spread(device, device_map, max_memory, offload_folder)
    if dtype == "float16" and place.type == "cpu":
        raise ConfigurationError("float16 on the CPU is slow and overflows; use `dtype` float32 or bfloat16")
    if attn_implementation is not None and attn_implementation.startswith(implementation_name("")):
        register_operation(operations[attn_implementation.removeprefix(implementation_name(""))]())
    access: dict[str, Any] = {"token": token, "local_files_only": local_files_only}
    folder, commit, path = locate(name, revision, trust_remote_code, subfolder, **access)
    gguf = None if path is None else read_gguf(path)
    with _one_at_a_time, contextlib.nullcontext() if gguf is None else parsed_once():
        config = read_config(folder, name, trust_remote_code) if gguf is None else read_gguf_config(gguf, name)
        files = weight_files(folder, name) if gguf is None else [gguf.path]
        headers = read_headers(files) if gguf is None else {}
        if spread and getattr(config, CONFIG_FIELD, None) is not None:
            raise UnsupportedModelError(f"{name} has an operation attached, which goes to one device; load it with `device`")
        options = dict(spread)
        if gguf is not None:
            options |= {"gguf_file": gguf.path.name, **unpacked()}
        if attn_implementation:
            options["attn_implementation"] = attn_implementation
        if trust_remote_code:
            options["trust_remote_code"] = True
        model = _build(folder, name, config, _dtype(dtype, place, config, files), options)
        if gguf is not None:
            require_all_read(name, model, gguf)
        read = None if tokenizer is not None else load_tokenizer(folder, name, trust_remote_code, gguf)
    tokenizer = read if tokenizer is None else given_tokenizer(tokenizer, trust_remote_code, **access)
    say_threads(torch.get_num_threads())
    require_numbers(name, model, headers)
    model = restore(model, folder, name)
    _check_finite(model, name)
    kind = kind_of(model)
    return LoadedModel(
        name=f"{name}/{subfolder}" if subfolder else name,
        model=(model if spread else model.to(place)).eval(),
        tokenizer=tokenizer,
        encoder=_encoder(model, tokenizer),
        revision=commit or hash_files(files),
        operation=_operation(model),
        num_parameters=num_parameters(model),
        source=folder,
        processor=load_processor(folder, name, kind, trust_remote_code) if processor is None and kind != "text" else processor,
        gguf=None if gguf is None else gguf.record(),
    )


OPTIONS = frozenset(inspect.signature(load_model).parameters) - {"name", "tokenizer", "attn_implementation"}
"""What may be said of a model wherever one is taken: how it is loaded if it is named."""

ACCESS = frozenset({"token", "local_files_only", "trust_remote_code"})
"""Those of them that hold for a tokenizer too."""


def wrap_model(
    model: PreTrainedModel,
    tokenizer: GivenTokenizer | None = None,
    *,
    name: str | None = None,
    processor: Processor | None = None,
    **access: Any,
) -> LoadedModel:
    """A model that is already in memory, for :func:`sinklab.audit`; it is put into evaluation mode.

    Its tokenizer is by default the one beside the checkpoint that it was loaded from (its ``name_or_path``), for which
    ``access`` (``token``, ``local_files_only``, ``trust_remote_code``) is as of :func:`load_model`. A model of pictures or of
    sound needs its ``processor`` too. What ``torch.compile``, DataParallel, DistributedDataParallel or PEFT has wrapped is
    taken out, adapters such as LoRA's in it. Of a model of sentence-transformers it is the model of transformers, with the
    tokenizer that comes with it.

    Raises:
        InputError: no model of transformers, no tokenizer, or NaN or infinity in its weights.
    """
    tokenizer = getattr(processor, "tokenizer", None) if tokenizer is None else tokenizer
    tokenizer = tokenizer_inside(model) if tokenizer is None else given_tokenizer(tokenizer, **access)
    model = unwrapped(model)
    lacks = None if isinstance(getattr(model, "config", None), PreTrainedConfig) else "config"
    if lacks is None and not hasattr(model, "get_input_embeddings"):  # a module of one's own that keeps the config of another
        lacks = "get_input_embeddings()"
    if lacks is not None:
        inside = model_inside(model) if isinstance(model, nn.Module) else "the model that is inside it"
        raise InputError(
            f"{type(model).__name__} is no model of transformers: it has no {lacks}; give {inside}. "
            "attend(module, probes=[...]) looks at any module that runs one"
        )
    name = name or getattr(model, "name_or_path", "") or "in memory"
    _check_finite(model, name)
    tokenizer = tokenizer_beside(model, **access) if tokenizer is None else tokenizer
    return LoadedModel(
        name=name,
        model=model.eval(),
        tokenizer=tokenizer,
        encoder=_encoder(model, tokenizer),
        revision=hash_weights(model),
        operation=_operation(model),
        num_parameters=num_parameters(model),
        processor=processor,
    )


def hash_weights(model: nn.Module) -> str:
    """Identity of the weights of a model in memory: ``sha256-`` and the first 16 digits of the hash of names and values.

    Where the weights are does not matter: offloaded ones are read. Nor does what torch has put round parts of the model, such
    as a layer that is compiled.
    """
    digest = hashlib.sha256()
    with bare_parts(model):
        for key, tensor in weights_of(model):
            digest.update(key.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"sha256-{digest.hexdigest()[:16]}"


def _dtype(name: str, device: torch.device, config: PreTrainedConfig, files: list[Path]) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float32
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    with safe_open(files[0], "pt") as tensors:
        dtype = tensors.get_tensor(next(iter(tensors.keys()))).dtype
    return dtype if dtype.is_floating_point else torch.float32


def _model_class(config: PreTrainedConfig, name: str, trust_remote_code: bool) -> type[PreTrainedModel | _BaseAutoModelClass]:
    """The class that the checkpoint was saved from; transformers' auto classes where the config does not say."""
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and type(config).__module__.startswith("transformers_modules"):
        for auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModel"):
            if auto in remote:
                return getattr(transformers, auto)
    for architecture in config.architectures or []:
        model_class = getattr(transformers, architecture, None)
        if model_class is not None:
            return model_class
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING):
        if type(config) in mapping:
            model_class = mapping[type(config)]
            return model_class[0] if isinstance(model_class, tuple) else model_class
    raise UnsupportedModelError(f"{name}: transformers {transformers.__version__} has no model for {type(config).__name__}")


def _build(
    folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype, options: Mapping[str, object]
) -> PreTrainedModel:
    """The model with its weights, after checking that every weight was there."""
    cls = _model_class(config, name, "trust_remote_code" in options)
    # Parameters of an attached operation are read by restore(); transformers would list them as unexpected.
    noisy = getattr(config, CONFIG_FIELD, None) is not None or is_quiet()
    quiet = only_errors() if noisy else contextlib.nullcontext()
    try:
        with quiet, without_bars():
            model, report = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # require_fit() refuses them by their shapes, which the error does not name
                **options,
            )
    except (SinklabError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        explained = _explained(error, cls, name, options)
        if explained is None:
            raise
        raise explained from error
    require_fit(name, model, report)
    if "gguf_file" in options:  # dense now, and what transformers notes of the packed file would say otherwise
        vars(model.config).pop("quantization_config", None)
        for note in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(model).pop(note, None)
    return model


def _explained(error: Exception, cls: type, name: str, options: Mapping[str, object]) -> SinklabError | None:
    """What is said of an error of ``from_pretrained``; ``None`` for one that is shown as it is."""
    if isinstance(error, ImportError):
        return UnsupportedModelError(f"{name} needs a package that is not installed: {first_line(error)}")
    if isinstance(error, OSError) and error.errno is not None:
        return None
    if (attention := options.get("attn_implementation")) and isinstance(error, ValueError):
        return ConfigurationError(f"{name} cannot use attention {attention!r}: {first_line(error)}")
    of_files = isinstance(error, SafetensorError | OSError | ValueError | RuntimeError | KeyError | AttributeError)
    if cls is SinkLM and not of_files:
        return None
    if "offload_folder" in str(error) and "offload_folder" not in options:
        return ConfigurationError(
            f"{name}: some weights go to the disk in another form than the checkpoint's; give a directory for them with "
            "`offload_folder`, or more room with `max_memory`"
        )
    return InputError(f"{name} cannot be loaded as {cls.__name__}: {first_line(error)}")


def num_parameters(model: PreTrainedModel) -> int:
    """Learned numbers, and those that are packed: two in a byte, or in what is no parameter."""
    # bitsandbytes: a parameter of bytes knows the shape that it stands for.
    shapes = (getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape) for parameter in model.parameters())
    # torch: weight and bias of a quantised linear map, as one entry of the state.
    packed = (entry for entry in model.state_dict().values() if isinstance(entry, (tuple, list)))
    numbers = (part.numel() for parts in packed for part in parts if isinstance(part, Tensor))
    # GPTQ, AWQ: linear maps of integers.
    quantised = (module for module in model.modules() if isinstance(getattr(module, "qweight", None), Tensor))
    maps = (int(module.in_features) * int(module.out_features) for module in quantised if hasattr(module, "in_features"))
    return sum(map(math.prod, shapes)) + sum(numbers) + sum(maps)


def _check_finite(model: nn.Module, name: str) -> None:
    for key, _ in model.named_parameters():
        finite = torch.isfinite(held(model, key))
        if not bool(finite.all()):
            bad, size = int((~finite).sum()), finite.numel()
            raise InputError(f"{name} has NaN or infinite weights: {bad} of {size} numbers in {key}")


def _rows(model: PreTrainedModel) -> int:
    """Rows of the embedding of token ids; 0 for a model of images, which has none."""
    try:
        embeddings = core_module(model.get_input_embeddings())
    except NotImplementedError:
        return 0
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else 0


def _encoder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Encoder:
    config, rows = model.config.get_text_config(), _rows(model)
    bos = getattr(config, "bos_token_id", None)
    bos = bos[0] if isinstance(bos, list) else bos
    bos = None if bos is None or bos >= rows else int(bos)  # past the vocabulary it is a default of the config's class
    if tokenizer is None:
        special = [getattr(config, f"{role}_token_id", None) for role in ("bos", "eos", "pad")]
        flat = [token for entry in special for token in (entry if isinstance(entry, list) else [entry]) if token is not None]
        return Encoder(vocab_size=rows, bos_token_id=bos, special_ids=frozenset(flat))
    cls_token_id = getattr(tokenizer, "cls_token_id", None)
    if tokenizer.bos_token_id is not None and tokenizer.bos_token_id < rows:
        bos = tokenizer.bos_token_id
    elif cls_token_id is not None:
        bos = cls_token_id
    closing: tuple[int, ...] = ()
    if not is_causal_lm(model):
        front, closing = _frame(tokenizer, rows)
        has_bos = tokenizer.bos_token_id is not None or cls_token_id is not None
        if len(front) == 1:
            bos = front[0]
        elif model.config.is_encoder_decoder and not has_bos:
            bos = None  # the config classes of some have a bos_token_id that no tokenizer of theirs puts anywhere
    added = {token for token, entry in getattr(tokenizer, "added_tokens_decoder", {}).items() if entry.special}
    return Encoder(
        # Vocabularies are often padded beyond the tokenizer's last id; those rows are not tokens.
        vocab_size=min(rows, len(tokenizer)),
        rows=rows,
        bos_token_id=bos,
        tokenizer=tokenizer,
        special_ids=frozenset(tokenizer.all_special_ids) | added,
        closing_ids=closing,
    )


def _frame(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that a tokenizer puts in front of a text and behind it; none where that cannot be seen, or the model lacks them."""
    try:
        outer = list(tokenizer("a", verbose=False)["input_ids"])
        inner = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    except Exception:
        return (), ()  # a tokenizer that needs more than a text; whoever gives it one sees its error
    starts = [start for start in range(len(outer) - len(inner) + 1) if outer[start : start + len(inner)] == inner]
    if not inner or not starts or max(outer) >= rows:
        return (), ()
    return tuple(outer[: starts[0]]), tuple(outer[starts[0] + len(inner) :])


def _operation(model: PreTrainedModel) -> str:
    if isinstance(model.config, SinkLMConfig):
        return str(model.config.operation["name"])
    if (attached := getattr(model.config, CONFIG_FIELD, None)) is not None:
        return str(attached["operation"]["name"])
    implementation = model.config._attn_implementation
    if isinstance(implementation, str) and implementation.startswith(implementation_name("")):
        return implementation.removeprefix(implementation_name(""))
    # gpt-oss, MiMo, Granite-SWA and others name their learned sink logits alike.
    return "softmax with sink logit" if any(key.endswith(".sinks") for key, _ in model.named_parameters()) else "softmax"


def opened(
    model: GivenModel, *, tokenizer: GivenTokenizer | None = None, processor: Processor | None = None, **options: Any
) -> LoadedModel:
    """The model, loaded with these options of :func:`load_model` if it was named; one in memory must be what they ask for."""
    access = {name: options[name] for name in ACCESS & options.keys()}
    if isinstance(model, str | os.PathLike):
        options |= {"tokenizer": tokenizer, "processor": processor}
        loaded = load_model(model, **options)
        if uses_returned(loaded.model) and loaded.model.config._attn_implementation != "eager":
            del loaded  # Falcon on sdpa is not causal while its weights are asked for
            loaded = load_model(model, **options, attn_implementation="eager")
        return loaded
    if not isinstance(model, LoadedModel):
        loaded = wrap_model(model, tokenizer, processor=processor, **access)
    else:
        changes: dict[str, Any] = {} if processor is None else {"processor": processor}
        if tokenizer is not None:
            other = given_tokenizer(tokenizer, **access)
            changes |= {"tokenizer": other, "encoder": _encoder(model.model, other)}
        if (operation := _operation(model.model)) != model.operation:  # attached since
            changes["operation"] = operation
        loaded = dataclasses.replace(model, **changes) if changes else model
    require_as_it_is(loaded, **options)
    return loaded


def model_and_tokenizer(
    model: GivenModel, tokenizer: GivenTokenizer | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """As :func:`opened`, where no record is written: weights in memory are neither looked through nor hashed."""
    if isinstance(model, str | os.PathLike | LoadedModel):
        loaded = opened(model, tokenizer=tokenizer, **options)
        return loaded.model, loaded.tokenizer
    access = {name: options[name] for name in ACCESS & options.keys()}
    if tokenizer is not None:
        found: PreTrainedTokenizerBase | None = given_tokenizer(tokenizer, **access)
    else:
        found = tokenizer_inside(model) or tokenizer_beside(unwrapped(model), **access)
    return model_alone(model, **options), found


def model_alone(model: GivenModel, **options: Any) -> PreTrainedModel:
    """As :func:`model_and_tokenizer`, for what reads no text."""
    require_known("load_model", options, OPTIONS)
    if isinstance(model, str | os.PathLike | LoadedModel):
        return opened(model, **options).model
    if options:
        require_as_it_is(next(require_module(model).parameters(), torch.zeros(0)), **options)
    return model


def require_as_it_is(
    placed: LoadedModel | Tensor,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    **placing: object,
) -> None:
    """Refuse options of loading that ask of a model in memory (or a parameter of it) for what it is not, and would have no
    effect."""
    known = placed.revision if isinstance(placed, LoadedModel) else None
    without_effect = {
        "device": None if device == "auto" or device in (str(placed.device), placed.device.type) else device,
        "dtype": None if dtype == "auto" or f"torch.{dtype_named(dtype)}" == str(placed.dtype) else dtype,
        "revision": None if revision == known else revision,
        **{name: value or None for name, value in placing.items() if name not in (*ACCESS, "tokenizer", "processor")},
    }
    for name, value in without_effect.items():
        if value is not None:
            to_do = f"load it so, load_model(…, {name}={value!r})" if isinstance(placed, LoadedModel) else "make it so yourself"
            raise ConfigurationError(
                f"`{name}` {value} has no effect on a model in memory, which is {placed.dtype} on {placed.device}: {to_do}, or "
                "leave it out"
            )
