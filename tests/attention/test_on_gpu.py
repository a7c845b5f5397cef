"""The kernels of a GPU: their numbers by Triton's interpreter where it is installed, and what they do not serve."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from tests.attention.column_calls import make_call
from tests.operators import Operators

from sinklab.attention.statistics import on_gpu
from sinklab.attention.statistics.blocked import blocked_statistics
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Dense
from sinklab.errors import ConfigurationError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def count_to(bound, out):
        count = 0
        for _ in range(tl.load(bound)):
            count += 1
        tl.store(out, count)


INTERPRETED = """
import dataclasses, torch
from tests.attention.test_on_gpu import count_to
counted = torch.zeros(1, dtype=torch.int32)
try:
    count_to[1,](torch.tensor([3], dtype=torch.int32), counted)
except Exception as error:
    print(type(error).__name__, error)
    raise SystemExit
assert counted.item() == 3
from tests.attention.column_calls import ALL, FIELDS, cases, dense_oracle, with_log_sum_exp
from sinklab.attention.statistics import on_gpu
from sinklab.attention.statistics.blocked import blocked_statistics

on_gpu._tiling = lambda call, of: on_gpu.Tiling(16, 32, 4, 1) if of == "rows" else on_gpu.Tiling(32, 16, 4, 1)
served = 0
for name, (call, visible) in cases().items():
    call = dataclasses.replace(call, **{part: getattr(call, part).float() for part in ("queries", "keys", "values")})
    plain = call.operation.is_softmax and call.softcap is None and call.bias is None
    if not plain or on_gpu.gpu_obstacle(call) or name == "huge scores":
        continue
    expected = dense_oracle(call, visible)
    for given in (call, with_log_sum_exp(call, visible)):
        for needs in (ALL, frozenset({"columns"})):
            found = on_gpu.gpu_statistics(given, needs)
            for field in FIELDS:
                one, two = getattr(found, field), expected[field]
                if one is not None:
                    # Scores, weights and sums over 37 rows, each rounded to float32.
                    torch.testing.assert_close(one.double().expand_as(two), two, rtol=1e-5, atol=1e-5, msg=f"{name}: {field}")
    served += 1
print(served)
"""


@pytest.mark.skipif(triton is None, reason="Triton, which has an interpreter, is not installed")
def test_the_kernels_give_the_numbers_of_the_definition():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if not done.stdout.strip().isdigit():  # that of Triton 3.6 does not count to a number that it has loaded, under NumPy 2.4
        pytest.skip(f"Triton's interpreter does not run a loop here: {done.stdout.strip()}")
    assert int(done.stdout) >= 12


def test_what_the_kernels_do_not_serve(monkeypatch):
    call = make_call(q_len=20, dtype=torch.float32)
    monkeypatch.setattr(on_gpu, "INSTALLED", False)
    assert "Triton is not installed" in (on_gpu.gpu_obstacle(call) or "")
    with pytest.raises(ConfigurationError, match="method 'triton' cannot be used: Triton is not installed"):
        column_statistics(call, method="triton")
    monkeypatch.setattr(on_gpu, "INSTALLED", True)
    assert on_gpu.gpu_obstacle(call) is None
    assert on_gpu.gpu_obstacle(make_call(q_len=20)) == "it does not take float64"
    mask = dataclasses.replace(call, visible=Dense(torch.ones(1, 1, 20, 20, dtype=torch.bool)))
    assert on_gpu.gpu_obstacle(mask) == "it serves bands of visible keys (causal, window, padding), got Dense"
    wide = make_call(q_len=20, head_dim=264, dtype=torch.float32)
    assert on_gpu.gpu_obstacle(wide) == "it holds heads of at most 256 coordinates, got 264"


@pytest.mark.parametrize(
    ("fails", "why"), [(ValueError("no layout"), "ValueError: no layout"), (None, "they refuse, or give other")]
)
def test_kernels_that_do_not_work_are_said_not_to(monkeypatch, fails, why):
    """With statistics that raise as a compiler does, or that are wrong: half of what they should be."""

    def statistics(call, needs):
        if fails is not None:
            raise fails
        found = blocked_statistics(call, needs)
        return dataclasses.replace(found, column_sum=found.column_sum / 2)

    monkeypatch.setattr(on_gpu, "gpu_statistics", statistics)
    kind = torch.device("cpu"), torch.float32, 24
    with pytest.warns(UserWarning, match=rf"do not work on cpu for heads of 24 in float32 \({why}.*a slower way"):
        assert not on_gpu.gpu_is_exact.__wrapped__(*kind)
    monkeypatch.setattr(on_gpu, "gpu_statistics", blocked_statistics)
    assert on_gpu.gpu_is_exact.__wrapped__(*kind)


@pytest.mark.parametrize(("needs", "most"), [(("columns",), 12), (("columns", "maximum"), 15), (("columns", "entropy"), 20)])
def test_few_operators_beside_the_kernels(monkeypatch, needs, most):
    """A start of a kernel costs microseconds of the host whatever its size, and a model asks once a layer."""
    call = make_call(q_len=64, heads=2, kv_heads=2)
    heads = call.queries.shape[:2]
    call = dataclasses.replace(call, log_sum_exp=torch.full((*heads, 64), 5.0))
    rows = [torch.ones(*heads, 64) for _ in range(3)]
    monkeypatch.setattr(on_gpu, "_rows", lambda *given: (*rows, None))
    monkeypatch.setattr(on_gpu, "_columns", lambda call, band, shift, factor, padded: torch.ones(*heads, 64))
    found = on_gpu.gpu_statistics(call, frozenset(needs))  # what depends on the sizes alone is kept from here on
    with Operators() as operators:
        on_gpu.gpu_statistics(call, frozenset(needs))
    assert operators.count <= most
    assert found.column_sum.shape == (*heads, 64)
