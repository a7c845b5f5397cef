"""A seeded fuzzer of the command line: ``python -m tests.reliability.fuzz [--lines 2000] [--seed 0] [--only INDEX]``.

Lines are drawn from the derived commands (:mod:`tests.reliability.lines`) and run one by one in forked children inside a
sandbox (:mod:`tests.reliability.sandbox`). What a line may do is said at :func:`faults_of`. Lines that do otherwise are printed
with what runs them again, and are in ``build/fuzz/record.json``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pkgutil
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.command_line import not_options
from tests.reliability.lines import QUICK, line
from tests.reliability.sandbox import LAUNCHED, Ended, Limits, enclose, ran

__all__ = ["Scene", "faults_of", "main"]

ROOT = Path(__file__).parents[2]
LONGEST = 1000
"""Characters of an error: one sentence, and a list of known names where there is one."""
STATUSES = {0: "ran", 1: "parts failed", 2: "refused", 3: "diverged", LAUNCHED: "ran", 130: "late"}
PASSING = re.compile(r"(^|/)\.(?!token|plan)[^/]*\.(lock|partial)(/|$)|\.tmp($|/)|(^|/)tmp[^/]*$")
"""Files that no line may leave behind; locks of the cache of texts and of a plan of trainings stay with what they lock."""

GOOD = """from sinklab.recipes.tiny import tiny
def good():
    return tiny()
"""


class Scene:
    """The folder in which lines run: as it was for each of them.

    Args:
        scratch: an empty folder.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.work = scratch, scratch / "work"
        self.template, self.outputs = scratch / "template", scratch / "outputs"
        self.before: dict[str, tuple[int, int]] = {}
        for folder in (scratch / "home", scratch / "tmp", self.template):
            folder.mkdir()

    def furnish(self, bare: bool = False) -> None:
        """Make what lines are about: a checkpoint, texts, recipes, and unless ``bare`` results of earlier commands."""
        from tests.conftest import TEXT

        letters = random.Random(0)
        texts = {
            "text.txt": TEXT + "".join(letters.choices("abcdefghijklmnopqrstuvwxyz    \n", k=20_000)),
            "empty.txt": "",
            "blank.txt": " \n\n",
            "one.txt": "a",
            "good.py": GOOD,
            "raises.py": "def raises():\n    raise ValueError('no')\n",
            "leaves.py": "import sys\nsys.exit(0)\n",
        }
        for name, text in texts.items():
            (self.template / name).write_text(text, encoding="utf-8")
        quick = ["--samples=2", "--seq-len=8", "--corpus=text.txt", "--no-cache"]
        made: list[Callable[[], Any]] = [
            _save_checkpoint,
            _called(["audit", "model", *quick, "--out=audit"]),
            _called(["audit", "model", *quick, "--seed=1", "--out=audit2"]),
            _called(["pretrain", *QUICK["pretrain"], "--quiet", "--out=run"]),
        ]
        for make in made[:1] if bare else made:
            ended = ran(make, self.template, self.outputs, Limits(seconds=60))
            if ended.status:
                raise SystemExit(f"the scene cannot be made: {ended.stderr}")
        self.reset()

    def files(self) -> dict[str, tuple[int, int]]:
        """Every file and folder of the working directory, with size and time of change."""
        found = {}
        for folder, _, files in os.walk(self.work):
            for path in [folder, *(os.path.join(folder, name) for name in files)]:
                stat = os.lstat(path)
                is_file = path != folder
                found[os.path.relpath(path, self.work)] = (stat.st_size if is_file else -1, stat.st_mtime_ns if is_file else 0)
        return found

    def reset(self) -> None:
        """Bring the working directory back to its beginning."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work)
        self.before = self.files()

    def run(self, call: Callable[[], None], limits: Limits) -> tuple[Ended, list[str]]:
        """One line, and its faults; the folder is as before afterwards."""
        ended = ran(call, self.work, self.outputs, limits)
        after = self.files()
        changed = sorted(name for name in {*after, *self.before} if after.get(name) != self.before.get(name))
        if changed:
            self.reset()
        for name in os.listdir(self.scratch / "tmp"):
            changed.append(f"tmp/{name}")
            shutil.rmtree(self.scratch / "tmp" / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.scratch / "tmp" / name).unlink()
        return ended, faults_of(ended, changed)


def faults_of(ended: Ended, changed: Sequence[str]) -> list[str]:
    """What is wrong with how a line ended; nothing, if it kept to the rules.

    - Status 0; 1 where parts failed, said on stderr; 2 for an error; 3 for a training that diverged. A line that is late is
      interrupted and has status 130.
    - No traceback, no warning.
    - With status 2: nothing on stdout; on stderr one line ``error: …`` of at most :data:`LONGEST` characters that speaks of no
      class of Python and of no option of another command, and no file that was not there before.
    - No lock, no partial result and no temporary file is left, and no host was asked for.

    Args:
        changed: files and folders that are new, gone or different.
    """
    found, words = [], ended.stderr.splitlines()
    killed = ended.late and ended.status == -signal.SIGKILL
    if (ended.status not in STATUSES or (ended.status == 130 and not ended.late)) and not killed:
        found.append(f"status {ended.status}")
    if "Traceback (most recent call last)" in ended.stderr:
        found.append(f"traceback: {words[-1] if words else ''}")
    if re.search(r"\b\w*Warning: ", ended.stderr):
        found.append("warning")
    if ended.network:
        found.append("network")
    if ended.status == 2:
        errors = [text for text in words if text.startswith("error: ")]
        if len(errors) != 1 or words[-1:] != errors:
            found.append(f"{len(errors)} errors in {len(words)} lines")
        elif len(words) != 1:
            found.append(f"{len(words)} lines")
        elif len(errors[0]) > LONGEST:
            found.append(f"an error of {len(errors[0])} characters")
        elif len(errors[0].split()) < 4:
            found.append("an error that says nothing")
        own = [text for text in errors if ".py" not in text]  # what a recipe of one's own raises is said as it is
        if any(re.search(r"\b[A-Z]\w*(Error|Exception)\b|\bNoneType\b|<class|object at 0x", text) for text in own):
            found.append("an error in terms of Python")
        if names := not_options("".join(own)):
            found.append(f"advice on {', '.join(names)}, which is no option of the command")
        if ended.stdout:
            found.append("output besides the error")
        if changed:
            found.append(f"left behind: {', '.join(changed[:3])}")
    elif ended.status != LAUNCHED and not killed:
        litter = [name for name in changed if PASSING.search(name)]
        if litter:
            found.append(f"left behind: {', '.join(litter[:3])}")
    if ended.status == 1 and not words:
        found.append("failed without a word")
    return found


def _save_checkpoint() -> None:
    from tests.conftest import make_sinklm, make_tokenizer

    make_sinklm().save_pretrained("model")
    make_tokenizer().save_pretrained("model")


def _called(arguments: Sequence[str]) -> Callable[[], None]:
    def call() -> None:
        from sinklab.cli import main

        sys.argv = ["sinklab", *arguments]
        main()

    return call


def _import_everything() -> None:
    """So that no child has to; what is not installed is left out."""
    import sinklab

    for module in pkgutil.walk_packages(sinklab.__path__, "sinklab."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                __import__(module.name)
    for name in ("matplotlib.backends.backend_agg", "scipy.stats", "torch._dynamo", "accelerate", "datasets"):
        __import__(name)


def _outcomes(scratch: Path, seed: int, indices: Sequence[int], limits: Limits, bare: bool) -> Iterator[dict[str, Any]]:
    """Runs lines inside the sandbox, and tells of each; the first record says whether there is one."""
    place = enclose(scratch)
    os.environ |= {
        "HOME": str(scratch / "home"),
        "TMPDIR": str(scratch / "tmp"),
        "MPLCONFIGDIR": str(scratch / "home"),
        "HF_HOME": str(scratch / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "home" / "inductor"),
        "COLUMNS": "200",
    }
    tempfile.tempdir = None
    scene = Scene(scratch)
    yield {"open": place}
    _import_everything()
    scene.furnish(bare)
    for index in indices:
        arguments = line(seed, index)
        ended, faults = scene.run(_called(arguments), limits)
        yield {"index": index, "arguments": arguments, "faults": faults, **dataclasses.asdict(ended)}


def _inner(options: argparse.Namespace) -> None:
    limits = Limits(options.seconds)
    indices = [options.only] if options.only is not None else range(options.first, options.first + options.lines)
    speak = os.fdopen(os.dup(1), "w")
    for outcome in _outcomes(Path(options.inside), options.seed, indices, limits, options.bare):
        speak.write(json.dumps(outcome) + "\n")
        speak.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lines and print what is wrong with them; the status is 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0, help="of the lines")
    parser.add_argument("--only", type=int, help="run this one line, and show what it prints")
    parser.add_argument("--seconds", type=float, default=8.0, help="after which a line is interrupted")
    parser.add_argument("--bare", action="store_true", help="without results of earlier commands, which take seconds to make")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "fuzz" / "record.json", help="where the record goes")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        _inner(options)
        return 0
    passed_on = {name: value for name, value in vars(options).items() if name not in ("record", "inside")}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    started, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="sinklab-fuzz-") as scratch:
        command = [sys.executable, "-m", "tests.reliability.fuzz", f"--inside={scratch}"]
        command += [f"--{name}={value}" for name, value in passed_on.items() if value is not None and name != "bare"]
        command += ["--bare"] if options.bare else []
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as inside:
            assert inside.stdout is not None
            opened = json.loads(inside.stdout.readline() or '{"open": "the sandbox could not be started"}')["open"]
            if opened:
                print(f"not enclosed ({opened}); lines name paths of their own folder only", flush=True)
            for text in inside.stdout:
                outcome = json.loads(text)
                outcomes.append(outcome)
                _tell(outcome, options)
    if inside.returncode:
        print(f"the sandbox ended with status {inside.returncode}")
    record = _record(outcomes, options.seed, time.monotonic() - started, opened)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")
    counted = ", ".join(f"{count} {name}" for name, count in record["outcomes"].items())
    print(
        f"{len(outcomes)} lines in {record['seconds']:.0f} s: {counted}; {len(record['faults'])} with faults ({options.record})"
    )
    return int(bool(record["faults"] or inside.returncode))


def _tell(outcome: Mapping[str, Any], options: argparse.Namespace) -> None:
    shown = " ".join(shlex.quote(argument) for argument in outcome["arguments"])
    shown = (shown if len(shown) < 300 else f"{shown[:300]}…").encode("utf-8", "backslashreplace").decode()
    if options.only is not None:
        print(f"sinklab {shown}\n{outcome['stdout']}{outcome['stderr']}status {outcome['status']}")
    if outcome["faults"]:
        print(
            f"{'; '.join(outcome['faults'])}\n    sinklab {shown}\n    --seed {options.seed} --only {outcome['index']}",
            flush=True,
        )


def _record(outcomes: Sequence[Mapping[str, Any]], seed: int, seconds: float, opened: str) -> dict[str, Any]:
    """What is kept of a session: counts, and the lines with faults as they were."""
    from sinklab.results.environment import environment

    kinds: collections.Counter[str] = collections.Counter()
    by_command: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in outcomes:
        kind = "late" if one["late"] else STATUSES.get(one["status"], "faulty")
        kinds[kind] += 1
        by_command[one["arguments"][0] if one["arguments"] else ""][kind] += 1
    return {
        "seed": seed,
        "lines": len(outcomes),
        "seconds": round(seconds, 1),
        "enclosed": not opened,
        "outcomes": dict(kinds),
        "commands": {name: dict(by_command[name]) for name in sorted(by_command)},
        "slowest": [
            [one["arguments"], round(one["seconds"], 1)]
            for one in sorted(outcomes, key=lambda one: one["seconds"], reverse=True)[:20]
        ],
        "faults": [dict(one) for one in outcomes if one["faults"]],
        **{key: value for key, value in environment(None).items() if key in ("versions", "commit")},
    }


if __name__ == "__main__":
    sys.exit(main())
