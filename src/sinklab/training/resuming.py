"""Going on with a run: whether it is the same run, and whether it still reads the same text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.table import read_run
from sinklab.training.checkpoints import saved_steps
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import PreparedData
from sinklab.training.initial import weights_folder

__all__ = ["earlier_run", "is_unfinished", "refuse_unfinished", "require_same_config", "require_same_text"]

PLACE = {
    *("training.threads", "training.device", "training.parallel", "training.micro_batch_size", "training.compile"),
    *("training.gradient_checkpointing", "training.save_every", "training.keep", "training.report_to"),
}
"""Fields that say where a run is computed and what is kept of it: they may change when it is resumed."""


def refuse_unfinished(out: Path) -> None:
    """Say of a folder with a run of pre-training that has not ended that it can be resumed, before it is replaced.

    Raises:
        InputError: there is such a run.
    """
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
    """The record of the run to go on with; ``None`` when there is nothing yet.

    Raises:
        InputError: something else is in the folder.
        ConfigurationError: the run has another configuration or started from other weights.
    """
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
            f"{out} was started from {begun or 'its seed'}, not from {init_from}; resume it without `init_from`, or choose "
            "another `out`"
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
            f"with under training.parallel {now[0]} with {now[1]}; resume the run as it was, or start from its weights with "
            "`init_from`"
        )


def require_same_text(earlier: dict[str, Any] | None, data: PreparedData, out: Path) -> None:
    """Refuse to go on with a run on a text that has become another since.

    Raises:
        InputError: tokens or tokenizer differ.
    """
    then, now = (earlier or {}).get("data"), data.identity
    if then is None or (then["sha256"], then["tokenizer"]["sha256"]) == (now["sha256"], now["tokenizer"]["sha256"]):
        return
    raise InputError(
        f"the text of {out} has changed since the run was begun: {then['tokens']:,} tokens of {then['source']} (revision "
        f"{then['revision']}) then, {now['tokens']:,} (revision {now['revision']}) now; bring the old text back, or begin "
        "again with `overwrite`"
    )


def require_same_config(earlier: dict[str, Any], config: PretrainingConfig, folder: Path) -> None:
    """Refuse to go on with a run under another configuration.

    Raises:
        ConfigurationError: fields differ that decide the numbers; all of them are listed.
    """
    then, now = _flat(earlier["config"]), _flat(config.model_dump(mode="json"))
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
