"""ELU kernel: queries and keys mapped to positive features, elu(x) + 1; the linear attention of Katharopoulos et al."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sinklab.attention.operation import State
from sinklab.attention.paths.linear import FeatureKernel
from sinklab.operations._elu_plus_one import elu_plus_one
from sinklab.registry import operations


@operations.register("elu_kernel")
@dataclass(frozen=True, kw_only=True)
class EluKernel(FeatureKernel):
    """``weights = (elu(q) + 1) · (elu(k) + 1) · scaling``, positive, divided by their row sum if ``normalize``.

    Katharopoulos et al. 2020 (arXiv 2006.16236); Gu et al. 2024 (arXiv 2410.10781) find a sink with the row sum, and that
    training fails without. Their release adds 1e-8 to the row sum, which is not done here. The map acts on each coordinate of
    queries and keys; ``elu`` is another operation, the same function of the score.

    Args:
        normalize: divide each row by its sum; rows then sum to one. Otherwise weights are in (0, ∞).
    """

    normalize: bool = True

    def features(self, queries: Tensor, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        return elu_plus_one(queries), elu_plus_one(keys)
