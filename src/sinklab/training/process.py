"""What a run means to the process it lives in: device, threads, compiler, trackers, arguments of the Trainer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from sinklab.errors import ConfigurationError
from sinklab.training.checkpoints import step_of
from sinklab.training.config import PretrainingConfig

RECOMPUTE = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
"""Argument by which activations are computed again in the backward pass: renamed in 5.23, which warns of the old name."""


def default_cache() -> Path:
    """Where encoded text is kept between runs: ``$SINKLAB_CACHE``, or ``sinklab`` in the user's cache directory."""
    given = os.environ.get("SINKLAB_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sinklab"


@contextlib.contextmanager
def process_settings(config: PretrainingConfig) -> Iterator[None]:
    """What a run sets for the whole process, and puts back."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    # transformers and accelerate speak to each other through these.
    names = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE", "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    before = {name: os.environ.get(name) for name in names}
    if chosen_device(config) == "cpu" and config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if compiles(config):
        # Dynamo counts the graphs of one function over all models of a process and gives up after a few.
        torch._dynamo.reset()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def is_main() -> bool:
    """Whether this is the process that writes, among those that ``torchrun`` or ``accelerate launch`` started."""
    return os.environ.get("RANK", "0") == "0"


def chosen_device(config: PretrainingConfig) -> str:
    """``cpu`` or ``cuda``, which must be there if it is asked for."""
    wanted = config.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"training.device is cuda and this machine's torch {torch.__version__} sees no GPU; use cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def has_bfloat16(device: str) -> bool:
    """Whether ``cpu`` or ``cuda`` multiplies bfloat16 matrices by instructions of its own.

    A CPU without AVX-512 or AMX (most desktops) does so number by number: a step of ``emergence`` takes eleven times as long
    as in float32.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def chosen_dtype(config: PretrainingConfig) -> str:
    """``bfloat16`` (autocast) or ``float32``."""
    device, wanted = chosen_device(config), config.training.dtype
    return ("bfloat16" if has_bfloat16(device) else "float32") if wanted == "auto" else wanted


def compiles(config: PretrainingConfig) -> bool:
    """Whether the model is compiled; where it must be, there must be a compiler."""
    wanted = config.training.compile
    possible = chosen_device(config) == "cuda" or any(
        shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")
    )
    if wanted and not possible:
        raise ConfigurationError(
            "training.compile is true and there is no C++ compiler (g++, clang++) on the path; set it to null"
        )
    return possible if wanted is None else wanted


def training_arguments(config: PretrainingConfig, out: Path) -> TrainingArguments:
    """What the configuration means to transformers; setting it up joins the processes of a distributed run."""
    training, device = config.training, chosen_device(config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    share = training.batch_size // world
    micro = min(training.micro_batch_size or share, share)
    if training.batch_size % world or micro < 1 or share % micro:
        raise ConfigurationError(
            f"training.batch_size {training.batch_size} cannot be divided into {world} processes of whole micro-batches of "
            f"{training.micro_batch_size or 'one row or more'}"
        )
    sharded = training.parallel == "fsdp" and world > 1
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=training.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        max_grad_norm=config.optimizer.max_grad_norm,
        bf16=chosen_dtype(config) == "bfloat16",
        tf32=False,  # transformers would switch it on with compilation, and what is measured in float32 would not be float32
        use_cpu=device == "cpu",
        torch_compile=compiles(config),
        fsdp=sharded or None,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["SinkLMLayer"]} if sharded else None,
        ddp_find_unused_parameters=False,
        seed=training.seed,
        dataloader_drop_last=True,
        dataloader_num_workers=0 if device == "cpu" else 2,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_steps=training.save_every,
        report_to=[name for name in training.report_to if name != "tensorboard"] or "none",
        project="sinklab",
        run_name=out.name,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        **{RECOMPUTE: training.gradient_checkpointing},
    )
    if sharded:  # bfloat16 is autocast over float32 weights here too; accelerate would cast the weights and the gradients
        arguments.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy()
    if arguments.device.type == "cpu":  # one of several processes has "cpu:0", where transformers before 5.18 cannot resume
        arguments._setup_devices = torch.device("cpu")
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for several processes, not for nn.DataParallel
    return arguments


def trackers(
    config: PretrainingConfig, arguments: TrainingArguments, out: Path, checkpoint: Path | None
) -> list[TrainerCallback]:
    """Callbacks of the trackers that need a folder of ours; the others are made by ``report_to``."""
    for name in config.training.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(f"training.report_to names {name}, which is not installed: pip install 'sinklab[{name}]'")
    if "tensorboard" not in config.training.report_to or not arguments.should_save:
        return []
    from torch.utils.tensorboard import SummaryWriter

    # What was drawn beyond the checkpoint will be drawn again.
    purge = None if checkpoint is None else step_of(checkpoint) + 1
    return [TensorBoardCallback(SummaryWriter(str(out / "tensorboard"), purge_step=purge))]
