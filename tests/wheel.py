"""The wheel, tried in fresh environments: ``python -m tests.wheel [--quick | ENVIRONMENT …]``.

An environment is ``PYTHON/LIBRARIES[/REQUIREMENT …]``, such as ``3.12/newest`` or ``3.11/floors/torch==2.13.0``. Libraries are

- ``newest``: what pip takes for the wheel alone, as a user gets it;
- ``oldest``: the oldest torch and transformers that pyproject.toml allows, and of all else what pip takes;
- ``floors``: the lower bound of every dependency.

Each is made from nothing but the wheel, without a constraint file and away from the repository, and removed when it has passed.
Only the standard library is needed, so that any Python runs this.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.versions import ROOT, floors, pinned

BUILD = ROOT / "build" / "wheel"
PACKAGE, CLAIMS = ROOT / "src" / "sinklab", ROOT / "src" / "sinklab_claims"
LARGEST = 13_000_000
"""Bytes of the wheel, and of the source distribution; the weights of its two models are 11.8 million, before packing."""
IMPORT = 0.3
"""Seconds of a processor for ``import sinklab``."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EVERYTHING = (*(f"{python}/{libraries}" for python in PYTHONS for libraries in ("newest", "oldest")), "3.11/floors")

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclasses.dataclass(frozen=True)
class Environment:
    """A Python and what is installed beside the wheel.

    Attributes:
        python: such as ``3.12``.
        requirements: as pip takes them.
    """

    python: str
    requirements: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Environment:
        """From ``PYTHON/LIBRARIES[/REQUIREMENT …]``; a requirement takes the place of that of the same package.

        Raises:
            ValueError: anything else.
        """
        python, libraries, *own = [*text.split("/"), "newest"] if "/" not in text else text.split("/")
        bounds = {name: f"{name}=={version}" for name, version in floors().items()}
        of = {"newest": {}, "oldest": {name: bounds[name] for name in ("torch", "transformers")}, "floors": bounds}
        if libraries not in of or not re.fullmatch(r"\d+\.\d+", python):
            raise ValueError(f"{text!r} is no environment; expected one such as 3.12/newest, 3.11/oldest or 3.11/floors")
        chosen = of[libraries] | {re.split(r"[<>=!~]", requirement)[0]: requirement for requirement in own}
        return cls(python, tuple(chosen.values()))


def quick() -> tuple[str, ...]:
    """What CI tries: this Python with the oldest and with the newest libraries, and the torch that it has already."""
    torch = f"torch=={pinned('torch')}"
    return f"{HERE}/floors/{torch}", f"{HERE}/newest/{torch}"


def find_python(version: str) -> str | None:
    """An interpreter of a version: this one, one of the path, of pyenv or of uv; ``None`` if none of them runs."""
    if version == HERE:
        return sys.executable
    return next((path for path in _candidates(version) if _runs(path, version)), None)


def _candidates(version: str) -> Iterator[str]:
    yield from filter(None, [shutil.which(f"python{version}")])
    for ask in (["pyenv", "root"], ["uv", "python", "find", "--no-project", version]):
        if shutil.which(ask[0]):
            said = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
            if said and ask[0] == "uv":
                yield said
            elif said:
                yield from map(str, sorted(Path(said, "versions").glob(f"{version}.*/bin/python"), reverse=True))


def _runs(path: str, version: str) -> bool:
    """A shim of pyenv is on the path for versions that are not active, and fails."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version


def make(folder: Path, python: str, requirements: Sequence[str]) -> Path:
    """The folder of programs of a new environment.

    Raises:
        CalledProcessError: with what pip said.
    """
    run([python, "-m", "venv", "--clear", folder])
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    if requirements:
        run([programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
    return programs


def run(line: Sequence[str | Path], cwd: Path | None = None) -> str:
    """What a line prints; it sees neither the repository nor a hub."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    settings = {name: value for name, value in os.environ.items() if name not in hidden} | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(line, cwd=cwd, env=settings, check=True, capture_output=True, text=True).stdout


def tools() -> Path:
    """The folder of programs of an environment with build and twine; made at the first call and kept."""
    programs = BUILD / "tools" / ("Scripts" if os.name == "nt" else "bin")
    return programs if (programs / "twine").exists() else make(BUILD / "tools", sys.executable, ["build", "twine"])


def build(out: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it, in a folder that is emptied first.

    Raises:
        ValueError: one of them is larger than :data:`LARGEST`.
    """
    shutil.rmtree(out, ignore_errors=True)
    run([tools() / "python", "-m", "build", "--outdir", out, ROOT])
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    for made in (source, wheel):
        if made.stat().st_size > LARGEST:
            raise ValueError(f"{made.name} has {made.stat().st_size:,} bytes; at most {LARGEST:,} are wanted")
    for package in (PACKAGE, CLAIMS):
        if differ := packed(wheel, package.name) ^ files(package):
            raise ValueError(f"{wheel.name} and {package.name} differ in {', '.join(sorted(differ))}")
    return source, wheel


def check(programs: Path, away: Path, wheel: Path, audit: Sequence[str] = ("--samples", "8")) -> str:
    """Try a sinklab that was installed from a wheel, in an empty folder; the versions that it names.

    Raises:
        AssertionError: what it did is not what it should do.
        CalledProcessError: a line failed.
    """
    python, sinklab = programs / "python", programs / "sinklab"
    versions = run([sinklab, "--version"], away)
    where = Path(run([python, "-c", "import sinklab; print(sinklab.__path__[0])"], away).strip())
    assert where.is_relative_to(programs.parent), f"{where} is not of the environment"
    assert files(where) == packed(wheel, where.name), sorted(files(where) ^ packed(wheel, where.name))
    assert "sink_rate" in run([sinklab, "list", "probes"], away)
    assert "sink_moves_to_bias" in run([sinklab, "claims"], away)
    timed = "import time; start = time.process_time(); import sinklab; print(time.process_time() - start)"
    seconds = min(float(run([python, "-c", timed], away)) for _ in range(5))
    assert seconds < IMPORT, f"import sinklab takes {seconds:.2f} s"
    said = run([sinklab, "audit", "embedded:softmax", *audit, "--out", "audit"], away)
    assert "position 0" in said, said
    assert (away / "audit" / "report.html").stat().st_size > 100_000
    run([python, "-m", "pip", "check", "--disable-pip-version-check"], away)
    return versions


def files(package: Path) -> set[str]:
    """What belongs to a package: sources, the embedded checkpoints of seed 0, assets of the page, ``py.typed``."""
    of_other_seeds = re.compile(r"embedded_checkpoints/\w+-\d")
    return {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyo") and not of_other_seeds.search(path.as_posix())
    }


def packed(wheel: Path, package: str) -> set[str]:
    """What of a package is in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.removeprefix(f"{package}/") for name in archive.namelist() if name.startswith(f"{package}/")}


def attempt(work: Callable[[], str]) -> tuple[bool, str]:
    """Whether it worked, and what it says."""
    try:
        return True, work()
    except subprocess.CalledProcessError as error:
        return False, f"{' '.join(map(str, error.cmd[:6]))} …: {(error.stderr or error.stdout).strip()[-2000:]}"
    except (AssertionError, ValueError) as error:
        return False, str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the wheel and try it in each environment; the number of those that fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environments", nargs="*", help=f"by default {' '.join(EVERYTHING)}")
    parser.add_argument("--quick", action="store_true", help=f"those of CI: {' '.join(quick())}")
    parser.add_argument("--wheel", type=Path, help="a wheel that is built already")
    given = parser.parse_args(arguments)
    wheel = given.wheel.absolute() if given.wheel else build(BUILD / "dist")[1]
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
    failed = 0
    for name in given.environments or (quick() if given.quick else EVERYTHING):
        wanted, folder, started = Environment.read(name), BUILD / name.replace("/", "-"), time.perf_counter()
        python = find_python(wanted.python)
        if python is None:
            print(f"not tried  {name}: there is no Python {wanted.python} on this machine", flush=True)
            continue

        def work(folder: Path = folder, python: str = python, wanted: Environment = wanted) -> str:
            with tempfile.TemporaryDirectory() as away:
                return check(make(folder, python, [str(wheel), *wanted.requirements]), Path(away), wheel)

        passed, said = attempt(work)
        failed += not passed
        outcome, seconds = "passed" if passed else "FAILED", time.perf_counter() - started
        print(f"{outcome}  {name} in {seconds:.0f} s: {', '.join(said.strip().splitlines())}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
