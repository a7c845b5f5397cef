"""Training throughput: run_training() against a plain hand-written loop over an SDPA Llama of the same shape, on a CPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import Bar, exit_with
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.configuration import with_overrides
from sinklab.models.architecture import Architecture
from sinklab.training import train
from sinklab.training.bookkeeping import Bookkeeper
from sinklab.training.config import DataConfig, PretrainingConfig, ScheduleConfig, TrainingConfig, WatchConfig

CONTEXT, ROWS, STEPS = 256, 8, 8
AS_SHIPPED = torch.backends.mkldnn.matmul.fp32_precision
WARM_UP = 3
"""Steps that are not counted: the first ones compile, and allocate what is kept."""


def ten_million() -> PretrainingConfig:
    """Six layers of six heads of 64, width 384, feed-forward 1,024, vocabulary 4,096: 10.6 million parameters."""
    return PretrainingConfig(
        name="ten_million",
        model=Architecture(
            hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6, max_position_embeddings=CONTEXT
        ),
        data=DataConfig(vocab_size=4096, max_tokens=200_000, held_out_rows=1),
        schedule=ScheduleConfig(warmup_steps=1),
        training=TrainingConfig(steps=STEPS, batch_size=ROWS, log_every=STEPS, evaluate_every=1000, save_every=1000),
        watch=WatchConfig(every=1000, samples=1),
    )


def plain_loop() -> Callable[[], object]:
    """One step of a float32 loop that somebody might write in an afternoon."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text = torch.from_numpy(np.random.default_rng(0).integers(0, 4096, 100_000))

    def step() -> float:
        starts = torch.randint(len(text) - CONTEXT, (ROWS,))
        batch = torch.stack([text[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


@contextmanager
def between_steps(action: Callable[[int], None]) -> Iterator[None]:
    """Call ``action(step)`` after every step of a run, before anything else is done after it."""
    native = Bookkeeper.on_step_end

    def on_step_end(self: Bookkeeper, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        action(state.global_step)
        native(self, args, state, control, **kwargs)

    Bookkeeper.on_step_end = on_step_end  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bookkeeper.on_step_end = native  # type: ignore[method-assign]


def compare(plain: Callable[[], object], folder: Path, *changes: str) -> float:
    """Shortest CPU time of a plain step over that of a step of ours, taken in turn; larger is faster."""
    ours, theirs = [], []
    mark = time.process_time()

    def other_candidate(step: int) -> None:
        nonlocal mark
        ours.append(time.process_time() - mark)
        setting, chosen = torch.backends.mkldnn.matmul, torch.backends.mkldnn.matmul.fp32_precision
        setting.fp32_precision = AS_SHIPPED  # ours is set for the whole process, and the plain loop knows nothing of it
        started = time.process_time()
        plain()
        theirs.append(time.process_time() - started)
        setting.fp32_precision = chosen
        mark = time.process_time()

    with between_steps(other_candidate):
        config = with_overrides(ten_million(), changes)
        train.run_training(config, folder / "run", cache=folder / "cache", overwrite=True, progress=False)
    print(f"{' '.join(changes) or 'default'}: {1e3 * min(ours[WARM_UP:-1]):.0f} ms a step, plain {1e3 * min(theirs):.0f} ms")
    return min(theirs) / min(ours[WARM_UP:-1])


@contextmanager
def products_as_they_are() -> Iterator[None]:
    """Leave the float32 products of ours with the library that the plain loop uses."""
    native, train.fast_float32 = train.fast_float32, lambda sizes: nullcontext(False)  # type: ignore[assignment]
    try:
        yield
    finally:
        train.fast_float32 = native


def measure() -> list[Bar]:
    torch.set_num_threads(1)
    plain = plain_loop()
    what = "10.6M parameters, 2,048 tokens a step: speed ÷ that of a plain float32 SDPA Llama loop; "
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with products_as_they_are():
            equal = compare(plain, folder, "training.dtype=float32", "training.compile=false")
        default = compare(plain, folder)
        float32 = compare(plain, folder, "training.dtype=float32")
    return [
        Bar("13", what + "equal settings", equal, ">=", 0.95),
        Bar("13", what + "default (bf16 autocast, compiled)", default, ">=", 2.5),
        Bar("13", what + "float32, compiled, with the matrix products that passed the self-test", float32, ">=", 1.5),
    ]


if __name__ == "__main__":
    exit_with(measure)
