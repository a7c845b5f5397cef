"""The configuration of a pre-training run: what a recipe returns, what ``--set`` changes, what ``run.json`` records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, model_validator

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.architecture import Architecture
from sinklab.registry import recipes


class DataConfig(Section):
    """Where the tokens come from and how rows are made of them."""

    corpus: str = Field(
        "python_source",
        description="a corpus from 'sinklab list corpora', the path of a text file or a folder of them, or a dataset of the "
        "Hugging Face datasets library (hub name or local path)",
    )
    subset: str | None = Field(None, description="configuration of a dataset, such as 'wikitext-2-raw-v1'")
    revision: str | None = Field(None, description="branch, tag or commit of a dataset")
    train_split: str = Field("train", description="split of a dataset to train on")
    held_out_split: str | None = Field(
        None, description="split of a dataset to evaluate on; by default 5 % of the documents, by the hash of their text"
    )
    text_column: str | None = Field(None, description="column of a dataset with the text; 'text' or the only string column")
    max_tokens: int | None = Field(None, ge=1, description="read no more than so many training tokens")
    tokenizer: str | None = Field(
        None, description="directory or hub id of a tokenizer; by default a byte-level BPE is trained on the corpus"
    )
    vocab_size: int = Field(2048, ge=258, description="size of the trained BPE; ignored with a given tokenizer")
    bos: Literal["rows", "documents", "none"] = Field(
        "rows", description="beginning-of-sequence token in front of every row, of every document, or nowhere"
    )
    eos: bool = Field(True, description="end-of-sequence token after every document")
    unique_fraction: float = Field(
        1.0, gt=0, le=1, description="share of the rows that is kept and repeated; fewer unique data, same number of steps"
    )
    random_positions: tuple[int, int] | None = Field(
        None, description="start and stop: these positions of every training row hold uniformly drawn tokens"
    )
    fixed_position: int | None = Field(None, ge=0, description="position at which every row holds fixed_token")
    fixed_token: int = Field(2, ge=0, description="id of the token at fixed_position")
    held_out_rows: int = Field(200, ge=1, description="rows of the held-out loss")
    seed: int = Field(0, ge=0, description="seed of the order of the rows and of all draws")

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        random, fixed = self.random_positions, self.fixed_position
        if random is not None and not 0 <= random[0] < random[1]:
            raise ConfigurationError(f"random_positions is start and stop, and {random[0]}, {random[1]} hold no position")
        if random is not None and fixed is not None and random[0] <= fixed < random[1]:
            raise ConfigurationError(f"fixed_position {fixed} is one of random_positions {random[0]} to {random[1] - 1}")
        if self.bos == "rows" and (fixed == 0 or (random is not None and random[0] == 0)):
            what = "fixed_position" if fixed == 0 else "random_positions"
            raise ConfigurationError(f"{what} takes position 0, where bos = rows puts the BOS token; set data.bos=none")
        return self


class OptimizerConfig(Section):
    """Optimiser of the run; the numbers mean what they mean in ``torch.optim``."""

    name: Literal["adamw", "adam", "sgd"] = Field(
        "adamw", description="adamw (fused), adam (decay through the gradient), or sgd"
    )
    learning_rate: float = Field(5e-3, gt=0, description="peak learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="decay rates of Adam's moments"
    )
    eps: float = Field(1e-8, gt=0, description="added to the root of Adam's second moment")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.1, ge=0, description="of every parameter; decoupled, except for adam and sgd")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this norm; 0 clips nothing")


class ScheduleConfig(Section):
    """Learning rate over steps."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(100, ge=0, description="linear from zero")
    min_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="learning rate over the peak towards which cosine falls: a step after the last would have it",
    )


class TrainingConfig(Section):
    """Steps, batches, precision and bookkeeping."""

    steps: int = Field(2000, ge=1)
    batch_size: int = Field(8, ge=1, description="rows per step, over all processes and accumulation steps together")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="rows per forward pass of one process; smaller than its share of the batch accumulates gradients",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="bfloat16 is autocast over float32 weights, float32 is float32 throughout; auto is bfloat16 where the "
        "device has instructions for it",
    )
    compile: bool | None = Field(None, description="torch.compile; by default when a C++ compiler (or CUDA) is there")
    threads: int | None = Field(
        1, ge=1, description="OpenMP threads per process on a CPU; spinning threads on shared cores cost"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="with several processes: replicas, or fully sharded (FSDP2)")
    gradient_checkpointing: bool = False
    vocab_multiple: int = Field(
        1, ge=1, description="the model's vocabulary is the tokenizer's, rounded up to a multiple of this"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the initialisation")
    log_every: int = Field(50, ge=1, description="steps between records of loss, learning rate, gradient norm and speed")
    evaluate_every: int = Field(500, ge=1, description="steps between held-out losses")
    save_every: int = Field(500, ge=1, description="steps between checkpoints from which a killed run resumes")
    keep: int | None = Field(2, ge=1, description="checkpoints kept; all of them with null")
    snapshots: tuple[int, ...] = Field(
        (), description="steps whose weights are kept as models of their own, for maps over time"
    )
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
        (), description="trackers besides the run's table"
    )
    diverged_above: float = Field(
        2.0, gt=1, description="a training loss above so many times its best (and a nat above it) is divergence; NaN always is"
    )
    stop_when_diverged: bool = Field(True, description="end the run then; the record stays")


class WatchConfig(Section):
    """What :class:`~sinklab.training.callback.SinkCallback` looks at during training."""

    every: int = Field(100, ge=1, description="steps between measurements")
    samples: int = Field(32, ge=1, description="rows of the fixed probe batch; rows of held-out text")
    seq_len: int = Field(64, ge=2, description="tokens of a probe row (Gu et al.: 64)")
    threshold: float = Field(0.3, ge=0, lt=1, description="epsilon of the sink rate")
    window: int = Field(32, ge=1, description="window of the loss with and without the sink beyond it")


class PretrainingConfig(Section):
    """One controlled pre-training run."""

    name: str = Field("run", description="name of the recipe")
    model: Architecture = Field(default_factory=Architecture)
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    watch: WatchConfig = Field(default_factory=WatchConfig)

    @model_validator(mode="after")
    def _check(self) -> PretrainingConfig:
        context, training, watch = self.model.max_position_embeddings, self.training, self.watch
        micro = training.micro_batch_size
        if micro is not None and training.batch_size % micro:
            raise ConfigurationError(f"batch_size {training.batch_size} must be a multiple of micro_batch_size {micro}")
        if watch.window >= watch.seq_len - 1:
            raise ConfigurationError(
                f"watch.window {watch.window} leaves no token beyond it in rows of watch.seq_len {watch.seq_len} tokens"
            )
        never = [step for step in training.snapshots if not 0 <= step <= training.steps]
        if never:
            raise ConfigurationError(
                f"training.snapshots has step {never[0]}, and the run has steps 0 to {training.steps} (training.steps)"
            )
        warmup = self.schedule.warmup_steps
        if warmup > training.steps:
            raise ConfigurationError(
                f"warm-up takes {warmup} steps and the run has {training.steps}; lower schedule.warmup_steps"
            )
        for what, last in (
            ("data.random_positions", self.data.random_positions[1] if self.data.random_positions else 0),
            ("data.fixed_position", 0 if self.data.fixed_position is None else self.data.fixed_position + 1),
            ("watch.seq_len", watch.seq_len),
        ):
            if last > context:
                raise ConfigurationError(f"{what} reaches to {last} tokens, beyond model.max_position_embeddings {context}")
        return self


def resolve_recipe(name: str | os.PathLike[str] | PretrainingConfig) -> PretrainingConfig:
    """The configuration that ``name`` stands for.

    Args:
        name: a recipe from ``sinklab list recipes``, with settings if need be (``tiny:model.window=8``); a ``run.json``, or a
            JSON or YAML file with the fields of one; or the output directory of a run.

    Raises:
        UnknownNameError: no recipe of that name.
        InputError: a file that is missing or cannot be read.
        ConfigurationError: a file whose content is no configuration.
    """
    if isinstance(name, PretrainingConfig):
        return name
    file = os.fspath(name).partition(":")[0]
    path = Path(file).expanduser()
    if path.suffix in (".json", ".yaml", ".yml") or (path.is_dir() and file not in recipes):
        return _from_fields(path / "run.json" if path.is_dir() else path)
    config = recipes.make(os.fspath(name))
    if not isinstance(config, PretrainingConfig):
        raise ConfigurationError(f"recipe {name!r} must return a PretrainingConfig, and returned {type(config).__name__}")
    return config


def _from_fields(path: Path) -> PretrainingConfig:
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(fields, dict) and fields.get("kind") == "pretrain":
        fields = fields["config"]
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{path} must hold the fields of a configuration, and holds {type(fields).__name__}")
    return PretrainingConfig.parse(fields)
