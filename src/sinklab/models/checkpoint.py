"""A checkpoint on disk: where its files are, and whether they are whole and safe to read. Nothing is built here."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import huggingface_hub
import transformers
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
from transformers import AutoConfig, PreTrainedConfig

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.embedded import PREFIX, embedded_names, embedded_path

__all__ = ["first_line", "hash_files", "locate", "read_config", "weight_files"]

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


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
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    try:
        # Sub-folders hold other formats of the same weights, and some are larger than the model.
        snapshot = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except GatedRepoError:
        raise InputError(f"{name} is gated on the hub: accept its terms there, then run: hf auth login") from None
    except RevisionNotFoundError:
        raise InputError(f"the hub repository {name} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{name!r} is neither a local directory nor a public hub repository; check the spelling, or log in; {known}"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk or a file that may not be written: nothing to do with the name
        raise InputError(
            f"{name!r} is not a local directory, not in the hub cache and could not be fetched from the hub (offline?); {known}"
        ) from None
    return Path(snapshot), Path(snapshot).name


def read_config(folder: Path, name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model directory.

    Raises:
        InputError: missing or damaged, or it asks for code that comes with the checkpoint.
        UnsupportedModelError: an architecture that this transformers version does not know.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{name} is an adapter, not a model; merge it into its base model first and give the merged directory"
            )
        raise InputError(f"{name} is not a model directory: it has no config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: not valid JSON ({error}); get the file again") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path} is damaged: expected a JSON object, got {type(fields).__name__}")
    model_type = fields.get("model_type")
    if "auto_map" in fields and model_type not in transformers.CONFIG_MAPPING and not trust_remote_code:
        raise InputError(
            f"{name} brings its own model code (auto_map in config.json), which sinklab does not run unless you say so: read "
            "that code, then add `trust_remote_code`"
        )
    if model_type is None:
        raise InputError(f"{path} does not say which architecture it describes: it has no model_type")
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


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of the checkpoint, each opened once so that a damaged one is named.

    Raises:
        InputError: none, some missing, a damaged one, or only pickles.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is damaged: {first_line(error)}; get the file again") from None
        files = [folder / shard for shard in names]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise InputError(
                f"{name} is incomplete: {len(missing)} of {len(files)} weight files are missing, first {missing[0]}"
            )
    else:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles or _hub_has_pickles(name, folder):
            raise InputError(
                f"{name} has only pickled weights ({', '.join(pickles) or 'on the hub'}), and unpickling can run any code, so "
                'sinklab reads safetensors only. Convert them once, if you trust their author: python -c "from '
                f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{name}').save_pretrained('converted')\""
            )
        raise InputError(f"{name} has no weights: expected model.safetensors (or its index and shards)")
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged ({first_line(error)}); get the file again") from None
    return files


def _hub_has_pickles(name: str, folder: Path) -> bool:
    """Whether the repository behind a snapshot, of which only safetensors were fetched, holds pickled weights."""
    if folder.parent.name != "snapshots":
        return False
    try:
        listed = huggingface_hub.list_repo_files(name, revision=folder.name)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return False
    return any(Path(entry).match(pattern) for entry in listed for pattern in PICKLES)


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
    """The first line of a foreign error that says something, short enough for one line of a terminal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
