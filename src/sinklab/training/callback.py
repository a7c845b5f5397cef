"""The sinks of a model in training: the callback that measures them, their rows, and the numbers that trackers get."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sinklab.attention.anatomy import unwrapped
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, MeasurementError, UnsupportedModelError
from sinklab.models.losses import loss_kind
from sinklab.probes.entropy import Entropy
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.massive_activation import MassiveActivation
from sinklab.probes.max_logit import MaxLogit
from sinklab.probes.sink_rate import SinkRate
from sinklab.results.environment import require_whole
from sinklab.results.metric import LOSS, PERCENTAGE, Metric, Row, SingleRow, declared
from sinklab.results.table import unpacked
from sinklab.sinks import SinkFinder, Sinks
from sinklab.training.record import RunTable
from sinklab.training.rows import token_losses, windowed_losses

HEADLINE: dict[str, tuple[str, str, Literal["value", "key_position"]]] = {
    "sink_rate": ("gu2024", "at position 0", "value"),
    "sink_rate_max": ("sink_position_rate", "of the strongest sink", "value"),
    "sink_position": ("sink_position_rate", "of the strongest sink", "key_position"),
    "first_token_attention": ("qiu2025_first_attention", "", "value"),
    "attention_entropy": ("entropy", "", "value"),
    "max_logit": ("max_logit", "", "value"),
    "probe_loss": ("loss", "on the probe rows", "value"),
    "sink_loss_gap": ("sink_loss_gap", "", "value"),
}
"""Name to the metric in the table, of the whole model, which of its rows, and the column; in the order of logging."""


def tracked(name: str) -> str:
    """How TensorBoard, trackio and wandb show a name: ``Trainer`` puts all that is logged in training below ``train``."""
    return f"train/{name}"


def headline_metrics() -> Iterator[tuple[str, Metric, str, str]]:
    """Every name with its metric, which of its rows, and the unit of what is logged."""
    for name, (metric, which, column) in HEADLINE.items():
        found = declared(metric)
        assert found is not None, f"{metric} is declared by no probe"
        yield name, found, which, found.unit if column == "value" else "position"


FIRST_POSITIONS = 8
"""Positions that get rows of their own for each layer and head; the profile over all positions is that of the whole model."""

READOUT_ROWS = 16
"""Rows of the read-out, the first ones: it takes two more forward passes, and the two losses of a token go together."""

TOKENS_PER_FORWARD = 2048
"""Of a measurement; the logits of more would fill the memory of small machines."""

SINK_POSITION_RATE = Metric(
    "sink_position_rate",
    "percent",
    "Rate, as the sinks are found (percent of row and head that sink there), of each position that the read-out treats as a "
    "sink: those of the first (seq_len - window) / 2 positions whose rate is at least half the largest; position 0 while no "
    "head has a sink there.",
    range=PERCENTAGE,
)
WINDOWED_LOSS_WITH_SINK = Metric(
    "windowed_loss_with_sink",
    "nats",
    f"Mean loss of the tokens predicted from positions >= window, in the first {READOUT_ROWS} rows, when queries see the last "
    "`window` tokens and the sinks.",
)
WINDOWED_LOSS_WITHOUT_SINK = Metric(
    "windowed_loss_without_sink", "nats", "windowed_loss_with_sink when every query sees the last `window` tokens only."
)
SINK_LOSS_GAP = Metric(
    "sink_loss_gap", "nats", "windowed_loss_without_sink - windowed_loss_with_sink: what the sinks are worth beyond the window."
)
PROBES = (SinkRate, Entropy, HiddenNorm, MassiveActivation, MaxLogit)
READOUT = (LOSS, SINK_POSITION_RATE, WINDOWED_LOSS_WITH_SINK, WINDOWED_LOSS_WITHOUT_SINK, SINK_LOSS_GAP)
"""Metrics of the probe ``sink_readout``; all losses are in float32."""


@dataclasses.dataclass(frozen=True)
class SinkMeasurement:
    """One measurement.

    Attributes:
        rows: rows of the long table, without what a run knows.
        headline: the few numbers that curves are drawn of, under the names of :data:`~sinklab.training.callback.HEADLINE`.
        operation: attention operation that the model was seen to run.
        sinks: where the sinks are; ``entropy`` is taken at the main one.
    """

    rows: list[SingleRow]
    headline: dict[str, float]
    operation: str
    sinks: Sinks = dataclasses.field(default_factory=Sinks)


class SinkCallback(TrainerCallback):
    """Watch the sinks of a model during training: rates, entropy, largest logit, norms, massive activations and
    windowed losses.

    Works with any ``transformers.Trainer`` and any causal language model on the attention interface. It measures before the
    first step, every ``every`` steps and after the last, in evaluation mode and in the precision of the weights (no autocast),
    and leaves weights, modes and random states as they were: training gives the same bits with it and without. Memory is linear
    in the length of the rows but for two boolean masks. In a run of several processes all of them measure (sharded weights need
    it) and the main one writes. Of a model whose loss is no number any more only that is written down: a null ``loss``.

    ``trainer.add_callback(SinkCallback(rows, trainer=trainer))`` also sends the headline numbers through ``Trainer.log``, so
    that every tracker of ``report_to`` gets them under the same names: those of
    :data:`~sinklab.training.callback.HEADLINE`, which TensorBoard, trackio and wandb show as ``train/sink_rate`` and so on.

    Args:
        rows: int64 ``(rows, seq_len)``: the fixed probe batch, the beginning-of-sequence token included if it should be.
        every: steps between measurements.
        threshold: epsilon of the sink rate (Gu et al. 2024, arXiv 2410.10781).
        window: tokens that a query sees in the read-out; fewer than ``seq_len - 1``.
        table: parquet file that the rows are written to after each measurement; what an earlier process wrote up to the step
            that training is resumed from is kept. Without it they are in memory.
        columns: columns of the table that are the same in all rows: ``corpus``, ``bos``, ``seed``, ….
        trainer: the Trainer whose ``log`` gets the headline numbers.

    Attributes:
        table: the :class:`RunTable` of the rows; ``callback.table.table()`` is the long table.
        last: the newest :class:`SinkMeasurement`, or ``None``.
        seconds: time spent in measuring so far.
        measures_end: whether a training that ends early is measured where it ends; not one that is stopped and will go on.

    Raises:
        ConfigurationError: an argument out of its range.
        UnsupportedModelError: at the first measurement, of a model that predicts no next token.
    """

    def __init__(
        self,
        rows: Tensor,
        every: int = 100,
        threshold: float = 0.3,
        window: int = 32,
        table: Path | str | RunTable | None = None,
        columns: Mapping[str, object] | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        if rows.ndim != 2 or rows.dtype != torch.int64 or not len(rows):
            raise ConfigurationError(f"rows must be int64 (rows, seq_len), got {rows.dtype} {tuple(rows.shape)}")
        require_whole("every", every, 1, ": steps between measurements")
        require_whole("window", window, 1)
        if rows.shape[1] < window + 2:
            raise ConfigurationError(
                f"window {window} leaves no token beyond it in probe rows of {rows.shape[1]} tokens; lower the window "
                "(watch.window)"
            )
        SinkRate(threshold=threshold)  # refuses a threshold outside [0, 1)
        self.rows, self.every, self.threshold, self.window, self.trainer = rows, every, threshold, window, trainer
        self.table = table if isinstance(table, RunTable) else RunTable(None if table is None else Path(table), {})
        self.columns = dict(columns or {})
        self.last: SinkMeasurement | None = None
        self.seconds = 0.0
        self.measures_end = True
        self._measured_at: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: object
    ) -> None:
        if state.global_step == 0:
            self._measure(state, control, model)
            return
        if not self.table.resumed and self.table.path is not None and self.table.path.is_file():
            # Rows of a step that is not due are of a training that ended there, and this one goes on.
            self.table.resume(state.global_step if self._due(state) else state.global_step - 1)
        if self._due(state):
            self._measured_at = state.global_step  # before the checkpoint of this step was written

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: object
    ) -> None:
        if self._due(state):
            self._measure(state, control, model)
        if control.should_save:
            self.table.write()  # a training that is resumed from this checkpoint finds its rows

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if control.should_save:
            self.table.write()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.table.write()  # whatever asked for the checkpoint, such as a best evaluation

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: object
    ) -> None:
        if self._measured_at != state.global_step and self.measures_end:  # it ended early
            self._measure(state, control, model)
        self.table.write()

    def _due(self, state: TrainerState) -> bool:
        return state.global_step % self.every == 0 or state.global_step >= state.max_steps

    def _measure(self, state: TrainerState, control: TrainerControl, model: nn.Module) -> None:
        with measuring(model) as (plain, clock):
            expected = self.last.sinks if self.last else None
            self.last = _measured(plain, self.rows, self.threshold, self.window, expected)
        self.seconds += clock.seconds
        self._measured_at = state.global_step
        self.table.writes &= state.is_world_process_zero
        known = {
            "model": getattr(plain.config, "name_or_path", "") or type(plain).__name__,
            "operation": self.last.operation or None,
        }
        self.table.add([{**known, **row} for row in self.last.rows], **self.columns, step=state.global_step)
        self.table.write(now=False)
        if self.trainer is not None and self.last.headline:
            log_between(self.trainer, control, self.last.headline)


def log_between(trainer: Trainer, control: TrainerControl, numbers: Mapping[str, float]) -> None:
    """Log numbers in the middle of a step: ``Trainer.log`` calls the step logged, and its training loss may still be due.

    What a trainer puts there of its own is for its own logs: those of TRL give away, and forget, what they have gathered since
    the last one. What is no finite number is left out: trackers draw it each in another way, or fail.
    """
    due = control.should_log
    Trainer.log(trainer, {name: value for name, value in numbers.items() if math.isfinite(value)})
    control.should_log = due


@dataclasses.dataclass
class Clock:
    """Seconds that a measurement took, once it is over."""

    seconds: float = 0.0


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[tuple[PreTrainedModel, Clock]]:
    """The model itself, out of its wrappers, in evaluation mode, without autocast and without gradients, for a ``with`` block.

    Modes, the forward that accelerate has put in place and the random states are restored, whatever happens.
    """
    plain = unwrapped(model)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for device in devices:
        torch.cuda.synchronize(device)  # steps still in the queue are not ours to account for
    clock, started = Clock(), time.perf_counter()
    modes = [(module, module.training) for module in plain.modules()]
    # accelerate replaces the bound forward of the model to run it under autocast; "_original_forward" is its mark.
    patched = plain.__dict__.pop("forward", None) if "_original_forward" in plain.__dict__ else None
    try:
        plain.eval()
        # Blocks of sharded models are compiled in place; what a measurement puts into them must not be compiled with them.
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=devices), torch.no_grad():
            yield plain, clock
    finally:
        if patched is not None:
            plain.forward = patched
        for module, mode in modes:
            module.training = mode
        for device in devices:
            torch.cuda.synchronize(device)
        clock.seconds = time.perf_counter() - started


def measure_sinks(
    model: PreTrainedModel, rows: Tensor, *, threshold: float = 0.3, window: int = 32, expected: Sinks | None = None
) -> SinkMeasurement:
    """Find the sinks, and run the probes and the read-out over the rows once; the model should be in evaluation mode.

    Args:
        rows: int64 ``(rows, seq_len)``.
        expected: where the sinks were last time; position 0 by default. Found elsewhere, they cost the rows one more pass.

    Raises:
        UnsupportedModelError: a model that predicts no next token: its losses, and its windows, would say nothing.
    """
    kind, two_sided = loss_kind(model), bool(getattr(model.config, "is_encoder_decoder", False))
    has_head = model.get_output_embeddings() is not None
    if kind != "next token" and (kind is not None or two_sided or not has_head or looks_ahead(model)):
        raise UnsupportedModelError(
            f"SinkCallback watches causal language models by their next-token losses, and {type(model).__name__} has none"
        )
    rows = rows.to(model.device)
    length = rows.shape[1]
    size = max(1, TOKENS_PER_FORWARD // length)
    finder, entropy = SinkFinder(threshold), Entropy().about(expected or Sinks())
    probes = (SinkRate(threshold=threshold), entropy, HiddenNorm(), MassiveActivation(), MaxLogit())
    with attend(model, [*probes, finder]) as session:
        losses = torch.cat([token_losses(model, part) for part in rows.split(size)])
    sinks, expected_position = finder.sinks(), entropy.sink_position
    if entropy.about(sinks).sink_position != expected_position:
        probes = (probes[0], entropy := Entropy().about(sinks), *probes[2:])
        with attend(model, [entropy], verify=False):
            for part in rows.split(size):
                model(**lean_arguments(model, {"input_ids": part}))
    measured: list[SingleRow] = [{**row, "probe": probe.name} for probe in probes for row in unpacked(probe.rows())]
    rates = finder.rates()
    strongest = _strongest(rates, (length - window) // 2)
    pairs = [windowed_losses(model, part, window, strongest) for part in rows[:READOUT_ROWS].split(size)]
    with_sink, without_sink = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    by_token = {
        LOSS: losses,
        WINDOWED_LOSS_WITH_SINK: with_sink,
        WINDOWED_LOSS_WITHOUT_SINK: without_sink,
        SINK_LOSS_GAP: without_sink - with_sink,
    }
    of_readout: list[Row] = [
        {"metric": metric, "value": values.mean().item(), "count": values.numel()} for metric, values in by_token.items()
    ]
    of_readout += [
        {"metric": SINK_POSITION_RATE, "value": rates[position], "count": len(rows), "key_position": position}
        for position in strongest
    ]
    readout: list[SingleRow] = [{**row, "probe": "sink_readout"} for row in unpacked(of_readout)]
    of_model = [row for row in measured if "layer" not in row]
    sink_rates = {row["key_position"]: row["value"] for row in of_model if row["metric"] == "gu2024"}
    means = {row["metric"]: row["value"] for row in (*of_model, *readout) if "key_position" not in row}
    numbers = (
        sink_rates.get(0, 0.0), rates[strongest[0]], float(strongest[0]), means["qiu2025_first_attention"], means["entropy"],
        means.get("max_logit", float("nan")), means[LOSS.name], means[SINK_LOSS_GAP.name],
    )  # fmt: skip
    headline = dict(zip(HEADLINE, numbers, strict=True))
    of_table = [*(row for row in measured if _wanted(row, strongest)), *readout]
    return SinkMeasurement(of_table, headline, session.operation, sinks)


def _measured(
    model: PreTrainedModel, rows: Tensor, threshold: float, window: int, expected: Sinks | None = None
) -> SinkMeasurement:
    """The measurement; of a model that computes no numbers, which measuring refuses, the fact."""
    try:
        return measure_sinks(model, rows, threshold=threshold, window=window, expected=expected)
    except MeasurementError:
        if token_losses(model, rows[:1].to(model.device)).isfinite().all():
            raise
    lost: Row = {"metric": LOSS, "value": float("nan"), "count": len(rows), "probe": "sink_readout"}
    return SinkMeasurement(list(unpacked([lost])), {}, "")


def _strongest(rates: Mapping[int, float], limit: int) -> list[int]:
    """Positions that the read-out treats as sinks, strongest first: see :data:`SINK_POSITION_RATE`."""
    early = {position: rate for position, rate in rates.items() if position < max(limit, 1)}
    largest = max(early.values())
    if largest <= 0:
        return [0]
    return sorted((position for position, rate in early.items() if rate >= largest / 2), key=lambda position: -early[position])


def _wanted(row: SingleRow, sinks: list[int]) -> bool:
    """Leave out rows of single layers and heads at late positions that are no sinks: most rows, and nobody's question."""
    position = row.get("key_position")
    return "layer" not in row or position is None or position < FIRST_POSITIONS or position in sinks
