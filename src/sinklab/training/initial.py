"""Where a run's weights start: drawn from its seed, or taken from an earlier run, perhaps under another operation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerBase

from sinklab.attention.operation import ATTRIBUTE
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.architecture import Architecture
from sinklab.models.block import SinkLMLayer
from sinklab.models.checkpoint import hash_files, locate, read_config, weight_files
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.training.checkpoints import PREFIX, newest
from sinklab.training.config import PretrainingConfig

CHANGEABLE = {
    *("operation", "position", "window", "prefix", "max_position_embeddings", "initialization", "initializer_range"),
    *("norm_eps", "vocab_size"),
}
"""Fields in which a run may differ from the one whose weights it starts from; vocabularies are compared as shapes."""


def build_model(config: PretrainingConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> SinkLM:
    """The model of a configuration with weights drawn from ``training.seed`` and the tokenizer's vocabulary, rounded up to
    the next multiple of ``training.vocab_multiple``; another ``model.vocab_size`` is refused."""
    multiple = config.training.vocab_multiple
    size = -(-vocab_size // multiple) * multiple
    if config.model.vocab_size not in (size, Architecture.model_fields["vocab_size"].default):
        raise ConfigurationError(
            f"model.vocab_size {config.model.vocab_size} cannot take effect: the tokenizer has {vocab_size} tokens, which "
            f"makes it {size}; leave it out, and set data.vocab_size, data.tokenizer or training.vocab_multiple"
        )
    architecture = config.model.model_copy(update={"vocab_size": size})
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    transformers.set_seed(config.training.seed)
    return SinkLM(SinkLMConfig.from_architecture(architecture, **special))


def weights_folder(source: Path) -> Path:
    """The directory of weights that ``init_from`` means: a model's own (``embedded:NAME`` too), a run's, or its newest
    checkpoint's."""
    if not source.is_dir() and not str(source).startswith("embedded:"):
        raise InputError(f"there is no directory {source} to take weights from")
    folder = locate(str(source), None, trust_remote_code=False).folder
    if (folder / "config.json").is_file():
        return folder
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    checkpoint = newest(folder / "checkpoints")
    if checkpoint is None:
        raise InputError(
            f"{source} holds no weights: expected config.json and model.safetensors there, or the output directory of a run "
            f"with model/ or checkpoints/{PREFIX}N"
        )
    return checkpoint


def load_weights(model: SinkLM, folder: Path) -> dict[str, object]:
    """Put the weights of a directory into the model, as far as both have them.

    The operation, the position scheme and the masks may differ; parameters that they add keep their initial values and those
    that they do not have are dropped, as are those of an operation that have another shape. All else must be alike. Maps that
    ``sigma_reparam`` scales are read as the maps that they are, where another operation takes its place.

    Returns:
        For the run record: ``path, sha256, operation`` there, and the names of the parameters ``new`` and ``dropped``.

    Raises:
        InputError: not a SinkLM, another architecture, or parameters of other shapes.
    """
    name = str(folder)
    config = _fitting_config(folder, model.config)
    files = weight_files(folder, name)
    stored: dict[str, Tensor] = {}
    for file in files:
        stored |= {_plain(key): tensor for key, tensor in load_file(file).items()}
    targets = {_plain(key): parameter for key, parameter in model.named_parameters()}
    buffers = {_plain(key): buffer for key, buffer in model.named_buffers()}
    _fold_scales(stored, targets)
    misshapen = _misshapen(stored, targets, name)
    with torch.no_grad():
        _copy(stored, {key: target for key, target in targets.items() if key not in misshapen})
        # What the operation has taken from the weights (singular vectors) is of the initial ones until here.
        if config.operation["name"] == model.config.operation["name"]:
            _copy(stored, buffers)
        else:
            for layer in model.modules():
                if isinstance(layer, SinkLMLayer):
                    layer.self_attn.operation.prepare(layer.self_attn)
    known = {*targets, *buffers, *model.all_tied_weights_keys}
    return {
        "path": name,
        "sha256": hash_files(files),
        "operation": config.operation["name"],
        "new": [key for key in targets if key not in stored or key in misshapen],
        "dropped": [key for key in stored if key not in known or key in misshapen],
    }


def _misshapen(stored: Mapping[str, Tensor], targets: Mapping[str, Tensor], name: str) -> set[str]:
    """Parameters of the operation that have another shape in the model."""
    misshapen = [key for key in targets if key in stored and stored[key].shape != targets[key].shape]
    # What an operation learns may have another shape with each of its settings.
    if wrong := [key for key in misshapen if f".{ATTRIBUTE}." not in key and not key.startswith("front_tokens.")]:
        raise InputError(
            f"the weights of {name} do not fit: {wrong[0]} has the shape {tuple(stored[wrong[0]].shape)} there and "
            f"{tuple(targets[wrong[0]].shape)} here"
        )
    return set(misshapen)


def _copy(stored: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for key in targets.keys() & stored.keys():
        targets[key].copy_(stored[key])


def _fitting_config(folder: Path, ours: SinkLMConfig) -> SinkLMConfig:
    """The config of a directory, whose model is like ours but for what may differ."""
    theirs = read_config(folder, str(folder), trust_remote_code=False)
    if not isinstance(theirs, SinkLMConfig):
        raise InputError(
            f"{folder} is a {theirs.model_type} model; `init_from` takes the weights of a SinkLM (a run of pretrain)"
        )
    different = [
        f"{field} is {getattr(theirs, field)!r} there and {getattr(ours, field)!r} here"
        for field in type(theirs.architecture).model_fields
        if field not in CHANGEABLE and getattr(theirs, field) != getattr(ours, field)
    ]
    if different:
        raise InputError(f"the weights of {folder} do not fit model: {'; '.join(different)}")
    return theirs


def _fold_scales(stored: dict[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Put ``γ / σ(W)`` of :class:`~sinklab.operations._sigma_linear.SigmaLinear` into the stored weight, in place, where the
    model has no ``γ``: the weight alone is another map."""
    for key, scale in stored.items():
        path, _, name = key.rpartition(".")
        if name != "gamma" or key in targets or not {f"{path}.left", f"{path}.right"} <= stored.keys():
            continue
        weight, left, right = (stored[f"{path}.{part}"].float() for part in ("weight", "left", "right"))
        norm = (weight * (normalize(left, dim=0)[:, None] * normalize(right, dim=0))).sum()
        stored[f"{path}.weight"] = (scale.float() / norm * weight).to(stored[f"{path}.weight"].dtype)


def _plain(key: str) -> str:
    """Name of a weight that an operation reparametrises as it would be without."""
    return key.replace(".parametrizations.weight.original", ".weight")
