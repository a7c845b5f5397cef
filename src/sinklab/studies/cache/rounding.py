"""A quantised cache, measured: what integers cost in loss, by bits and by the tokens that stay in full precision."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.forward_arguments import cache_argument
from sinklab.attention.placement import input_device
from sinklab.attention.session import Session
from sinklab.models.lengths import trained_length
from sinklab.models.loading import LoadedModel
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.results.intervals import rare_cost
from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.cache import QuantizedEntry
from sinklab.results.table import make_table
from sinklab.sinks import find_sinks
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.limits import most_slots
from sinklab.streaming.perplexity import estimate, losses
from sinklab.streaming.quantized import read_bits
from sinklab.studies.export.chosen import INTEGER_MARGIN

__all__ = ["must_stay_whole", "quantized_caches", "quantized_table", "require_quantized"]

GAP = Metric(
    "cache_quantization_gap",
    "nats",
    "Mean next-token loss with a cache of integers, less that with the same cache in the model's dtype; of the same tokens.",
)
BYTES = Metric(
    "cache_bytes_ratio",
    "ratio",
    "Bytes of a cache of integers over those of the same cache in the model's dtype.",
    range=(0.0, float("inf")),
)

READ = 64
"""Most tokens read at once, and an eighth of a short text: they see each other unrounded, and a decoder's do not."""

FIRST = (0, 1, 2, 3)
"""Tokens that stay whole without a look at the model."""

FOUND_IN = 256
"""Tokens of a text in which sinks and largest activations are looked for."""


def quantized_caches(
    loaded: LoadedModel, rows: Tensor, kinds: Sequence[str], budget: int, *, progress: Progress = silent
) -> list[QuantizedEntry]:
    """Loss with a cache of integers less the loss with one in the model's dtype, text by text.

    All tokens of a text (as many as the model was trained on) are held, so that rounding is all that differs, with nothing,
    the first four tokens, the sinks that are found or the tokens of the largest activations in full precision; and then
    ``budget`` tokens are held besides the sinks, of the whole text. Where layers have a window, both are as many as the
    narrowest one sees besides the pinned tokens. Tokens whose group is not full are never rounded.

    Args:
        rows: texts, int64 ``(documents, tokens)``.
        kinds: see :data:`~sinklab.streaming.quantized.BITS`.

    Raises:
        ConfigurationError: bits that do not exist.
        UnsupportedModelError: a model whose keys cannot be kept in slots.
    """
    for kind in kinds:
        read_bits(kind)
    model, most = loaded.model, most_slots(loaded.model)
    short = rows[:, : min(rows.shape[1], trained_length(model) or rows.shape[1], most or rows.shape[1])]
    sinks = tuple(find_sinks(model, short[:, :FOUND_IN]).positions_in_text)
    whole: dict[str, tuple[int, ...]] = {
        "nothing": (),
        "the first 4 tokens": FIRST,
        "the sinks found": sinks,
        "the largest activations": _largest(model, short[:, :FOUND_IN]),
    }
    if most is not None:  # slots of pinned tokens and of the one at hand are among those that the narrowest layer sees
        short = short[:, : most - 1 - max(map(len, whole.values()))]
        budget = min(budget, most - 1 - len(sinks))
    cells = [(names, pinned, short.shape[1], short) for pinned, names in _by_positions(whole).items()]
    cells.append((_by_positions(whole)[sinks], sinks, budget, rows))
    entries: list[QuantizedEntry] = []
    exact: dict[tuple[int, int], Tensor] = {}
    total = len(cells) * len(kinds)
    for names, pinned, window, texts in cells:
        policy = Pinned(pinned=pinned, window=window) if pinned else SinkWindow(num_sinks=0, window=window)
        chunk = max(1, min(READ, texts.shape[1] // 8))
        # Where all tokens are held, what is pinned makes no difference but to what is rounded.
        # A window of the trained length is not that case: the texts are longer.
        case = (window, texts.shape[1])
        if case not in exact:
            exact[case] = losses(model, texts, policy, chunk=chunk)
        unrounded = _bytes(model, policy, texts, None)
        for kind in kinds:
            rounded = losses(model, texts, policy, chunk=chunk, quantized=kind)
            gap = estimate(rounded - exact[case])
            entries.append(
                {
                    "quantized": kind, "whole": names, "positions": list(pinned), "window": None if texts is short else window,
                    "tokens": texts.shape[1], "gap": {"mean": gap.mean, "low": gap.low, "high": gap.high},
                    "bytes_ratio": _bytes(model, policy, texts, kind) / unrounded,
                }
            )  # fmt: skip
            progress("quantised caches", len(entries), total)
    return entries


def must_stay_whole(entries: Sequence[QuantizedEntry], texts: int | None = None) -> str:
    """Which tokens must stay in full precision, a sentence for each number of bits.

    The fewest tokens are named with which rounding the others moves the loss by at most ``INTEGER_MARGIN``: the whole interval,
    on either side, since a loss that falls by rounding is a change and no gain. All tokens are held there.

    Args:
        texts: that were measured, to say how rare a cost may be of which none of them shows anything.
    """
    whole = [entry for entry in entries if entry["window"] is None]
    said = [
        _must_stay(kind, [entry for entry in whole if entry["quantized"] == kind])
        for kind in dict.fromkeys(entry["quantized"] for entry in entries)
    ]
    if texts is not None and any(_most(entry) <= INTEGER_MARGIN for entry in whole):
        said.append(rare_cost(texts))
    return " ".join(said)


def _most(entry: QuantizedEntry) -> float:
    """How far from 0 the interval of a gap reaches."""
    ends = (entry["gap"]["low"], entry["gap"]["high"])
    return max(float("inf") if end is None else abs(end) for end in ends)


def _must_stay(kind: str, entries: Sequence[QuantizedEntry]) -> str:
    within = [entry for entry in entries if _most(entry) <= INTEGER_MARGIN]
    if not within:
        return (
            f"{kind}: no tokens are shown that keep the change of the loss within {INTEGER_MARGIN:g} nats per token if they "
            "stay in full precision; more texts make intervals shorter."
        )
    fewest = min(within, key=lambda entry: len(entry["positions"]))
    change = f"the loss changes by {_most(fewest):.4f} nats per token at most"
    if not fewest["positions"]:
        return f"{kind}: no token must stay in full precision; {change}."
    nothing = next((_most(entry) for entry in entries if not entry["positions"]), None)
    besides = "" if nothing is None else f", with nothing in full precision perhaps by {nothing:.4f}"
    places = f"position{'s' if len(fewest['positions']) > 1 else ''} {', '.join(map(str, fewest['positions']))}"
    return f"{kind}: keep {places} ({fewest['whole']}) in full precision; {change}{besides}."


def require_quantized(model: PreTrainedModel, kinds: Sequence[str]) -> None:
    """Refuse at once a model whose keys cannot be kept as integers, or whose attention cannot be seen, to find its sinks.

    Raises:
        ConfigurationError: bits that do not exist.
        UnsupportedModelError: such a model.
    """
    for kind in kinds:
        PolicyCache(Pinned(pinned=FIRST, window=2), model, quantized=kind)  # the least that is measured
    Session(model)  # which is how sinks are found


def _by_positions(whole: dict[str, tuple[int, ...]]) -> dict[tuple[int, ...], str]:
    """Sets of positions, each once, and what they are."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, positions in whole.items():
        names.setdefault(positions, []).append(name)
    return {positions: ", ".join(those) for positions, those in names.items()}


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


def quantized_table(
    entries: Sequence[QuantizedEntry],
    loaded: LoadedModel,
    *,
    documents: int,
    corpus: str,
    bos: bool,
    run_id: str,
    seed: int,
) -> pd.DataFrame:
    """The entries in the long schema; ``policy`` says what is held, in which bits, and what of it is whole.

    Args:
        documents: texts that each entry was measured on.
    """
    rows: list[Row] = []
    for entry in entries:
        held = "all tokens" if entry["window"] is None else f"window of {entry['window']}"
        of_cache: Coordinates = {"policy": f"{entry['quantized']}, {held}, whole: {entry['whole']}"}
        scored = documents * (entry["tokens"] - 1)  # nothing predicts the first token of a text
        rows.append({**of_cache, "metric": GAP, "value": entry["gap"]["mean"], "count": scored})
        rows.append({**of_cache, "metric": BYTES, "value": entry["bytes_ratio"], "count": 1})
    return make_table(
        rows, run_id=run_id, model=loaded.name, revision=loaded.revision, operation=loaded.operation, corpus=corpus,
        bos=int(bos), seed=seed, probe="quantized_caches",
    )  # fmt: skip
