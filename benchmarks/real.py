"""Studies on real language models: seconds by the clock, and CPU time over that of plain forward passes of the same tokens.

python benchmarks/real.py [--models build/models] [NAME …]      (make models first; nothing else should run meanwhile)

A study runs in a process of its own with all cores. ``forwards`` is the CPU time of the process over the time that the
same process would take for the tokens its model has read, at the cost of a plain forward pass of 64 samples of 64 tokens with
all logits: what is skipped (blocks below an edit, logits that nobody scores) makes it less, all that is no forward pass more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMOLLM2, GEMMA = "smollm2-135m", "gemma3-270m"

STUDIES: dict[str, tuple[str, list[str], float]] = {
    "audit": (SMOLLM2, ["audit"], 80),
    "audit --quick": (SMOLLM2, ["audit", "--quick"], 15),
    "origin": (SMOLLM2, ["origin"], 60),
    "quantize": (SMOLLM2, ["quantize"], 300),
    "cache": (
        SMOLLM2,
        [
            "cache",
            "--policies",
            "full,sink_window",
            "--window",
            "64",
            "--sinks",
            "0,1,4",
            "--tokens",
            "320",
            "--documents",
            "2",
        ],
        45,
    ),
    "causes --budget 15m": (SMOLLM2, ["causes", "--budget", "15m"], 930),
    "fold": (SMOLLM2, ["fold"], 90),
    "depend": (SMOLLM2, ["depend", "passkey,line_lookup,true_statements", "--items", "8", "--window", "256"], 120),
    "cache, Gemma": (GEMMA, ["cache", "--window", "256", "--sinks", "0,4"], 90),
    "audit, Gemma": (GEMMA, ["audit"], 160),
    "origin, Gemma": (GEMMA, ["origin"], 60),
    "quantize, Gemma": (GEMMA, ["quantize"], 300),
    "depend, Gemma": (GEMMA, ["depend", "passkey,line_lookup,true_statements", "--items", "8", "--window", "256"], 120),
}
"""Name → model, command without the model and the output directory, and the seconds by the clock that two cores may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones; all by default: {', '.join(STUDIES)}")
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="what make models has left")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.child:
        return run(rest or arguments.names, arguments.child)
    print("| Study | Model | Clock | Limit | CPU | Tokens read | Forwards | Memory | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    missed = 0
    for name in arguments.names or STUDIES:
        model, line, limit = STUDIES[name]
        with tempfile.TemporaryDirectory() as folder:
            facts = Path(folder, "facts.json")
            line = [line[0], str(arguments.models / model), *line[1:], "--out", str(Path(folder, "out")), "--quiet"]
            begun = time.perf_counter()
            child = [sys.executable, __file__, "--child", str(facts), "--", *line]
            done = subprocess.run(child, capture_output=True, text=True)
            clock = time.perf_counter() - begun
            if done.returncode or not facts.exists():
                print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
                return 1
            found = json.loads(facts.read_text())
        clock -= found["calibration"]
        missed += clock > limit
        print(
            f"| `{name}` | {model} | {clock:.0f} s | {limit:.0f} s | {found['cpu']:.0f} s | {found['tokens']:,} | "
            f"{found['cpu'] / (found['tokens'] * found['per_token']):.2f} × | {found['memory']:.1f} GB | "
            f"{'met' if clock <= limit else '**missed**'} |",
            flush=True,
        )
    return int(missed > 0)


def run(line: list[str], facts: Path) -> int:
    """One study in this process, with the tokens that enter the first block of its model counted."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    from sinklab.cli import main as sinklab

    tokens = 0

    def count(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        nonlocal tokens
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings > 10_000 and isinstance(inputs[0], torch.Tensor):
            tokens += inputs[0].numel()

    hook = register_module_forward_pre_hook(count)
    sys.argv = ["sinklab", *line]
    try:
        sinklab()
    except SystemExit as end:
        if end.code:
            return int(end.code)
    hook.remove()
    used = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.perf_counter()
    per_token = plain_forward(line[1])
    facts.write_text(
        json.dumps(
            {
                "cpu": used.ru_utime + used.ru_stime,
                "memory": used.ru_maxrss / 2**20,
                "tokens": tokens,
                "per_token": per_token,
                "calibration": time.perf_counter() - begun,
            }
        )
    )
    return 0


def plain_forward(model: str) -> float:
    """CPU seconds a token of a plain float32 forward pass of 64 samples of 64 tokens, eight at a time, all logits."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.randint(0, 1000, (64, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain(ids[:8])
        begun = time.process_time()
        for batch in ids.split(8):
            plain(batch, use_cache=False)
        return (time.process_time() - begun) / ids.numel()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
