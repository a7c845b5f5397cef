"""Kill and resume: every command that writes is killed at seeded moments, run again, and must leave what it leaves undisturbed.

``python -m tests.reliability.kill`` (``make kill``) takes every command; ``--command``, ``--kills`` and ``--seed`` choose.
The moment is before one of the changes of names that the command makes on the disk, or a point in its time; the signal
SIGKILL, SIGTERM or SIGINT; the process the command's own or one of its workers. A JSON record goes to build/kill.json.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError, safe_open

from sinklab.cli.commands import find_commands
from sinklab.errors import SinklabError
from sinklab.results.run import Listing
from sinklab.results.table import read_table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "build" / "kill.json"

MODEL = "{inputs}/model"
FEW = ("--samples", "4", "--seq-len", "32", "--corpus", "{inputs}/text.txt")
TRAINING = (
    *("--set=data.corpus={inputs}/text.txt", "--set=training.steps=12", "--set=training.save_every=4"),
    *("--set=training.log_every=3", "--set=training.evaluate_every=6", "--set=watch.every=6", "--set=watch.samples=8"),
    *("--set=data.held_out_rows=8", "--quiet"),
)
OUT = ("--out", "{work}/out")


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a command is run small: ``{work}`` is the folder that it writes in, ``{inputs}`` that of what is made once.

    Attributes:
        copied: input to the name under which it lies in ``{work}`` before the command.
        goes_on: whether the same line goes on with what is there.
        ends_well: signals that are an end like another.
    """

    line: tuple[str, ...]
    result: str = "out"
    copied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workers: bool = False
    goes_on: bool = False
    ends_well: tuple[int, ...] = ()


ENTRIES = {
    "audit": Entry((MODEL, *FEW, "--no-cache", *OUT), ends_well=(signal.SIGINT, signal.SIGTERM)),
    "measure": Entry(("embedded:softmax", "--probe", "sink_rate,entropy", *FEW, *OUT)),
    "cache": Entry(
        (MODEL, "--text", "{inputs}/text.txt", "--tokens", "96", "--documents", "2", "--window", "16", "--sinks", "0,1", *OUT)
    ),
    "causes": Entry((MODEL, "--domains", "{inputs}/text.txt", "--texts", "10", "--seq-len", "32", "--sink", "0", *OUT)),
    "quantize": Entry((MODEL, *FEW, "--calibration", "2", "--schemes", "w8a8", *OUT)),
    "origin": Entry((MODEL, *FEW, "--controls", "1", *OUT)),
    "fold": Entry((MODEL, "--samples", "2", "--seq-len", "32", *OUT)),
    "depend": Entry((MODEL, "--task", "long_text:corpus={inputs}/text.txt", "--window", "24", "--items", "3", *OUT)),
    "trigger": Entry(("--operation", "softmax,relu", "--seeds", "0..1", "--cap", "3", "--samples", "16", *OUT)),
    "reproduce": Entry(
        ("sigmoid_has_no_sink", "repeated_token_laws", "--seeds", "0", "--jobs", "2", *OUT), workers=True, goes_on=True
    ),
    "pretrain": Entry(("tiny", *TRAINING, *OUT)),
    "sweep": Entry(("tiny", *TRAINING, "--grid", "lr=1e-3,4e-3", "--jobs", "2", *OUT), workers=True),
    "stream": Entry(
        (MODEL, "--prompt", "the a of", "--max-new-tokens", "40", "--endless", "--save", "{work}/state.safetensors"),
        result="state.safetensors",
        ends_well=(signal.SIGINT,),
    ),
    "compare": Entry(("{inputs}/audit", "{inputs}/audit2", "--out", "{work}/both.html"), result="both.html"),
    "export": Entry(
        ("{inputs}/compared", "--to", "transformers", "--out", "{work}/export"), result="export/transformers_cache.py"
    ),
    "report": Entry(("{work}/audit",), result="audit/report.html", copied={"audit": "audit"}),
}


def parameters(command: str) -> Mapping[str, inspect.Parameter]:
    """Those of the function of a command, with annotations as text."""
    return inspect.signature(find_commands()[command].load()).parameters


def writers() -> set[str]:
    """The commands that write: those that return more than a listing, and those that are told where to write."""
    found = set()
    for name, place in find_commands().items():
        returned = inspect.signature(place.load()).return_annotation
        if returned != Listing.__name__ or {"out", "save", "store"} & set(parameters(name)):
            found.add(name)
    return found


def forgotten() -> set[str]:
    """Commands that write and have no entry, and entries of no such command."""
    return writers() ^ set(ENTRIES)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill, ``at`` a change of the disk or a point in time, and what is not as it should be, in sentences."""

    command: str
    signal: str
    whom: str
    at: str
    status: int | None
    problems: list[str]
    seconds: float


class Lab:
    """A folder to run lines in, one at a time, each in a process that is forked from one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work, self.inputs = folder, folder / "work", folder / "inputs"
        self.token = secrets.token_hex(8)
        path = os.pathsep.join(dict.fromkeys([*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]))
        everywhere = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "PYTHONPATH": path}
        os.environ.update(everywhere)
        own = {"SINKLAB_CACHE": str(self.work / "cache"), "SINKLAB_KILL": self.token, "TOKENIZERS_PARALLELISM": "false"}
        self.environment = everywhere | own
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["tests.reliability.victim"])

    def renew(self, copied: Mapping[str, str]) -> None:
        """An empty folder to work in."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for name, target in copied.items():
            shutil.copytree(self.inputs / name, self.work / target)

    def line(self, command: str, *more: str) -> list[str]:
        """A command of the table with its arguments."""
        places = {"work": str(self.work), "inputs": str(self.inputs)}
        line = [re.sub(r"\{(work|inputs)\}", lambda match: places[match[1]], word) for word in ENTRIES[command].line]
        return [command, *line, *more]

    def run(
        self,
        line: Sequence[str],
        *,
        die_at: tuple[int, int] | None = None,
        meanwhile: Callable[[int], None] = lambda process: None,
    ) -> tuple[int, int]:
        """Run a line to its end; its status (minus the signal that ended it) and the changes of names that it made."""
        from tests.reliability.victim import run_line

        writes = self.processes.Value("i", 0)
        process = self.processes.Process(target=run_line, args=(list(line), self.work, self.environment, writes, die_at))
        process.start()
        assert process.pid is not None
        meanwhile(process.pid)
        process.join(300)
        if process.is_alive():
            process.kill()
            process.join()
            return -999, writes.value
        assert process.exitcode is not None
        return process.exitcode, writes.value

    def run_well(self, line: Sequence[str]) -> int:
        """Run a line that nobody disturbs and that must end well; the changes of names that it made."""
        status, changes = self.run(line)
        if status:
            raise SystemExit(f"undisturbed, sinklab {' '.join(line)} ends with status {status}: {self.said()}")
        return changes

    def said(self) -> str:
        """The last line on stderr."""
        lines = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def others(self) -> list[int]:
        """Processes that lines have left or have at work: all with our mark that are no children of the server by fork."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    marked = f"SINKLAB_KILL={self.token}".encode() in (entry / "environ").read_bytes()
                except OSError:
                    continue
                if marked:
                    found.append(int(entry.name))
        return found

    def settle(self) -> list[str]:
        """Wait for the workers of a dead driver, who notice it by themselves."""
        deadline = time.monotonic() + 60
        while self.others():
            if time.monotonic() > deadline:
                for process in self.others():
                    os.kill(process, signal.SIGKILL)
                return ["workers were still alive a minute after their driver"]
            time.sleep(0.05)
        return []


def make_inputs(lab: Lab, commands: Sequence[str]) -> None:
    """What these commands read: a text, and models, a run, audits and a comparison of policies if asked for."""
    lab.inputs.mkdir(parents=True)
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=generator.randint(2, 6))) for _ in range(200)]
    paragraphs = [" ".join(generator.choices(words, k=80)) for _ in range(120)]
    (lab.inputs / "text.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    asked = {name for command in commands for name in re.findall(r"\{inputs\}/(\w+)", " ".join(ENTRIES[command].line))}
    asked |= {name for command in commands for name in ENTRIES[command].copied}
    if asked & {"model", "run", "audit", "audit2", "compared"}:
        lab.renew({})
        lab.run_well(lab.line("pretrain"))
        shutil.copytree(lab.work / "out" / "model", lab.inputs / "model")
        (lab.work / "out").rename(lab.inputs / "run")
    for name in sorted(asked & {"audit", "audit2", "compared"}):
        lab.renew({})
        lab.run_well(lab.line("cache" if name == "compared" else "audit"))
        (lab.work / "out").rename(lab.inputs / name)


# --- what is compared ---

VOLATILE = re.compile(
    r"run_id|sweep_id|created|resumed|(.*_)?seconds|(.*_)?tokens_per_second"
    r"|trainer_state\.json"  # in the listing of a checkpoint: its hash, for it holds seconds
)
"""Keys of records, metrics and columns that say when, how fast and in how many attempts."""

IGNORED = re.compile(r"(^|/)logs(/|$)")
"""Logs tell of every attempt."""

DIGEST = re.compile(r"(?<=-)[0-9a-f]{8}(?=\.json$)")
"""In the name of an entry of a store, which may be known by the identity of a run."""

MARKS = (
    (re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}"), "RUN"),
    (re.compile(r"<dt>wall_seconds</dt><dd>[\d.]+"), "SECONDS"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+\d\d:\d\d|Z| UTC)?"), "TIME"),
)
"""Identities and times in texts."""


def differences(reference: Path, found: Path) -> Iterator[str]:
    """What is in one folder (or file) and not in another, which should be alike but for times and identities."""
    if reference.is_file():
        yield from filter(None, [_difference(reference, found)])
        return
    files = [
        {DIGEST.sub("DIGEST", path.relative_to(folder).as_posix()): path for path in folder.rglob("*") if path.is_file()}
        for folder in (reference, found)
    ]
    wanted, there = ({name for name in of if not IGNORED.search(name)} for of in files)
    if missing := sorted(wanted - there):
        yield f"missing: {', '.join(missing[:5])}"
    if litter := sorted(there - wanted):
        yield f"not in an undisturbed run: {', '.join(litter[:5])}"
    for name in sorted(wanted & there):
        if problem := _difference(files[0][name], files[1][name]):
            yield f"{name}: {problem}"


def _difference(reference: Path, found: Path) -> str | None:
    try:
        return None if _content(reference) == _content(found) else "it differs"
    except (SinklabError, SafetensorError, ValueError, OSError) as error:
        return f"it cannot be read: {error}"


def _content(path: Path) -> Any:
    """What a file says, but for times and identities; of a safetensors file not the record of an entry of a store, either."""
    if path.suffix in (".parquet", ".csv"):
        table = read_table(path).drop(columns="run_id") if path.suffix == ".parquet" else pd.read_csv(path)
        if "metric" in table:
            table.loc[table["metric"].map(lambda metric: bool(VOLATILE.fullmatch(metric))), "value"] = 0.0
        kept = table[[column for column in table if not VOLATILE.fullmatch(column)]].astype(object)
        return list(table), kept.where(kept.notna(), None).to_dict("list")
    if path.suffix == ".json":
        return _lasting(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            header = {name: value for name, value in (file.metadata() or {}).items() if name != "record"}
            return header, {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    return _lasting(path.read_text(encoding="utf-8")) if path.suffix in (".html", ".md") else path.read_bytes()


def _lasting(record: Any) -> Any:
    """A record without what is volatile, and with marks in place of identities and times."""
    if isinstance(record, dict):
        return {name: _lasting(value) for name, value in record.items() if not VOLATILE.fullmatch(name)}
    if isinstance(record, list):
        return [_lasting(value) for value in record]
    for pattern, word in MARKS if isinstance(record, str) else ():
        record = pattern.sub(word, record)
    return record


def half_states(work: Path) -> Iterator[str]:
    """What lies at its place and is not whole: records that cannot be read, and tables of another run than their record."""
    names = [path.relative_to(work) for path in sorted(work.rglob("*"))]
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    for name in names:
        path, identities = work / name, set()
        try:
            if name.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif name.name == "table.parquet":
                identities = set(read_table(path)["run_id"])
        except (SinklabError, ValueError) as error:
            yield f"{name} is half there: {error}"
        with contextlib.suppress(FileNotFoundError, ValueError):  # which is said above
            if identities and identities != {known := json.loads(path.with_name("run.json").read_text()).get("run_id")}:
                yield f"{name} is of the run {', '.join(identities)}, and run.json beside it of {known}"


# --- kills ---


class Victim:
    """One command: what it leaves undisturbed, in ``reference``, and what it leaves after a kill."""

    def __init__(self, lab: Lab, command: str, reference: Path) -> None:
        self.lab, self.command, self.reference = lab, command, reference
        self.entry, self.options = ENTRIES[command], set(parameters(command))
        self.resumes = "resume" in self.options and parameters(command)["resume"].default is False
        lab.renew(self.entry.copied)
        started = time.monotonic()
        self.changes = lab.run_well(lab.line(command))
        self.seconds = time.monotonic() - started
        shutil.rmtree(reference, ignore_errors=True)
        lab.work.rename(reference)

    def again(self) -> list[str] | None:
        """The line after the kill; ``None`` where the result is there and is not to be touched."""
        if self.resumes:
            return self.lab.line(self.command, "--resume")
        there = (self.lab.work / self.entry.result).exists()
        if there and not self.entry.goes_on and "overwrite" in self.options:
            return self.lab.line(self.command, "--overwrite")
        return self.lab.line(self.command)

    def kill(self, number: int, whom: str, moment: tuple[str, float]) -> Kill:
        """Kill it once at a moment, ``change`` or ``time`` and a fraction, run it again, and compare."""
        lab, (kind, fraction) = self.lab, moment
        lab.renew(self.entry.copied)
        started = time.monotonic()
        die_at, at = None, f"{fraction:.0%} of the time"
        if kind == "change":
            change = 1 + int(fraction * self.changes)
            die_at, at = (change, number), f"change {change} of {self.changes}"

        def later(process: int) -> None:
            if die_at is not None:
                return
            begun = time.monotonic()
            while whom == "worker" and not lab.others() and time.monotonic() - begun < 60:
                time.sleep(0.02)  # the time of a worker begins when there is one
            time.sleep(fraction * self.seconds * (0.5 if whom == "worker" else 1.0))
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(lab.others()[0] if whom == "worker" else process, number)

        status, _ = lab.run(lab.line(self.command), die_at=die_at, meanwhile=later)
        problems = [*lab.settle(), *self._of_status(status, number, whom), *half_states(lab.work)]
        there = (lab.work / self.entry.result).exists()
        if there and not (self.resumes or self.entry.goes_on) and number not in self.entry.ends_well:
            found = differences(self.reference / self.entry.result, lab.work / self.entry.result)
            problems += [f"at its place before it ran again: {problem}" for problem in found]
        line = self.again()
        again, _ = lab.run(line)
        if again:
            problems.append(f"status {again} when it ran again: {lab.said()}")
        problems += [*half_states(lab.work), *differences(self.reference, lab.work)]
        seconds = time.monotonic() - started
        return Kill(self.command, signal.Signals(number).name, whom, at, status, problems, round(seconds, 2))

    def _of_status(self, status: int, number: int, whom: str) -> Iterator[str]:
        """A signal ends a command with 128 and its number, unless it came too late, or met a worker."""
        expected = 1 if whom == "worker" else -number if number == signal.SIGKILL else 128 + number
        if status not in (0, expected):
            yield f"status {status} after {signal.Signals(number).name}, expected {expected}: {self.lab.said()}"


def moments(entry: Entry, kills: int, generator: random.Random) -> Iterator[tuple[int, str, tuple[str, float]]]:
    """Signal, whom it is sent to, and when: all signals in turn, half of the moments before a change on the disk."""
    numbers = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for index in range(kills):
        if entry.workers and index % 4 == 3:
            yield generator.choice((signal.SIGKILL, signal.SIGTERM)), "worker", ("time", generator.random())
        else:
            kind = "change" if index % 2 == 0 or index % 3 == 0 else "time"
            yield numbers[index % 3], "driver", (kind, generator.random())


def run_kills(
    commands: Sequence[str], kills: int, seed: int, folder: Path, tell: Callable[[Kill], None] = lambda kill: None
) -> list[Kill]:
    """Kill every command so many times."""
    lab = Lab(folder)
    make_inputs(lab, commands)
    done = []
    for command in commands:
        victim = Victim(lab, command, folder / "reference")
        for number, whom, moment in moments(ENTRIES[command], kills, random.Random(f"{seed} {command}")):
            done.append(victim.kill(number, whom, moment))
            tell(done[-1])
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if something fell."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.kill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--command", action="append", choices=sorted(ENTRIES), help="repeatable; by default all that write")
    parser.add_argument("--kills", type=int, default=4, help="of every command")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON file for what became of every kill")
    given = parser.parse_args(arguments)
    if wrong := forgotten():
        print(f"commands without an entry in {__file__}, or entries without a command: {', '.join(sorted(wrong))}")
        return 1
    commands = given.command or sorted(ENTRIES)
    started = time.monotonic()

    def tell(kill: Kill) -> None:
        verdict = "; ".join(kill.problems) or "as undisturbed"
        print(f"{kill.command}: {kill.signal} to the {kill.whom} at {kill.at}, status {kill.status}: {verdict}", flush=True)

    with tempfile.TemporaryDirectory(prefix="sinklab-kill-") as folder:
        done = run_kills(commands, given.kills, given.seed, Path(folder), tell)
    fell = [kill for kill in done if kill.problems]
    seconds = round(time.monotonic() - started, 1)
    given.record.parent.mkdir(exist_ok=True)
    record = {"seed": given.seed, "seconds": seconds, "kills": [dataclasses.asdict(kill) for kill in done]}
    given.record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{len(done)} kills, {len(fell)} fell, {seconds:.0f} s; {given.record}")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
