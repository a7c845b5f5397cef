"""Run the streaming tests on other releases of transformers: ``python -m tests.streaming.versions [RELEASE …]``.

Every release gets a thin environment in ``build/versions``: its own transformers with what that pins, and everything else from
the environment that runs this. It is made at the first call and kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

__all__ = ["environment", "floor", "main"]

ROOT = Path(__file__).parents[2]
MIDDLE = "5.19.0"
TESTS = ("cache", "families", "generate", "ordered", "padding", "positions_far", "refusals", "rotation", "step", "verify")


def floor() -> str:
    """The oldest release that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = (line for line in project["dependencies"] if re.match(r"transformers\b", line))
    found = re.search(r">=\s*([\d.]+)", required)
    assert found, required
    return ".".join([*found[1].split("."), "0", "0"][:3])


def environment(release: str) -> Path:
    """Its Python, with this release of transformers before the packages of the environment that runs this."""
    folder = ROOT / "build" / "versions" / release
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        shared = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "zz_shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"transformers=={release}"], check=True)
        ready.touch()
    return python


def main(releases: list[str]) -> int:
    """Run the tests on each release; the number of releases that fail."""
    tests = [f"tests/streaming/test_{name}.py" for name in TESTS]
    outcomes = {}
    for release in releases or [floor(), MIDDLE]:
        python = environment(release)
        said = "import transformers, torch; print(transformers.__version__, 'with torch', torch.__version__)"
        print(
            f"transformers {subprocess.run([python, '-c', said], check=True, capture_output=True, text=True).stdout}",
            flush=True,
        )
        run = subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        outcomes[release] = run.returncode
    for release, code in outcomes.items():
        print(f"transformers {release}: {'passed' if code == 0 else 'FAILED'}")
    return sum(code != 0 for code in outcomes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
