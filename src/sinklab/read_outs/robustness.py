"""Robustness: what a trained model loses when its text is noisy, is of another language, or holds what looks like a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.jobs.trained import TrainedModel
from sinklab.read_outs._attention import LEAST_ROWS, TOKENS, batches
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.windowed import token_losses

__all__ = ["METRICS", "NOISE", "STRETCH", "robustness"]

NOISE = 0.1
"""Share of the tokens that noise replaces."""

STRETCH = 4
"""Tokens of a false sink: as many as StreamingLLM keeps of true ones."""

METRICS = (
    Metric(
        "noise_gap",
        "nats",
        f"Mean next-token loss over the tokens that stay when {NOISE:.0%} of the tokens of a row, the first and a fixed one "
        "excepted, are replaced by tokens drawn uniformly from those of the text, less the loss of the same tokens without.",
    ),
    Metric(
        "other_language_gap",
        "nats",
        "Mean next-token loss on the held-out rows with the tokens that are letters alone exchanged by one permutation of "
        "them, all others left, less that on the rows as they are; of bigram-backcopy text: other bigram laws, triggers kept.",
    ),
    Metric(
        "false_sink_gap",
        "nats",
        f"Mean next-token loss predicted from the second half of the row when {STRETCH} tokens from a quarter of it on are "
        "replaced by the first token of the row (BOS, where rows have it), less the loss of the same tokens without.",
    ),
)
"""Metrics, on the same drawn changes for all models of a vocabulary."""


@read_outs.register("robustness")
@torch.no_grad()
def robustness(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows of the length of the training."""
    rows = trained.rows(max(LEAST_ROWS, TOKENS // trained.context)).cpu()
    noisy, replaced = with_noise(trained, rows)
    plain, under_noise = _losses(trained, rows), _losses(trained, noisy)
    stays = ~replaced[:, 1:]  # a loss is that of the token behind its query
    late = trained.context // 2
    return {
        "noise_gap": (under_noise[stays].mean() - plain[stays].mean()).item(),
        "other_language_gap": (_losses(trained, in_other_language(trained, rows)).mean() - plain.mean()).item(),
        "false_sink_gap": (_losses(trained, with_false_sink(rows))[:, late:].mean() - plain[:, late:].mean()).item(),
    }


def with_noise(trained: TrainedModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with a share of their tokens drawn anew, and which these are, boolean of the same shape."""
    generator, ids = torch.Generator().manual_seed(trained.draw), trained.text_ids
    replaced = torch.rand(rows.shape, generator=generator) < NOISE
    replaced[:, 0] = False
    if trained.fixed is not None:
        replaced[:, trained.fixed[0]] = False
    return torch.where(replaced, ids[torch.randint(len(ids), rows.shape, generator=generator)], rows), replaced


def in_other_language(trained: TrainedModel, rows: Tensor) -> Tensor:
    """The rows with each token that is letters alone in the place of another such token, everywhere the same one."""
    tokenizer = trained.data.tokenizer
    letters = torch.tensor([token for token in trained.text_ids.tolist() if tokenizer.decode([token]).strip().isalpha()])
    # Every token goes to the next one of a random circle, so that none stays what it is.
    circle = letters[torch.randperm(len(letters), generator=torch.Generator().manual_seed(trained.draw))]
    exchanged = torch.arange(int(max(rows.max(), trained.text_ids.max())) + 1)
    exchanged[circle] = circle.roll(1)
    return exchanged[rows]


def with_false_sink(rows: Tensor) -> Tensor:
    """The rows with their first token again, a few times, from a quarter of their length on."""
    start = rows.shape[1] // 4
    changed = rows.clone()
    changed[:, start : start + STRETCH] = rows[:, :1]
    return changed


def _losses(trained: TrainedModel, rows: Tensor) -> Tensor:
    """Loss of every token but the first, float64 ``(rows, seq_len - 1)`` on the CPU."""
    model, device = trained.loaded.model, trained.loaded.device
    return torch.cat([token_losses(model, part.to(device)).cpu() for part in batches(rows)]).double()
