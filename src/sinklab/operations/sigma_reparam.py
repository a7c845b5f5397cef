"""sigma-reparam: projections over their spectral norm, times a learned number, against collapse of the attention entropy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sinklab.errors import ConfigurationError
from sinklab.operations._sigma_linear import SigmaLinear
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("sigma_reparam")
@dataclass(frozen=True, kw_only=True)
class SigmaReparam(Softmax):
    """Softmax attention between projections ``(γ / σ(W)) W``; weights in [0, 1], rows sum to one, and there is no null mass.

    Zhai et al. 2023 (arXiv 2303.06296): ``σ(W)`` is the spectral norm and ``γ`` is learned, so the norm of a projection, and
    with it the size of the scores, moves only as fast as one number does. The projections are the ``nn.Linear`` modules inside
    the attention module; each becomes a SigmaLinear, whose ``weight`` keeps its name, with ``gamma`` beside it. ``γ`` starts at
    ``σ(W)``, so that the function is unchanged, as in their released vision code; the paper starts at 1. ``σ(W)`` is followed
    by one step of power iteration in each forward of training, as in the paper: while weights change fast it lags some percent
    behind the spectral norm.
    """

    def prepare(self, module: nn.Module) -> None:
        """Reparametrise the projections of ``module``; a second time, start again from weights that have been drawn since.

        ``γ`` and singular vectors that were read from a checkpoint are kept.

        Raises:
            ConfigurationError: no ``nn.Linear`` inside, or one of a derived class.
        """
        linears = [
            (parent, name, child)
            for parent in module.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
        ]
        if not linears:
            raise ConfigurationError(
                f"operation 'sigma_reparam': {type(module).__name__} has no nn.Linear whose weight could be reparametrised; "
                "attach it to a model with separate linear projections"
            )
        for parent, name, child in linears:
            if isinstance(child, SigmaLinear):
                child.start()
            elif type(child) is nn.Linear:
                setattr(parent, name, SigmaLinear(child))
            else:
                raise ConfigurationError(
                    f"operation 'sigma_reparam': {name} of {type(parent).__name__} is a {type(child).__name__}, not a plain "
                    "nn.Linear; load the model without quantisation and adapters"
                )
