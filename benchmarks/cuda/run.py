"""GPU benchmarks: every part in a process of its own; all prepare at once, and one at a time uses the device to measure.

python benchmarks/cuda/run.py --out FOLDER [--only NAME …] [--write docs/benchmarks-cuda.md] [--device cpu --quick]
python benchmarks/cuda/run.py --from-json FOLDER/results.json … --write docs/benchmarks-cuda.md

Results are written to FOLDER/results.json after every bar, so that a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from _page import is_met, one_line, page  # noqa: E402

PARTS = {
    "null": "operations",
    "columns": "columns",
    "stream4k": "streaming",
    "stream32k": "streaming",
    "sigmoid": "operations",
    "relu": "operations",
    "softpick": "operations",
    "memory": "columns",
    "layer": "streaming",
    "measure": "columns",
    "rows": "columns",
    "lengths": "operations",
    "elu": "operations",
    "clipped_softmax": "operations",
    "far": "streaming",
}
"""Part to its module, in the order in which they measure: what is asked for most comes first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="folder for results.json and what the parts print")
    parser.add_argument(
        "--only", nargs="+", default=list(PARTS), choices=[*PARTS, *sorted(set(PARTS.values()))], metavar="NAME"
    )
    parser.add_argument("--write", type=Path, help="Markdown file to write the page to")
    parser.add_argument("--from-json", type=Path, nargs="+", help="write the page of earlier runs, and measure nothing")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see whether everything runs; no figure means anything"
    )
    parser.add_argument("--at-once", type=int, default=15, help="how many parts prepare at the same time")
    parser.add_argument("--prepare", type=float, default=100.0, help="seconds that a part may take to prepare")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds that a part may take to measure")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        work(arguments.part, arguments.device, arguments.quick)
        return 0
    if arguments.from_json:
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.from_json]
    elif arguments.out:
        runs = [Runner(arguments).run()]
    else:
        parser.error("--out or --from-json is needed")
    text = page(*runs)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    elif arguments.from_json:
        print(text)
    bars = [entry for results in runs for entry in results["entries"] if entry["kind"] != "figure"]
    return int(not all(entry["kind"] == "bar" and is_met(entry) for entry in bars))


def work(part: str, device: str, quick: bool) -> None:
    """One part, here; the runner reads what it tells."""
    import torch
    from _bench import Bench

    bench = Bench(part, device, quick=quick)
    bench.tell(kind="machine", **machine(bench.device))
    if device == "cpu":
        torch.set_num_threads(1)
    with bench.attempt(part):
        importlib.import_module(PARTS[part]).PARTS[part](bench)


def machine(device: Any) -> dict[str, str]:
    """What the figures are of."""
    import torch
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, to try the benchmarks out"
    found["cudnn"] = str(torch.backends.cudnn.version())
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found


class Runner:
    """The processes, and what they tell."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.names = [name for name in PARTS if {name, PARTS[name]} & set(arguments.only)]
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "quick": arguments.quick,
            "machine": {},
            "entries": [],
            "seconds": {},
        }
        self.lock = threading.Lock()
        self.start = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Prepare together, measure one after the other; groups of so many parts as may prepare at once."""
        size = self.arguments.at_once
        for first in range(0, len(self.names), size):
            parts = [_Part(self, name) for name in self.names[first : first + size]]
            end = time.monotonic() + self.arguments.prepare
            for part in parts:
                part.wait_ready(end)
            for part in parts:
                part.measure(self.arguments.limit)
        self.results["seconds"]["all"] = round(time.monotonic() - self.start, 1)
        self.save()
        print(f"{self.results['seconds']['all']} s", flush=True)
        return self.results

    def take(self, record: dict[str, Any]) -> None:
        """A line of a part."""
        with self.lock:
            if record["kind"] == "machine":
                self.results["machine"] |= {key: value for key, value in record.items() if key not in ("kind", "part")}
                return
            if record["kind"] == "bar":
                record["met"] = is_met(record)
            self.results["entries"].append(record)
            print(f"[{time.monotonic() - self.start:5.1f} s] {record['part']}: {one_line(record)}", flush=True)
            self._write()

    def save(self) -> None:
        """Write what there is."""
        with self.lock:
            self._write()

    def _write(self) -> None:
        temporary = self.out / "results.json.new"
        temporary.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
        temporary.replace(self.out / "results.json")


class _Part:
    """One process."""

    def __init__(self, runner: Runner, name: str) -> None:
        self.runner, self.name = runner, name
        arguments = runner.arguments
        command = [sys.executable, str(HERE / "run.py"), "--part", name, "--device", arguments.device]
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "2", **os.environ, "HF_HUB_OFFLINE": "1"}
        self.log = (runner.out / f"{name}.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [*command, "--quick"] if arguments.quick else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.ready, self.gone, self.killed = threading.Event(), threading.Event(), False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                record = json.loads(line)
                kind = record["kind"]
            except (json.JSONDecodeError, TypeError, KeyError):
                self.log.write(line)  # a library that prints
                continue
            if kind == "ready":
                self.runner.results["seconds"][f"{self.name}, ready after"] = round(time.monotonic() - self.runner.start, 1)
                self.ready.set()
            else:
                self.runner.take(record)
        code = self.process.wait()
        if code and not self.killed:
            self._fail(f"the process ended with status {code}; its last lines are in {self.name}.log")
        self.gone.set()
        self.ready.set()

    def _fail(self, why: str) -> None:
        self.runner.take({"part": self.name, "kind": "error", "what": self.name, "error": why, "traceback": ""})

    def _kill(self, why: str) -> None:
        self.killed = True
        self._fail(why)
        self.process.kill()
        self.gone.wait(10)

    def wait_ready(self, end: float) -> None:
        """Wait until it has prepared, or has ended; at most until then."""
        if not self.ready.wait(max(0.0, end - time.monotonic())):
            self._kill(f"had not prepared after {self.runner.arguments.prepare:g} s")

    def measure(self, limit: float) -> None:
        """Its turn."""
        begin = time.monotonic()
        if not self.gone.is_set():
            assert self.process.stdin is not None
            try:
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass
            if not self.gone.wait(limit):
                self._kill(f"was stopped after {limit:g} s")
        self.runner.results["seconds"][self.name] = round(time.monotonic() - begin, 1)
        self.log.close()


if __name__ == "__main__":
    sys.exit(main())
