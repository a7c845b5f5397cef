"""Cost: time of every operation beside softmax's, all in turns in one process, so that what else the machine does hits all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.results.run import Progress, silent
from sinklab.training.config import PretrainingConfig
from sinklab.training.process import chosen_dtype
from sinklab_claims.pathways.operations import Pathway

__all__ = ["costs", "spread"]

ROUNDS, WARM_UP = 15, 2
"""Rounds that count, and rounds before them that do not."""

LONG = 1024
"""Tokens of the longer rows, unless the context is longer; with as many tokens a batch."""


def costs(
    pathways: Sequence[Pathway],
    config: PretrainingConfig,
    *,
    widths: Mapping[str, int] = MappingProxyType({}),
    rounds: int = ROUNDS,
    long: int = LONG,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> dict[str, dict[str, dict[str, float]]]:
    """Label to column to :func:`spread` over the rounds of the ratio to softmax in the same round; ``parameters`` has none.

    Every round times each operation once, forward alone and forward with backward, beginning with another one than the round
    before. Weights are drawn anew and tokens are random. Parameters are updated in the same way for all, which is left out.

    Args:
        config: of the scale: its shape, batch, dtype and device.
        widths: label to the width of the feed-forward layer, where it is not the scale's.
        long: tokens of the longer rows.
        clock: seconds that pass.

    Raises:
        ConfigurationError: fewer rounds than quartiles need.
    """
    if rounds < 2:
        raise ConfigurationError(f"pathways: the cost is a median with quartiles; rounds {rounds} must be at least 2")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.training.threads or threads)
    try:
        ratios_of: dict[str, dict[str, dict[str, float]]] = {pathway.label: {} for pathway in pathways}
        context = config.model.max_position_embeddings
        for suffix, length in (("", context), ("_long", max(context, long))):
            timed = [_Timed(pathway, config, length, clock, widths.get(pathway.label)) for pathway in pathways]
            if not suffix:
                for model in timed:
                    ratio = model.parameters / timed[0].parameters
                    ratios_of[model.label]["parameters"] = {"value": ratio, "low": ratio, "high": ratio}
            for number in range(WARM_UP + rounds):
                progress(f"rounds of {length} tokens", number, WARM_UP + rounds)
                order = [timed[(index + number) % len(timed)] for index in range(len(timed))]
                for model in order:
                    model.go(keep=number >= WARM_UP)
            progress(f"rounds of {length} tokens", WARM_UP + rounds, WARM_UP + rounds)
            for model in timed:
                for kind in ("train_time", "forward_time"):
                    ratios = [own / of for own, of in zip(model.seconds[kind], timed[0].seconds[kind], strict=True)]
                    ratios_of[model.label][kind + suffix] = spread(ratios)
        return ratios_of
    finally:
        torch.set_num_threads(threads)


def spread(values: Sequence[float]) -> dict[str, float]:
    """``value``, the median, and ``low`` and ``high``, the quartiles, of at least two numbers."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"value": middle, "low": low, "high": high}


class _Timed:
    """A model with random weights, a batch, and the seconds that it took."""

    def __init__(
        self, pathway: Pathway, config: PretrainingConfig, length: int, clock: Callable[[], float], width: int | None = None
    ) -> None:
        fields: dict[str, Any] = config.model.model_dump()
        fields["intermediate_size"] = width or config.model.intermediate_size
        fields |= {
            "operation": pathway.operation(length),
            "max_position_embeddings": length,
            "vocab_size": config.data.vocab_size,
        }
        device = config.training.device
        self.device = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
        torch.manual_seed(0)
        self.model = SinkLM(SinkLMConfig.from_architecture(Architecture.parse(fields))).to(self.device)
        tokens = (config.training.micro_batch_size or config.training.batch_size) * config.model.max_position_embeddings
        self.rows = torch.randint(config.data.vocab_size, (max(1, tokens // length), length)).to(self.device)
        self.half = chosen_dtype(config) == "bfloat16"
        self.label, self.clock = pathway.label, clock
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.seconds: Mapping[str, list[float]] = {"train_time": [], "forward_time": []}

    def go(self, keep: bool) -> None:
        """One forward pass alone, and one with the backward pass."""
        for kind, step in (("forward_time", self._forward), ("train_time", self._train)):
            self._wait()
            started = self.clock()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                step()
            self._wait()
            if keep:
                self.seconds[kind].append(self.clock() - started)

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
