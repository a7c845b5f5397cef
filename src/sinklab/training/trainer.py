"""The trainer: what happens at every step, in which order rows come, and the optimisers and schedules of the configuration."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Sampler, default_collate
from transformers import Trainer, get_constant_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup

from sinklab.errors import ConfigurationError
from sinklab.training import checkpoints
from sinklab.training.config import OptimizerConfig, PretrainingConfig, ScheduleConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimiser of the configuration over the trainable parameters of a model."""
    rate, decay = config.learning_rate, config.weight_decay
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, betas=config.betas, eps=config.eps, weight_decay=decay, fused=True)
    if config.name == "adam":
        return torch.optim.Adam(parameters, lr=rate, betas=config.betas, eps=config.eps, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=decay)


def make_schedule(optimizer: Optimizer, schedule: ScheduleConfig, steps: int) -> LambdaLR:
    """The scheduler that multiplies every parameter group's own rate: linearly from 0, which the first step has, over
    ``warmup_steps``; then by 1, or along half a cosine towards ``min_ratio``, which a step behind the last one would have."""
    chosen: LambdaLR
    if schedule.name == "constant":
        chosen = get_constant_schedule_with_warmup(optimizer, schedule.warmup_steps)
    else:
        least = schedule.min_ratio
        chosen = get_cosine_with_min_lr_schedule_with_warmup(optimizer, schedule.warmup_steps, steps, min_lr_rate=least)
    return chosen


class RowOrder(Sampler[int]):
    """Row numbers of a whole run: epoch after epoch a permutation of its own, each cut to whole batches.

    Depends on nothing but its arguments: not on the state of any generator, the number of processes or the accumulation of
    gradients, so that step ``n`` sees the same rows in all of them.
    """

    def __init__(self, rows: int, batch_size: int, steps: int, seed: int) -> None:
        self.rows, self.batch_size, self.steps, self.seed = rows, batch_size, steps, seed

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        left, epoch = len(self), 0
        while left:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.rows)
            order = order[: min(left, self.rows // self.batch_size * self.batch_size)]
            yield from order.tolist()
            left, epoch = left - len(order), epoch + 1


class PretrainingTrainer(Trainer):
    """Everything that a run does at every step; the rest is callbacks.

    Args:
        config: of the run.
        before_saving: called on every process before a checkpoint is written: what must be on the disk when it is there.
        arguments: of ``Trainer``.

    Attributes:
        losses: the loss of every forward pass since somebody last emptied the list; on the device, so nothing waits for it.
        interim: the checkpoints from here on are of a run that is stopped between two planned ones.
        saving_seconds: time spent in writing checkpoints.
    """

    def __init__(self, config: PretrainingConfig, before_saving: Callable[[], None] | None = None, **arguments: Any) -> None:
        self.config = config
        self.before_saving = before_saving
        self.losses: list[Tensor] = []
        self.interim = False
        self.saving_seconds = 0.0
        self._staged: Path | None = None
        super().__init__(data_collator=default_collate, **arguments)

    optimizer: torch.optim.Optimizer | None  # transformers sets both in its __init__, without saying so
    lr_scheduler: LRScheduler | None

    def create_accelerator_and_postprocess(self) -> None:
        state = PartialState()
        if self.args.fsdp and state.distributed_type is DistributedType.MULTI_CPU:
            # accelerate shards on GPUs only and would train replicas here without a word. Behind this switch nothing in it
            # minds the device, so what is tested on CPUs is what runs on GPUs.
            state.distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled != bool(self.args.fsdp):
            requested = "shard the weights" if self.is_fsdp_enabled else "train replicas"
            raise ConfigurationError(
                f"training.parallel is {self.config.training.parallel}, and accelerate was asked to {requested}"
            )
        if self.is_fsdp_enabled:
            # Block by block and in place: a compiled whole would be the root of the shards, and measurements need the model.
            self.accelerator.state.dynamo_plugin.use_regional_compilation = True

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[object]:
        # accelerate puts no autocast around sharded models: it would cast their weights to bfloat16 instead.
        return self.accelerator.autocast() if self.is_fsdp_enabled else super().compute_loss_context_manager()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model if model is None else model, self.config.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        if self.lr_scheduler is None:
            chosen = optimizer or self.optimizer
            assert chosen is not None  # it is made before its schedule
            self.lr_scheduler = make_schedule(chosen, self.config.schedule, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> RowOrder:
        rows = self.train_dataset if train_dataset is None else train_dataset
        training = self.config.training
        return RowOrder(len(rows), training.batch_size, training.steps, self.config.data.seed)

    def training_step(self, model: nn.Module, inputs: dict[str, object], num_items_in_batch: object = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss)
        return loss

    def go_on(self, losses: Sequence[float], recorded_at: int) -> None:
        """Have the next record be the mean of these losses too, of the passes between the record before and the checkpoint."""
        self.losses = [torch.tensor(loss, device=self.args.device) for loss in losses]
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        for loss in self.losses:
            self._tr_loss += loss
        self._globalstep_last_logged = recorded_at

    def floating_point_ops(self, inputs: dict[str, object]) -> int:
        # transformers would count the parameters at every step, and nobody reads the sum.
        return 0

    def _get_output_dir(self, trial: object) -> str:
        return str(self._staged or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        started = time.perf_counter()
        folder, step = Path(self.args.output_dir), self.state.global_step
        staged = folder / checkpoints.STAGING
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with checkpoints.writing(f"checkpoint of step {step}", folder, staged):
            if self.before_saving is not None:
                self.before_saving()
            self._staged = staged
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staged = None
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                name = f"{checkpoints.PREFIX}{step}"
                checkpoints.complete(staged / name, folder / name, interim=self.interim)
                staged.rmdir()
                checkpoints.prune(folder, self.config.training.keep)
        self.accelerator.wait_for_everyone()
        self.saving_seconds += time.perf_counter() - started
