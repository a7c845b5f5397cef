"""What makes a function a command, and the arguments that several commands share: one type and one help text each.

A command is a function with the mark :func:`command`. Its signature and its docstring are the only place where an option is
written; ``sinklab.cli`` derives the command line from them. Nothing here imports torch, and no module of a command does: the
signature is read, and the help shown, without it.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import operator
import os
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from typing_extensions import Doc

from sinklab.errors import ConfigurationError, require_known
from sinklab.registry import registry_of, split_specs
from sinklab.results.environment import dtype_named, require_whole
from sinklab.results.folder import default_out
from sinklab.results.intervals import require_threshold
from sinklab.results.run import COMMAND, Progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sinklab.attention.operation import Operation
    from sinklab.corpora.base import Corpus
    from sinklab.models.loading import LoadedModel
    from sinklab.models.tokenizer import Processor

    _Model: TypeAlias = str | LoadedModel | PreTrainedModel
    _Corpus: TypeAlias = str | Corpus
    _Tokenizer: TypeAlias = str | PreTrainedTokenizerBase
    _Dtype: TypeAlias = str | torch.dtype
    _Device: TypeAlias = str | torch.device
    _Token: TypeAlias = str | bool  # unknown when it runs, as Processor is: no option of a line
    _MaxMemory: TypeAlias = str | Mapping[str | int, str | int]
    _Seeds: TypeAlias = str | Sequence[int]
    _Operations: TypeAlias = str | Sequence[str | Mapping[str, object] | Operation]
else:
    _Model = _Corpus = _Tokenizer = _Dtype = _Device = _MaxMemory = _Seeds = _Operations = str

WHOLE = "whole"
"""In the annotation of a list: the command line does not split its parts at commas."""


@dataclasses.dataclass(frozen=True)
class WrittenTo:
    """In the annotation of a path: where the command line writes if nothing is said, such as ``sinklab-audit/{model}``."""

    template: str

    def path(self, words: Mapping[str, str]) -> Path:
        """The path, below the folder of all outputs."""
        return default_out(self.template.format_map(words))


@dataclasses.dataclass(frozen=True)
class Known:
    """In the annotation of texts: what each is, up to a colon; others are refused before torch is imported.

    Args:
        kind: of plug-ins, such as ``policies``, whose names they are; a path is a corpus or a recipe too.
        others: what they are besides, a regular expression; ``words`` say it.
    """

    kind: str = ""
    others: str = ""
    words: str = ""

    def require(self, name: str, spec: str) -> None:
        """Refuse another text as the argument ``name``."""
        word = spec.partition(":")[0].strip()
        if re.fullmatch(self.others, word, re.IGNORECASE) or (self.kind == "recipes" and re.search(r"[/\\.]", word)):
            return
        if not self.kind:
            raise ConfigurationError(f"`{name}` {spec!r} is none of {self.words or self.others.replace('|', ', ')}")
        if self.kind == "corpora":
            from sinklab.corpora import kind_of_spec

            kind_of_spec(spec if Path(spec).expanduser().exists() else word)
        elif word not in (registry := registry_of(self.kind)) and (
            self.kind != "probes" or word not in DEFINITIONS.read_text()
        ):
            registry[word]  # says which there are; of a metric its probe is said where that is known


DEFINITIONS = Path(__file__).parents[1] / "cli" / "definitions.json"
FLOATS = "fp8|fp8b|mxfp4|nvfp4"
ENGINES = Known(others=r"kvpress|llama\.cpp", words="kvpress, llama.cpp")
_BITS = f"([2-8]|16|{FLOATS})"
SCHEMES = Known(
    others=f"w{_BITS}a{_BITS}|{FLOATS}",
    words=f"w and a with 2 to 8 bits each, or 16 for numbers that stay as they are, such as w8a8, w8a16 or w4a16, or "
    f"{FLOATS.replace('|', ', ')}, for both or in place of bits",
)
AsJson = Annotated[bool, "--json", Doc("Print JSON on stdout, and nothing else.")]
ModelSource = Annotated[_Model, Doc("embedded:softmax, embedded:sigmoid, a directory, a GGUF file, or a hub id.")]
_CORPORA = Known("corpora", "auto")
CorpusSource = Annotated[
    _Corpus, _CORPORA, Doc("A name from 'sinklab list corpora', optionally with settings, or a UTF-8 text file.")
]
CorpusOfModel = Annotated[
    _Corpus, _CORPORA, Doc("A name from 'sinklab list corpora', or a path; auto chooses by what the model reads.")
]
SeqLen = Annotated[int, Doc("Tokens in a sample, the beginning-of-sequence token included; of sound, frames.")]
SEQ_LEN = 64
"""Where no other is given."""
Samples = Annotated[int, Doc("Samples to average over.")]
Threshold = Annotated[float, Doc("A head has a sink on a key when its mean weight there exceeds this.")]
Device = Annotated[_Device, Doc("auto (CUDA if available), cpu, cuda, cuda:1, …")]
Dtype = Annotated[_Dtype, Doc("auto (float32 on a CPU, else the checkpoint's), float32, bfloat16 (bf16), float16, float64.")]
DeviceMap = Annotated[
    str | None,
    Known(others="auto|balanced|balanced_low_0|sequential"),
    Doc("Instead of a device: auto, balanced, balanced_low_0 or sequential, over devices, memory and disk."),
]
MaxMemory = Annotated[_MaxMemory | None, Doc("With --device-map auto, the limit for each device: 0=20GiB,cpu=64GiB.")]
OffloadFolder = Annotated[
    Path | None, Doc("With --device-map: directory for weights on disk that the checkpoint does not have in this form.")
]
Seed = Annotated[int, Doc("Seed of the sampling; the same seed gives the same tokens.")]
Operations = Annotated[
    _Operations,
    Known("operations", "all"),
    Doc("From 'sinklab list operations', optionally with settings: softmax,relu:uncounted=0; or all."),
]
Seeds = Annotated[_Seeds, Doc("Seeds of initial weights and data: 0..2 (both ends included), or a list such as 0,3,7.")]
Jobs = Annotated[int | None, Doc("Processes at a time; by default one per GPU, or cores over training.threads.")]
Retries = Annotated[int, Doc("How often a killed training continues from its last checkpoint.")]
StepSamples = Annotated[int, Doc("Fresh samples per step.")]
Tolerance = Annotated[float, Doc("Training stops when every coordinate of a batch has a smaller error.")]
StepCap = Annotated[int, Doc("Largest number of steps.")]
FreshSamples = Annotated[int, Doc("Fresh samples for the evaluation.")]
Bos = Annotated[
    Literal["auto", "always", "none"],
    Doc("Beginning-of-sequence token in front: as the tokenizer does by default, always, or none."),
]
BatchSize = Annotated[int | None, Doc("Samples in a forward pass; by default chosen from the lengths.")]
Revision = Annotated[str | None, Doc("Branch, tag or commit of a hub repository.")]
Subfolder = Annotated[str, Doc("Folder of the checkpoint inside its directory or hub repository.")]
LocalFilesOnly = Annotated[bool, Doc("Ask no hub: what is not on this machine is refused.")]
Tokenizer = Annotated[_Tokenizer | None, Doc("In place of the model's own: a directory, or a hub id.")]
TrustRemoteCode = Annotated[bool, Doc("Run model code that comes with the checkpoint.")]
Out = Annotated[Path | None, Doc("Output directory; it appears complete or not at all.")]
Overwrite = Annotated[bool, Doc("Replace the output directory if it exists.")]
OverwriteFile = Annotated[bool, Doc("Replace the output file if it exists.")]
Quiet = Annotated[bool, "--quiet", "-q", Doc("Show only the result and errors, no progress or hints.")]
Resume = Annotated[bool, Doc("Continue the run in the output directory; finished work is kept.")]


class Options:
    """Base of frozen dataclasses whose fields are arguments of every function that takes one.

    ``loading: Loading = Loading()`` in the signature of a command stands for the fields of :class:`Loading`: options of
    the line, which callers from Python give by name, ``audit(model, dtype="bfloat16")``, or all at once. What the annotation
    of the parameter notes (:class:`WrittenTo`) belongs to the field ``out``.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading(Options):
    """How a model that is named is loaded (:func:`~sinklab.models.loading.load_model`), and what reads for it.

    ``token``, of the hub, and ``processor`` only Python has; no record keeps the first.
    """

    device: Device = "auto"
    dtype: Dtype = "auto"
    device_map: DeviceMap = None
    max_memory: MaxMemory = None
    offload_folder: OffloadFolder = None
    revision: Revision = None
    subfolder: Subfolder = ""
    token: _Token | None = None
    local_files_only: LocalFilesOnly = False
    trust_remote_code: TrustRemoteCode = False
    tokenizer: Tokenizer = None
    processor: Processor | None = None

    def open(self, model: _Model) -> LoadedModel:
        """The model, loaded if it was named."""
        from sinklab.models.loading import opened

        return opened(model, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Options):
    """Where a result is written, and what is called with the progress."""

    out: Out = None
    overwrite: Overwrite = False
    progress: Progress | None = None


R = TypeVar("R")


@overload
def command(function: Callable[..., R]) -> Callable[..., R]: ...
@overload
def command(function: str) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def command(function: Any) -> Any:
    """Mark of a function that is a command of ``sinklab``; its numbers and paths are checked before it is called.

    The command line knows it by its line in ``sinklab.cli.commands``, or by an entry point of another package.

    - What comes before ``*`` in the signature is given by its position, all else is an option, called as its parameter, with
      hyphens, or as words of the annotation say: ``Annotated[bool, "--json"]``. Help is the text in ``Doc`` of the annotation,
      or the entry under ``Args:``; ``In Python:`` says what a line cannot give.
    - Lists can be repeated, and their parts separated by commas, unless :data:`WHOLE` is in the annotation. With a
      :class:`WrittenTo` in that of a path, the command line always writes a folder.
    - ``progress``, ``quiet`` and ``say``, which prints a sentence on stderr, are handed in; what only Python has is no option.
    - A :class:`~sinklab.results.run.Result` or :class:`~sinklab.results.run.Listing` is shown, and gives the command
      ``--json``; text or a path is printed.
    """
    if isinstance(function, str):
        return functools.partial(_with_checked_numbers, name=function)
    return _with_checked_numbers(function, name=function.__name__)


def _with_checked_numbers(function: Callable[..., R], name: str) -> Callable[..., R]:
    """The function behind :func:`~sinklab.configuration.check_numbers` of every argument, from Python and from a line alike."""
    parameters = inspect.signature(function).parameters.values()
    groups = {parameter.name: parameter.default for parameter in parameters if isinstance(parameter.default, Options)}
    group_of = {field.name: name for name, default in groups.items() for field in dataclasses.fields(default)}  # type: ignore[arg-type]

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        given = {group: named.pop(group, default) for group, default in groups.items()}
        for field in [argument for argument in named if argument in group_of]:
            group = group_of[field]
            given[group] = dataclasses.replace(given[group], **{field: _checked(call, field, named.pop(field))})
        signature = inspect.signature(function)
        require_known(function.__name__, named, inspect.signature(call).parameters)
        try:
            bound = signature.bind(*positional, **named)
        except TypeError as error:
            raise TypeError(
                f"{function.__name__}() {error}; it takes {', '.join(inspect.signature(call).parameters)}"
            ) from None
        for argument, value in bound.arguments.items():
            if argument == "model" and isinstance(value, os.PathLike):  # a directory; everything behind reads names
                value = os.fspath(value)
            bound.arguments[argument] = _checked(call, argument, value)
        everything = {**bound.arguments, **{k: v for part in given.values() for k, v in vars(part).items()}}
        _check_early(call, everything)
        line = COMMAND.set(_line(call, name, everything))
        try:
            return function(*bound.args, **bound.kwargs, **given)
        finally:
            COMMAND.reset(line)

    call.__signature__ = _flat(function)  # type: ignore[attr-defined]
    return call


def _line(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> str:
    """How the command line says a call; empty where an object of Python was given, which no line can name."""
    words = ["sinklab", name]
    for argument, parameter in inspect.signature(function).parameters.items():
        value, default = (
            list(one) if isinstance(one, (list, tuple)) else [one]
            for one in (given.get(argument, parameter.default), parameter.default)
        )
        if argument in ("out", "overwrite", "resume", "progress", "say", "quiet", "token") or value in ([], [None]):
            continue
        if not all(isinstance(one, (str, int, float, Path)) for one in value):
            return ""
        notes = getattr(annotations_of(function)[argument], "__metadata__", ())
        option = next((str(note) for note in notes if str(note).startswith("--")), f"--{argument.replace('_', '-')}")
        if parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
            words += map(str, value)
        elif value == default:
            continue
        elif isinstance(value[0], bool):
            words.append(option if value[0] else f"--no-{option.removeprefix('--')}")
        else:
            words += [f"{option}={one}" for one in (value if WHOLE in notes else [",".join(map(str, value))])]
    return shlex.join(words)


def _flat(function: Callable[..., Any]) -> inspect.Signature:
    """The signature with the fields of :class:`Options` in place of these; annotations as they are written."""
    flat: list[inspect.Parameter] = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if not isinstance(parameter.default, Options):
            flat.append(parameter)
            continue
        for field in dataclasses.fields(parameter.default):  # type: ignore[arg-type]
            default = getattr(parameter.default, field.name)
            flat.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type))
    return signature.replace(parameters=flat)


class _Unknown(type):
    """What is read off a module that is imported for type checkers only (``nn.Module``) is as unknown as the module."""

    def __getattr__(cls, name: str) -> _Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: object) -> _Unknown:
        return cls


class InMemory(metaclass=_Unknown):
    """Stands for types that are imported for type checkers only: models and plug-ins in memory, which no line can name."""


@functools.cache
def annotations_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Parameter of a command to its annotation, evaluated; those of :class:`Options` field by field."""
    evaluated = _evaluated(function)
    found: dict[str, Any] = {}
    for parameter in inspect.signature(inspect.unwrap(function)).parameters.values():
        if not isinstance(parameter.default, Options):
            found[parameter.name] = evaluated.get(parameter.name, Any)
            continue
        notes = getattr(evaluated[parameter.name], "__metadata__", ())
        for name, annotation in _evaluated(type(parameter.default)).items():
            found[name] = functools.reduce(lambda kind, note: Annotated[kind, note], notes if name == "out" else (), annotation)
    return found


def _evaluated(holder: Any) -> dict[str, Any]:
    known = {**vars(builtins), **vars(sys.modules[holder.__module__])}

    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return known.get(name, InMemory)

    return get_type_hints(inspect.unwrap(holder), {}, Names(), include_extras=True)


def _checked(function: Callable[..., Any], name: str, value: Any) -> Any:
    """The value; where a number is declared, as one of Python, which runs can record, and not of numpy."""
    annotation = annotations_of(function)[name]
    annotation = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    declared = set(get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,))
    if value is None and type(None) in declared:
        return None
    listed = isinstance(value, Iterable) and not isinstance(value, (str, os.PathLike, Mapping))  # a text is one, of its letters
    if get_origin(next(iter(declared - {type(None)}))) is Sequence and str not in declared and not listed:
        raise ConfigurationError(f"`{name}` is {value!r}; expected a list, also of one")
    if name in ("dtype", "device") and value is not None:  # of torch, by their names
        return dtype_named(value) if name == "dtype" else str(value)
    if Progress in declared and not callable(value):
        raise ConfigurationError(
            f"`{name}` is {value!r}; expected a function of the stage, what is done and what there is in all"
        )
    if isinstance(value, (int, float, list, tuple)):
        from sinklab.configuration import check_numbers

        check_numbers(f"`{name}`", value)
    if name in ("seed", "seeds"):
        for seed in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(seed, int):
                require_whole(f"`{name}`", seed, 0)
    try:
        if declared <= {int, type(None)}:
            return value if isinstance(value, bool) else operator.index(value)
        if declared <= {int, float, type(None)}:
            if isinstance(value, str):
                raise TypeError
            return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        what = "number" if float in declared else "whole number"
        raise ConfigurationError(f"`{name}` is {value!r}; expected a {what}") from None
    return type(value)([_of_python(item) for item in value]) if type(value) in (list, tuple) else value


DEVICES = (
    "auto", "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "mkldnn", "mps", "mtia", "npu",
    "opencl", "opengl", "ve", "vulkan", "xla", "xpu",
)  # fmt: skip
"""What torch may call a device, and ``auto``."""


def _check_early(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse names that are none, broken GGUF files and folders that are in the way before anything heavy is imported."""
    annotations = annotations_of(function)
    if annotations.get("threshold") == Threshold and "threshold" in given:
        require_threshold(given["threshold"], "`threshold`")
    if (place := str(given.get("device", "auto")).partition(":")[0]) not in DEVICES and not place.isdecimal():
        raise ConfigurationError(f"there is no device {given['device']!r}; `device` is auto, cpu, cuda, cuda:1, mps, …")
    few = {"seq_len": (SeqLen, 2), "samples": (Samples, 1), "batch_size": (BatchSize, 1)}
    for name, (annotation, least) in few.items():
        value = given.get(name)
        if annotations.get(name) == annotation and isinstance(value, int) and value < least:
            raise ConfigurationError(f"`{name}` must be at least {least}, got {value}")
    if annotations.get("model") in (ModelSource, str) and isinstance(model := given.get("model"), str):
        from sinklab.models.embedded import require_name
        from sinklab.models.gguf_file import local_gguf, read_gguf

        require_name(model)
        if (path := local_gguf(model)) is not None:
            read_gguf(path)
    for name, value in given.items():
        for known in _known(annotations.get(name)):
            parts = split_specs(value) if known.kind == "operations" and isinstance(value, str) else [value]
            for spec in value if isinstance(value, (list, tuple)) else parts:
                if isinstance(spec, str):
                    known.require(name, spec)
    if given.get("out") is not None and annotations.get("overwrite") == Overwrite and "resume" not in annotations:
        from sinklab.results.folder import check_free, check_place

        check_place(Path(given["out"]))
        check_free(Path(given["out"]), given.get("overwrite", False))


def _known(annotation: Any) -> Iterator[Known]:
    """What texts of a parameter are, one or several."""
    yield from (note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Known))
    for inner in get_args(annotation):
        yield from _known(inner)


def _of_python(value: Any) -> Any:
    """A number of numpy as one of Python; all else as it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def parse_seeds(seeds: str | Sequence[int]) -> list[int]:
    """``0..4`` (both ends included), ``7``, or a list of these, ``0,1,10..12``; numbers as they are."""
    if not isinstance(seeds, str):
        return list(seeds)
    from sinklab.configuration import check_numbers

    numbers: list[int] = []
    for part in seeds.split(","):
        match = re.fullmatch(r"\s*(\d{1,20})(?:\.\.(\d{1,20}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ConfigurationError(f"`seeds` {seeds!r}: expected seeds such as 0..4 (five of them) or 0,3,7")
        check_numbers("`seeds`", last)
        numbers += range(first, last + 1)
    return numbers
