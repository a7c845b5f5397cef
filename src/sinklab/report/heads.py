"""The page of heads: every head of a model on what it was just shown, its map, the tokens, and the sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from sinklab.errors import InputError
from sinklab.report.maps import HEAD_NUMBERS, Maps, add_maps, bins_of, data_address, pack_unsigned, pool_positions, round_matrix
from sinklab.report.numbers import GridRow, Numbers, labelled, part_order
from sinklab.report.page import json_text, render, write_page
from sinklab.results.blocks import counted, front_names, number, quote
from sinklab.results.html import framed
from sinklab.results.intervals import just_above

BUDGET = 512 * 1024
"""Bytes that a page in its frame stays below, whatever the model and the length."""

MOST_TOKENS, TOKENS_BUDGET, BINS_BUDGET, NUMBERS_BUDGET = 4096, 96_000, 96_000, 64_000
"""Tokens that are written out, and what their texts, the attention by position and other numbers of the heads may take."""

MOST_NUMBERS = 40_000
"""Weights on pictures; where there are more, heads are averaged over them."""

LISTED = 8
"""Sinks that are listed at most."""

HEIGHT = 760
"""Of the frame, until the page has measured itself."""


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """What keys receive of every head, float32, with the names of the attention modules in the order of the second axis.

    Attributes:
        received: ``(samples, modules, heads, keys)``: mean weight over the queries that see the key; NaN where none does.
        seen, queries: ``(samples, modules, keys)``: queries that see the key; ``(samples, modules)``: how many there are.
        null: ``(samples, modules, heads)``: mean mass on the null score; NaN where there is none.
        share: as ``received``, of rows divided by their sums; ``None`` where that is the same.
        front: learned tokens in front of every text, the first of the keys.
    """

    modules: Sequence[str]
    received: NDArray[np.float32]
    seen: NDArray[np.float32]
    queries: NDArray[np.float32]
    null: NDArray[np.float32]
    share: NDArray[np.float32] | None = None
    front: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Shown:
    """What a model was shown: ``kind`` is text, pairs, image or audio; ``notes`` are sentences for the top of the page.

    ``names`` are of positions that are no tokens of a text, some of which are looked at together (``groups``). ``pictures`` are
    uint8 ``(samples, height, width, 3)``, and ``grid`` is rows and columns of their patches, which are the last positions.
    """

    model: str
    kind: str = "text"
    notes: Sequence[str] = ()
    names: Sequence[str | None] | None = None
    groups: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    pictures: NDArray[np.uint8] | None = None
    grid: tuple[int, int] | None = None
    sources: Sequence[str] = ()


class Sink(TypedDict):
    """What gets more than the threshold of some head's attention: as a weight and, as in an audit, as a share of the row.

    ``position`` is ``None`` for a group and for the null score, ``token`` where it is not known. ``mean_weight`` is over
    all heads,
    of an encoder–decoder over those of the ``part``; ``heads`` are layer, head and mean weight, strongest first.
    """

    name: str
    position: int | None
    token: str | None
    mean_weight: float
    heads: list[tuple[int, int, float]]
    part: str


class SinksSeen(list[Sink]):
    """The sinks of a view; printed as a line each."""

    def __repr__(self) -> str:
        if not self:
            return "no sink"
        return "\n".join(
            f"{sink['name']}{'' if sink['token'] is None else ' (' + quote(sink['token']) + ')'}: mean weight "
            f"{sink['mean_weight']:.2f}, of {counted(len(sink['heads']), 'head')}, most {sink['heads'][0][2]:.2f} of "
            f"{sink['heads'][0][0]}.{sink['heads'][0][1]}"
            for sink in self
        )


@dataclasses.dataclass(frozen=True, eq=False)
class HeadView:
    """The heads of a model on one text, or on what a session saw; shows itself in a notebook.

    ``finding`` says what is to be seen; ``sinks`` get more than the threshold of some head, strongest first; ``html`` is
    the page.
    """

    finding: str
    sinks: list[Sink]
    html: str = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame, below :data:`BUDGET` bytes."""
        return framed(self.html, HEIGHT, self.finding)

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.finding} (save(path) writes the page)"

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, whole or not at all, and return its path.

        Raises:
            InputError: what is there is no page of sinklab.
        """
        return write_page(self.html, Path(path))


def head_view(
    sites: Sequence[tuple[int, str, str]],
    *,
    about: Shown,
    operation: str,
    received: Received | None = None,
    maps: Maps | None = None,
    numbers: Numbers | None = None,
    threshold: float = 0.3,
) -> HeadView:
    """Make the page of what is known; what is not known is left out."""
    grid = labelled(sorted(sites, key=lambda site: (part_order(site[2]), site[0])))
    measures = [] if numbers is None else _measures(numbers, grid)
    if received is None and not measures:
        raise InputError(
            "there is nothing to draw: no probe of this session gives a number per head; add one, such as AttentionMaps()"
        )
    data: dict[str, Any] = {
        "page": "heads", "grid": [dataclasses.asdict(row) for row in grid], "threshold": threshold, "sample": about.kind,
        "arrays": {}, "bins": [], "sinks": [], "headNumbers": [], "maps": None, "pictures": None,
        "tokens": [], "targets": [], "candidates": [], "measure": "weight", "finding": "",
    }  # fmt: skip
    blobs: dict[str, str] = {}
    notes, finding = list(about.notes), ""
    sinks: list[Sink] = []
    weights: _Weights | None = None
    if received is not None:
        weights = _on_grid(received, grid)
        named = _sinks(weights, about, maps, threshold, front_names(received.front))
        found = len(named)
        named = sorted(named, key=lambda entry: (-len(entry[0]["heads"]), -entry[0]["mean_weight"]))[:LISTED]
        sinks = [sink for sink, _ in named]
        finding = _finding(sinks, found, weights, threshold, about.kind, len(received.received))
        _add_received(data, blobs, weights, named)
        data["pictures"] = _pictures(about, received)
    data["heads"] = weights.mean.shape[1] if weights is not None else numbers.num_heads if numbers else 0
    for entry in measures:
        if len(json_text({"": [*data["headNumbers"], entry]}).encode()) <= NUMBERS_BUDGET:
            data["headNumbers"].append(entry)
    if maps is not None:
        notes += _add_tokens(data, maps)
    pictures = data["pictures"] is not None
    context = {"title": about.model, "operation": operation, "finding": finding, "notes": notes, "pictures": pictures}
    if maps is not None:
        without = len(framed(render("heads.html.j2", context, data, blobs)).encode())
        add_maps(data, blobs, maps, BUDGET - without - 80 * len(grid) * len(maps.weights) - 2_000, scores=False)
    return HeadView(finding, SinksSeen(sinks), render("heads.html.j2", context, data, blobs))


@dataclasses.dataclass(frozen=True, eq=False)
class _Weights:
    """What every key gets of every head, in the order of the grid."""

    grid: Sequence[GridRow]
    mean: NDArray[Any]
    shares: NDArray[Any]
    early: NDArray[np.bool_]
    null: NDArray[Any]


def _on_grid(received: Received, grid: Sequence[GridRow]) -> _Weights:
    index = {name: index for index, name in enumerate(received.modules)}
    order = [index[row.module] for row in grid]
    mean = _over_samples(received.received)
    shares = mean if received.share is None else _over_samples(received.share)
    viewers = received.seen.sum(0)
    early = (viewers > 0) & (2 * viewers >= received.queries.sum(0)[:, None])
    return _Weights(grid, mean[order], shares[order], early[order], received.null.mean(0)[order])


def _over_samples(values: NDArray[np.float32]) -> NDArray[Any]:
    """Mean over the samples in which there is a number; NaN without any."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: NDArray[Any] = np.where(known, values, 0.0).sum(0) / known.sum(0)
    return mean


Place = tuple[str, int | None, str | None, NDArray[Any], NDArray[Any]]
"""Name, position, token, and what every head gives it, as a weight and as a share of the row, ``(modules, heads)``."""


def _places(
    weights: _Weights, here: NDArray[np.bool_], part: str, about: Shown, maps: Maps | None, above: float, front: Sequence[str]
) -> Iterator[Place]:
    """Groups of positions, the null score, and the positions that get more than the threshold of some head of a part."""
    mean, shares = (np.where((weights.early & here)[:, None], values, np.nan) for values in (weights.mean, weights.shares))
    # The keys of the decoder are tokens of the target, and nothing of what the names and groups are of.
    names, groups = (about.names, about.groups) if part != "decoder" else (None, {})
    for name, members in groups.items():
        yield name, None, None, mean[..., list(members)].sum(-1), shares[..., list(members)].sum(-1)
    null = np.where(here, weights.null, np.nan)
    if np.isfinite(null).any():
        yield "the null score", None, None, null, null
    texts = _texts(maps, part)
    grouped = {position for members in groups.values() for position in members}
    for position in np.flatnonzero((np.nan_to_num(np.minimum(mean, shares)) > above).any((0, 1))).tolist():
        if position not in grouped:
            text = texts[position] if texts is not None and position < len(texts) else None
            named = front if not part and position < len(front) else names or ()
            called = named[position] if position < len(named) else None
            token = None if called is not None else text
            yield called or f"position {position}", position, token, mean[..., position], shares[..., position]


def _sinks(
    weights: _Weights, about: Shown, maps: Maps | None, threshold: float, front: Sequence[str]
) -> list[tuple[Sink, NDArray[Any]]]:
    """The places that get more than the threshold of some head, part by part.

    Each with what every head gives it, ``(modules, heads)``; 0 of heads of other parts.
    """
    above, found = just_above(threshold), []
    for part in dict.fromkeys(row.part for row in weights.grid):
        here = np.array([row.part == part for row in weights.grid])[:, None]
        whose = "" if not part else f" of {part}" if part == "cross-attention" else f" of the {part}"
        for name, place, token, values, share in _places(weights, here, part, about, maps, above, front):
            # A weight says nothing by itself where rows have no fixed sum: that of a sigmoid is 1/2 on every key of score 0.
            sinking = np.argwhere(np.nan_to_num(np.minimum(values, share)) > above).tolist()
            if sinking:
                heads = [(weights.grid[row].layer, head, float(values[row, head])) for row, head in sinking]
                sink = Sink(
                    name=name + whose, position=place, token=token, mean_weight=float(np.nanmean(values)),
                    heads=sorted(heads, key=lambda head: -head[2]), part=part,
                )  # fmt: skip
                others = np.where(np.isfinite(weights.mean).any(-1), 0.0, np.nan)
                found.append((sink, np.where(here, values, others)))
    return found


def _texts(maps: Maps | None, part: str) -> list[str] | None:
    """Tokens of the keys of a part; of several samples, and of the two sides of a pair, a position holds more than one."""
    if maps is None or (maps.targets and not part):
        return None
    side = maps.targets if part == "decoder" else maps.tokens
    return side[0] if len(side) == 1 else None


def _finding(sinks: Sequence[Sink], found: int, weights: _Weights, threshold: float, kind: str, samples: int) -> str:
    """What is to be seen, in a sentence: the place that most heads look at, and how many others there are."""
    what = {"image": "picture", "audio": "recording", "pairs": "pair"}.get(kind, "text")
    what = f"this {what}" if samples == 1 else f"these {samples} {what}s"
    grid, least = weights.grid, np.minimum(weights.mean, weights.shares)
    if not sinks:
        candidates = np.where(weights.early[:, None], least, np.nan)
        if np.isnan(candidates).all():
            return f"On {what} no position is seen by half of the queries, so none can be a sink."
        row, head, at = (int(index) for index in np.unravel_index(np.nanargmax(candidates), candidates.shape))
        most = f"{number(float(candidates[row, head, at]), 2)}, of head {grid[row].label}.{head} on position {at}"
        return f"On {what} no head gives any position more than {threshold:g} of its attention; the most is {most}."
    top, there = sinks[0], np.isfinite(least).any(-1)
    # What heads of other parts do not see, they cannot look at: they are not among those counted.
    heads = int(sum(there[index].sum() for index, row in enumerate(grid) if top["part"] in ("", row.part)))
    name = top["name"] + (f" ({quote(top['token'])})" if top["token"] is not None else "")
    others = f"; {counted(found - 1, 'other place')} get{'s' * (found == 2)} as much of some head" if found > 1 else ""
    return f"On {what} {len(top['heads'])} of {heads} heads give {name} more than {threshold:g} of their attention{others}."


def _add_received(
    data: dict[str, Any], blobs: dict[str, str], received: _Weights, sinks: Sequence[tuple[Sink, NDArray[Any]]]
) -> None:
    """Weights by head and position, as fine as fits; the script takes them in percent as its rates, and as they are."""
    weights, early = received.mean, received.early
    places = [sink["position"] for sink, _ in sinks if sink["position"] is not None]
    for most in (256, 128, 64, 32, 16, 8, 4, 2):
        bins = bins_of(weights.shape[-1], frozenset(places[: most // 8]), most)
        text, scale = pack_unsigned(pool_positions(weights.astype(np.float64), bins))
        if len(text) <= BINS_BUDGET:
            blobs["blob-received"], data["bins"] = text, bins
            data["arrays"] = {"received": {"shape": [*weights.shape[:2], len(bins)], "scale": scale}}
            break
    data["candidates"] = [int(np.flatnonzero(row).max(initial=-1)) + 1 for row in early]
    own = np.where(early[:, None], np.nan_to_num(weights), -1.0).argmax(-1)
    data["ownSink"] = own.tolist()
    for sink, values in sinks:
        entry: dict[str, Any] = {"position": sink["position"], "token": sink["token"]}
        entry["rate"] = float(f"{100 * sink['mean_weight']:.4g}")
        if sink["position"] is None or sink["part"]:
            entry |= {"position": None, "kind": "group", "rates": round_matrix(100 * values)}
        if sink["token"] is None or sink["part"]:
            entry["name"] = sink["name"]
        data["sinks"].append(entry)


def _add_tokens(data: dict[str, Any], maps: Maps) -> list[str]:
    """Texts of the tokens, as many as fit; says in a sentence how many do not."""
    for length in (MOST_TOKENS >> step for step in range(14)):
        data["tokens"], data["targets"] = ([row[:length] for row in side] for side in (maps.tokens, maps.targets))
        if len(json_text({"": [data["tokens"], data["targets"]]}).encode()) <= TOKENS_BUDGET:
            break
    longest = max((len(row) for side in (maps.tokens, maps.targets) for row in side), default=0)
    return [f"The first {length:,} of {longest:,} tokens are written out."] if longest > length else []


def _pictures(about: Shown, received: Received) -> dict[str, Any] | None:
    """The pictures with what their positions receive, in the order in which the model runs its layers."""
    if about.pictures is None or about.grid is None or about.names is None:
        return None
    values = received.received
    if values.shape[-1] != len(about.names):
        return None
    names = list(about.names)
    if None in names:  # of a picture among texts its patches alone
        patches = [position for position, name in enumerate(names) if name is not None]
        names, values = [names[position] for position in patches], values[..., patches]
    averaged = values.size > MOST_NUMBERS
    values = values.mean(2, keepdims=True) if averaged else values
    return {
        "images": [data_address(picture) for picture in about.pictures], "sources": list(about.sources),
        "grid": list(about.grid), "names": names, "norms": None, "averaged": averaged,
        "received": np.rint(1e4 * np.nan_to_num(values)).astype(int).tolist(),
    }  # fmt: skip


def _measures(numbers: Numbers, grid: Sequence[GridRow]) -> list[dict[str, Any]]:
    """Numbers per head of a table, each with its name and unit, in the order of the grid."""
    known = {(probe, metric): (label, note) for label, probe, metric, _, note in HEAD_NUMBERS}
    place = {row.module: index for index, row in enumerate(numbers.grid)}
    measures = []
    for probe, metric, unit in numbers.head_metrics:
        values = numbers.by_head(probe, metric)
        if values is None or not np.isfinite(values).any():
            continue
        missing = np.full(numbers.num_heads, np.nan)
        rows = [values[place[row.module]] if row.module in place else missing for row in grid]
        label, note = known.get((probe, metric), (metric.replace("_", " ").capitalize(), ""))
        measures.append({"label": label, "unit": unit, "note": note, "values": round_matrix(np.stack(rows))})
    return measures
