"""The work behind claims besides training: read-outs of trained models and measurements of a seed, in processes of their own.

Every result is a small JSON file that says which code made it. A file whose code has changed since is made anew; all others
are kept, so that a run that was interrupted, or a claim that was added, costs what is missing and nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import ConfigurationError, SinklabError
from sinklab.jobs.cell import REFUSED, stop_with_driver
from sinklab.jobs.processes import run_processes
from sinklab.jobs.watch import watching
from sinklab.registry import claims, read_outs
from sinklab.reproduction.claim import Claim, ReadOut, Scale
from sinklab.reproduction.trained import TrainedModel
from sinklab.results.table import read_run, write_json

__all__ = ["Reading", "claim_called", "measured", "name_of", "read_numbers", "run_measures", "run_readings"]

BATCH = 12
"""Readings of one process: enough that starting it, five seconds, is the smaller part."""


class Reading:
    """One read-out of one trained model.

    Args:
        folder: run folder of the model.
        read_out: a name from ``sinklab.read_outs``, or ``claim.function`` for a function in the file of a claim.
    """

    def __init__(self, folder: Path, read_out: str) -> None:
        self.folder, self.read_out = folder, read_out

    @property
    def path(self) -> Path:
        """Where the numbers are kept."""
        return self.folder / "read_outs" / f"{self.read_out}.json"

    def kept(self) -> dict[str, Any] | None:
        """What was read before by the code as it is now."""
        return _kept(self.path, function_of(self.read_out))


def claim_called(name: str) -> Claim:
    """The claim of a name.

    Raises:
        UnknownNameError: no such claim.
        ConfigurationError: its file does not give a claim.
    """
    claim = claims.make(name)
    if not isinstance(claim, Claim):
        raise ConfigurationError(f"claim {name!r}: its function must return a Claim, and returned {type(claim).__name__}")
    return claim


def name_of(claim: str, read_out: str | ReadOut) -> str:
    """The name under which a read-out of a claim is kept."""
    return read_out if isinstance(read_out, str) else f"{claim}.{read_out.__name__}"  # type: ignore[attr-defined]


def function_of(read_out: str) -> Callable[[TrainedModel], Mapping[str, float]]:
    """The function behind a name of :func:`name_of`.

    Raises:
        UnknownNameError: no such read-out or claim.
        ConfigurationError: the claim has no read-out of that name.
    """
    claim, dot, function = read_out.partition(".")
    if not dot:
        found: Any = read_outs.make(read_out)
        return found
    for candidate in claim_called(claim).read_outs:
        if not isinstance(candidate, str) and name_of(claim, candidate) == read_out:
            return candidate
    raise ConfigurationError(f"claim {claim!r} has no read-out {function!r}")


def read_numbers(folder: Path, wanted: Sequence[str]) -> dict[str, float]:
    """Numbers of a trained model: how its training ended, and what has been read out of it; what is missing is left out."""
    run = read_run(folder)
    result = run.get("result") or {}
    numbers = {"diverged": float(run["status"] == "diverged")}
    for name in ("held_out_loss", "steps"):
        if result.get(name) is not None and (name == "steps" or run["status"] == "finished"):
            numbers[name] = float(result[name])
    for read_out in wanted:
        kept = Reading(folder, read_out).kept()
        numbers |= {} if kept is None else {key: value for key, value in kept["numbers"].items() if value is not None}
    return numbers


def measured(folder: Path, claim: str, seed: int) -> dict[str, Any] | None:
    """What a claim has measured at a seed, by the code as it is now: ``numbers`` and ``seconds``."""
    return _kept(_measure_path(folder, claim, seed), claim_called(claim).measure)


def run_readings(readings: Sequence[Reading], logs: Path, *, cache: Path, jobs: int, progress: bool) -> dict[str, str]:
    """Take the read-outs that are missing, several processes at a time; the errors by batch.

    A run that diverged is read only by read-outs that say so (a true attribute ``of_diverged``).
    """
    left = [reading for reading in readings if _readable(reading) and reading.kept() is None]
    by_folder: dict[Path, list[str]] = {}
    for reading in left:
        names = by_folder.setdefault(reading.folder, [])
        if reading.read_out not in names:
            names.append(reading.read_out)
    folders = list(by_folder)
    size = max(1, min(BATCH, math.ceil(len(folders) / jobs))) if folders else 1
    batches = {f"read-outs {start // size + 1}": folders[start : start + size] for start in range(0, len(folders), size)}
    commands = {
        name: [
            *(sys.executable, "-m", "sinklab.reproduction.work", "read", str(cache)),
            json.dumps([[str(folder), by_folder[folder]] for folder in batch]),
        ]
        for name, batch in batches.items()
    }

    def outcome(name: str) -> str | None:
        done = all(Reading(folder, read).kept() is not None for folder in batches[name] for read in by_folder[folder])
        return f"{len(batches[name])} models read" if done else None

    return _run(commands, logs, outcome, jobs=jobs, progress=progress)


def run_measures(
    wanted: Sequence[tuple[str, int]], folder: Path, scale: Scale, logs: Path, *, jobs: int, progress: bool
) -> dict[str, str]:
    """Take the measurements that are missing, a process for each claim and seed; the errors by claim and seed.

    Args:
        folder: where measurements of this scale are kept.
    """
    left = {f"{claim} seed {seed}": (claim, seed) for claim, seed in wanted if measured(folder, claim, seed) is None}
    commands = {
        name: [sys.executable, "-m", "sinklab.reproduction.work", "measure", str(folder), claim, str(seed), scale]
        for name, (claim, seed) in left.items()
    }

    def outcome(name: str) -> str | None:
        return None if measured(folder, *left[name]) is None else "measured"

    return _run(commands, logs, outcome, jobs=jobs, progress=progress)


def _run(
    commands: Mapping[str, Sequence[str]], logs: Path, outcome: Callable[[str], str | None], *, jobs: int, progress: bool
) -> dict[str, str]:
    if not commands:
        return {}
    environments = {name: {"OMP_NUM_THREADS": "1"} for name in commands}
    with watching(len(commands), 0, wanted=progress) as watch:
        return run_processes(
            commands,
            lambda name: logs / f"{name.replace(' ', '-')}.log",
            outcome,
            jobs=jobs,
            retries=0,
            watch=watch,
            environments=environments,
        )


def _readable(reading: Reading) -> bool:
    status = read_run(reading.folder)["status"] if (reading.folder / "run.json").is_file() else "waiting"
    return status == "finished" or (status == "diverged" and getattr(function_of(reading.read_out), "of_diverged", False))


def _measure_path(folder: Path, claim: str, seed: int) -> Path:
    return folder / f"{claim}-seed{seed}.json"


def _kept(path: Path, function: Any) -> dict[str, Any] | None:
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return kept if kept.get("code") == _code(function) else None


def _code(function: Any) -> str:
    """Hash of the file that a function is in, and of the private files beside it that it imports from.

    The function that states a claim is left out of its file: to add a remark to a claim is no reason to measure it again. Nor
    is a change elsewhere in sinklab; whoever makes one that matters deletes the files.
    """
    module = inspect.getmodule(function)
    assert module is not None
    text, stated = inspect.getsource(module), getattr(module, module.__name__.rpartition(".")[2], None)
    if inspect.isfunction(stated) and stated is not function:
        text = text.replace(inspect.getsource(stated), "")
    package = re.escape(module.__name__.rpartition(".")[0])
    beside = sorted(set(re.findall(rf"^from {package}\.(_\w+) import", text, flags=re.MULTILINE)))
    folder = Path(str(module.__file__)).parent
    content = [text, *((folder / f"{name}.py").read_text(encoding="utf-8") for name in beside)]
    return hashlib.sha256("".join(content).encode()).hexdigest()[:16]


def _write(path: Path, function: Any, numbers: Any, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json({"code": _code(function), "numbers": numbers, "seconds": round(seconds, 2)}, path)


def _plain(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers for JSON, which has none that are not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def _read(cache: str, batch: str) -> None:
    for folder, names in json.loads(batch):
        trained = TrainedModel(Path(folder), Path(cache))
        for name in names:
            reading, started = Reading(Path(folder), name), time.monotonic()
            if reading.kept() is None:
                print(f"{Path(folder).name}: {name}", file=sys.stderr, flush=True)
                numbers = _plain(function_of(name)(trained))
                _write(reading.path, function_of(name), numbers, time.monotonic() - started)


def _measure(folder: str, claim: str, seed: str, scale: Scale) -> None:
    measure = claim_called(claim).measure
    if measure is None:
        raise ConfigurationError(f"claim {claim!r} measures nothing by itself")
    started = time.monotonic()
    numbers = {label: _plain(values) for label, values in measure(int(seed), scale).items()}
    _write(_measure_path(Path(folder), claim, int(seed)), measure, numbers, time.monotonic() - started)


def main(kind: str, *arguments: str) -> None:
    """The process of a batch of read-outs, or of one measurement."""
    threading.Thread(target=stop_with_driver, daemon=True).start()
    try:
        {"read": _read, "measure": _measure}[kind](*arguments)  # type: ignore[operator]
    except SinklabError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main(*sys.argv[1:])
