"""A quantised cache, measured: what integers cost in loss, by bits and by the tokens that stay in full precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.host_arguments import cache_argument
from sinklab.attention.modules import input_device
from sinklab.attention.session import Session
from sinklab.models.loading import LoadedModel
from sinklab.models.positions import trained_length
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.results.progress import Progress, silent
from sinklab.sinks import find_sinks
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.limits import most_slots
from sinklab.streaming.perplexity import estimate, losses
from sinklab.studies.cache.found import Difference, QuantizedEntry

READ = 64
"""Most tokens read at once, and an eighth of a short text: they see each other unrounded, and a decoder's do not."""

FIRST = (0, 1, 2, 3)
"""Tokens that stay whole without a look at the model."""

FOUND_IN = 256
"""Tokens of a text in which sinks and largest activations are looked for."""


def require_quantized(model: PreTrainedModel, kinds: Sequence[str]) -> None:
    """Refuse at once a model whose keys cannot be kept as integers, or whose attention cannot be seen, to find its sinks."""
    for kind in kinds:
        PolicyCache(Pinned(pinned=FIRST, window=2), model, quantized=kind)  # the least that is measured
    Session(model)  # which is how sinks are found


def quantized_caches(
    loaded: LoadedModel, rows: Tensor, kinds: Sequence[str], budget: int, *, progress: Progress = silent
) -> list[QuantizedEntry]:
    """Loss with a cache of integers less the loss with one in the model's dtype, text by text, int64 ``(documents, tokens)``.

    All tokens of a text (as many as the model was trained on) are held, so that rounding is all that differs, with nothing,
    the first four tokens, the sinks that are found or the tokens of the largest activations in full precision; and then
    ``budget`` tokens are held besides the sinks, of the whole text. Where layers have a window, both are as many as the
    narrowest one sees besides the pinned tokens. Tokens whose group is not full are never rounded.
    """
    model, most = loaded.model, most_slots(loaded.model)
    short = rows[:, : min(rows.shape[1], trained_length(model) or rows.shape[1], most or rows.shape[1])]
    sinks = tuple(find_sinks(model, short[:, :FOUND_IN]).positions_in_text)
    whole = [
        ("nothing", ()), ("the first 4 tokens", FIRST), ("the sinks found", sinks),
        ("the largest activations", _largest(model, short[:, :FOUND_IN])),
    ]  # fmt: skip
    names: dict[tuple[int, ...], list[str]] = {}
    for name, positions in whole:
        names.setdefault(positions, []).append(name)
    if most is not None:  # slots of pinned tokens and of the one at hand are among those that the narrowest layer sees
        short = short[:, : most - 1 - max(map(len, names))]
        budget = min(budget, most - 1 - len(sinks))
    cells = [(pinned, short.shape[1], short) for pinned in names]
    cells.append((sinks, budget, rows))
    entries: list[QuantizedEntry] = []
    exact: dict[tuple[int, int], Tensor] = {}
    for pinned, window, texts in cells:
        policy = Pinned(pinned=pinned, window=window) if pinned else SinkWindow(num_sinks=0, window=window)
        tokens = texts.shape[1]
        chunk = max(1, min(READ, tokens // 8))
        # Where all tokens are held, what is pinned makes no difference but to what is rounded.
        # A window of the trained length is not that case: the texts are longer.
        if (window, tokens) not in exact:
            exact[window, tokens] = losses(model, texts, policy, chunk=chunk)
        unrounded = _bytes(model, policy, texts, None)
        for kind in kinds:
            gap = estimate(losses(model, texts, policy, chunk=chunk, quantized=kind) - exact[window, tokens])
            held, ratio = None if texts is short else window, _bytes(model, policy, texts, kind) / unrounded
            difference = Difference(gap.mean, gap.low, gap.high)
            entries.append(QuantizedEntry(kind, ", ".join(names[pinned]), list(pinned), held, tokens, difference, ratio))
            progress("quantised caches", len(entries), len(cells) * len(kinds))
    return entries


@torch.no_grad()
def _largest(model: PreTrainedModel, rows: Tensor) -> tuple[int, ...]:
    """Positions at which the largest coordinate of any hidden state stands in at least a quarter of the texts, four at most."""
    where = []
    for row in rows:
        states = model(row[None].to(input_device(model)), output_hidden_states=True, use_cache=False).hidden_states
        # The last one has been through the final norm, which hides what is large.
        where.append(torch.stack([state[0].abs().amax(dim=-1) for state in states[:-1]]).amax(dim=0).argmax())
    positions, counts = torch.stack(where).cpu().unique(return_counts=True)
    often = counts * 4 >= len(rows)
    return tuple(sorted(positions[often][counts[often].argsort(descending=True)][:4].tolist()))


@torch.no_grad()
def _bytes(model: PreTrainedModel, policy: Pinned | SinkWindow, rows: Tensor, kind: str | None) -> int:
    """Bytes of a cache for one text, as allocated."""
    cache = PolicyCache(policy, model, quantized=kind)
    model(rows[:1, :1].to(input_device(model)), **cache_argument(model, cache), use_cache=True)
    return cache.bytes_held()
