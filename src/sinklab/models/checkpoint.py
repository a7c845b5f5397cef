"""A checkpoint on disk: where its files are, and whether they are whole and safe to read. Nothing is built here."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.embedded import PREFIX, embedded_names, embedded_path
from sinklab.models.hub import refusal
from sinklab.results.file import read_object, require_plain_file

__all__ = ["OwnCode", "TensorHeader", "first_line", "hash_files", "locate", "read_config", "read_headers", "weight_files"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""Weights of an adapter that lies beside the model, which transformers puts into it."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken")
"""Files of a checkpoint that a loader may open, whether or not their names are known here."""

DISTRIBUTED = "shard-[0-9]*-model-*.safetensors"
"""Shards of a distributed checkpoint, which transformers prefers to the weights that are hashed and checked here."""

VARIANT = re.compile(r"model\.([\w-]+)\.safetensors|model\.safetensors\.index\.([\w-]+)\.json")
"""Weights, or the index of shards, that ``from_pretrained`` reads with a ``variant``."""

MOST_LISTED = 4
"""Names of files that a refusal lists."""

MOST_OF_A_KIND = 65_536
"""Layers, labels or experts that a config may ask for: a hundred times what the largest models have."""

COUNTED = re.compile(r"(^|_)(layers?|depths?|blocks|stages|labels|experts)$")
"""Names of fields that say how many modules or names a config class or a model makes, one by one."""


class OwnCode(InputError):
    """A checkpoint that brings its own model code.

    Args:
        name: of the checkpoint.
        end: of the sentence that sinklab does not run it: what can be done.
    """

    def __init__(self, name: str, end: str) -> None:
        super().__init__(f"{name} brings its own model code (auto_map in config.json), which sinklab does not run {end}")
        self.name, self.end = name, end

    def __reduce__(self) -> tuple[type[OwnCode], tuple[str, str]]:
        return OwnCode, (self.name, self.end)


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says of a tensor before its numbers are read.

    Attributes:
        dtype: as the format writes it: ``F32``, ``BF16``, ``I32``, ``F8_E4M3``, …
        shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]


Token = int | list[int] | None


class ConfigFields(BaseModel):
    """The fields of config.json that are read here before transformers sees them; others are left to it."""

    model_config = ConfigDict(strict=True, extra="allow")

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    transformers_weights: str | None = None
    quantization_config: dict[str, Any] | None = None
    sinklab: dict[str, Any] | None = None
    bos_token_id: Token = None
    eos_token_id: Token = None
    pad_token_id: Token = None


def locate(name: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, str | None]:
    """Local directory of the files and, for a hub repository (fetched if need be), its commit.

    Raises:
        UnknownNameError: no embedded model of that name.
        InputError: nothing of that name here, in the hub cache or on the hub; the message says which.
        ConfigurationError: a revision of something local.
    """
    if not name:
        raise InputError("the model's name is empty; give embedded:softmax, a directory or a hub id")
    path = Path(name).expanduser()
    if name.startswith(PREFIX) or path.exists():
        if revision is not None:
            raise ConfigurationError(f"`revision` {revision} is for hub repositories; {name} is local")
        if name.startswith(PREFIX):
            return embedded_path(name), None
        if not path.is_dir():
            raise InputError(f"{name} is a file; give the directory that holds config.json and model.safetensors")
        return path, None
    known = f"models that need no download: {', '.join(embedded_names())}"
    if not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name):
        raise InputError(f"there is no directory {name!r}, and a hub id looks like org/model; {known}")
    snapshot = _fetched(name, revision, ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])])
    # The weights by their names, at the same commit: variants of them are as large as they, and are not read.
    _fetched(name, snapshot.name, [WEIGHTS, ADAPTER])
    if not (snapshot / WEIGHTS).exists() and (snapshot / INDEX).exists():
        _fetched(name, snapshot.name, _shards(snapshot / INDEX))
    return snapshot, snapshot.name


def _fetched(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot of a hub repository, with the files of these patterns.

    Raises:
        InputError: it cannot be had.
    """
    try:
        # Sub-folders hold other formats of the same weights, and some are larger than the model.
        snapshot = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk or a file that may not be written: nothing to do with the name
        raise InputError(refusal(error, name, revision)) from None
    return Path(snapshot)


def read_config(folder: Path, name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model directory.

    Raises:
        InputError: missing or damaged, or it asks for code that comes with the checkpoint.
        UnsupportedModelError: an architecture that this transformers version does not know.
    """
    path = folder / "config.json"
    if not path.exists():
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{name} is an adapter, not a model; merge it into its base model first and give the merged directory, or from "
                "Python hand over the model that PEFT has loaded"
            )
        inside = [place.parent for place in sorted(folder.glob("*/config.json"))]
        hint = f"; {inside[0]} is one" if inside else ""  # that of a training run holds the model it made, and its checkpoints
        raise InputError(f"{name} is not a model directory: it has no config.json{hint}")
    _require_own_files(folder)
    content = read_object(path)
    fields = _typed(content, path)
    model_type = fields.model_type
    if fields.auto_map is not None and model_type not in transformers.CONFIG_MAPPING and not trust_remote_code:
        raise OwnCode(name, "unless you say so: read that code, then add `trust_remote_code`")
    if model_type is None:
        raise InputError(f"{path} does not say which architecture it describes: it has no model_type")
    if fields.transformers_weights not in (None, WEIGHTS, INDEX):
        raise InputError(
            f"{path} says that the weights are in {fields.transformers_weights!r} (transformers_weights); sinklab reads "
            f"{WEIGHTS}, or {INDEX} and its shards. Rename the file"
        )
    for field, count in _counts(content):
        if count > MOST_OF_A_KIND:
            headers = read_headers(weight_files(folder, name)).values()
            raise InputError(
                f"{path} says {field} = {count:,}, and the weights of {name} are {len(headers):,} tensors; is config.json "
                "that of another model?"
            )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError) as error:
        if model_type in transformers.CONFIG_MAPPING:
            raise InputError(f"{path} does not describe a {model_type} model: {first_line(error)}") from error
        raise UnsupportedModelError(
            f"{name}: transformers {transformers.__version__} knows no model type {model_type!r} (model_type in config.json); "
            "a newer one may"
        ) from error
    except Exception as error:
        # Config classes validate their fields with errors of their own kinds; all of them mean that the file is wrong.
        raise InputError(f"{path} cannot be used: {first_line(error)}") from error


def _typed(content: dict[str, Any], path: Path, inside: str = "") -> ConfigFields:
    """The fields of a config that are read here; those of the configs inside it are checked too.

    Raises:
        InputError: one of another type; the message names it.
    """
    for name, inner in content.items():
        if not inside and isinstance(inner, dict) and (name.endswith("_config") or "model_type" in inner):
            _typed(inner, path, f"{name}.")
    try:
        return ConfigFields(**{name: value for name, value in content.items() if name in ConfigFields.model_fields})
    except ValidationError as error:
        problem = error.errors()[0]
        given = repr(problem["input"])
        given = given if len(given) <= 60 else f"{given[:60]}…"
        raise InputError(
            f"{path} cannot be used: {inside}{problem['loc'][0]} holds {given}; {problem['msg'][0].lower()}{problem['msg'][1:]}"
        ) from None


def _counts(content: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Numbers in a config that say how many of something are to be made, with the paths of their fields."""
    waiting = list(content.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            waiting += [(f"{name}.{inner}", item) for inner, item in value.items()]
        elif isinstance(value, list):
            waiting += [(name, item) for item in value]
        elif isinstance(value, int) and COUNTED.search(name.rpartition(".")[2]):
            yield name, value


def _require_own_files(folder: Path) -> None:
    """Refuse a directory in which a loader could hang, or read what is not part of the checkpoint.

    Links may lead to other places of the directory, and in a snapshot of the hub's cache to its blobs.

    Raises:
        InputError: a pipe or another thing that is no file among the files to be read, a link that leads out of the directory,
            or two checkpoints in one directory.
    """
    for path in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*"))):
        if not any(path.match(pattern) for pattern in READ):
            continue
        if path.is_symlink():
            _require_inside(path, folder)
        if path.is_symlink() or not path.is_dir():
            require_plain_file(path)
    if distributed := sorted(folder.glob(DISTRIBUTED)):
        raise InputError(
            f"{folder} holds shards of a distributed checkpoint (first {distributed[0].name}), which would be loaded in place "
            f"of {WEIGHTS}; load them with transformers, and save the model into a directory of its own"
        )


def _require_inside(path: Path, folder: Path) -> None:
    """Refuse a link, or a path through one, that leads out of the directory of a checkpoint."""
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":
        inside.append((folder.parent.parent / "blobs").resolve())
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: pathlib's word for a loop before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else "it leads back to itself"
        raise InputError(f"{path} is a symbolic link that cannot be followed ({reason}); put the file itself there") from error
    if not any(target.is_relative_to(place) for place in inside):
        raise InputError(
            f"{path} leads to {target}, outside of the checkpoint; copy the file there if it belongs to it and you trust it"
        )


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of the checkpoint, each opened once so that a damaged one is named.

    Raises:
        InputError: none, only under another name, some missing, outside of the directory or damaged, or only pickles.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    elif index.exists():
        files = [folder / shard for shard in _shards(index)]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise InputError(
                f"{name} is incomplete: {len(missing)} of {len(files)} weight files are missing, first {missing[0]}"
            )
    else:
        there = {path.name for path in folder.iterdir()} | _on_hub(name, folder)
        _require_no_other_name(there, name)
        if pickles := sorted(file for file in there for pattern in PICKLES if Path(file).match(pattern)):
            raise InputError(
                f"{name} has only pickled weights ({', '.join(pickles)}), and unpickling can run any code, so "
                'sinklab reads safetensors only. Convert them once, if you trust their author: python -c "from '
                f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{name}').save_pretrained('converted')\""
            )
        raise InputError(f"{name} has no weights: expected {WEIGHTS} (or its index and shards)")
    for path in files:
        _require_inside(path, folder)
        require_plain_file(path)
    read_headers(files)
    return files


def _require_no_other_name(there: Collection[str], name: str) -> None:
    """Refuse weights that are there under another name than that of the weights of a model, such as a variant.

    Args:
        there: names of the files of the directory or repository.

    Raises:
        InputError: there are some.
    """
    weights = re.compile(r".*\.safetensors(\.index\..*json)?")
    found = sorted(file for file in there if weights.fullmatch(file))
    if not found:
        return
    listed = ", ".join(found[:MOST_LISTED]) + (f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else "")
    variants = (VARIANT.fullmatch(file) for file in found)
    variant = next((match[1] or match[2] for match in variants if match), None)
    way_out = (
        "rename the file in a copy of the directory if these are the weights of the model"
        if variant is None
        else f'save the variant that you mean as a checkpoint of its own: python -c "from transformers import '
        f"AutoModelForCausalLM as M; M.from_pretrained('{name}', variant='{variant}').save_pretrained('{variant}')\""
    )
    raise InputError(f"{name} has no {WEIGHTS} and no index of shards; what is there is {listed}: {way_out}")


def _shards(index: Path) -> list[str]:
    """Names of the files in an index, sorted, each once.

    Raises:
        InputError: it has no map of names, or one that leads out of the directory or to a file of another format.
    """
    content = read_object(index)
    weights = content.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(f"{index} is damaged: it has no weight_map from tensors to files; get the file again")
    for tensor, shard in weights.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise InputError(f"{index} is damaged: weight_map puts {tensor} in {shard!r}, which is no safetensors file")
        if os.path.isabs(shard) or ".." in Path(shard).parts:
            raise InputError(
                f"{index} puts {tensor} in {shard!r}, outside of the checkpoint; shards lie in the directory of the index"
            )
    return sorted(set(weights.values()))


def read_headers(files: list[Path]) -> dict[str, TensorHeader]:
    """Dtype and shape of every tensor in safetensors files, by name; no numbers are read.

    Raises:
        InputError: a damaged file, or one that may not be read.
    """
    headers: dict[str, TensorHeader] = {}
    for path in files:
        try:
            # Opened plainly first: what may not be read is "No such file" to safetensors.
            with path.open("rb"), safe_open(path, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  not a mapping
                    tensor = tensors.get_slice(key)
                    headers[key] = TensorHeader(str(tensor.get_dtype()), tuple(tensor.get_shape()))
        except PermissionError as error:
            raise InputError(f"{path} cannot be opened: {error.strerror}; change its permissions") from error
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged ({first_line(error)}); get the file again") from error
    return headers


def _on_hub(name: str, folder: Path) -> set[str]:
    """Files of the repository behind a snapshot, of which only what is read was fetched; empty where it cannot be asked."""
    if folder.parent.name != "snapshots":
        return set()
    try:
        return {entry for entry in huggingface_hub.list_repo_files(name, revision=folder.name) if "/" not in entry}
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return set()


def hash_files(files: list[Path]) -> str:
    """``sha256-`` and 16 digits: of the file itself, as ``sha256sum`` prints it, or of the list of several files' hashes."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(digests) > 1:
        listing = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True))
        digests = [hashlib.sha256(listing.encode()).hexdigest()]
    return f"sha256-{digests[0][:16]}"


def first_line(error: BaseException) -> str:
    """What a foreign error says, short enough for one line of a terminal: its first line, and the one behind a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    if said.endswith(":") and len(lines) > 1:
        said = f"{said} {lines[1]}"
    return said[:300]
