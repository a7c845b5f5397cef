"""Quantised linear maps: codes of weights and inputs multiplied as integers, and what is to stay whole beside them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklab.errors import ConfigurationError, MeasurementError, UnsupportedModelError
from sinklab.models.float_grids import FloatInputs, FloatWeights


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """``codes = clamp(round(x / scale) + zero, lowest, highest)``, which stand for ``(codes - zero) · scale``.

    0 lies on the grid. Ties are rounded to even, and the division is a product with ``1 / scale``, as in torch's own kernels.
    """

    scale: Tensor  # float32, positive; broadcasts with what is quantised
    zero: Tensor  # int32, the code of 0; broadcasts too
    lowest: int  # codes; they fit int8 for 8 bits or fewer, else int32
    highest: int

    def codes(self, values: Tensor) -> Tensor:
        """int8 (int32 above 8 bits), of the shape of the values; what lies outside of the range takes its end."""
        rounded = torch.round(values.float() * (1.0 / self.scale)) + self.zero
        return rounded.clamp_(self.lowest, self.highest).to(torch.int8 if self.highest <= 127 else torch.int32)

    def widened(self, codes: Tensor) -> Tensor:
        """What codes stand for, float32."""
        return (codes.to(torch.int32) - self.zero) * self.scale

    def __call__(self, values: Tensor) -> Tensor:
        """The values on the grid, in their own dtype: within half a scale of them inside the range."""
        return self.widened(self.codes(values)).to(values.dtype)


def symmetric_grid(largest: Tensor, bits: int) -> Grid:
    """``2^bits - 1`` values around 0, the outer ones at ``largest``: absolute values, one, or one a grid (``(rows, 1)``)."""
    most = 2 ** (bits - 1) - 1
    scale = _positive(largest.float() / most)
    return Grid(scale, torch.zeros_like(scale, dtype=torch.int32), -most, most)


def affine_grid(low: Tensor, high: Tensor, bits: int) -> Grid:
    """``2^bits`` values from ``low`` to ``high``, moved by less than a step so that 0 is one of them; a range without 0 is
    widened to it."""
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = _positive((high - low) / (highest - lowest))
    zero = (lowest - torch.round(low / scale)).clamp(lowest, highest).to(torch.int32)
    return Grid(scale, zero, lowest, highest)


def _positive(scale: Tensor) -> Tensor:
    """Where all is 0 any scale will do; its inverse must be a number."""
    return scale.clamp(min=torch.finfo(torch.float32).tiny * 4)


GROUP = 32
"""Input channels that share a scale where weights have 4 bits or fewer; above, an output channel has one scale."""

MOST_INPUTS = (2**31 - 1) // (255 * 127)
"""Input channels of which sums of products are sure to fit int32: codes of inputs less their zero point, times int8."""

UNIT = 2.0**-24
"""Relative error of one rounding to float32."""

CHECKED = 64
"""Of the inputs of a map about so many are compared, spread over all that were multiplied: each takes all of its weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightCodes:
    """The weights of a linear map as codes."""

    groups: tuple[Tensor, ...]  # for each group of input channels the codes, int8 (channels, out_features)
    scales: Tensor  # float32 (groups, out_features)
    sums: Tensor  # int32 (groups, out_features), codes summed over the channels of a group: a zero point is multiplied by it

    def widened(self) -> Tensor:
        """What the codes stand for, float32 ``(out_features, in_features)``."""
        return torch.cat([codes.float() * scale for codes, scale in zip(self.groups, self.scales, strict=True)]).T


def weight_codes(weight: Tensor, bits: int) -> WeightCodes:
    """Symmetric codes of a weight ``(out_features, in_features)``.

    An output channel has one scale; with 4 bits or fewer, each of its groups of :data:`GROUP` input channels has one.
    """
    size = GROUP if bits <= 4 else weight.shape[1]
    groups, scales = [], []
    for part in weight.detach().float().split(size, dim=1):
        grid = symmetric_grid(part.abs().amax(dim=1, keepdim=True), bits)
        groups.append(grid.codes(part).T.contiguous())
        scales.append(grid.scale[:, 0])
    return WeightCodes(tuple(groups), torch.stack(scales), torch.stack([g.sum(0, dtype=torch.int32) for g in groups]))


@dataclasses.dataclass(frozen=True, eq=False)
class LinearSetting:
    """How a linear map is to be computed."""

    weights: WeightCodes | FloatWeights | None  # None for weights as they are
    inputs: (
        Grid | FloatInputs | int | None
    )  # one grid for all; bits for symmetric grids of each token's own range; None for inputs as they are
    positions: Tensor | None = None  # int64, of tokens (the second of three axes) that are computed whole, as they are
    channels: Tensor | None = None  # int64, of inputs that are left out of the grid and multiplied as they are
    integer: bool = True  # multiply codes as integers; else multiply what they stand for as float32


class QuantizedLinear(nn.Module):
    """A linear map computed as its ``setting`` says, and as it was where that is ``None``; of as many inputs as int32 can add
    up.

    It takes the place of an ``nn.Linear`` or a ``Conv1D`` and has its parameters.
    """

    def __init__(self, linear: nn.Linear | Conv1D, name: str) -> None:
        super().__init__()
        self.weight, self.bias, self.name = linear.weight, linear.bias, name
        self.transposed = isinstance(linear, Conv1D)
        self.out_features, self.in_features = self.matrix.shape
        if self.in_features > MOST_INPUTS:
            raise UnsupportedModelError(
                f"{name} has {self.in_features} inputs, and int32 holds sums of at most {MOST_INPUTS} products for sure"
            )
        self.setting: LinearSetting | None = None

    @property
    def matrix(self) -> Tensor:
        """The weight, ``(out_features, in_features)``."""
        return self.weight.T if self.transposed else self.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        setting = self.setting
        if setting is None or (setting.weights is None and setting.inputs is None):
            return nn.functional.linear(hidden_states, self.matrix, self.bias)
        rows = hidden_states.reshape(-1, self.in_features)
        outputs = self._product(rows, setting)
        if setting.channels is not None:
            outputs = outputs + rows[:, setting.channels] @ self.matrix[:, setting.channels].T
        if self.bias is not None:
            outputs = outputs + self.bias
        outputs = outputs.to(hidden_states.dtype).view(*hidden_states.shape[:-1], self.out_features)
        if setting.positions is not None and hidden_states.ndim == 3:
            chosen = setting.positions
            outputs[:, chosen] = nn.functional.linear(hidden_states[:, chosen], self.matrix, self.bias)
        return outputs

    def _product(self, rows: Tensor, setting: LinearSetting) -> Tensor:
        """Inputs times weights without what stays whole, float32 ``(rows, out_features)``."""
        if setting.channels is not None:
            rows = rows.index_fill(1, setting.channels, 0.0)  # 0 is on every grid
        if isinstance(setting.inputs, FloatInputs):
            rows = setting.inputs(rows)
        elif (coded := inputs_on_grid(rows, setting.inputs)) is not None:
            codes, grid = coded
            if isinstance(setting.weights, WeightCodes) and setting.integer:
                return integer_product(codes, grid, setting.weights, self.name)
            rows = grid.widened(codes)
        return nn.functional.linear(rows, self.matrix if setting.weights is None else setting.weights.widened())

    def check(self, hidden_states: Tensor, setting: LinearSetting) -> float:
        """Largest difference between the integer product and the one of what the codes stand for, over its bound; at most 1.

        A product of ``n`` float32 terms is off by at most ``n u`` of the sum of their sizes, ``u`` = 2^-24, and the two factors
        of each by ``u``; the integer sum is exact, and rounded when it becomes float32, is multiplied by two scales, and is
        added up over groups. Together at most ``(n + groups + 8) u`` of that sum.

        Raises:
            MeasurementError: it is more, so the integers are not what they should be.
            ConfigurationError: this device has no products of int8.
        """
        rows = hidden_states.reshape(-1, self.in_features)
        if isinstance(setting.inputs, FloatInputs) or not isinstance(setting.weights, WeightCodes):
            return 0.0
        coded = inputs_on_grid(rows, setting.inputs)
        if coded is None:
            return 0.0
        codes, grid = coded
        compared = slice(None, None, max(1, len(rows) // CHECKED))
        wide, weights = grid.widened(codes)[compared], setting.weights.widened()
        product = integer_product(codes, grid, setting.weights, self.name)[compared]
        difference = (product - nn.functional.linear(wide, weights)).abs()
        sizes = nn.functional.linear(wide.double().abs(), weights.double().abs())
        bound = (self.in_features + len(setting.weights.groups) + 8) * UNIT * sizes
        ratio = float((difference / bound.clamp(min=torch.finfo(torch.float64).tiny)).max())
        if not ratio <= 1.0:
            raise MeasurementError(
                f"{self.name}: the integer product differs from the simulated one by {ratio:.3g} times what rounding allows; "
                "take `products` simulated"
            )
        return ratio


def inputs_on_grid(rows: Tensor, inputs: Grid | int | None) -> tuple[Tensor, Grid] | None:
    """Codes of inputs, int8 ``(rows, in_features)``, and their grid; ``None`` where they stay as they are."""
    if inputs is None:
        return None
    grid = inputs if isinstance(inputs, Grid) else symmetric_grid(rows.abs().amax(dim=1, keepdim=True), inputs)
    return grid.codes(rows), grid


def integer_product(inputs: Tensor, grid: Grid, weights: WeightCodes, name: str) -> Tensor:
    """Products of codes summed as int32 by ``torch._int_mm``, then scaled: float32 ``(rows, out_features)``."""
    parts = inputs.split([len(codes) for codes in weights.groups], dim=1)
    total: Tensor | None = None
    for part, codes, scale, sums in zip(parts, weights.groups, weights.scales, weights.sums, strict=True):
        try:
            product = torch._int_mm(part.contiguous(), codes)
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"device {part.device} has no product of int8 matrices {tuple(part.shape)} × {tuple(codes.shape)} for {name} "
                f"({str(error).splitlines()[0]}); use `device` cpu, or `products` simulated"
            ) from error
        scaled = (product - grid.zero * sums) * scale
        total = scaled if total is None else total + scaled
    assert total is not None, "a map has an input"
    return total * grid.scale
