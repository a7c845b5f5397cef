"""from_weights(): the numbers of a session for attention weights that somebody already has, from any library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import Site
from sinklab.attention.positions import Positions
from sinklab.attention.probe import Probe
from sinklab.attention.returned import UNAVAILABLE, GivenCall, RowSums, find_fault, given_call, reach
from sinklab.attention.session import table_of
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal, Dense, Everything, Visibility, Window
from sinklab.configuration import check_numbers
from sinklab.errors import ConfigurationError, InputError
from sinklab.probes._shared import SinkProbe
from sinklab.registry import probes as registry
from sinklab.results.blocks import counted
from sinklab.results.environment import require_number
from sinklab.results.progress import warn
from sinklab.sinks import SinkFinder, Sinks, SinkWeights
from sinklab.sinks.short_rows import few_queries_warning
from sinklab.studies.measure.probing import make_probe, make_probes, require_positions

if TYPE_CHECKING:
    import pandas as pd

TIER = "from given weights"
"""Column ``tier`` of the table."""

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"

_SHAPES = "(queries, keys), (heads, q, k), (layers, heads, q, k) or (layers, samples, heads, q, k)"
_EXPECTED = "expected floating-point weights between 0 and 1, of 16 bits or more: divide integers by what stands for 1"
_HINTS = {
    "number": "weights are finite; where a mask left NaN in rows of padding, say which tokens these are with `attention_mask`",
    "negative": "weights are 0 or more: give what comes after the softmax, and of signed operations the absolute values",
    "future": "which comes later: give causal=False for attention in both directions",
    "hidden": "which it does not see under `window` and `attention_mask`: correct them, or leave them out",
    "sum": "and not to 1: give row_sums='null_mass' if the rest goes to no key (a learned sink logit), row_sums='any' if rows "
    "have no fixed sum (sigmoid), `attention_mask` if the row is padding, `tolerance` if the weights were rounded",
}
"""What to do about a :class:`~sinklab.attention.returned.Fault`, by kind."""


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredWeights:
    """What was measured of given weights: the long table, whose column ``tier`` is :data:`TIER`, and where the sinks are.

    ``sinks`` has what every head gives to the main one; value ratios are not known. ``shape`` says how the array was read:
    layers,
    samples, heads of a layer (the most), queries, keys.
    """

    table: pd.DataFrame
    sinks: Sinks
    shape: tuple[int, int, int, int, int]

    def __repr__(self) -> str:
        names = ("layer", "sample", "head", "query", "key")
        read = ", ".join(counted(number, noun) for number, noun in zip(self.shape, names, strict=True))
        main = self.sinks.main
        sinks = f"sink at {main.describe()}, {main.sinking} of {counted(len(self.sinks.heads), 'head')}" if main else "no sink"
        return f"MeasuredWeights({read.replace('querys', 'queries')}; {sinks})"


def from_weights(
    weights: Array | Sequence[Array | None],
    *,
    causal: bool = True,
    tokens: Array | Sequence[Any] | None = None,
    attention_mask: Array | None = None,
    window: int | Sequence[int | None] | None = None,
    row_sums: RowSums = "one",
    tolerance: float | None = None,
    threshold: float = 0.3,
    probes: Sequence[str | Mapping[str, object] | Probe] | None = None,
) -> MeasuredWeights:
    """Measure attention weights: the rows and the sinks that a session gives for the model that they come from.

    Self-attention, after the softmax and without dropout. Scores, values and hidden states are not in the weights, so probes
    that read them are refused.

    Args:
        weights: numpy or torch, floating point: ``(queries, keys)``, ``(heads, q, k)``, ``(layers, heads, q, k)`` or ``(layers,
            samples, heads, q, k)``; or a list with an array for each layer, as ``output_attentions`` gives it, of which entries
            ``None`` (layers without attention) are left out; or what ``generate(output_attentions=True)`` returns, without
            beams, whose rows change places.
        causal: a query sees its own key and those before it; with fewer queries than keys the queries are the last ones.
        tokens: of the keys, ids or texts, ``(keys,)`` or ``(samples, keys)``; a sink is then also found as a token.
        attention_mask: ``(samples, keys)``, 0 or false for padding, not measured; positions count from the first token.
        window: how many keys up to its own one a query sees (with ``causal=False``: to either side), for all layers or, in a
            list, for each. ``None`` is for all keys, and is refused where no query looks that far.
        row_sums: ``one``; ``null_mass`` if rows sum to one together with a null mass (learned sink logit), which is then what
            they lack to one; ``any`` for operations without a fixed sum, whose rows are divided by their sums as Gu et al. do.
        tolerance: how far a row sum may be from one, and how large a hidden weight; by default what rounding to the dtype of
            the weights explains.
        threshold: mean weight above which a head sinks, in [0, 1).
        probes: names, settings or probes; by default all that weights are enough for. Those of a sink are about the one found,
            unless they name another ``sink_position`` than 0.

    Raises:
        InputError: an array that is not of these shapes, not of floating point, empty, or that cannot be attention weights: the
            message says in which layer, sample, head and query.
        ConfigurationError: an argument whose value cannot take effect.
    """
    check_numbers("`threshold`", threshold)
    if row_sums not in ("one", "null_mass", "any"):
        raise ConfigurationError(f"`row_sums` {row_sums!r} must be one, null_mass or any")
    if tolerance is not None:
        require_number("`tolerance`", tolerance)
    if not 0.0 <= (tolerance or 0.0) < 1.0:
        raise ConfigurationError(f"`tolerance` {tolerance} must be in [0, 1): it is a distance from a row sum of one")
    layers = _layers(weights)
    samples, _, q_len, kv_len = layers[0].shape
    if q_len > kv_len or (q_len < kv_len and not causal):
        raise InputError(
            f"`weights` have {q_len:,} queries and {kv_len:,} keys; expected as many of both, or fewer queries under "
            "causal=True, the last ones. Cross-attention is measured with attend()"
        )
    rules = _rules(window, causal, layers)
    real = _mask(attention_mask, samples, kv_len)
    ids, decode = _tokens(tokens, samples, kv_len)
    calls = []
    for number, (layer, rule) in enumerate(zip(layers, rules, strict=True)):
        queries, keys = _positions(layer, real)
        key_tokens = None if ids is None else ids.to(layer.device).masked_fill(keys.positions < 0, -1)
        site = Site(module=f"layers.{number}", layer=number)
        call = given_call(layer, site, rule, queries, keys, key_tokens=key_tokens, row_sums=row_sums)
        fault, _ = find_fault(call, row_sums, tolerance)
        if fault is not None:
            where = f"layer {number}, " if len(layers) > 1 else ""
            raise InputError(f"`weights`: {where}{fault.text}, {_HINTS[fault.kind]}")
        calls.append(call)
    if window is None:
        _require_reach(calls, causal)
    chosen = _chosen(probes, threshold)
    require_positions(chosen, kv_len)
    # Probes of the main sink wait until it is known; the others, of a position that was named too, do not.
    of_main_sink = [probe for probe in chosen if isinstance(probe, SinkProbe) and probe.sink_position == 0]
    others = [probe for probe in chosen if probe not in of_main_sink]
    finder = SinkFinder(threshold)
    _show(calls, [*others, finder])
    sinks = finder.sinks(decode=decode)
    heads = SinkWeights(sinks)
    _show(calls, [*(probe.about(sinks) for probe in of_main_sink), heads])
    table = table_of(chosen)
    table["tier"], table["operation"] = TIER, calls[0].operation.name
    longest = kv_len if real is None else int(real.sum(1).max())
    windows = window if isinstance(window, (Sequence, np.ndarray)) else [window]
    narrowest = min((int(size) for size in windows if size is not None), default=None)
    if causal and q_len == kv_len and (few := few_queries_warning(longest, narrowest, threshold)):
        warn(f"from_weights: {few}")
    shape = (len(layers), samples, max(layer.shape[1] for layer in layers), q_len, kv_len)
    return MeasuredWeights(
        table.astype({"tier": "string", "operation": "string"}), heads.completed() if sinks.main else sinks, shape
    )


def measurable(probe: Probe) -> bool:
    """Whether a probe needs nothing but weights."""
    return not probe.needs & {*UNAVAILABLE, "hidden_states"}


def _chosen(probes: Sequence[str | Mapping[str, object] | Probe] | None, threshold: float) -> list[Probe]:
    if probes is None:
        return [probe for name in registry if measurable(probe := make_probe(name, threshold))]
    chosen = make_probes(probes, threshold)
    for probe in chosen:
        if not measurable(probe):
            words = {**UNAVAILABLE, "hidden_states": "hidden states"}
            missing = ", ".join(text for need, text in words.items() if need in probe.needs)
            raise ConfigurationError(
                f"probe {probe.name!r} reads {missing}, which weights do not give; leave it out of `probes`"
            )
    return chosen


def _show(calls: Sequence[GivenCall], probes: Sequence[Probe]) -> None:
    needs = frozenset().union(*(probe.needs for probe in probes))
    for call in calls:
        statistics = column_statistics(call, needs)
        for probe in probes:
            probe.update(call, statistics)


def _require_reach(calls: Sequence[GivenCall], causal: bool) -> None:
    """Refuse weights that keep to a window of which nothing was said, or see nothing ahead where that was allowed."""
    for number, call in enumerate(calls):
        extent = reach(call)
        if extent.whole:
            continue
        if not causal and extent.ahead <= 0:
            raise InputError(
                f"`weights`: in layer {number} no query gives anything to a later key, so these are causal weights; give "
                "causal=True: keys would be compared by queries that cannot see them"
            )
        far = max(extent.back, extent.ahead)
        raise InputError(
            f"`weights`: in layer {number} no query gives anything to a key more than {far} away, and some have keys that are "
            f"{max(extent.possible_back, extent.possible_ahead)} away; if it has a window, give `window` (here {far + 1}, or a "
            f"list with a number for each layer, None for those without); if not, window={call.kv_len} says so"
        )


def _layers(weights: object) -> list[Tensor]:
    """One tensor ``(samples, heads, queries, keys)`` a layer."""
    if isinstance(weights, (list, tuple)):
        if weights and all(isinstance(step, tuple) for step in weights):
            weights = _of_steps(weights)
        layers = [_array(layer, f"`weights`: entry {number}", 4) for number, layer in enumerate(weights) if layer is not None]
        if not layers:
            raise InputError(
                f"`weights` is a list of {len(weights)} entries and no array; models return none unless they are asked with "
                "output_attentions=True and loaded with attn_implementation='eager'"
            )
    else:
        layers = list(_array(weights, "`weights`", 5))
    first: tuple[int, ...] = tuple(layers[0].shape) if layers else ()
    for number, layer in enumerate(layers):
        if (layer.shape[0], *layer.shape[2:]) != (first[0], *first[2:]):
            raise InputError(
                f"`weights`: layer {number} is {tuple(layer.shape)} and layer 0 {first} as (samples, heads, q, k), and "
                "not the same but for the heads"
            )
    return layers


def _of_steps(steps: Sequence[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    """What ``generate(output_attentions=True)`` returns, a tuple of layers for each forward, as one array a layer."""
    return [None if parts[0] is None else _of_forwards(number, parts) for number, parts in enumerate(zip(*steps, strict=True))]


def _of_forwards(number: int, parts: Sequence[Any]) -> Tensor:
    ends, total = [part.shape[-1] for part in parts], sum(part.shape[-2] for part in parts)
    if ends != list(np.cumsum([part.shape[-2] for part in parts])):
        raise InputError(
            f"`weights`: the forwards of layer {number} have {', '.join(map(str, ends[:4]))} … keys, and not one more for each "
            "token: under a bounded cache, beams or an assistant, read the ids that came of it with attend()"
        )
    return torch.cat([torch.nn.functional.pad(part, (0, total - part.shape[-1])) for part in parts], dim=-2)


def _array(value: object, where: str, axes: int) -> Tensor:
    """The array as a tensor of so many axes; of four where there may be five the first are layers, and one sample each."""
    if not isinstance(value, Tensor):
        if not hasattr(value, "__array__"):
            raise InputError(f"{where} is a {type(value).__name__}; expected a numpy array or a torch tensor")
        array = np.ascontiguousarray(value)
        if array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise InputError(f"{where} is {array.dtype}; {_EXPECTED}")
        value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))  # a file of another machine
    if value.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise InputError(f"{where} is {value.dtype}; {_EXPECTED}")
    if not 2 <= value.ndim <= axes or not value.numel():
        raise InputError(f"{where} has shape {tuple(value.shape)}; expected {_SHAPES}, and none of these of length 0")
    if axes == 5 and value.ndim == 4:
        value = value[:, None]
    return value.detach()[(None,) * (axes - value.ndim)]


def _positions(layer: Tensor, real: Tensor | None) -> tuple[Positions, Positions]:
    """Where the queries of a layer stand, the last ones of the keys, and where the keys do."""
    samples, _, q_len, kv_len = layer.shape
    keys = Positions.plain(samples, kv_len, layer.device) if real is None else Positions.counted(real, 0, kv_len, layer.device)
    return Positions(keys.positions[:, kv_len - q_len :], keys.documents[:, kv_len - q_len :]), keys


def _rules(window: int | Sequence[int | None] | None, causal: bool, calls: Sequence[Tensor]) -> list[Visibility]:
    """Which keys a query sees in each layer, besides padding."""
    windows = list(window) if isinstance(window, (Sequence, np.ndarray)) else [window] * len(calls)
    for size in windows:
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer))):
            raise ConfigurationError(f"`window` is {size!r}; expected a whole number of keys, or None, or a list of these")
    if len(windows) != len(calls):
        raise ConfigurationError(
            f"`window` has {counted(len(windows), 'number')} for {counted(len(calls), 'layer')}; expected a number, or one "
            "a layer"
        )
    rules: list[Visibility] = []
    for size, layer in zip(windows, calls, strict=True):
        q_len, kv_len = layer.shape[2:]
        offset, device = kv_len - q_len, layer.device
        if size is not None and size < 1:
            raise ConfigurationError(f"`window` is {size}; expected 1 key or more, or None")
        if causal:
            rule = Causal(offset, device)
            rules.append(rule if size is None else rule & Window(int(size), offset, device))
        elif size is None:
            rules.append(Everything(device))
        else:
            index = torch.arange(kv_len, device=device)
            rules.append(Dense(((index[:, None] - index).abs() < size)[None, None]))
    return rules


def _mask(attention_mask: Array | None, samples: int, keys: int) -> Tensor | None:
    if attention_mask is None:
        return None
    mask = attention_mask if isinstance(attention_mask, Tensor) else torch.from_numpy(np.ascontiguousarray(attention_mask))
    if tuple(mask.shape) != (samples, keys):
        raise InputError(f"`attention_mask` has shape {tuple(mask.shape)}; expected (samples, keys) = {(samples, keys)}")
    real = mask > 0 if mask.dtype != torch.bool else mask
    if not bool(real.any()):
        raise InputError("`attention_mask` says that every token is padding; expected 1 or true for tokens")
    return real


def _tokens(tokens: Array | Sequence[Any] | None, samples: int, keys: int) -> tuple[Tensor | None, Callable[[int], str] | None]:
    """Ids ``(samples, keys)``, and the text of an id where texts were given."""
    if tokens is None:
        return None, None
    array = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if array.shape not in ((keys,), (samples, keys)):
        raise InputError(f"`tokens` has shape {array.shape}; expected (keys,) or (samples, keys) = {(samples, keys)}")
    array = np.broadcast_to(array, (samples, keys))
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64)), None
    if array.dtype.kind not in "UO" or not all(isinstance(token, str) for token in array.flat):
        raise InputError(f"`tokens` is {array.dtype}; expected ids (integers) or texts")
    texts, ids = np.unique(array.astype(str), return_inverse=True)
    return torch.from_numpy(ids.reshape(array.shape).astype(np.int64)), lambda token: str(texts[token])
