"""What a run writes down: metrics into the table and onto the screen, held-out losses, divergence, snapshots, stopping."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from sinklab.models.losses import IGNORED, cross_entropies
from sinklab.results.metric import Metric, Row
from sinklab.results.progress import Screen
from sinklab.training import checkpoints
from sinklab.training.callback import TOKENS_PER_FORWARD, SinkCallback, log_between, measuring
from sinklab.training.config import PretrainingConfig
from sinklab.training.record import RunTable
from sinklab.training.trainer import PretrainingTrainer

TRAIN_LOSS = Metric("train_loss", "nats", "Mean training loss of the steps since the row before; count is their number.")
HELD_OUT_LOSS = Metric(
    "held_out_loss", "nats", "Mean next-token loss over the held-out rows, float32; count is the number of predicted tokens."
)
LEARNING_RATE = Metric("learning_rate", "1", "Learning rate of the step.")
GRADIENT_NORM = Metric("gradient_norm", "norm", "L2 norm of all gradients of the step, before clipping.")
TOKENS_PER_SECOND = Metric(
    "tokens_per_second",
    "tokens/s",
    "Tokens of the steps since the row before over the time that training them took: measurements, evaluations and checkpoints "
    "are left out, compilation is not.",
)
DIVERGED_AT = Metric(
    "diverged_at",
    "step",
    "First step known to be bad, in the row of the step at which it was found: the loss or the gradient norm was no finite "
    "number, or the train_loss above training.diverged_above times its best (and a nat above it).",
)
METRICS = (TRAIN_LOSS, HELD_OUT_LOSS, LEARNING_RATE, GRADIENT_NORM, TOKENS_PER_SECOND, DIVERGED_AT)
"""Metrics of the probe ``training``."""

LEAST_RISE = 1.0
"""Nats by which a loss must exceed its best to be called diverged: twice next to nothing is next to nothing."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """When the training diverged, and what was seen."""

    step: int
    found_at: int
    reason: str


class Bookkeeper(TrainerCallback, ExportableState):
    """Writes down what a run does; the first of its callbacks, so that its records do not wait for measurements.

    A checkpoint holds what lies between two records (:meth:`state`), and a run that is stopped writes nothing that it would not
    write if it went on: after it was resumed, its table is that of a run that was never stopped.

    Attributes:
        divergence: the first one found, or ``None``.
        diverged: whether the newest record was bad.
        stopped, stopped_by: whether somebody asked to stop, and the signal that said so.
        speeds: tokens per second of every interval between records.
    """

    def __init__(
        self,
        config: PretrainingConfig,
        *,
        table: RunTable,
        held_out: Dataset,
        tokens_per_step: int,
        screen: Screen,
        snapshot: Callable[[int], None],
    ) -> None:
        self.config, self.table, self.screen, self.snapshot = config, table, screen, snapshot
        self.held_out_rows, self.tokens_per_step = held_out, tokens_per_step
        self.trainer: PretrainingTrainer | None = None
        self.sinks: SinkCallback | None = None
        self.divergence: Divergence | None = None
        self.diverged = self.stopped = False
        self.stopped_by: str | None = None
        self.speeds: list[float] = []
        self._best = math.inf
        self._elsewhere = 0.0
        self._recorded_at = 0
        self._mark = (time.perf_counter(), 0.0)  # the state is asked for before the training begins

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        losses = [record["loss"] for record in state.log_history if "loss" in record]
        self._best = min((loss for loss in losses if math.isfinite(loss)), default=math.inf)
        # Checkpoints of earlier versions have no such state; they were written right after a record.
        before = state.stateful_callbacks.setdefault(type(self).__name__, {}).get("attributes", {})
        self._recorded_at = before.get("recorded_at", state.global_step)
        if before.get("divergence") is not None:
            self.divergence = Divergence(**before["divergence"])
        if before.get("losses"):
            assert self.trainer is not None
            self.trainer.go_on(before["losses"], self._recorded_at)
        if state.global_step == 0:
            self._snapshot(0)
        self._restart(before.get("seconds", 0.0))

    def state(self) -> dict[str, object]:
        """What a checkpoint must hold: the losses and the seconds since the last record, its step, and the divergence."""
        losses = [loss.item() for loss in self.trainer.losses] if self.trainer is not None else []
        attributes = {
            "losses": losses,
            "recorded_at": self._recorded_at,
            "seconds": self._seconds(),
            "divergence": None if self.divergence is None else dataclasses.asdict(self.divergence),
        }
        return {"args": {}, "attributes": attributes}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: PreTrainedModel, **kwargs: object
    ) -> None:
        step = state.global_step
        self.screen.progress("training", step, self.config.training.steps)
        last = step >= state.max_steps
        if control.should_save or last:
            control.should_log = True  # a checkpoint is written only of losses that have been judged
        if step % self.config.training.evaluate_every == 0 or last:
            self.evaluate(step, model, control)
        self._snapshot(step)
        if self.stopped and not last:
            self._stop(control)

    def _stop(self, control: TrainerControl) -> None:
        """End the training here with a checkpoint; nothing is recorded, evaluated or measured for the stop."""
        assert self.trainer is not None
        control.should_training_stop = True
        if not control.should_save:
            # Of a training that diverges the checkpoint before is worth more.
            good = not self.diverged and all(loss.isfinite() for loss in self.trainer.losses)
            control.should_save = self.trainer.interim = good
        if self.sinks is not None:
            self.sinks.measures_end = False

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **kwargs: object
    ) -> None:
        if "sink_rate" in logs:
            self._say(state.global_step, f"sink rate {logs['sink_rate']:.3g} %  sink loss gap {logs['sink_loss_gap']:.3g}")
        if "loss" not in logs:
            return
        step, loss = state.global_step, float(logs["loss"])
        since = max(1, step - self._recorded_at)
        speed = since * self.tokens_per_step / max(self._seconds(), 1e-9)
        self._recorded_at = step
        self._restart()
        self.speeds.append(speed)
        rows = [
            _row(TRAIN_LOSS, loss, since),
            _row(LEARNING_RATE, logs["learning_rate"]),
            _row(GRADIENT_NORM, logs["grad_norm"]),
            _row(TOKENS_PER_SECOND, speed, since),
        ]
        bad = self._judge(step, loss, float(logs["grad_norm"]), since)
        if bad is not None:
            rows.append(_row(DIVERGED_AT, bad.step))
        self._add(step, rows)
        if bad is not None:
            self.screen.note(f"step {step}: {bad.reason}")
            control.should_save = False  # the checkpoint before is worth more
            if self.config.training.stop_when_diverged:
                control.should_training_stop = True
        self.table.write(now=control.should_training_stop)
        self._say(step, f"loss {loss:.4f}  {speed:,.0f} tokens/s")

    def evaluate(self, step: int, model: nn.Module, control: TrainerControl) -> None:
        """Take the held-out loss and write it down."""
        with measuring(model) as (plain, clock):
            loss, count = held_out_loss(plain, self.held_out_rows)
        self._elsewhere += clock.seconds
        self._add(step, [_row(HELD_OUT_LOSS, loss, count)])
        self._say(step, f"held out loss {loss:.3g}")
        if self.trainer is not None:
            log_between(self.trainer, control, {"held_out_loss": loss})

    def _say(self, step: int, numbers: str) -> None:
        self.screen.note(f"step {step}/{self.config.training.steps}  {numbers}")

    def _add(self, step: int, rows: list[Row]) -> None:
        self.table.add(rows, probe="training", step=step, bos=int(self.config.data.bos == "rows"))

    def _judge(self, step: int, loss: float, gradient_norm: float, since: int) -> Divergence | None:
        assert self.trainer is not None
        losses, self.trainer.losses = self.trainer.losses, []
        reason, first = None, step
        if not math.isfinite(loss):
            finite = torch.stack(losses).isfinite().tolist() if losses else [True]
            per_step = max(1, len(finite) // since)
            # Of several processes, another one may have met it; then the step is only known to lie since the last record.
            first = step if all(finite) else step - since + 1 + finite.index(False) // per_step
            reason = f"the training loss is {loss} from step {first} on"
        elif not math.isfinite(gradient_norm):
            reason = f"the norm of the gradients is {gradient_norm}"
        elif loss > max(self.config.training.diverged_above * self._best, self._best + LEAST_RISE):
            times = self.config.training.diverged_above
            reason = f"the training loss is {loss:.4g}, above {times:g} times its best, {self._best:.4g}"
        self.diverged = reason is not None
        if reason is None:
            self._best = min(self._best, loss)
            return None
        divergence = Divergence(first, step, reason)
        self.divergence = self.divergence or divergence
        return divergence

    def _snapshot(self, step: int) -> None:
        if step in self.config.training.snapshots:
            started = time.perf_counter()
            self.snapshot(step)
            self._elsewhere += time.perf_counter() - started

    def _spent_elsewhere(self) -> float:
        return (
            self._elsewhere
            + (self.sinks.seconds if self.sinks is not None else 0.0)
            + (self.trainer.saving_seconds if self.trainer is not None else 0.0)
        )

    def _restart(self, seconds: float = 0.0) -> None:
        """Count the seconds of training anew, from a number of them on."""
        self._mark = (time.perf_counter() - seconds, self._spent_elsewhere())

    def _seconds(self) -> float:
        """Seconds of training since the last record, also before the run was stopped."""
        then, elsewhere = self._mark
        return time.perf_counter() - then - (self._spent_elsewhere() - elsewhere)

    @property
    def speed(self) -> float | None:
        """Median speed in tokens per second, without the first interval when there are others: it holds the compilation."""
        return statistics.median(self.speeds[1:] or self.speeds) if self.speeds else None


def _row(metric: Metric, value: SupportsFloat, count: int = 1) -> Row:
    return {"metric": metric, "value": float(value), "count": count}


def held_out_loss(model: PreTrainedModel, rows: Dataset) -> tuple[float, int]:
    """Mean next-token loss in nats over a map-style dataset of rows, and the number of predicted tokens.

    Every token counts once, however rows are batched; those inside the prefix of a prefix LM do not.
    """
    total, count = 0.0, 0
    prefix = getattr(model.config, "prefix_length", 0)
    per_forward = max(1, TOKENS_PER_FORWARD // len(rows[0]["input_ids"]))
    for start in range(0, len(rows), per_forward):  # type: ignore[arg-type]
        batch = default_collate([rows[index] for index in range(start, min(start + per_forward, len(rows)))])  # type: ignore[arg-type]
        labels: Tensor = batch["labels"].to(model.device)
        labels[:, :prefix] = IGNORED
        logits = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        total += cross_entropies(logits, targets).sum().item()
        count += int((targets != IGNORED).sum())
    return total / max(count, 1), count


def save_model(trainer: PretrainingTrainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the model as it is now, with its tokenizer, whole or not at all; every process must call it."""
    model = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model
    state = trainer.accelerator.get_state_dict(model)  # collective when the weights are sharded
    if trainer.args.should_save:
        plain = trainer.accelerator.unwrap_model(trainer.model)
        for name in plain.all_tied_weights_keys:  # gathered from shards, they no longer share memory and would be saved twice
            state.pop(name, None)
        staged = folder.parent / f"{checkpoints.STAGING}-{folder.name}"
        with checkpoints.writing(f"the model of step {trainer.state.global_step}", folder.parent, staged):
            shutil.rmtree(staged, ignore_errors=True)
            plain.save_pretrained(staged, state_dict=state)
            tokenizer.save_pretrained(staged)
            shutil.rmtree(folder, ignore_errors=True)
            staged.replace(folder)
    trainer.accelerator.wait_for_everyone()


@contextlib.contextmanager
def stoppable(bookkeeper: Bookkeeper, *, alone: bool) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run after the step at hand, with a checkpoint; a second one ends it at once.

    Only in the main thread, where signals arrive, and with a single process: several would stop at different steps and wait
    for each other for ever.
    """
    if not alone or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: object) -> None:
        bookkeeper.stopped, bookkeeper.stopped_by = True, signal.Signals(number).name
        bookkeeper.screen.note("stopping after this step, with a checkpoint; once more to stop at once")
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
