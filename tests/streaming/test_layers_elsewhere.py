"""Layers on another device than the inputs of a model: what a step says of them is there. ``meta`` stands for that device."""

from __future__ import annotations

import pytest
import torch
from tests.streaming.decoders import SINKS, WINDOW, decoder

from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.rotation import read_rotations
from sinklab.streaming.slot_table import SlotTable

ELSEWHERE = torch.device("meta")
PIECES = (5, 1, 1, 12, *[1] * 40, 7)


@pytest.mark.parametrize(
    "policy", [SinkWindow(num_sinks=SINKS, window=WINDOW), Pinned(pinned=(0, 7), window=WINDOW)], ids=lambda policy: policy.name
)
def test_keys_stay_where_their_layer_is(policy):
    """Steps are planned on the CPU; operations on tensors of both devices fail."""
    rotation = read_rotations(decoder("llama")).layers[0]
    table = SlotTable(policy, torch.device("cpu"))
    here, there = SlotLayer(table, rotation), SlotLayer(table, rotation)
    for rows in (1, 3):
        table.clear()
        here.release()
        there.release()
        for length in PIECES:
            valid = None if rows == 1 else torch.ones(rows, length, dtype=torch.bool)
            if rows > 1:
                table.spread(rows)
            table.step = table.plan(length, valid)
            keys = torch.randn(rows, 2, length, 8)
            found = here.update(keys, keys)
            moved = there.update(keys.to(ELSEWHERE), keys.to(ELSEWHERE))
            assert [tensor.device for tensor in moved] == [ELSEWHERE] * 2
            assert [tensor.shape for tensor in moved] == [tensor.shape for tensor in found]
            table.step = None
        assert table.full


def test_the_same_matrices_elsewhere():
    """Those of steps that are planned ahead share one tensor and take their part of it; a copy takes that part."""
    rotation = read_rotations(decoder("llama")).layers[0]
    table = SlotTable(SinkWindow(num_sinks=SINKS, window=WINDOW), torch.device("cpu"))
    for _ in range(30):
        step = table.step = table.plan(1, None)
        if step.shifts is not None:
            copy = step.on(torch.device("cpu"))
            assert torch.equal(copy.rotation_matrices(rotation, torch.float32), step.rotation_matrices(rotation, torch.float32))
            assert torch.equal(copy.rotation_matrices(rotation, torch.float32), step.rotation_matrices(rotation, torch.float32))
        assert table.step_at(torch.device("cpu")) is step
        assert table.step_at(ELSEWHERE) is table.step_at(ELSEWHERE)
    assert step.shifts is not None
