"""A checkpoint on disk: where its files are, whether they are whole and safe to read, and whether they fit the model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError, first_line
from sinklab.models.embedded import PREFIX, embedded_names, embedded_path, require_name
from sinklab.models.gguf_file import Gguf, in_repository, local_gguf, require_package
from sinklab.results.file import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""Weights of an adapter that lies beside the model, which transformers puts into it."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DISTRIBUTED = "shard-[0-9]*-model-*.safetensors"
"""Shards of a distributed checkpoint, which transformers prefers to the weights that are hashed and checked here."""


class OwnCode(InputError):
    """The checkpoint ``name`` brings its own model code; ``end`` is of the sentence that sinklab does not run it."""

    def __init__(self, name: str, end: str) -> None:
        super().__init__(f"{name} brings its own model code (auto_map in config.json), which sinklab does not run {end}")
        self.name, self.end = name, end

    def __reduce__(self) -> tuple[type[OwnCode], tuple[str, str]]:
        return OwnCode, (self.name, self.end)


class Located(NamedTuple):
    """Where a checkpoint is: its local folder, the hub's commit it was fetched from, and the GGUF file that holds it, if
    any."""

    folder: Path
    commit: str | None = None
    gguf: Path | None = None


def locate(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    subfolder: str = "",
    *,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Located:
    """The files of a name, in a folder of it if one is given; those of a hub repository are fetched if need be.

    Raises:
        UnknownNameError: no embedded model of that name.
        InputError: nothing of that name here, in the hub cache or on the hub; the message says which.
        ConfigurationError: a revision of something local.
    """
    require_name(name)
    path = Path(name).expanduser()
    if name.startswith(PREFIX) or path.exists():
        if revision is not None:
            raise ConfigurationError(f"`revision` {revision} is for hub repositories; {name} is local")
        if name.startswith(PREFIX):
            return Located(embedded_path(name))
        if (gguf := local_gguf(path)) is not None:
            return Located(gguf.parent, gguf=gguf)
        path /= subfolder
        if subfolder and not path.is_dir():
            raise InputError(f"{name} has no folder {subfolder!r}")
        if not path.is_dir():
            raise InputError(f"{name} is a file; give one that ends in .gguf, or the directory of config.json and {WEIGHTS}")
        return Located(path)
    if (inside := in_repository(name)) is not None:
        return _located_gguf(*inside, revision, token=token, local_files_only=local_files_only)
    asked: dict[str, Any] = {"token": token, "local_files_only": local_files_only}
    front = f"{subfolder.strip('/')}/" if subfolder else ""

    def fetch(commit: str | None, patterns: list[str]) -> Path:
        ignored = (f"{front}*/*",)
        return _fetched(name, commit, [front + pattern for pattern in patterns], ignored, **asked)

    root = fetch(revision, ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])])
    commit, snapshot = root.name, root / front
    if front and not snapshot.is_dir():
        raise InputError(f"the hub repository {name} has no folder {subfolder!r}")
    # The weights by their names, at the same commit: variants of them are as large as they, and are not read.
    fetch(commit, [WEIGHTS, ADAPTER])
    if not (snapshot / WEIGHTS).exists() and (snapshot / INDEX).exists():
        fetch(commit, _shards(snapshot / INDEX))
    if not any(snapshot.glob(f"{WEIGHTS}*")) and (packed := _ggufs(name, snapshot)):
        raise InputError(f"{name} holds {len(packed)} GGUF files and no {WEIGHTS}; name one: {name}/{packed[0]}")
    return Located(snapshot, commit)


def locate_files(name: str, revision: str | None, patterns: list[str], token: str | bool | None, local: bool) -> Path:
    """The folder of some files of a hub repository, fetched if need be; an :class:`InputError` where they cannot be had."""
    return _fetched(name, revision, patterns, token=token, local_files_only=local)


def _located_gguf(repository: str, file: str, revision: str | None, **access: Any) -> Located:
    """One file of a hub repository."""
    require_package(f"{repository}/{file}")  # before gigabytes are fetched
    snapshot = _fetched(repository, revision, [file], ignored=[], **access)
    if not (snapshot / file).exists():
        there = f"; it holds {', '.join(packed)}" if (packed := _ggufs(repository, snapshot)) else ""
        raise InputError(f"the hub repository {repository} has no {file}{there}")
    return Located((snapshot / file).parent, snapshot.name, snapshot / file)


def _ggufs(name: str, snapshot: Path) -> list[str]:
    """GGUF files of the repository behind a snapshot, sorted."""
    return sorted(file for file in _on_hub(name, snapshot) if file.endswith(".gguf"))


def _fetched(name: str, revision: str | None, patterns: list[str], ignored: Sequence[str] = ("*/*",), **access: Any) -> Path:
    """The snapshot of a hub repository, with the files of these patterns."""
    try:
        # Sub-folders hold other formats of the same weights, and some are larger than the model.
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=list(ignored), **access
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk or a file that may not be written: nothing to do with the name
        raise InputError(_refusal(error, name, revision)) from None
    return Path(snapshot)


def _refusal(error: Exception, name: str, revision: str | None) -> str:
    """Why a model could not be fetched, and what to do about it."""
    known = f"models that need no download: {', '.join(embedded_names())}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return f"{name} is gated on the hub: accept its terms there ({constants.ENDPOINT}/{name}), then run: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub repository {name} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        why, way_out = "neither a local directory nor a public hub repository", "check the spelling, or run: hf auth login"
    elif isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        why, way_out = "not a local directory and not in the hub cache, and HF_HUB_OFFLINE is set", "unset it"
    elif status is not None:
        why = f"not fetched: the hub answered with an error (HTTP {status})"
        way_out = "try again later"
    else:
        why = "not a local directory, not in the hub cache and could not be fetched from the hub (offline?)"
        way_out = f"run 'hf download {name}' where there is a network and give the directory"
    return f"{name!r} is {why}; {way_out}; {known}"


def read_config(folder: Path, name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model directory; refuses a damaged one, one that asks for code of its own, and unknown architectures."""
    path = folder / "config.json"
    if not path.exists():
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{name} is an adapter, not a model; merge it into its base model, or hand over the model that PEFT has loaded"
            )
        inside = [place.parent for place in sorted(folder.glob("*/config.json"))]
        hint = f"; {inside[0]} is one" if inside else ""  # that of a training run holds the model it made, and its checkpoints
        raise InputError(f"{name} is not a model directory: it has no config.json{hint}")
    if distributed := sorted(folder.glob(DISTRIBUTED)):
        raise InputError(
            f"{folder} holds shards of a distributed checkpoint ({distributed[0].name}), loaded in place of {WEIGHTS}"
        )
    content = read_object(path)
    model_type = content.get("model_type")
    if content.get("auto_map") is not None and model_type not in transformers.CONFIG_MAPPING and not trust_remote_code:
        raise OwnCode(name, "unless you say so: read that code, then add `trust_remote_code`")
    if model_type is None:
        raise InputError(f"{path} does not say which architecture it describes: it has no model_type")
    if (named := content.get("transformers_weights")) not in (None, WEIGHTS, INDEX):
        raise InputError(
            f"{path} says that the weights are in {named!r} (transformers_weights); sinklab reads {WEIGHTS}. Rename the file"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError) as error:
        if model_type in transformers.CONFIG_MAPPING:
            raise InputError(f"{path} does not describe a {model_type} model: {first_line(error)}") from error
        raise UnsupportedModelError(
            f"{name}: transformers {transformers.__version__} knows no model type {model_type!r}; a newer one may"
        ) from error
    except Exception as error:
        # Config classes validate their fields with errors of their own kinds; all of them mean that the file is wrong.
        raise InputError(f"{path} cannot be used: {first_line(error)}") from error


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of the checkpoint, each opened once so that a damaged or missing one is named."""
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
        there = sorted({path.name for path in folder.iterdir()} | _on_hub(name, folder))
        others = [file for file in there if re.fullmatch(r".*\.safetensors(\.index\..*json)?", file)]
        pickles = [file for file in there for pattern in PICKLES if Path(file).match(pattern)]
        if pickles and not others:
            raise InputError(
                f"{name} has only pickled weights ({', '.join(pickles)}), and unpickling can run any code, so "
                'sinklab reads safetensors only. Convert them once, if you trust their author: python -c "from '
                f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{name}').save_pretrained('converted')\""
            )
        what = f"what is there is {', '.join(others)}: rename it if it is what you mean" if others else "there is none"
        raise InputError(f"{name} has no {WEIGHTS} and no index of shards; {what}")
    read_headers(files)
    return files


def _shards(index: Path) -> list[str]:
    """Names of the files in an index, sorted, each once."""
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


def read_headers(files: list[Path]) -> dict[str, str]:
    """Dtype of every tensor in safetensors files, as the format writes it (``F32``, ``F8_E4M3``), by name; no numbers are read,
    and a damaged file is refused.
    """
    headers: dict[str, str] = {}
    for path in files:
        try:
            # Opened plainly first: what may not be read is "No such file" to safetensors.
            with path.open("rb"), safe_open(path, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  not a mapping
                    headers[key] = str(tensors.get_slice(key).get_dtype())
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


NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of safetensors that are weights as they stand."""


def require_fit(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuse a model with tensors of random numbers: missing or misshapen, as ``output_loading_info`` reports them."""
    kind = type(model).__name__
    if wrong := sorted(report["mismatched_keys"], key=lambda entry: str(entry[0])):
        key, stored, built = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise InputError(
            f"{name} cannot be loaded as {kind}: config.json makes {key} of shape {tuple(built)}, and on the disk it is "
            f"{tuple(stored)}{more}. Is config.json that of another model?"
        )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"{name} lacks {len(missing)} of the tensors of {kind}, first {missing[0]}. Is config.json that of another model?"
        )


def read_gguf_config(gguf: Gguf, name: str) -> PreTrainedConfig:
    """The config that transformers makes of the metadata of a GGUF file; refused where it makes none."""
    try:
        config = AutoConfig.from_pretrained(gguf.path.parent, gguf_file=gguf.path.name)
        config.dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(gguf.half or "", torch.float32)
        if gguf.rows:  # transformers counts the tokens, of which a file may have fewer, or none
            config.vocab_size = gguf.rows
        return config
    except Exception as error:
        # Metadata that no model has makes the reader, and config classes, fail in every way that Python has.
        raise UnsupportedModelError(
            f"{name}: transformers {transformers.__version__} cannot read this GGUF file: {first_line(error)}"
        ) from error


def require_all_read(name: str, model: PreTrainedModel, gguf: Gguf) -> None:
    """Refuse a model of fewer or more numbers than its GGUF file: transformers passes over tensors that it does not map."""
    parameters = dict(model.named_parameters(remove_duplicate=False)).keys()
    buffers = [tensor for key, tensor in model.state_dict().items() if key not in parameters]
    if (read := sum(tensor.numel() for tensor in (*model.parameters(), *buffers))) != gguf.numbers:
        raise UnsupportedModelError(
            f"{name} holds {gguf.numbers:,} numbers, and transformers {transformers.__version__} makes a "
            f"{type(model).__name__} of {read:,} from it: it does not know this kind of GGUF file as a whole"
        )


def require_numbers(name: str, model: PreTrainedModel, headers: Mapping[str, str]) -> None:
    """Refuse weights whose dtype is not that of weights: transformers casts integers, truth values, and complex numbers too.

    Those of a quantised checkpoint may be of any dtype; transformers reads them with their scales.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return
    weights = [key for key, tensor in model.named_parameters(remove_duplicate=False) if tensor.is_floating_point()]
    for key, dtype in headers.items():
        if dtype not in NUMBERS and any(_same(key, weight) for weight in weights):
            scales = "without a quantization_config that says how" if dtype.startswith("F8") else "which is no weight"
            raise InputError(f"{name} holds {key} in {dtype}, {scales}; a weight is one of {', '.join(sorted(NUMBERS))}")


def _same(one: str, other: str) -> bool:
    """Whether two names mean one tensor: a checkpoint of a model without its head lacks the prefix, or has one more."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
