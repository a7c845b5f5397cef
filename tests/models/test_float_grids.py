"""Floating-point formats against plain tables of all their numbers, written from their definitions."""

import itertools
import math

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.models.float_grids import FORMATS

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
    for exponent, fraction in itertools.product(range(16), range(8))
][:-1]  # the last is no number


def nearest(value: float, numbers: list[float]) -> float:
    """Of the numbers, by their codes, the nearest to a size; of two that are as near, the one of the even code."""
    size = min(abs(value), numbers[-1])
    code = min(range(len(numbers)), key=lambda code: (abs(numbers[code] - size), code % 2))
    return math.copysign(numbers[code], value)


def plain(kind: str, row: list[float]) -> list[float]:
    """A tensor of one row."""
    largest = max(map(abs, row))
    if kind in ("fp8", "fp8b"):
        return [nearest(value / (largest / 448), E4M3) * (largest / 448) for value in row]
    size, whole, found = (32, 1.0, []) if kind == "mxfp4" else (16, largest / (448 * 6), [])
    for begin in range(0, len(row), size):
        block = row[begin : begin + size]
        peak = max(map(abs, block))
        scale = 2.0 ** (math.floor(math.log2(peak)) - 2) if kind == "mxfp4" else nearest(peak / 6 / whole, E4M3) * whole
        found += [nearest(value / scale, E2M1) * scale for value in block]
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_each_number_is_the_nearest_of_the_format(kind):
    row = torch.randn(64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 4, 64)
    row[3], row[40] = 37.5, 0.0  # a spike
    assert FORMATS[kind](row).tolist() == pytest.approx(plain(kind, row.tolist()), rel=1e-5, abs=1e-9)


def test_ties_go_to_even_and_a_spike_hides_its_block():
    exact = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)  # of a block whose scale is 1
    assert FORMATS["mxfp4"](exact).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 2
    row = torch.ones(64)
    row[0] = 1000.0
    for kind, lost in (("fp8", 0), ("mxfp4", 31), ("nvfp4", 15)):
        assert int((FORMATS[kind](row) == 0).sum()) == lost
    assert (FORMATS["nvfp4"](torch.zeros(2, 16)) == 0).all()


def test_channels_that_fill_no_block_are_refused_where_they_are_kept_and_filled_where_they_are_not():
    with pytest.raises(ConfigurationError, match="mxfp4 has blocks of 32, and heads of the keys have 40 channels"):
        FORMATS["mxfp4"].require(40, "heads of the keys")
    assert FORMATS["mxfp4"](torch.ones(3, 41)).shape == (3, 41)
