"""pretrain(): one configuration, one training run, one folder with its table, record, checkpoints and model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from sinklab.auditing.output import check_free, environment, new_run_id
from sinklab.corpora._corpus import hash_tokens
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.language_model import SinkLM
from sinklab.models.loading import wrap_model
from sinklab.pretraining.bookkeeping import Bookkeeper, save_model, stoppable
from sinklab.pretraining.callback import SinkCallback
from sinklab.pretraining.checkpoints import PREFIX, usable
from sinklab.pretraining.config import PretrainingConfig
from sinklab.pretraining.data import PreparedData, prepare_data
from sinklab.pretraining.initial import build_model, load_weights, weights_folder
from sinklab.pretraining.progress import Display, display
from sinklab.pretraining.record import (
    RunRecord,
    RunResult,
    Status,
    definitions,
    library_versions,
    read_result,
    require_same_config,
)
from sinklab.pretraining.run_table import RunTable
from sinklab.pretraining.trainer import PretrainingTrainer
from sinklab.results.table import read_run

__all__ = ["default_cache", "pretrain"]


def pretrain(
    config: PretrainingConfig,
    out: Path,
    *,
    resume: bool = False,
    init_from: Path | None = None,
    overwrite: bool = False,
    cache: Path | None = None,
    progress: bool = True,
) -> RunResult:
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
        cache: directory for encoded text, shared by all runs; by default :func:`default_cache`.
        progress: show a bar on a terminal's stderr, a line per record elsewhere.

    Raises:
        ConfigurationError: fields that cannot take effect here, or a run to resume that has another configuration.
        InputError: text, weights, a folder or a disk that cannot be used.
    """
    with _process_settings(config), display(config.training.steps, wanted=progress and _is_main()) as screen:
        arguments = _arguments(config, out)
        if arguments.should_save and not resume:
            check_free(out, overwrite)
            shutil.rmtree(out, ignore_errors=True)
        arguments.distributed_state.wait_for_everyone()
        earlier = _earlier_run(out, config, init_from) if resume else None
        if earlier is not None and earlier["status"] in ("finished", "diverged"):
            screen.note(f"{out} has {earlier['status']} already")
            return read_result(out)
        checkpoint, passed_over = usable(out / "checkpoints") if earlier is not None else (None, [])
        for sentence in passed_over:
            screen.note(sentence)
        if earlier is not None:
            screen.note(f"going on from {checkpoint.name}" if checkpoint else "no whole checkpoint yet: beginning again")
        source = weights_folder(init_from) if init_from is not None and checkpoint is None else None
        prepared = _with_tokenizer(config, checkpoint if earlier is not None and earlier.get("init_from") else source)
        with arguments.main_process_first(local=True):
            data = prepare_data(prepared, cache or default_cache(), screen.preparing)
        _require_same_text(earlier, data, out)

        model = build_model(config, data.tokenizer, data.identity["tokenizer"]["vocab_size"])
        start = load_weights(model, source) if source is not None else None
        if start is not None:
            screen.note(_about(start, model))
        probe_rows = data.probe_rows(config.watch.samples, config.watch.seq_len, config.watch.bos)
        record = RunRecord(out, earlier or {"run_id": new_run_id(), "init_from": start}, writes=arguments.should_save)
        _take_down(record, config, arguments, model, data, probe_rows, checkpoint, passed_over)
        table = RunTable(
            out / "table.parquet",
            {
                "run_id": record.fields["run_id"],
                "model": config.name,
                "operation": model.config.operation["name"],
                "corpus": config.data.corpus,
                "bos": int(config.data.bos == "rows"),
                "seed": config.training.seed,
            },
            writes=arguments.should_save,
        )
        if checkpoint is not None:
            table.resume(int(checkpoint.name.removeprefix(PREFIX)))
        return _train(config, arguments, model, data, probe_rows, checkpoint, table, record, screen)


def _train(
    config: PretrainingConfig,
    arguments: TrainingArguments,
    model: SinkLM,
    data: PreparedData,
    probe_rows: torch.Tensor,
    checkpoint: Path | None,
    table: RunTable,
    record: RunRecord,
    screen: Display,
) -> RunResult:
    out = record.path.parent
    watch, context = config.watch, config.model.max_position_embeddings

    def before_saving() -> None:
        table.write()
        record.update(steps=trainer.state.global_step)

    book = Bookkeeper(
        config,
        table=table,
        held_out=data.held_out_dataset,
        tokens_per_step=config.training.batch_size * context,
        screen=screen,
        snapshot=lambda step: save_model(trainer, data.tokenizer, out / "snapshots" / f"step-{step}"),
    )
    trainer = PretrainingTrainer(
        config,
        before_saving,
        model=model,
        args=arguments,
        train_dataset=data.train,
        processing_class=data.tokenizer,
        callbacks=[*_trackers(config, arguments, out, checkpoint), book],
    )
    trainer.remove_callback(PrinterCallback)
    bos = data.tokenizer.bos_token_id
    columns = {"bos": int(bos is not None and bool((probe_rows[:, 0] == bos).all()))}
    sinks = SinkCallback(
        probe_rows,
        every=watch.every,
        threshold=watch.threshold,
        window=watch.window,
        table=table,
        columns=columns,
        trainer=trainer,
    )
    trainer.add_callback(sinks)
    book.trainer, book.sinks = trainer, sinks
    record.update(status="running")
    try:
        with stoppable(book, alone=arguments.world_size == 1):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(OSError):  # a full disk is what may have brought us here; the error itself goes on
            record.update(status="stopped" if isinstance(error, KeyboardInterrupt) else "failed", error=reason)
        raise
    status: Status = "diverged" if book.diverged else "stopped" if _cut_short(book, trainer) else "finished"
    if status == "finished" or (status == "diverged" and all(p.isfinite().all() for p in model.parameters())):
        save_model(trainer, data.tokenizer, out / "model")
    table.write()
    result = {
        "held_out_loss": book.held_out,
        "sink_rate": sinks.last.headline["sink_rate"] if sinks.last is not None else None,
        "tokens_per_second": book.speed,
        "steps": trainer.state.global_step,
    }
    divergence = None if book.divergence is None else vars(book.divergence)
    record.update(status=status, steps=trainer.state.global_step, result=result, divergence=divergence)
    return RunResult(folder=out, table=table.table(), status=status, run=record.fields, **result)  # type: ignore[arg-type]


def default_cache() -> Path:
    """Where encoded text is kept between runs: ``$SINKLAB_CACHE``, or ``sinklab`` in the user's cache directory."""
    given = os.environ.get("SINKLAB_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sinklab"


# --- the process ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process_settings(config: PretrainingConfig) -> Iterator[None]:
    """What a run sets for the whole process, and puts back."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    names = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    before = {name: os.environ.get(name) for name in names}  # TrainingArguments speaks to accelerate through these
    if _device(config) == "cpu" and config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if _compiles(config):
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


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _device(config: PretrainingConfig) -> str:
    wanted = config.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"training.device is cuda and this machine's torch {torch.__version__} sees no GPU; use cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def _compiles(config: PretrainingConfig) -> bool:
    wanted = config.training.compile
    possible = _device(config) == "cuda" or any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++"))
    if wanted and not possible:
        raise ConfigurationError(
            "training.compile is true and there is no C++ compiler (g++, clang++) on the path; set it to null"
        )
    return possible if wanted is None else wanted


def _arguments(config: PretrainingConfig, out: Path) -> TrainingArguments:
    """What the configuration means to transformers; setting it up joins the processes of a distributed run."""
    training, device = config.training, _device(config)
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
        bf16=training.dtype == "bfloat16",
        use_cpu=device == "cpu",
        torch_compile=_compiles(config),
        activation_checkpointing=training.gradient_checkpointing,
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
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for several processes, not for nn.DataParallel
    return arguments


def _trackers(
    config: PretrainingConfig, arguments: TrainingArguments, out: Path, checkpoint: Path | None
) -> list[TrainerCallback]:
    for name in config.training.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(f"training.report_to names {name}, which is not installed; try: pip install {name}")
    if "tensorboard" not in config.training.report_to or not arguments.should_save:
        return []
    from torch.utils.tensorboard import SummaryWriter

    # What was drawn beyond the checkpoint will be drawn again.
    purge = None if checkpoint is None else int(checkpoint.name.removeprefix(PREFIX)) + 1
    return [TensorBoardCallback(SummaryWriter(str(out / "tensorboard"), purge_step=purge))]


# --- resuming -------------------------------------------------------------------------------------------------------------


def _earlier_run(out: Path, config: PretrainingConfig, init_from: Path | None) -> dict[str, Any] | None:
    """The record of the run to go on with; ``None`` when there is nothing yet."""
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if not (out / "run.json").is_file():
        raise InputError(f"{out} holds no run.json, so there is no run to resume; choose another directory with --out")
    earlier = read_run(out)
    if earlier.get("kind") != "pretrain":
        raise InputError(f"{out} holds no run of pretrain but of {earlier.get('kind')!r}; choose another directory with --out")
    require_same_config(earlier, config, out)
    begun = (earlier.get("init_from") or {}).get("path")
    if init_from is not None and begun != str(weights_folder(init_from)):
        raise ConfigurationError(
            f"{out} was started from {begun or 'its seed'}, not from {init_from}; resume it without --init-from, or choose "
            "another directory with --out"
        )
    return earlier


def _with_tokenizer(config: PretrainingConfig, folder: Path | None) -> PretrainingConfig:
    """The configuration with the tokenizer that the weights in ``folder`` were trained with, unless one is named."""
    if folder is None or config.data.tokenizer is not None or not (folder / "tokenizer_config.json").is_file():
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(folder)})})


def _require_same_text(earlier: dict[str, Any] | None, data: PreparedData, out: Path) -> None:
    then, now = (earlier or {}).get("data"), data.identity
    if then is None or (then["sha256"], then["tokenizer"]["sha256"]) == (now["sha256"], now["tokenizer"]["sha256"]):
        return
    raise InputError(
        f"the text of {out} has changed since the run was begun: {then['tokens']:,} tokens of {then['source']} (revision "
        f"{then['revision']}) then, {now['tokens']:,} (revision {now['revision']}) now; bring the old text back, or begin "
        "again with --overwrite"
    )


def _about(start: dict[str, Any], model: SinkLM) -> str:
    """What became of the weights of another run, in a sentence."""
    parts = [f"weights of {start['path']} ({start['operation']}) under {model.config.operation['name']}"]
    for word in ("new", "dropped"):
        if start[word]:
            parts.append(f"{word}: {len(start[word])} parameters ({start[word][0]}{', …' if len(start[word]) > 1 else ''})")
    return "; ".join(parts)


def _cut_short(book: Bookkeeper, trainer: PretrainingTrainer) -> bool:
    return book.stopped and trainer.state.global_step < trainer.state.max_steps


def _take_down(
    record: RunRecord,
    config: PretrainingConfig,
    arguments: TrainingArguments,
    model: SinkLM,
    data: PreparedData,
    probe_rows: torch.Tensor,
    checkpoint: Path | None,
    passed_over: list[str],
) -> None:
    """Fill the record with everything that is known before the first step."""
    training, context = config.training, config.model.max_position_embeddings
    loaded = wrap_model(model, data.tokenizer, name=config.name)
    facts = environment(loaded)
    resumed = record.fields.get("resumed", [])
    if checkpoint is not None or passed_over:
        resumed = [*resumed, {"from": checkpoint.name if checkpoint else None, "passed_over": passed_over}]
    record.update(
        kind="pretrain",
        status="running",
        name=config.name,
        config=config.model_dump(mode="json"),
        resolved={
            "vocab_size": model.config.vocab_size,
            "parameters": loaded.num_parameters,
            "attn_implementation": model.config._attn_implementation,
            "device": _device(config),
            "dtype": training.dtype,
            "compile": _compiles(config),
            "processes": arguments.world_size,
            "micro_batch_size": arguments.per_device_train_batch_size,
            "accumulation": arguments.gradient_accumulation_steps,
            "tokens_per_step": training.batch_size * context,
            "tokens": training.steps * training.batch_size * context,
            "epochs": training.steps / (len(data.train) // training.batch_size),
        },
        seeds={"initialisation": training.seed, "data": config.data.seed},
        data=data.identity,
        token_sha256={
            "train": data.identity["sha256"],
            "held_out": hash_tokens(data.held_out),
            "probe_rows": hash_tokens(probe_rows),
        },
        definitions=definitions(),
        resumed=resumed,
        **{**facts, "versions": {**facts["versions"], **library_versions()}},
    )
