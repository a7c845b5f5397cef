"""A model's losses: which one it has, what its targets are, and its value for every token or class."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sinklab.attention.looks_ahead import looks_ahead
from sinklab.errors import ConfigurationError, InputError

IGNORED = -100
"""As a target: no loss is taken there."""

LOGITS_AT_ONCE, ON_A_CPU = 2**24, 2**19
"""Logits that are turned into losses at once, 64 MiB in float32; on a CPU 2 MiB, which its caches hold: four times as fast."""

HIDDEN_SHARE = 0.15
"""Share of the tokens that a masked-LM loss hides and asks for (Devlin et al. 2018, arXiv 1810.04805)."""

LossKind: TypeAlias = Literal["next token", "masked token", "target token", "class"]
"""What a loss is taken of: every next token; tokens that were hidden; the tokens of a target text; a class."""


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Whether the model predicts the next token of its own text: it can generate, and its attention sees no later token."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder and not looks_ahead(model)


def is_two_sided(model: nn.Module) -> bool:
    """Whether the model reads a source and a target: an encoder–decoder, and not its encoder, which keeps the whole's
    config."""
    two = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return two and "decoder_input_ids" in inspect.signature(model.forward).parameters


def loss_kind(model: nn.Module) -> LossKind | None:
    """What the loss of a model is taken of; ``None`` for a model without a head, or with one of another task.

    A head that would serve a decoder and sits on attention in both directions is that of a masked LM in the families that have
    a field for it (XLM, Flaubert, the BERT family); of others (XLNet) no loss is known.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    generates = bool(getattr(model, "can_generate", lambda: False)())
    if getattr(config, "is_encoder_decoder", False):
        return "target token" if generates else None
    if isinstance(model, PreTrainedModel) and generates and not is_causal_lm(model):
        fields = (getattr(config, "causal", None), getattr(config, "is_decoder", None))
        return "masked token" if False in fields else None
    if generates:
        return "next token"
    if name.endswith("ForMaskedLM"):
        return "masked token"
    return "class" if name.endswith(("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")) else None


def guess_warning(model: nn.Module, loss: float | None, *, text: str = "") -> str:
    """A sentence where a loss over tokens (of ``text``), in nats, is above that of a guess among all; empty otherwise."""
    config = getattr(model, "config", None)
    words = getattr(config.get_text_config(), "vocab_size", None) if isinstance(config, PreTrainedConfig) else None
    if loss is None or loss_kind(model) in (None, "class") or not isinstance(words, int) or not loss > math.log(max(words, 1)):
        return ""
    return (
        f"A loss of {loss:.3f} nats{f' on {text}' if text else ''} is above that of a guess among all {words:,} tokens, "
        f"{math.log(words):.3f}: the model was not trained on such text, or not at all. Rates and losses may be others on text "
        "of its own kind."
    )


def hide_tokens(
    tokens: Tensor, free: Tensor, mask_token: int, *, share: float = HIDDEN_SHARE, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Samples of a masked-LM loss: some tokens of each sample, drawn without replacement, all become the mask token.

    Args:
        tokens: int64 ``(samples, seq_len)``.
        free: boolean of the same shape: which of them may be hidden; padding and special tokens may not.
        share: of the free tokens of a sample, in (0, 1], to the nearest whole number, and at least one if there is any.

    Returns:
        The tokens with the hidden ones replaced, and the targets: the token where one is hidden, :data:`IGNORED` elsewhere.
    """
    if not 0 < share <= 1:
        raise ConfigurationError(f"share of masked positions must be above 0 and at most 1, got {share}")
    number = free.sum(1, keepdim=True)
    if not bool((number > 0).any()):
        raise ConfigurationError("the samples hold special and unknown tokens alone, and none that could be hidden")
    draws = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)).to(tokens.device)
    rank = draws.masked_fill(~free, 2.0).argsort(dim=1).argsort(dim=1)
    hidden = free & (rank < (share * number).round().clamp(min=1))
    return tokens.masked_fill(hidden, mask_token), tokens.masked_fill(~hidden, IGNORED)


def cross_entropies(logits: Tensor, targets: Tensor, by: LogitMap | FewWords | None = None) -> Tensor:
    """Cross-entropy in nats of each token under the logits at its index; for the next token, targets are shifted by the caller.

    ``logits`` are ``(batch, length, vocab_size)``, or hidden states of which they are made ``by`` a map; ``targets`` int64
    ``(batch, length)`` on any device; the result is float32 (float64 for float64 logits), 0 where a target is :data:`IGNORED`.
    """
    wanted = targets.to(logits.device)
    if by is not None:
        scored = wanted != IGNORED
        states = logits[scored]
        found = (by.log_sum_exp(states) - by.of(states, wanted[scored])).clamp_min(0.0)  # below it by rounding alone
        return found.new_zeros(wanted.shape).masked_scatter(scored, found)
    dtype = torch.promote_types(logits.dtype, torch.float32)

    def losses(part: Tensor, own: Tensor) -> Tensor:
        rows = part.to(dtype).flatten(0, -2)
        return torch.nn.functional.cross_entropy(rows, own.flatten(), reduction="none", ignore_index=IGNORED).view_as(own)

    if logits.requires_grad:
        return losses(logits, wanted)
    # A part at a time, of samples or of one sample: copies of all logits would take twice what the logits do.
    some, tokens = (tokens_at_once(logits, tokens=each) for each in (logits.shape[1], 1))
    parts = zip(logits.split(some), wanted.split(some), strict=True)
    pieces = (zip(part.split(tokens, 1), own.split(tokens, 1), strict=True) for part, own in parts)
    return torch.cat([torch.cat([losses(*piece) for piece in of_samples], 1) for of_samples in pieces])


TILE, COLUMNS = 2**19, 2048
"""Logits of a tile, 2 MiB of float32, and tokens of one; a larger vocabulary is taken in several."""

LEAST_SHARE = 1e-5
"""Of all tokens at some position: what a token has at least that is one of :class:`FewWords`."""

MANY_WORDS = 2**16
"""Vocabulary from which on a processor makes no logits where losses are taken of them: to write and read all of them takes as
long as a third of the products."""


@dataclasses.dataclass(frozen=True, eq=False)
class LogitMap:
    """The linear map from hidden states to logits: weight ``(vocab_size, hidden_size)``, bias ``(vocab_size,)`` or ``None``;
    and whether changes are multiplied in bfloat16."""

    weight: Tensor
    bias: Tensor | None = None
    coarse: bool = False

    def tiles(self, hidden: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Rows, tokens, and their logits, tile by tile, of hidden ``(n, width)``."""
        rows = max(1, TILE // min(COLUMNS, len(self.weight)))
        for start in range(0, len(self.weight), COLUMNS):
            columns = slice(start, start + COLUMNS)
            weight = self.weight[columns].to(hidden.dtype)
            bias = None if self.bias is None else self.bias[columns].to(hidden.dtype)
            for first in range(0, len(hidden), rows):
                chosen = slice(first, first + rows)
                yield chosen, columns, nn.functional.linear(hidden[chosen], weight, bias)

    def log_sum_exp(self, hidden: Tensor, likeliest: Tensor | None = None) -> Tensor:
        """Log-sum-exp of the logits, ``(n,)`` for hidden states ``(n, width)``; ``likeliest``, int64 ``(n,)``, becomes the
        tokens of the largest."""
        total, most = hidden.new_zeros(len(hidden)), hidden.new_full((len(hidden),), -math.inf)
        for rows, columns, logits in self.tiles(hidden):
            if likeliest is None:
                largest = logits.amax(-1)
            else:
                largest, token = logits.max(-1)
                likeliest[rows] = torch.where(largest > most[rows], columns.start + token, likeliest[rows])
            top = torch.maximum(largest, most[rows])
            total[rows] = total[rows] * (most[rows] - top).exp() + logits.sub_(top[:, None]).exp_().sum(-1)
            most[rows] = top
        return total.log() + most

    def of(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The logit of one token of each, ``(n,)``."""
        own = torch.linalg.vecdot(hidden, self.weight[tokens].to(hidden.dtype))
        return own if self.bias is None else own + self.bias[tokens].to(own.dtype)

    def log_sum_exp_changes(self, hidden: Tensor, log_sum_exp: Tensor, moved: Tensor) -> Tensor:
        """Changes ``(edits, n)`` of the log-sum-exp of hidden ``(n, width)`` moved by ``(edits, n, width)``: of the logits
        unedited, and the products in bfloat16 of the changes and the weight."""
        rounded = moved.to(torch.bfloat16)
        total = hidden.new_zeros(1 + len(moved), len(hidden))
        for rows, columns, logits in self.tiles(hidden):
            logits -= log_sum_exp[rows, None]
            weight = self.weight[columns].to(torch.bfloat16)  # every time: all at once are half a model of many tokens
            total[0, rows] += logits.exp().sum(-1)
            for edit, change in enumerate(rounded, 1):
                total[edit, rows] += (logits + nn.functional.linear(change[rows], weight)).exp_().sum(-1)
        return (total[1:] / total[0]).log()


class FewWords:
    """A map to logits of the tokens that have :data:`LEAST_SHARE` or more at some position; all others together keep the share
    that they have at each.

    Args:
        states: hidden ``(batch, length, width)`` of the model as it is, which those of a changed one are compared with.
        targets: int64 ``(batch, length)``; :data:`IGNORED` where nothing is scored.
    """

    @torch.no_grad()
    def __init__(self, logits: LogitMap, states: Tensor, targets: Tensor) -> None:
        hidden, self.of = states[targets.to(states.device) != IGNORED], logits.of
        every, largest = logits.log_sum_exp(hidden), hidden.new_full((len(logits.weight),), -math.inf)
        for rows, columns, made in logits.tiles(hidden):
            largest[columns] = torch.maximum(largest[columns], (made - every[rows, None]).amax(0))
        chosen = largest >= math.log(LEAST_SHARE)
        self.few = LogitMap(logits.weight[chosen], None if logits.bias is None else logits.bias[chosen])
        self.others = every - self.few.log_sum_exp(hidden)

    def log_sum_exp(self, hidden: Tensor) -> Tensor:
        """Of the same positions, ``(n, width)``, of a changed model."""
        return self.few.log_sum_exp(hidden) + self.others


_makes_logits: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def without_logits(model: nn.Module) -> Iterator[LogitMap | None]:
    """Within it, the logits that a model gives are what its head reads, and the map is given; ``None`` where they are logits.

    They stay logits in half precision, on accelerators, with less than :data:`MANY_WORDS`, and where a forward shows that
    something follows the head. It runs once for a model, where the block is entered: nothing else may watch the model there.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or head.out_features < MANY_WORDS or head.weight.device.type != "cpu":
        yield None
        return
    if model not in _makes_logits:
        made = list[Tensor]()
        hook = head.register_forward_hook(lambda module, inputs, output: made.append(output.clone()))
        with contextlib.suppress(Exception), torch.no_grad():  # what reads no such tokens has no logits of this kind
            ids = torch.tensor([[7, 11]])  # padding may be all zeros, of which any cap makes zeros
            logits = model(input_ids=ids).logits
            _makes_logits[model] = len(made) == 1 and torch.equal(made[0], logits) and head.weight.dtype.itemsize >= 4
        hook.remove()
    if not _makes_logits.setdefault(model, False):
        yield None
        return
    own = vars(head)
    before = {name: own[name] for name in ("forward",) if name in own}
    own["forward"] = lambda states: states
    try:
        yield LogitMap(head.weight.detach(), None if head.bias is None else head.bias.detach())
    finally:
        del own["forward"]
        own.update(before)


def tokens_at_once(logits: Tensor, *, tokens: int = 1) -> int:
    """How many tokens, or runs of so many, have few enough logits to be turned into losses at once; one at least."""
    most = ON_A_CPU if logits.device.type == "cpu" else LOGITS_AT_ONCE
    return max(1, most // max(1, tokens * logits.shape[-1]))


LISTED = 5


def class_targets(model: PreTrainedModel, labels: Sequence[str | int | None], corpus: str) -> Tensor | None:
    """Class numbers, int64 ``(samples,)``, :data:`IGNORED` where a sample has no label; ``None`` where no loss can be taken.

    A label is a name of the model's ``id2label``, one of the names between its commas, or the number of a class; upper and
    lower case are the same, and so are ``_`` and a space. One that the model has not, or has twice, is an :class:`InputError`.
    """
    config = model.config
    if loss_kind(model) != "class" or all(label is None for label in labels):
        return None
    if getattr(config, "problem_type", None) not in (None, "single_label_classification") or config.num_labels < 2:
        return None
    classes = {int(number): str(name) for number, name in config.id2label.items()}
    parts: dict[str, set[int]] = {}
    for number, name in classes.items():
        for part in name.split(","):
            parts.setdefault(_plain(part), set()).add(number)
    numbers = {str(number): {number} for number in classes}
    known = numbers | parts | {_plain(name): {number} for number, name in classes.items()}  # a whole name means its own class
    return torch.tensor([IGNORED if label is None else _number(str(label), known, classes, corpus) for label in labels])


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").casefold().split())


def _number(label: str, known: Mapping[str, set[int]], classes: Mapping[int, str], corpus: str) -> int:
    numbers = sorted(known.get(_plain(label), ()))
    if len(numbers) == 1:
        return numbers[0]
    if numbers:
        listed = ", ".join(f"{number} ({classes[number]})" for number in numbers[:LISTED])
        raise InputError(f"corpus {corpus!r}: label {label!r} stands for several classes, {listed}; use the number")
    listed = ", ".join(list(classes.values())[:LISTED]) + (", …" if len(classes) > LISTED else "")
    raise InputError(
        f"corpus {corpus!r}: label {label!r} is none of the model's {len(classes)} classes ({listed}); a class is its name or "
        f"its number, 0 to {max(classes)}. Files that lie at the top of a folder have none, and no loss is taken of them"
    )
