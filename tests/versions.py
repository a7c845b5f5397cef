"""Run commands and tests on other versions of the libraries: ``python -m tests.versions [--make | RELEASE …]``.

``--make`` runs nothing and makes the environment of the oldest transformers, which ``tests/test_wheel.py`` uses.

A release of transformers, or ``oldest``: the lower bound of every dependency in pyproject.toml but torch, which PyPI has with
gigabytes of CUDA only. Each gets a thin environment in ``build/versions``: its own packages, and everything else from the
environment that runs this. It is made at the first call and kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

OLDEST = "oldest"
MIDDLE = "5.23.0"
"""The last before the argument `past_key_values` became `cache`, and GPT-J and CodeGen came to the attention interface."""

TESTS = (
    *(f"tests/streaming/test_{name}.py" for name in ("cache", "families", "padding")),
    *(f"tests/streaming/test_{name}.py" for name in ("kinds", "positions_far", "refusals", "rollback", "step")),
    *("tests/models", "tests/training", "tests/jobs/test_sweep.py"),
)
SEAM = tuple(f"tests/architectures/test_{name}.py" for name in ("calls", "weights", "isolation"))
FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "gpt_oss", "bert", "vit", "whisper")
"""What of the zoo the seam is tried on."""


def floors() -> dict[str, str]:
    """Every dependency, and the oldest version of it that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+)(,<\d+)?", line) for line in project["dependencies"])
    return {match[1]: match[2] for match in found if match is not None}


def pinned(name: str = "transformers") -> str:
    """The release of a package in constraints.txt, the newest that is known to work."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(f"{name}==") for line in lines if line.startswith(f"{name}=="))


def requirements(release: str) -> list[str]:
    """What its environment has of its own."""
    if release != OLDEST:
        return [f"transformers=={release}"]
    return [f"{name}=={version}" for name, version in floors().items() if name != "torch"]


def environment(release: str) -> Path:
    """Its Python; a ``CalledProcessError`` with what pip said when it cannot be made."""
    folder = ROOT / "build" / "versions" / release
    python, ready = folder / "bin" / "python", folder / "ready"
    shared = next(path for path in sys.path if path.endswith("site-packages"))
    made_of = "\n".join([sys.version, shared, *requirements(release)])
    if not ready.is_file() or ready.read_text(encoding="utf-8") != made_of:
        venv.create(folder, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "zz_shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements(release)]
        subprocess.run(install, check=True, capture_output=True, text=True)
        ready.write_text(made_of, encoding="utf-8")
    return python


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def main(releases: list[str]) -> int:
    """Run commands and tests on each release; the number of releases that fail."""
    outcomes: dict[str, str] = {}
    for release in releases or [floors()["transformers"], OLDEST, MIDDLE, pinned()]:
        try:
            python = environment(release)
        except subprocess.CalledProcessError as error:
            outcomes[release] = error.stderr.strip()
            continue
        pytest = [python, "-m", "pytest", "-p", "no:cacheprovider"]
        runs = {
            "commands": [python, "-m", "tests.every_command"],
            "seam": [*pytest, *SEAM, "-k", " or ".join(["isolation", *(f"[{family}" for family in FAMILIES)])],
            "tests": [*pytest, *TESTS],
        }
        if release != OLDEST and _numbers(release) > _numbers(pinned()):  # what has changed is to be looked for in every family
            runs["families"] = [python, "tools/families.py", "all"]
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        codes = {name: subprocess.run(run, cwd=ROOT, env=settings).returncode for name, run in runs.items()}
        outcomes[release] = ", ".join(f"{name} failed" for name, code in codes.items() if code)
    for release, outcome in outcomes.items():
        print(f"{release}: {outcome or 'passed'}")
    return sum(map(bool, outcomes.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        environment(floors()["transformers"])
    else:
        sys.exit(main(sys.argv[1:]))
