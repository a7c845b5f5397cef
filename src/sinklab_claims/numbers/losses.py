"""What a trained model loses: behind a window, beyond its context, on noisy text, and in eight bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import InputError
from sinklab.registry import read_outs
from sinklab.results.metric import Metric
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab.training.rows import TextRows, token_losses, windowed_losses
from sinklab.training.trainer import stack
from sinklab_claims.contract.trained import MeasuredModel, TrainedModel, gives
from sinklab_claims.numbers.attention import batches
from sinklab_claims.numbers.quantized import quantized

__all__ = ["NOISE", "STRETCH", "calibration_batches", "int8", "quantization_gap", "robustness", "window"]

TOKENS, LEAST_ROWS = 16_384, 32
"""Tokens of held-out text behind a mean loss, and rows of it at least."""

SINKS = 4
"""First tokens that are kept beside the window, as in StreamingLLM."""

WINDOW = (
    Metric(
        "window_gap",
        "nats",
        "Mean next-token loss when every query sees the last quarter of the context and nothing else, less the loss of dense "
        "attention; over the tokens predicted from positions behind the first quarter; of documents that training kept apart, "
        "from positions in them, and absent where none is that long.",
    ),
    Metric(
        "window_sink_gap",
        "nats",
        f"The same when queries also see the first {SINKS} tokens and the learned tokens in front (Xiao et al. 2023, arXiv "
        "2309.17453).",
    ),
    Metric("sink_worth", "nats", "window_gap - window_sink_gap."),
)
"""Metrics. Positions stay those of the text: nothing is moved up, as a cache would."""


@read_outs.register("window")
@gives(*WINDOW)
@torch.no_grad()
def window(trained: MeasuredModel) -> dict[str, float]:
    """What queries lose that see a window only, and how much of that the first tokens give back.

    Numbers of :data:`WINDOW` on held-out rows of the length of the training.
    """
    model, context = trained.loaded.model, trained.context
    size, visible = max(1, context // 4), range(trained.front + SINKS)
    dense, with_sinks, alone = [], [], []
    for part in batches(trained.text(max(LEAST_ROWS, TOKENS // context))):
        dense.append(part.scored(token_losses(model, part, after=size), after=size))
        losses = windowed_losses(model, part, size, visible)
        with_sinks.append(losses[0])
        alone.append(losses[1])
    if not any(part.numel() for part in dense):
        return {}
    losses_of = [torch.cat(parts).double().mean().item() for parts in (dense, with_sinks, alone)]
    numbers = {"window_gap": losses_of[2] - losses_of[0], "window_sink_gap": losses_of[1] - losses_of[0]}
    return numbers | {"sink_worth": numbers["window_gap"] - numbers["window_sink_gap"]}


FACTOR = 4
"""Length of the rows over the context of the training."""

BEYOND, BEYOND_ROWS = 16_384, 16
"""Tokens of held-out text beyond the context, and rows of it at least."""

BOUNDED = "learned"
"""Position scheme that has no positions beyond the context."""

EXTRAPOLATION = (
    Metric(
        "longer_gap",
        "nats",
        f"Mean next-token loss predicted from positions beyond the context of the training, in rows of {FACTOR} contexts, less "
        "that predicted from the last quarter of the context in the same rows (Press et al. 2022, arXiv 2108.12409); absent "
        "with learned positions, which end there. Of documents that training kept apart the positions are those in them, and "
        "the number is absent where none is that long.",
    ),
)


@read_outs.register("extrapolation")
@gives(*EXTRAPOLATION)
@torch.no_grad()
def extrapolation(trained: TrainedModel) -> dict[str, float]:
    """What is lost on tokens that lie further back in a text than any that the model was trained on.

    Numbers of :data:`EXTRAPOLATION` on held-out rows, with the token in front of training and nothing evicted or moved.
    """
    config = trained.config
    context = config.model.max_position_embeddings
    if config.model.position.get("name", "rotary") == BOUNDED:
        return {}
    held_out = config.data.held_out_rows
    wanted = min(held_out, max(BEYOND_ROWS, BEYOND // ((FACTOR - 1) * context)))
    data = prepare_data(_longer(config), trained.cache)
    try:
        rows = data.probe_text(wanted, FACTOR * context, front=trained.front).to(trained.loaded.device)
    except InputError:
        return {}  # no document is that long
    start = context - context // 4
    losses = torch.cat([token_losses(trained.loaded.model, part, after=start) for part in batches(rows)]).double()
    inside = context - start  # predicted from positions start … context - 1, all of which training has seen
    if rows.position_ids is None:
        return {"longer_gap": (losses[:, inside:].mean() - losses[:, :inside].mean()).item()}
    further, near = rows.scored(losses[:, inside:], after=context), rows.scored(losses, after=start)
    if not further.numel():
        return {}
    # Those from the last quarter on are those of the last quarter and those beyond it.
    of_quarter = (near.sum() - further.sum()) / (near.numel() - further.numel())
    return {"longer_gap": (further.mean() - of_quarter).item()}


def _longer(config: PretrainingConfig) -> PretrainingConfig:
    fields = config.model_dump()
    fields["model"]["max_position_embeddings"] *= FACTOR
    return PretrainingConfig.parse(fields)


NOISE = 0.1
"""Share of the tokens that noise replaces."""

STRETCH = 4
"""Tokens of a false sink: as many as StreamingLLM keeps of true ones."""

ROBUSTNESS = (
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
@gives(*ROBUSTNESS)
@torch.no_grad()
def robustness(trained: TrainedModel) -> dict[str, float]:
    """What is lost when the text is noisy, is of another language, or holds what looks like a sink.

    Numbers of :data:`ROBUSTNESS` on held-out rows of the length of the training.
    """
    text = trained.text(max(LEAST_ROWS, TOKENS // trained.context)).to("cpu")
    rows, positions = text.ids, text.position_ids
    noisy, replaced = with_noise(trained, rows, positions)
    plain, under_noise = _token_losses(trained, text), _token_losses(trained, text.with_ids(noisy))
    misled, other = _token_losses(trained, text.with_ids(with_false_sink(rows, positions))), in_other_language(trained, rows)
    stays = ~replaced[:, 1:]  # a loss is that of the token behind its query
    scored, sees = torch.ones_like(stays), torch.zeros_like(stays)
    sees[:, trained.context // 2 :] = True
    if positions is not None:
        scored = torch.diff(positions, dim=1) == 1
        sees &= (torch.arange(rows.shape[1]) - positions)[:, :-1] <= rows.shape[1] // 4
    compared = [("noise_gap", under_noise, stays & scored), ("false_sink_gap", misled, sees & scored)]
    if other is not None:
        compared.append(("other_language_gap", _token_losses(trained, text.with_ids(other)), scored))
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


def _token_losses(trained: TrainedModel, rows: TextRows) -> Tensor:
    """Loss of every token but the first, float64 ``(rows, seq_len - 1)`` on the CPU."""
    model, device = trained.loaded.model, trained.loaded.device
    return torch.cat([token_losses(model, part.to(device)).cpu() for part in batches(rows)]).double()


CALIBRATION, BATCH_TOKENS = 16, 1024
"""Batches of training text from which the ranges of activations are taken (Bondarenko et al. 2023), and their tokens."""

INT8 = (
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
@gives(*INT8)
def int8(trained: TrainedModel) -> dict[str, float]:
    """What is lost when weights and activations are quantised to eight bits after training.

    Numbers of :data:`INT8` on held-out rows of the length of the training.
    """
    before, after = quantization_gap(trained, weight_bits=8, activation_bits=8)
    return {"int8_loss": after, "float_loss": before, "int8_gap": after - before}


@torch.no_grad()
def quantization_gap(trained: TrainedModel, *, weight_bits: int, activation_bits: int) -> tuple[float, float]:
    """Held-out loss in nats as it is and on grids of so many bits."""
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
