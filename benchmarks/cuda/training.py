"""Bar 18: tokens per second and model FLOP utilisation of training on one GPU, softmax and other operations, and a plain loop.

    python benchmarks/cuda/training.py --out training.json [--steps 30]

Every candidate is a process of its own, so that they compile side by side; a lock lets one at a time run the steps that are
timed. The corpus decides nothing here: tokens come from `python_source`, the vocabulary has the paper's 50,432 rows.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training_throughput import ten_million

from sinklab.configuration import with_overrides
from sinklab.models.architecture import Architecture
from sinklab.recipes.gu2024_60m import gu2024_60m
from sinklab.training import train
from sinklab.training.bookkeeping import Bookkeeper
from sinklab.training.config import PretrainingConfig

PEAK = 989e12
"""FLOP/s of dense bfloat16 products on an H100 or H200 with SXM, by the vendor's datasheet."""

WARM_UP = 8
"""Steps that are not counted: the first ones compile, and allocate what is kept."""

COMMON = (
    *("data.vocab_size=4096", "data.max_tokens=4_000_000", "data.held_out_rows=4", "data.eos=false", "training.snapshots=[]"),
    *("training.log_every=100000", "training.evaluate_every=100000", "training.save_every=100000", "schedule.warmup_steps=1"),
    *("watch.every=100000", "watch.samples=1"),
)
SIXTY = (*COMMON, "data.corpus=python_source", "data.tokenizer=null", "training.vocab_multiple=50432", "training.batch_size=32")


def at_context_1024() -> PretrainingConfig:
    """The 10.6 million parameters of the CPU's bar 13, at context 1,024 and 65,536 tokens a step."""
    return with_overrides(ten_million(), ["model.max_position_embeddings=1024", "training.batch_size=64"])


def of_operation(name: str, **settings: object) -> tuple[str, ...]:
    rows = "training.batch_size=8", "training.micro_batch_size=8"
    return (*SIXTY, *rows, f"model.operation={json.dumps({'name': name, **settings})}")


CANDIDATES: dict[str, tuple[Callable[[], PretrainingConfig], tuple[str, ...]] | None] = {
    "60m softmax": (gu2024_60m, SIXTY),
    "60m plain loop": None,
    "10m softmax": (at_context_1024, COMMON),
    # Other operations in batches of eight rows: one without a fused kernel holds all scores of a batch.
    **{f"60m, 8 rows, {name}": (gu2024_60m, of_operation(name)) for name in ("softmax", "key_bias", "sigmoid", "softpick")},
}


def flops_per_token(model: Architecture, vocabulary: int) -> float:
    """Six for each weight of a matrix product, the head among them, and the causal half of the scores and their products."""
    width, inner = model.hidden_size, model.num_attention_heads * model.head_size
    keys = (model.num_key_value_heads or model.num_attention_heads) * model.head_size
    layer = width * (2 * inner + 2 * keys) + 3 * width * model.intermediate_size
    weights = model.num_hidden_layers * layer + width * vocabulary
    return 6.0 * weights + 6.0 * model.num_hidden_layers * model.max_position_embeddings * inner


class Clock:
    """Times steps ``WARM_UP`` to the last, which one process at a time may take."""

    def __init__(self, lock: Path, steps: int) -> None:
        self.lock, self.steps = lock, steps
        self.marks: list[float] = []
        self.step = 0

    def tick(self) -> None:
        self.step += 1
        if self.step == WARM_UP:
            torch.cuda.synchronize()
            self.file = self.lock.open("w")
            fcntl.flock(self.file, fcntl.LOCK_EX)
        if self.step >= WARM_UP:
            torch.cuda.synchronize()
            self.marks.append(time.perf_counter())
        if self.step == self.steps:
            self.file.close()

    @property
    def seconds(self) -> float:
        """Of a step, the median."""
        return statistics.median(b - a for a, b in zip(self.marks, self.marks[1:], strict=False))


def ours(name: str, lock: Path, steps: int) -> dict[str, Any]:
    """Tokens per second of ``run_training`` as users call it."""
    chosen = CANDIDATES[name]
    assert chosen is not None
    make, changes = chosen
    config = with_overrides(make(), [*changes, f"training.steps={steps + 2}"])
    clock = Clock(lock, steps)
    native = Bookkeeper.on_step_end

    def on_step_end(self: Bookkeeper, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        native(self, args, state, control, **kwargs)
        clock.tick()

    Bookkeeper.on_step_end = on_step_end  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        result = train.run_training(config, Path(folder) / "run", progress=False)
    tokens = config.training.batch_size * config.model.max_position_embeddings
    vocabulary = int(result.record["resolved"]["vocab_size"])
    return report(tokens / clock.seconds, flops_per_token(config.model, vocabulary), vocabulary)


def plain(lock: Path, steps: int) -> dict[str, Any]:
    """A loop that somebody might write in an afternoon: transformers' Llama of the same shape, compiled, bfloat16 autocast."""
    recipe, vocabulary = gu2024_60m().model, 50432
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to("cuda").train()
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    clock = Clock(lock, steps)
    for _ in range(steps):
        batch = torch.randint(4096, (32, recipe.max_position_embeddings), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    tokens = 32 * recipe.max_position_embeddings
    return report(tokens / clock.seconds, flops_per_token(recipe, vocabulary), vocabulary)


def report(speed: float, flops: float, vocabulary: int) -> dict[str, Any]:
    return {
        "tokens_per_second": speed,
        "flops_per_token": flops,
        "mfu": speed * flops / PEAK,
        "vocabulary": vocabulary,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def start(name: str, out: Path, steps: int, lock: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The process of a candidate and its log, whose last line is the report."""
    log = out.with_name(f"{name.replace(' ', '-')}.log")
    command = [sys.executable, __file__, "--out", str(out), "--steps", str(steps), "--only", name, "--lock", str(lock)]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "2"}), log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=list(CANDIDATES), help="one candidate, in this process")
    parser.add_argument("--those-with", default="", help="only candidates whose names hold this")
    parser.add_argument("--lock", type=Path, default=None)
    given = parser.parse_args()
    if given.only:
        plainly = CANDIDATES[given.only] is None
        print(json.dumps(plain(given.lock, given.steps) if plainly else ours(given.only, given.lock, given.steps)))
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    lock = given.out.with_suffix(".lock")
    running = {name: start(name, given.out, given.steps, lock) for name in CANDIDATES if given.those_with in name}
    found: dict[str, Any] = {}
    for name, (process, log) in running.items():
        status, said = process.wait(), log.read_text()
        found[name] = json.loads(said.splitlines()[-1]) if status == 0 else {"error": said[-3000:]}
        print(name, found[name], flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
