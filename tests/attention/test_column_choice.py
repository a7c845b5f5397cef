"""Which way of computing column statistics serves a call: by device, length and what stands in the way."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from tests.attention.column_calls import make_call

from sinklab.attention.statistics import columns


@pytest.mark.parametrize(
    ("q_len", "kv_len", "way"), [(128, 128, "blocked"), (128, 129, "fused"), (1, 16384, "blocked"), (1, 16385, "fused")]
)
def test_on_the_cpu_the_size_decides(q_len, kv_len, way):
    assert columns._choose(make_call(batch=1, q_len=q_len, kv_len=kv_len)) == way


def test_what_is_no_plain_softmax_of_scores_is_taken_in_blocks():
    call = make_call(batch=1, q_len=200, kv_len=200)
    for changed in (
        dataclasses.replace(call, softcap=30.0),
        dataclasses.replace(call, bias=torch.zeros(1, 4, 200, 200)),
        make_call(batch=1, q_len=200, kv_len=200, operation={"name": "relu"}),
    ):
        assert columns._choose(changed) == "blocked"


@pytest.mark.parametrize(
    ("kv_len", "obstacle", "exact", "way"),
    [
        (512, None, True, "blocked"),
        (513, None, True, "triton"),
        (513, "a mask", True, "blocked"),
        (513, None, False, "blocked"),
    ],
)
def test_on_cuda_the_kernels_must_serve_and_be_exact(monkeypatch, kv_len, obstacle, exact, way):
    """Without a GPU: a call that says that it is on one, and what is found out about the kernels."""
    monkeypatch.setattr(columns, "_obstacle", lambda _call, _method: obstacle)
    monkeypatch.setattr(columns, "gpu_is_exact", lambda *_: exact)
    queries = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(1, 4, 2, 8))
    assert columns._choose(types.SimpleNamespace(queries=queries, kv_len=kv_len)) == way
