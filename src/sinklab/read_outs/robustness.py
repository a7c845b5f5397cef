"""Robustness: what a trained model loses when its text is noisy, is of another language, or holds what looks like a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.read_outs._attention import LEAST_ROWS, TOKENS, batches
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.rows import TextRows
from sinklab.training.windowed import token_losses
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["METRICS", "NOISE", "STRETCH", "robustness"]

NOISE = 0.1
"""Share of the tokens that noise replaces."""

STRETCH = 4
"""Tokens of a false sink: as many as StreamingLLM keeps of true ones."""

METRICS = (
    Metric(
        "noise_gap",
        "nats",
        f"Mean next-token loss over the tokens that stay when {100 * NOISE:.0f} % of the tokens of a row, the first and a "
        "fixed one excepted, are replaced by tokens drawn uniformly from those of the text, less the loss of the same tokens "
        "without.",
    ),
    Metric(
        "other_language_gap",
        "nats",
        "Mean next-token loss on the held-out rows with the tokens that are letters alone exchanged by one permutation of "
        "them, all others left, less that on the rows as they are; of bigram-backcopy text: other bigram laws, triggers kept. "
        "Absent where fewer than two tokens are letters alone.",
    ),
    Metric(
        "false_sink_gap",
        "nats",
        f"Mean next-token loss predicted from the second half of the row when {STRETCH} tokens from a quarter of it on are "
        "replaced by the first token of the row (BOS, where rows have it), less the loss of the same tokens without. Of "
        "documents that training kept apart it is the first token of the one that is there, and the loss of its tokens; absent "
        "where none reaches from a quarter of the row into the second half.",
    ),
)
"""Metrics, on the same drawn changes for all models of a vocabulary."""


@read_outs.register("robustness")
@torch.no_grad()
def robustness(trained: TrainedModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on held-out rows of the length of the training."""
    text = trained.text(max(LEAST_ROWS, TOKENS // trained.context)).to("cpu")
    rows, positions = text.ids, text.position_ids
    noisy, replaced = with_noise(trained, rows, positions)
    plain, under_noise = _losses(trained, text), _losses(trained, text.with_ids(noisy))
    misled, other = _losses(trained, text.with_ids(with_false_sink(rows, positions))), in_other_language(trained, rows)
    stays = ~replaced[:, 1:]  # a loss is that of the token behind its query
    scored, sees = torch.ones_like(stays), torch.zeros_like(stays)
    sees[:, trained.context // 2 :] = True
    if positions is not None:
        scored = torch.diff(positions, dim=1) == 1
        sees &= (torch.arange(rows.shape[1]) - positions)[:, :-1] <= rows.shape[1] // 4
    compared = [("noise_gap", under_noise, stays & scored), ("false_sink_gap", misled, sees & scored)]
    if other is not None:
        compared.append(("other_language_gap", _losses(trained, text.with_ids(other)), scored))
    return {name: (losses[of].mean() - plain[of].mean()).item() for name, losses, of in compared if of.any()}


def with_noise(trained: TrainedModel, rows: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows with a share of their tokens drawn anew, and which these are, boolean of the same shape.

    The first token of each row stays and, with ``positions`` of the tokens in their documents, that of each document.
    """
    generator, ids = torch.Generator().manual_seed(trained.draw), trained.text_ids
    replaced = torch.rand(rows.shape, generator=generator) < NOISE
    replaced[:, 0] = False
    if positions is not None:
        replaced[positions == 0] = False
    if trained.fixed is not None:
        replaced[:, trained.fixed[0]] = False
    return torch.where(replaced, ids[torch.randint(len(ids), rows.shape, generator=generator)], rows), replaced


def in_other_language(trained: TrainedModel, rows: Tensor) -> Tensor | None:
    """The rows with each token that is letters alone in the place of another such token, everywhere the same one.

    ``None`` where there are no two such tokens, as of a vocabulary of digits.
    """
    tokenizer = trained.data.tokenizer
    letters = torch.tensor([token for token in trained.text_ids.tolist() if tokenizer.decode([token]).strip().isalpha()])
    if len(letters) < 2:
        return None
    # Every token goes to the next one of a random circle, so that none stays what it is.
    circle = letters[torch.randperm(len(letters), generator=torch.Generator().manual_seed(trained.draw))]
    exchanged = torch.arange(int(max(rows.max(), trained.text_ids.max())) + 1)
    exchanged[circle] = circle.roll(1)
    return exchanged[rows]


def with_false_sink(rows: Tensor, positions: Tensor | None = None) -> Tensor:
    """The rows with their first token again, a few times, from a quarter of their length on.

    With ``positions`` of the tokens in their documents it is the first token of the document that is there.
    """
    start = rows.shape[1] // 4
    changed = rows.clone()
    first = rows[:, :1] if positions is None else rows.gather(1, start - positions[:, start : start + 1])
    changed[:, start : start + STRETCH] = first
    return changed


def _losses(trained: TrainedModel, rows: TextRows) -> Tensor:
    """Loss of every token but the first, float64 ``(rows, seq_len - 1)`` on the CPU."""
    model, device = trained.loaded.model, trained.loaded.device
    return torch.cat([token_losses(model, part.to(device)).cpu() for part in batches(rows)]).double()
