"""Identity kernel: the score itself is the weight, of either sign; no normalisation, and no sink appears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sinklab.attention.paths.linear import FeatureKernel
from sinklab.registry import operations


@operations.register("identity")
@dataclass(frozen=True, kw_only=True)
class Identity(FeatureKernel):
    """``weights = q · k · scaling``, divided by ``max(|row sum|, 1)`` if ``normalize``; any sign, any size.

    Gu et al. 2024 (arXiv 2410.10781), the row "q·k/√d": no sink with weights as they are, and training failed with the divisor.
    Their metric takes absolute values of signed weights.

    Args:
        normalize: divide each row by its sum where that is larger than 1 in size. Rows need not sum to one either way.
    """

    signed: ClassVar[bool] = True
