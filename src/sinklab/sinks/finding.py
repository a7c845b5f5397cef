"""Finding sinks: a pass over some texts that finds them, and one that measures what every head gives to the main one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from sinklab.attention.anatomy import require_module
from sinklab.attention.call import PARTS, AttentionCall, Part, Statistics
from sinklab.attention.chosen_keys import scores_of_keys, stands_on_no_key, weights_of_keys
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.attention.maps import Names, picture_names, shared_names
from sinklab.attention.operation import repeat_groups, row_share
from sinklab.attention.positions import rows_of
from sinklab.attention.probe import Watcher, filled
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, InputError
from sinklab.results.progress import warn
from sinklab.sinks.finder import SinkFinder
from sinklab.sinks.short_rows import short_rows_warning
from sinklab.sinks.value import Head, Sink, SinkPlace, Sinks, sink_at


def share_of_sink(sinks: Sinks, call: AttentionCall, statistics: Statistics) -> Tensor | None:
    """Share of every row on the main sink, ``(batch, num_heads, q_len)``; ``None`` without one, or where the call lacks it."""
    if sinks.main is None:
        return None
    if sinks.main.kind == "null":
        return statistics.null_mass
    share = weights_of_keys(call, sinks.all_keys(call), statistics.log_sum_exp).sum(-1)
    if not call.operation.normalized:
        share = row_share(share, filled(statistics, "row_mass")[0], call.operation)
    return share


class SinkWeights(Watcher):
    """What every self-attention head (of ``part``) gives to the main one of known sinks, and how long its value is."""

    name, needs = "sink_weights", frozenset({"mass", "log_sum_exp"})

    def __init__(self, sinks: Sinks, *, part: Part = "") -> None:
        self.given, self.part = sinks, part
        self._sums: dict[str, tuple[list[Head], Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        main = self.given.main
        if main is None or (call.site.part != self.part if self.part else call.site.kind != "self"):
            return
        share = share_of_sink(self.given, call, statistics)
        if share is None:
            return
        norms = repeat_groups(call.values, call.groups).double().norm(dim=-1)
        at = main.mask(call.key_positions, call.key_documents, call.key_tokens)
        real = call.key_positions >= 0
        if main.kind == "null":
            queries = call.counted[:, None]
            null = call.null_value
            own = torch.zeros(call.num_heads) if null is None else null.double().norm(dim=-1).expand(call.num_heads)
            own_count = torch.ones(call.num_heads)
        else:
            index = self.given.all_keys(call)
            places = call.key_positions.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
            standing = (places == call.query_positions[..., None]).any(-1)
            if stands_on_no_key(call):
                standing = torch.zeros_like(standing)
            queries = scores_of_keys(call, index)[1].any(-1) & (call.counted & ~standing)[:, None]
            own = norms.masked_fill(~at[:, None], 0.0).sum((0, 2))
            own_count = at.sum().expand(call.num_heads)
        rest = (real & ~at)[:, None]
        numbers = torch.stack([
            part.double().cpu()
            for part in (
                share.double().masked_fill(~queries, 0.0).sum((0, 2)), queries.expand(share.shape).sum((0, 2)), own, own_count,
                norms.masked_fill(~rest, 0.0).sum((0, 2)), rest.sum().expand(call.num_heads),
            )
        ])  # fmt: skip
        heads, known = self._sums.get(call.site.module, ([], torch.zeros(6, call.num_heads, dtype=torch.float64)))
        if main.kind == "null" and heads:  # one value for all calls
            numbers[2:4] = 0.0
        heads = heads or [Head(call.site.layer, number, call.site.module) for number in range(call.num_heads)]
        self._sums[call.site.module] = (heads, known + numbers)

    def completed(self) -> Sinks:
        """The sinks with the numbers of all heads; a head none of whose queries sees the sink has NaN."""
        heads = [head for heads, _ in self._sums.values() for head in heads]
        sums = np.concatenate([sums.numpy() for _, sums in self._sums.values()], axis=1)
        share, queries, own, own_count, rest, rest_count = sums
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = share / queries
            others = rest / rest_count
            ratio = np.where(others > 0, own / np.maximum(own_count, 1.0) / others, np.nan)
        main = self.given.main
        assert main is not None
        if main.mass is None and queries.sum():
            main = dataclasses.replace(main, mass=float(share.sum() / queries.sum()))
        return dataclasses.replace(
            self.given, sinks=(main, *self.given.sinks[1:]), heads=tuple(heads), weights=weights, value_ratio=ratio
        )


@torch.no_grad()
def find_sinks(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Tensor] | Sequence[str],
    *,
    tokenizer: Any = None,
    threshold: float = 0.3,
    place: SinkPlace | Literal["find"] | None = "find",
    groups: Sequence[Tensor] | None = None,
    batch_size: int = 16,
    decode: Callable[[int], str] | None = None,
    corpus: str | None = None,
    bos: int | None = None,
    names: Names | None = None,
    together: Mapping[str, Sequence[int]] | None = None,
    part: Part = "",
) -> Sinks:
    """Find the sinks of a model on some texts, and what every head gives to the main one.

    A warning says so where every sample is so short that a head of a decoder that looks at all keys alike would sink.

    Args:
        model: or what ``load_model`` gives, with its tokenizer.
        inputs: token ids ``(samples, seq_len)``, the model's inputs by name, the samples along the first axis, or texts.
        tokenizer: reads texts, and names tokens if ``decode`` does not.
        threshold: mean weight above which a head sinks in a document, in [0, 1).
        place: what to measure instead of searching; ``None`` for a model without a sink.
        groups: numbers of the samples of each domain, looked at apart for ``tried``; all of them together by default.
        batch_size: samples per forward.
        decode: token id to text.
        corpus, bos: of the texts, for the record.
        names, together: see :class:`SinkFinder`; patches of pictures among texts are named by themselves.
        part: of an encoder–decoder, ``encoder``, ``decoder`` or ``cross-attention``, whose sinks are meant. Without it all
            self-attention is looked at together, and position 3 is that of the source and that of the target.

    Raises:
        ConfigurationError: a place that these texts and this model do not have, or a part that the model does not have.
        InputError: no samples, samples without tokens, or nothing but padding.
    """
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    model = require_module(model)
    if decode is None and tokenizer is not None:
        decode = lambda token: str(tokenizer.decode([token]))  # noqa: E731
    if not isinstance(inputs, Tensor | Mapping):
        inputs = _ids_of(inputs, tokenizer)
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    for name, tensor in inputs.items():
        if not tensor.numel() or (name == "attention_mask" and not tensor.any()):
            raise InputError(f"{name} of shape {tuple(tensor.shape)} holds no token; give at least one sample with a token")
    number = len(inputs.get("input_ids", next(iter(inputs.values()))))
    names = shared_names(picture_names(getattr(model, "config", None), inputs)) if names is None else names
    finders: list[SinkFinder] = []
    for rows in groups or [torch.arange(number)]:
        finders.append(SinkFinder(threshold, part=part, names=names, together=together))
        with attend(model, [finders[-1]], verify=len(finders) == 1):
            _run(model, inputs, rows, batch_size)
    if part and not finders[0].windowed()[1]:
        raise ConfigurationError(
            f"`part` {part!r}: {type(model).__name__} showed no attention of such a part; parts are those of an "
            f"encoder–decoder ({', '.join(PARTS)})"
        )
    whole = SinkFinder(threshold, part=part, names=names, together=together)
    for finder in finders:
        whole.merge(finder)
    sinks = dataclasses.replace(whole.sinks(decode=decode, corpus=corpus, bos=bos), tried=_tried(finders))
    if _hears_padding(model, inputs):
        warn(f"find_sinks: {type(model).__name__} gives a row padded in front other logits than the row alone; pad behind it")
    if place != "find":
        sinks = _placed(sinks, place, whole, inputs)
    elif short := short_rows_warning(sinks.length, threshold):
        decoder = "input_ids" in inputs and isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder
        if decoder and not looks_ahead(model):
            warn(f"find_sinks: {short}")
    if sinks.main is None:
        unknown = np.full(len(sinks.heads), np.nan)
        return dataclasses.replace(sinks, weights=unknown, value_ratio=unknown)
    return weigh_sinks(model, inputs, sinks, batch_size=batch_size, part=part)


def _ids_of(texts: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
    """Ids of texts, padded behind."""
    if isinstance(texts, str) or not texts or tokenizer is None:
        raise InputError(
            "`inputs` are token ids, tensors by name, or a list of texts, which a tokenizer must read: `tokenizer`"
        )
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    masks = [torch.ones_like(row) for row in rows]
    return {"input_ids": pad_sequence(rows, batch_first=True), "attention_mask": pad_sequence(masks, batch_first=True)}


def _tried(finders: Sequence[SinkFinder]) -> tuple[tuple[int | Literal["null"], float], ...]:
    """Positions and the null score with the largest share that a head gives to them in any domain, the largest first."""
    largest: dict[int | Literal["null"], float] = {}
    for finder in finders:
        largest |= {key: max(share, largest.get(key, 0.0)) for key, share in finder.tried().items()}
    return tuple(sorted(largest.items(), key=lambda pair: -pair[1]))


@torch.no_grad()
def weigh_sinks(
    model: nn.Module, inputs: Mapping[str, Tensor], sinks: Sinks, *, batch_size: int = 16, part: Part = ""
) -> Sinks:
    """The same sinks with what every head gives to the main one on these texts, and how long the value is that stands there.

    ``inputs`` are those of the model by name, the samples along the first axis; ``batch_size`` is of samples per forward.
    """
    measured = SinkWeights(sinks, part=part)
    with attend(model, [measured], verify=False):
        _run(model, inputs, torch.arange(len(inputs.get("input_ids", next(iter(inputs.values()))))), batch_size)
    return measured.completed()


def _run(model: nn.Module, inputs: Mapping[str, Tensor], rows: Tensor, batch_size: int) -> None:
    for chosen in rows.split(batch_size):
        model(**lean_arguments(model, rows_of(inputs, chosen)))


def _hears_padding(model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether padding in front of a text moves its last logits: as columns that are counted, or in a state or a block."""
    mask = inputs.get("attention_mask")
    if mask is None or inputs.keys() != {"input_ids", "attention_mask"} or not bool((mask[:, 0] < mask[:, -1]).any()):
        return False
    row = (mask[:, -1] - mask[:, 0]).argmax()[None]
    padded, alone = rows_of(inputs, row), {"input_ids": inputs["input_ids"][row][mask[row].bool()][None]}
    moved, last = (model(**lean_arguments(model, given))[0][0, -1].double() for given in (padded, alone))
    return bool((moved - last).abs().max() > (1e-2 if next(model.parameters()).dtype.itemsize > 2 else 0.5) * last.std())


def _placed(sinks: Sinks, place: SinkPlace | None, finder: SinkFinder, inputs: Mapping[str, Tensor]) -> Sinks:
    """The same with a given main sink; the others that were found come after it."""
    if place is None:
        return dataclasses.replace(sinks, sinks=(), followed=(), weak=(), silent=())
    given, null = sink_at(place), finder.has_null
    known = {"position": 0 <= (given.position or 0) < sinks.length, "null": null, "token": "input_ids" in inputs}
    known["group"] = bool(given.positions) and min(given.positions) >= 0 and max(given.positions) < sinks.length
    if not known[given.kind]:
        has = f"positions 0 to {sinks.length - 1} and {'a null score' if null else 'not a null score in every module'}"
        raise ConfigurationError(f"place {given.place!r}: no such place; on these texts the model has {has}")
    same = [sink for sink in sinks.sinks if sink.place == given.place]
    others = tuple(sink for sink in sinks.sinks if sink.place != given.place)
    return dataclasses.replace(sinks, sinks=(given if isinstance(place, Sink) or not same else same[0], *others))
