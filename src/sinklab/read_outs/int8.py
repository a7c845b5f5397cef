"""Int8: what a trained model loses when weights and activations are quantised to eight bits after training."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from sinklab.read_outs._attention import LEAST_ROWS, TOKENS, batches
from sinklab.read_outs._quantized import quantized
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.rows import TextRows
from sinklab.training.trainer import stack
from sinklab.training.windowed import token_losses
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "calibration_batches", "int8", "quantization_gap"]

CALIBRATION, BATCH_TOKENS = 16, 1024
"""Batches of training text from which the ranges of activations are taken (Bondarenko et al. 2023), and their tokens."""

METRICS = (
    Metric(
        "int8_loss",
        "nats",
        "Mean next-token loss on held-out text with weights and activations on grids of 256 values (W8A8), simulated; what is "
        "quantised: Bondarenko et al. 2023 (arXiv 2306.12929), but for the inside of the attention function.",
    ),
    Metric("float_loss", "nats", "The loss of the model as it is, float32, on the same text."),
    Metric("int8_gap", "nats", "int8_loss - float_loss."),
)


@read_outs.register("int8")
def int8(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows of the length of the training."""
    before, after = quantization_gap(trained, weight_bits=8, activation_bits=8)
    return {"int8_loss": after, "float_loss": before, "int8_gap": after - before}


@torch.no_grad()
def quantization_gap(trained: TrainedModel, *, weight_bits: int, activation_bits: int) -> tuple[float, float]:
    """Held-out loss in nats as it is and on grids of so many bits.

    Raises:
        ConfigurationError: bits outside 2 to 16.
    """
    model = copy.deepcopy(trained.loaded.model).float()
    rows = trained.text(max(LEAST_ROWS, TOKENS // trained.context))
    coarse = quantized(model, calibration_batches(trained), weight_bits=weight_bits, activation_bits=activation_bits)
    return _loss(model, rows), _loss(coarse, rows)


def calibration_batches(trained: TrainedModel) -> Iterator[TextRows]:
    """Training rows spread evenly over the training text, in 16 batches of about 1,024 tokens, on the model's device."""
    text = trained.data.train
    size = max(1, BATCH_TOKENS // text.context)
    for batch in range(CALIBRATION):
        numbers = range(batch * size, (batch + 1) * size)
        batch_of = stack([text[number * len(text) // (CALIBRATION * size)] for number in numbers])
        yield TextRows(batch_of["input_ids"], batch_of.get("position_ids")).to(trained.loaded.device)


def _loss(model: PreTrainedModel, rows: TextRows) -> float:
    losses = [part.scored(token_losses(model, part)) for part in batches(rows)]
    return torch.cat(losses).double().mean().item()
