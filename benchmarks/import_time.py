"""How long a user waits for nothing: `import sinklab` and `sinklab list`, beside an empty interpreter in the same run."""

from __future__ import annotations

import subprocess
import sys
import time

ROUNDS = 7
BARS = {"import sinklab": 0.3, "sinklab list": 1.0}
"""Seconds, from the start of the process to its end."""

COMMANDS = {
    "empty interpreter": ["-c", "pass"],
    "import sinklab": ["-c", "import sinklab"],
    "sinklab list": ["-m", "sinklab", "list"],
    "import torch": ["-c", "import torch"],
}


def best(arguments: list[str]) -> float:
    """Shortest wall time of several rounds; the first, with cold caches, rarely is."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    measured = {name: best(arguments) for name, arguments in COMMANDS.items()}
    floor = measured["empty interpreter"]
    missed = 0
    for name, seconds in measured.items():
        bar = BARS.get(name)
        verdict = "" if bar is None else f"bar {bar:.1f} s: {'met' if seconds < bar else 'MISSED'}"
        missed += bar is not None and seconds >= bar
        print(f"{name:<18}{seconds:7.3f} s  {seconds / floor:6.1f} × empty  {verdict}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
