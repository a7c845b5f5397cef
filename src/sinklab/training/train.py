"""pretrain(): one configuration, one training run, one folder with its table, record, checkpoints and model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import types
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from sinklab.corpora.base import hash_tokens
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.language_model import SinkLM
from sinklab.models.loading import wrap_model
from sinklab.results.blocks import front_warning
from sinklab.results.environment import environment
from sinklab.results.file import clear_partial
from sinklab.results.folder import FolderLock, check_free, clear, set_aside
from sinklab.results.metric import definitions
from sinklab.results.progress import Screen, on_screen
from sinklab.results.run import Result, new_run_id
from sinklab.results.table import read_run
from sinklab.sinks.short_rows import few_queries_warning
from sinklab.training import checkpoints
from sinklab.training.bookkeeping import METRICS, Bookkeeper, save_model, stoppable
from sinklab.training.callback import PROBES, READOUT, SinkCallback
from sinklab.training.checkpoints import saved_steps, step_of
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import PreparedData, prepare_data
from sinklab.training.initial import build_model, load_weights, weights_folder
from sinklab.training.process import (
    chosen_device,
    chosen_dtype,
    compiles,
    default_cache,
    has_bfloat16,
    is_main,
    process_settings,
    trackers,
    training_arguments,
)
from sinklab.training.record import (
    RunRecord,
    RunTable,
    Status,
    library_versions,
    newest,
    read_result,
    result_of,
    weights_sha256,
)
from sinklab.training.tokenizer import beginning_as_rows
from sinklab.training.trainer import PretrainingTrainer

PLACE = {
    *("training.threads", "training.device", "training.parallel", "training.micro_batch_size", "training.compile"),
    *("training.gradient_checkpointing", "training.save_every", "training.keep", "training.report_to"),
}
"""Fields that say where a run is computed and what is kept of it: they may change when it is resumed."""


def refuse_unfinished(out: Path) -> None:
    """Say of a folder with a run of pre-training that has not ended that it can be resumed, before it is replaced."""
    if is_unfinished(out):
        raise InputError(
            f"output directory {out} exists, with a run that has not ended; go on with it by `resume`, choose another with "
            "`out`, or replace it with `overwrite`"
        )


def is_unfinished(out: Path) -> bool:
    """Whether a folder has a run of pre-training that has not ended."""
    if not (out / "run.json").is_file():
        return False
    run = read_run(out)
    return run.get("kind") == "pretrain" and run.get("status") not in ("finished", "diverged")


def earlier_run(out: Path, config: PretrainingConfig, init_from: Path | None) -> dict[str, Any] | None:
    """The record of the run to go on with; ``None`` when there is nothing yet. Another run, or what is none, is refused."""
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if not (out / "run.json").is_file():
        raise InputError(f"{out} holds no run.json, so there is no run to resume; choose another `out`")
    earlier = read_run(out)
    if earlier.get("kind") != "pretrain":
        raise InputError(f"{out} holds no run of pretrain but of {earlier.get('kind')!r}; choose another `out`")
    require_same_config(earlier, config, out)
    _require_same_sharding(earlier, config, out)
    begun = (earlier.get("init_from") or {}).get("path")
    if init_from is not None and begun != str(weights_folder(init_from)):
        raise ConfigurationError(
            f"{out} was started from {begun or 'its seed'}, not from {init_from}; resume it without `init_from`"
        )
    return earlier


def _require_same_sharding(earlier: dict[str, Any], config: PretrainingConfig, out: Path) -> None:
    """Refuse checkpoints of sharded weights for others and the other way round: their optimiser's state has another form."""

    def sharded(parallel: str, processes: int) -> bool:
        return parallel == "fsdp" and processes > 1

    before = earlier["config"]["training"]["parallel"], earlier["resolved"]["processes"]
    now = config.training.parallel, int(os.environ.get("WORLD_SIZE", "1"))
    if sharded(*before) != sharded(*now) and saved_steps(out / "checkpoints"):
        raise ConfigurationError(
            f"the checkpoints in {out} are of training.parallel {before[0]} with {before[1]} processes, and cannot be gone on "
            f"with under {now[0]} with {now[1]}; start from its weights with `init_from`"
        )


def require_same_text(earlier: dict[str, Any] | None, data: PreparedData, out: Path) -> None:
    """Refuse to go on with a run on a text that has become another since."""
    then, now = (earlier or {}).get("data"), data.identity
    if then is None or (then["sha256"], then["tokenizer"]["sha256"]) == (now["sha256"], now["tokenizer"]["sha256"]):
        return
    raise InputError(
        f"the text of {out} has changed since the run was begun: {then['tokens']:,} tokens of {then['source']} (revision "
        f"{then['revision']}) then, {now['tokens']:,} (revision {now['revision']}) now; bring the old text back, or begin "
        "again with `overwrite`"
    )


def require_same_config(earlier: dict[str, Any], config: PretrainingConfig, folder: Path) -> None:
    """Refuse to go on with a run under a configuration that differs in fields that decide the numbers; all are listed."""
    then, now = (_flat(of.model_dump(mode="json")) for of in (PretrainingConfig.parse(earlier["config"]), config))
    different = [
        f"{path} was {then.get(path)!r} and is {now.get(path)!r}"
        for path in sorted(then.keys() | now.keys())
        if then.get(path) != now.get(path) and path not in PLACE
    ]
    if different:
        raise ConfigurationError(
            f"{folder} is a run of another configuration: {'; '.join(different)}. Resume it as it was, choose another "
            "`out`, or start from its weights with `init_from`"
        )


def _flat(fields: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested dictionaries as dotted paths; lists compare as lists."""
    flat: dict[str, object] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """Everything that a run has before its first step; ``checkpoint`` is the one to go on from."""

    config: PretrainingConfig
    folder: Path
    arguments: TrainingArguments
    data: PreparedData
    model: SinkLM
    probe_rows: Tensor
    checkpoint: Path | None
    table: RunTable
    record: RunRecord
    screen: Screen


def run_training(
    config: PretrainingConfig,
    out: Path,
    *,
    resume: bool = False,
    init_from: Path | None = None,
    overwrite: bool = False,
    cache: Path | None = None,
    progress: bool = True,
    patience: float = 0.0,
) -> Result:
    """Train a model as a configuration says, and watch its sinks on the way.

    ``out`` gets ``run.json``, ``table.parquet`` (written while training goes), ``checkpoints/checkpoint-N``,
    ``snapshots/step-N`` and, at the end, ``model``, which ``sinklab audit`` and ``from_pretrained`` take. A run that was killed
    goes on from its newest whole checkpoint to the same numbers. Under ``torchrun`` or ``accelerate launch`` every process
    calls this function alike; ``training.batch_size`` is that of all of them together.

    Args:
        resume: go on with the run in ``out`` if there is one, and begin it if not.
        init_from: directory of a run, a checkpoint or a model whose weights to start from; its operation, position scheme and
            masks may differ. Without ``data.tokenizer`` its tokenizer is used.
        overwrite: replace an earlier run in ``out``.
        cache: directory for encoded text, shared by all runs; by default ``$SINKLAB_CACHE`` or ``~/.cache/sinklab``.
        progress: show a bar on a terminal's stderr, a line per record elsewhere.
        patience: seconds to wait for another process that runs it, which is perhaps still writing its last checkpoint.

    Raises:
        ConfigurationError: fields that cannot take effect here, or a run to resume that has another configuration.
        InputError: text, weights, a folder or a disk that cannot be used, or another process that is using the folder.
    """
    if resume and overwrite:
        raise ConfigurationError("resume goes on with the run in the output directory and overwrite removes it; give one")
    with (
        process_settings(config),
        on_screen("preparing", wanted=progress and is_main()) as shown,
        contextlib.ExitStack() as using,
    ):
        arguments = training_arguments(config, out)
        if arguments.should_save:  # of the processes of one run the first one has the folder for all
            if not resume:
                if not overwrite:
                    refuse_unfinished(out)
                check_free(out, overwrite)
            using.enter_context(FolderLock(out, patience=patience))
            if not resume:
                clear(out)
                check_free(out, overwrite)  # it may have been put there before we had the lock
                using.callback(clear, out)
                set_aside(out)
            clear_partial(out)
        arguments.distributed_state.wait_for_everyone()
        earlier = earlier_run(out, config, init_from) if resume else None
        if earlier is not None and earlier["status"] in ("finished", "diverged"):
            shown.note(f"the run in {out} has {earlier['status']} already")
            return read_result(out)
        try:
            prepared = _prepare(config, out, arguments, earlier, init_from, cache or default_cache(), shown)
        except BaseException:
            if arguments.should_save and not resume:
                shutil.rmtree(out, ignore_errors=True)  # what it was to replace comes back
            raise
        if arguments.should_save:
            clear(out)
        return _train(prepared)


def _prepare(
    config: PretrainingConfig,
    out: Path,
    arguments: TrainingArguments,
    earlier: dict[str, Any] | None,
    init_from: Path | None,
    cache: Path,
    screen: Screen,
) -> Prepared:
    """Read the text, build or load the model, and take down all that is known before the first step."""
    checkpoint = checkpoints.newest(out / "checkpoints") if earlier is not None else None
    if earlier is not None:
        screen.note(f"going on from {checkpoint.name}" if checkpoint else "no whole checkpoint yet: beginning again")
        before, dtype = earlier["resolved"]["dtype"], chosen_dtype(config)
        if checkpoint and before != dtype:
            screen.note(f"its steps were in {before}; here they are in {dtype}, and their numbers differ by its rounding")
        origin = (earlier.get("init_from") or {}).get("path")
        init_from = None if origin is None else Path(origin)
    source = weights_folder(init_from) if init_from is not None and checkpoint is None else None
    with arguments.main_process_first(local=True):
        named, trained = config, checkpoint if init_from else source  # whose tokenizer is taken, unless one is named
        if config.data.tokenizer is None and trained is not None and (trained / "tokenizer_config.json").is_file():
            named = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(trained)})})
        data = prepare_data(named, cache, screen.progress)
    require_same_text(earlier, data, out)
    if config.training.dtype == "bfloat16" and not has_bfloat16(chosen_device(config)):
        screen.note("this device has no instructions for bfloat16, and steps in it are many times slower than in float32")
    model = build_model(config, data.tokenizer, data.identity["tokenizer"]["vocab_size"])
    start: dict[str, Any] | None = (earlier or {}).get("init_from")
    if source is not None:
        start = load_weights(model, source)
        screen.note(_about(start, model))
    record = RunRecord(out, earlier or {"run_id": new_run_id()}, writes=arguments.should_save)
    columns = {
        "run_id": record.fields["run_id"],
        "model": config.name,
        "operation": model.config.operation["name"],
        "corpus": config.data.corpus,
        "seed": config.training.seed,
    }
    table = RunTable(out / "table.parquet", columns, writes=arguments.should_save)
    if checkpoint is not None:
        table.resume(step_of(checkpoint))
    probe_rows = data.probe_rows(config.watch.samples, config.watch.seq_len)
    prepared = Prepared(config, out, arguments, data, model, probe_rows, checkpoint, table, record, screen)
    _take_down(prepared, start)
    return prepared


def _train(run: Prepared) -> Result:
    config, arguments, out, table, record = run.config, run.arguments, run.folder, run.table, run.record

    def before_saving() -> None:
        table.write()
        record.update(steps=trainer.state.global_step)

    tokenizer = beginning_as_rows(run.data.tokenizer, config.data.bos != "none")
    bookkeeper = Bookkeeper(
        config,
        table=table,
        held_out=run.data.held_out_dataset,
        tokens_per_step=config.training.batch_size * config.model.max_position_embeddings,
        screen=run.screen,
        snapshot=lambda step: save_model(trainer, tokenizer, out / "snapshots" / f"step-{step}"),
    )
    trainer = PretrainingTrainer(
        config,
        before_saving,
        model=run.model,
        args=arguments,
        train_dataset=run.data.train,
        processing_class=tokenizer,
        callbacks=[*trackers(config, arguments, out, run.checkpoint), bookkeeper],
    )
    trainer.remove_callback(PrinterCallback)
    bos = run.data.tokenizer.bos_token_id
    sinks = SinkCallback(
        run.probe_rows,
        every=config.watch.every,
        threshold=config.watch.threshold,
        window=config.watch.window,
        table=table,
        columns={"bos": int(bos is not None and bool((run.probe_rows[:, 0] == bos).all()))},
        trainer=trainer,
    )
    trainer.add_callback(sinks)
    bookkeeper.trainer, bookkeeper.sinks = trainer, sinks
    try:
        with stoppable(bookkeeper, alone=arguments.world_size == 1):
            trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
        steps = trainer.state.global_step
        status = _status(config, steps, diverged=bookkeeper.diverged)
        if status == "finished" or (status == "diverged" and all(p.isfinite().all() for p in run.model.parameters())):
            save_model(trainer, tokenizer, out / "model")
        table.write()
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(OSError):  # a full disk may be what brought us here; the error itself goes on
            record.update(status="stopped" if isinstance(error, KeyboardInterrupt) else "failed", error=reason)
        raise
    result = {**newest(table.table()), "tokens_per_second": bookkeeper.speed, "steps": steps}
    divergence = None if bookkeeper.divergence is None else dataclasses.asdict(bookkeeper.divergence)
    weights = weights_sha256(out / "model")
    stopped_by = bookkeeper.stopped_by if status == "stopped" else None
    warning = _warning(config)
    record.update(
        status=status, steps=steps, result=result, divergence=divergence, weights_sha256=weights, stopped_by=stopped_by,
        **({"warning": warning} if warning else {}),
    )  # fmt: skip
    return result_of(out, table.table(), record.fields)


def _status(config: PretrainingConfig, steps: int, *, diverged: bool) -> Status:
    """How a training came to its end."""
    if steps < config.training.steps and not (diverged and config.training.stop_when_diverged):
        return "stopped"
    return "diverged" if diverged else "finished"


def _warning(config: PretrainingConfig) -> str:
    """What keeps the sink rates of a run from saying what they seem to; empty where nothing does."""
    watch = config.watch
    few = few_queries_warning(watch.seq_len, config.model.window, watch.threshold)
    return " ".join(filter(None, (few, front_warning(config.model.operation["name"], config.model.tokens_in_front))))


def _take_down(run: Prepared, start: dict[str, Any] | None) -> None:
    """Fill the record with everything that is known before the first step."""
    config, arguments, data, model = run.config, run.arguments, run.data, run.model
    training = config.training
    loaded = wrap_model(model, data.tokenizer, name=config.name)
    # The model is moved to the device of the run by its first step.
    facts = environment(types.SimpleNamespace(device=arguments.device, dtype=loaded.dtype))
    tokens_per_step = training.batch_size * config.model.max_position_embeddings
    resumed = run.record.fields.get("resumed", [])
    if run.checkpoint is not None:
        stretch = {"from": run.checkpoint.name}
        before = run.record.fields["resolved"]["dtype"]
        resumed = [*resumed, stretch if before == chosen_dtype(config) else {**stretch, "dtype_before": before}]
    run.record.fields.pop("error", None)
    run.record.update(
        kind="pretrain",
        status="running",
        name=config.name,
        config=config.model_dump(mode="json"),
        resolved={
            "vocab_size": model.config.vocab_size,
            "parameters": loaded.num_parameters,
            "attn_implementation": model.config._attn_implementation,
            "device": chosen_device(config),
            "dtype": chosen_dtype(config),
            "compile": compiles(config),
            "processes": arguments.world_size,
            "micro_batch_size": arguments.per_device_train_batch_size,
            "accumulation": arguments.gradient_accumulation_steps,
            "tokens_per_step": tokens_per_step,
            "tokens": training.steps * tokens_per_step,
            "epochs": training.steps / (len(data.train) // training.batch_size),
        },
        init_from=start,
        seeds={"initialisation": training.seed, "data": config.data.seed},
        data=data.identity,
        token_sha256={
            "train": data.identity["sha256"],
            "held_out": hash_tokens(data.held_out),
            "probe_rows": hash_tokens(run.probe_rows),
        },
        definitions=definitions({"training": METRICS, "sink_readout": READOUT, **{each.name: each.metrics for each in PROBES}}),
        resumed=resumed,
        **{**facts, "versions": {**facts["versions"], **library_versions()}},
    )


def _about(start: dict[str, Any], model: SinkLM) -> str:
    """What became of the weights of another run, in a sentence."""
    parts = [f"weights of {start['path']} ({start['operation']}) under {model.config.operation['name']}"]
    for word in ("new", "dropped"):
        if start[word]:
            parts.append(f"{word}: {len(start[word])} parameters ({start[word][0]}{', …' if len(start[word]) > 1 else ''})")
    return "; ".join(parts)
