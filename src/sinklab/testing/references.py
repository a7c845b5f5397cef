"""Reference sinks: pinned models, token ids, and the numbers of every head under every definition, to check a tool against.

    from sinklab.testing import load_references

    for reference in load_references():
        reference.check("gu2024", my_sink_rates(reference.model, reference.rows))

Numbers are those of :func:`dense_numbers` in float64: whole attention matrices and a line for each definition, with no code of
the probes. The rows of decoders were drawn from the model itself, so that they are text that it would write.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np
from numpy.typing import ArrayLike

from sinklab.errors import ContractError, InputError

THRESHOLD = 0.3
"""Mean share of a row above which a head has a sink, in ``gu2024``."""

DEFINITIONS: Mapping[str, str] = {
    "gu2024": "percent of rows in which the first token gets more than 0.3 of the attention on average",
    "qiu2025_first_attention": "mean share of the first token",
    "kaul2024_first_argmax": "percent of queries that give the first token most",
    "first_token_share": "all weight on the first token over all weight",
    "first_four_share": "mean weight of the first four tokens, from the fifth query on",
    "entropy": "mean entropy of a row of attention, in nats",
}
"""Name of a number, as in ``sinklab list metrics``, to what it is of one head."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """One model with what is known of it.

    Attributes:
        model: name on the hub, or of an embedded model; what :func:`sinklab.load_model` takes.
        revision: hash of the weights, as ``load_model(…).revision`` gives it.
        kind: ``decoder`` or ``encoder``.
        rows: token ids, one list a row, with all special tokens that the model is to see; no padding.
        numbers: name of a definition to ``(layers, heads)``, float64.
        tolerances: by name, how far an exact tool in float32 may be off: rates jump where a weight is close to a bound.
    """

    model: str
    revision: str
    kind: str
    rows: tuple[tuple[int, ...], ...]
    numbers: Mapping[str, np.ndarray]
    tolerances: Mapping[str, float]

    def check(self, name: str, numbers: ArrayLike, tolerance: float | None = None) -> None:
        """Compare the numbers of another tool with the recorded ones.

        Args:
            name: one of :data:`DEFINITIONS`.
            numbers: ``(layers, heads)``, in the unit of the definition.
            tolerance: largest absolute difference; by default that of an exact tool in float32.

        Raises:
            ContractError: numbers differ; the message names the head that differs most.
            InputError: no such definition, or numbers of another shape.
        """
        if name not in self.numbers:
            raise InputError(f"no definition is called {name!r}; known: {', '.join(self.numbers)}")
        expected, measured = self.numbers[name], np.asarray(numbers, dtype=np.float64)
        if measured.shape != expected.shape:
            raise InputError(f"{self.model}: {name} has shape {measured.shape}; expected (layers, heads) {expected.shape}")
        allowed = self.tolerances[name] if tolerance is None else tolerance
        off = np.where(np.isnan(measured), np.inf, abs(measured - expected))
        layer, head = np.unravel_index(off.argmax(), off.shape)
        if off[layer, head] > allowed:
            raise ContractError(
                f"{self.model}: {name} of head {layer}.{head} is {measured[layer, head]:.6g}, expected "
                f"{expected[layer, head]:.6g} within {allowed:.1e}; {(off > allowed).sum()} of {off.size} heads differ"
            )


@functools.cache
def load_references() -> tuple[Reference, ...]:
    """All references, by name of the model; two of them come with the package, the others are on the hub."""
    folder = resources.files("sinklab.testing") / "reference_sinks"
    read = [json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir() if file.name.endswith(".json")]
    return tuple(
        Reference(
            model=fields["model"],
            revision=fields["revision"],
            kind=fields["kind"],
            rows=tuple(map(tuple, fields["rows"])),
            numbers={name: np.array(values) for name, values in fields["numbers"].items()},
            tolerances=fields["tolerances"],
        )
        for fields in sorted(read, key=lambda fields: str(fields["model"]))
    )


def dense_numbers(rows: Sequence[ArrayLike]) -> dict[str, np.ndarray]:
    """Every definition of :data:`DEFINITIONS` from whole attention matrices, as its paper states it.

    Args:
        rows: for every row of token ids ``(layers, heads, queries, keys)``: weights, 0 on keys that are not visible; the first
            token is visible to all queries. Rows may have different lengths, of five tokens or more.

    Returns:
        By name ``(layers, heads)``, float64.

    Raises:
        InputError: a row that is too short.
    """
    alphas, firsts, largest, on_first, on_all, on_four, entropies = ([] for _ in range(7))
    for row in rows:
        weights = np.asarray(row, dtype=np.float64)
        if weights.ndim != 4 or weights.shape[-1] < 5:
            raise InputError(
                f"a row of weights has shape {weights.shape}; expected (layers, heads, queries, keys), 5 keys or more"
            )
        share = weights / weights.sum(-1, keepdims=True)
        alphas.append(share[..., 0].mean(-1))
        firsts.append(share[..., 0])
        largest.append(weights[..., 0] >= weights.max(-1))
        on_first.append(weights[..., 0].sum(-1))
        on_all.append(weights.sum((-1, -2)))
        on_four.append(weights[..., 4:, :4].sum(-1))
        logarithms = np.log(share, where=share > 0, out=np.zeros_like(share))
        entropies.append(-(share * logarithms).sum(-1))
    return {
        "gu2024": 100.0 * (np.stack(alphas) > THRESHOLD).mean(0),
        "qiu2025_first_attention": np.concatenate(firsts, -1).mean(-1),
        "kaul2024_first_argmax": 100.0 * np.concatenate(largest, -1).mean(-1),
        "first_token_share": np.stack(on_first).sum(0) / np.stack(on_all).sum(0),
        "first_four_share": np.concatenate(on_four, -1).mean(-1),
        "entropy": np.concatenate(entropies, -1).mean(-1),
    }
