"""Calls made by hand, and every statistic of a call from the whole matrix: slow, obvious, independent of the library."""

import torch
from tests.attention import column_calls
from torch import Tensor

from sinklab.attention.call import AttentionCall, LayerOutput, Site, Statistics
from sinklab.attention.operation import Operation
from sinklab.attention.visibility import Dense
from sinklab.registry import operations
from sinklab.results.table import unpacked


def places(lengths: list[list[int]], total: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Positions and documents of rows that hold documents of the given lengths, padded to ``total`` on one side."""
    positions, documents = torch.full((len(lengths), total), -1), torch.full((len(lengths), total), -1)
    for row, sizes in enumerate(lengths):
        at = total - sum(sizes) if left else 0
        for document, size in enumerate(sizes):
            positions[row, at : at + size] = torch.arange(size)
            documents[row, at : at + size] = document
            at += size
    return positions, documents


def visible_matrix(
    query_positions: Tensor, query_documents: Tensor, key_positions: Tensor, key_documents: Tensor, window: int | None
) -> Tensor:
    """Causal inside each document: boolean ``(batch, 1, q_len, kv_len)``."""
    query, key = query_positions[:, :, None], key_positions[:, None]
    visible = (query_documents[:, :, None] == key_documents[:, None]) & (key <= query) & (key >= 0) & (query >= 0)
    if window is not None:
        visible &= key > query - window
    return visible[:, None]


def make_call(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    *,
    lengths: list[list[int]] | None = None,
    left: bool = False,
    window: int | None = None,
    scaling: float | None = None,
    operation: Operation | None = None,
    site: Site | None = None,
    cached: int = 0,
    **fields: object,
) -> AttentionCall:
    """A causal self-attention call; with ``cached`` only the queries after the first so many are asked."""
    batch, _, total, head_dim = keys.shape
    positions, documents = places(lengths or [[total]] * batch, total, left=left)
    asked, owners = positions[:, cached:], documents[:, cached:]
    return AttentionCall(
        site=site or Site("layers.0.self_attn", 0),
        queries=queries[:, :, cached:] if queries.shape[2] == total else queries,
        keys=keys,
        values=keys if values is None else values,
        scaling=head_dim**-0.5 if scaling is None else scaling,
        visible=Dense(visible_matrix(asked, owners, positions, documents, window)),
        operation=operation or operations["softmax"](),
        query_positions=asked,
        key_positions=positions,
        query_documents=owners,
        key_documents=documents,
        cached_keys=cached,
        **fields,  # type: ignore[arg-type]
    )


def call_from_weights(weights: Tensor, **fields: object) -> AttentionCall:
    """A call of one row and one head whose causal softmax gives exactly the rows of ``weights`` ``(T, T)``."""
    size = weights.shape[0]
    # Keys are unit vectors, so the scores are the queries: logarithms of the wanted weights.
    queries = torch.log(weights.clamp(min=1e-30))[None, None]
    return make_call(queries, torch.eye(size, dtype=weights.dtype)[None, None], scaling=1.0, **fields)  # type: ignore[arg-type]


def dense_weights(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, visibility and weights ``(batch, num_heads, q_len, kv_len)`` in float64, the whole matrix."""
    visible = call.visible.block(0, call.q_len, 0, call.kv_len).expand(*call.queries.shape[:3], -1)
    scores, weights = column_calls.dense_weights(call, visible)
    return scores, visible, weights


def dense_statistics(call: AttentionCall) -> Statistics:
    """All statistics, straight from their definitions."""
    fields = column_calls.dense_oracle(call, dense_weights(call)[1])
    return Statistics(**{name: None if values is None else values.float() for name, values in fields.items()})


def show(probe, *calls: AttentionCall):
    """Show calls with their dense statistics to a probe and close it."""
    for call in calls:
        probe.update(call, dense_statistics(call))
    return probe


def values_of(probe) -> dict[tuple, tuple[float, int]]:
    """Rows as ``(metric, module, head, key_position)`` to value and count."""
    table = {}
    for row in unpacked(probe.rows()):
        key = (row["metric"], row.get("module"), row.get("head"), row.get("key_position"))
        assert key not in table, f"two rows at {key}"
        table[key] = (row["value"], row["count"])
    return table


def layer_output(
    hidden_states: Tensor,
    *,
    lengths: list[list[int]] | None = None,
    left: bool = False,
    kind: str = "layer",
    layer: int = 0,
    start: int = 0,
) -> LayerOutput:
    """Hidden states ``(batch, seq_len, hidden_size)`` with their places; ``start`` cached tokens come before them."""
    batch, total, _ = hidden_states.shape
    positions, documents = places(lengths or [[total]] * batch, total, left=left)
    name = f"layers.{layer}" if kind == "layer" else f"layers.{layer}.self_attn"
    return LayerOutput(Site(name, layer), kind, hidden_states, torch.where(positions >= 0, positions + start, -1), documents)


def show_layers(probe, *outputs: LayerOutput):
    """Show layer outputs to a probe and close it."""
    for output in outputs:
        probe.update_layer(output)
    return probe


def assert_same(found: dict, expected: dict, rel: float) -> None:
    """Two results of :func:`values_of` with the same rows, the same counts and nearly the same values."""
    assert {key: count for key, (_, count) in found.items()} == {key: count for key, (_, count) in expected.items()}
    for key, (value, _) in expected.items():
        assert abs(found[key][0] - value) <= rel * max(abs(value), 1e-3), (key, found[key], value)
