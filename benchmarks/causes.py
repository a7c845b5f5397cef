"""Effects of all variants on all heads of the embedded model: the engine against one head at a time, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from _timing import Bar, exit_with

from sinklab.corpora.python_source import PythonSource
from sinklab.models.loading import load_model
from sinklab.sinks import find_sinks
from sinklab.studies.causes.effects import Effects, make_variants, one_by_one
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples

TEXTS, LENGTH = 16, 256


def measure() -> list[Bar]:
    loaded = load_model("embedded:softmax")
    tokens = PythonSource().sample(loaded.encoder, seq_len=LENGTH, samples=TEXTS, seed=0, bos=True)
    samples = token_samples([("python_source", tokens)])
    sink = find_sinks(loaded.model, samples.inputs)
    variants = make_variants(loaded.model, sink, samples)

    def run(how: Callable[..., Effects]) -> tuple[Effects, float]:
        start = time.process_time()
        return how(loaded.model, samples, NextToken(), variants, sink.heads), time.process_time() - start

    measure_effects(loaded.model, samples, NextToken(), variants[:1], sink.heads[:1])  # what the first use loads
    fast, seconds = run(measure_effects)
    slow, oracle = run(one_by_one)
    what = f"{len(variants)} variants × {len(sink.heads)} heads, {TEXTS} texts × {LENGTH} tokens"
    error = max(float(np.abs(getattr(fast, of) - getattr(slow, of)).max()) for of in ("loss", "clean_loss"))
    return [
        Bar("causes", f"one head at a time ÷ the engine ({what})", oracle / seconds, ">=", 5.0),
        Bar("causes", "largest difference of an effect, in nats", error, "<=", 1e-5, ""),
        Bar("causes", "CPU time of the engine", seconds, "<=", 120.0, "s"),
    ]


if __name__ == "__main__":
    exit_with(measure)
