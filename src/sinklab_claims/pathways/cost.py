"""Cost: time of every operation beside softmax's, all in turns in one process, so that what else the machine does hits all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sinklab.models.language_model import SinkLM
from sinklab.results.run import Progress, silent
from sinklab.training.config import PretrainingConfig
from sinklab.training.process import chosen_dtype
from sinklab_claims.pathways.operations import Pathway, model_of

__all__ = ["costs", "spread"]

ROUNDS, WARM_UP = 15, 2
"""Rounds that count, and rounds before them that do not."""

LONG = 1024
"""Tokens of the longer rows, unless the context is longer; with as many tokens a batch."""


def costs(
    pathways: Sequence[Pathway],
    config: PretrainingConfig,
    widths: Mapping[str, int],
    *,
    rounds: int = ROUNDS,
    long: int = LONG,
    progress: Progress = silent,
) -> dict[str, dict[str, dict[str, float]]]:
    """Label to column to :func:`spread` over the rounds of the ratio to softmax in the same round; ``parameters`` has none.

    Every round times each operation once, forward alone and forward with backward, beginning with another one than the round
    before. Weights are drawn anew and tokens are random. Parameters are updated in the same way for all, which is left out.

    Args:
        config: of the scale: its shape, batch, dtype and device.
        widths: label to the width of the feed-forward layer.
        rounds: two or more.
        long: tokens of the longer rows.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(config.training.threads or threads)
    ratios_of: dict[str, dict[str, dict[str, float]]] = {pathway.label: {} for pathway in pathways}
    context = config.model.max_position_embeddings
    try:
        for suffix, length in (("", context), ("_long", max(context, long))):
            timed = [_Timed(pathway, config, length, widths[pathway.label]) for pathway in pathways]
            for number in range(WARM_UP + rounds):
                progress(f"rounds of {length} tokens", number, WARM_UP + rounds)
                for index in range(len(timed)):
                    timed[(index + number) % len(timed)].go(keep=number >= WARM_UP)
            progress(f"rounds of {length} tokens", WARM_UP + rounds, WARM_UP + rounds)
            for own in timed:
                for kind, seconds in own.seconds.items():
                    ratios = [ours / of for ours, of in zip(seconds, timed[0].seconds[kind], strict=True)]
                    ratios_of[own.label][kind + suffix] = spread(ratios)
                ratio = own.model.num_parameters() / timed[0].model.num_parameters()
                if not suffix:
                    ratios_of[own.label]["parameters"] = {"value": ratio, "low": ratio, "high": ratio}
        return ratios_of
    finally:
        torch.set_num_threads(threads)


def spread(values: Sequence[float]) -> dict[str, float]:
    """``value``, the median, and ``low`` and ``high``, the quartiles, of at least two numbers."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"value": middle, "low": low, "high": high}


class _Timed:
    """A model with random weights, a batch, and the seconds that it took."""

    def __init__(self, pathway: Pathway, config: PretrainingConfig, length: int, width: int) -> None:
        device = config.training.device
        self.device = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
        torch.manual_seed(0)
        self.model: SinkLM = model_of(pathway, config, width, length).to(self.device)
        tokens = (config.training.micro_batch_size or config.training.batch_size) * config.model.max_position_embeddings
        self.rows: Tensor = torch.randint(config.data.vocab_size, (max(1, tokens // length), length)).to(self.device)
        self.half = chosen_dtype(config) == "bfloat16"
        self.label = pathway.label
        self.seconds: Mapping[str, list[float]] = {"train_time": [], "forward_time": []}

    def go(self, keep: bool) -> None:
        """One forward pass alone, and one with the backward pass."""
        for kind, step in (("forward_time", self._forward), ("train_time", self._train)):
            self._wait()
            started = time.perf_counter()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                step()
            self._wait()
            if keep:
                self.seconds[kind].append(time.perf_counter() - started)

    def _forward(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(input_ids=self.rows, use_cache=False)

    def _train(self) -> None:
        self.model.train()
        self.model(input_ids=self.rows, labels=self.rows, use_cache=False).loss.backward()
        self.model.zero_grad(set_to_none=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
