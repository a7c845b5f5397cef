"""sigma-reparam: projections whose largest singular value is one learned number, against collapse of the attention entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from sinklab.errors import ConfigurationError
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

__all__ = ["SigmaLinear", "SigmaReparam"]


@operations.register("sigma_reparam")
@dataclass(frozen=True, kw_only=True)
class SigmaReparam(Softmax):
    """Softmax attention between projections ``(γ / σ(W)) W``; weights in [0, 1], rows sum to one, and there is no null mass.

    Zhai et al. 2023 (arXiv 2303.06296): ``σ(W)`` is the spectral norm and ``γ`` is learned, so the norm of a projection, and
    with it the size of the scores, moves only as fast as one number does. The projections are the ``nn.Linear`` modules inside
    the attention module; each becomes a :class:`SigmaLinear`, whose ``weight`` keeps its name. ``γ`` starts at ``σ(W)``, so
    that the function is unchanged, as in their released vision code; the paper starts at 1.
    """

    def prepare(self, module: nn.Module) -> None:
        """Reparametrise the projections of ``module``; a second time, start again from weights that have been drawn since.

        ``γ`` and singular vectors that were read from a checkpoint are kept.

        Raises:
            ConfigurationError: no ``nn.Linear`` inside, or one of a derived class.
        """
        found = [
            (parent, name, child)
            for parent in module.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
        ]
        if not found:
            raise ConfigurationError(
                f"operation 'sigma_reparam': {type(module).__name__} has no nn.Linear whose weight could be reparametrised; "
                "attach it to a model with separate linear projections"
            )
        for parent, name, child in found:
            if isinstance(child, SigmaLinear):
                child.start()
            elif type(child) is nn.Linear:
                setattr(parent, name, SigmaLinear(child))
            else:
                raise ConfigurationError(
                    f"operation 'sigma_reparam': {name} of {type(parent).__name__} is a {type(child).__name__}, not a plain "
                    "nn.Linear; load the model without quantisation and adapters"
                )


class SigmaLinear(nn.Linear):
    """``y = (γ / σ(W)) W x + b`` with ``σ(W) = u · W v`` and the singular vectors u, v from power iteration.

    Each forward in training mode does one step of power iteration, in float32 or wider; in evaluation mode nothing changes. The
    gradient flows through ``W`` in ``σ(W)``; u and v are constants to it.

    Attributes:
        weight, bias: those of the map that it was made of, the very same parameters.
        gamma: learned, ``(1,)``.
        left, right: buffers u ``(out_features,)`` and v ``(in_features,)``.
    """

    gamma: nn.Parameter
    left: Tensor
    right: Tensor

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.training = plain.training
        self.gamma = nn.Parameter(plain.weight.new_ones(1))
        self.register_buffer("left", plain.weight.new_zeros(plain.out_features))
        self.register_buffer("right", plain.weight.new_zeros(plain.in_features))
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Take the singular vectors and ``γ`` from the weight as it is, unless they were read from a checkpoint.

        Raises:
            ConfigurationError: the weight is zero and has no direction.
        """
        if self.weight.is_meta or getattr(self.gamma, "_is_hf_initialized", False):
            return
        weight = self._wide()
        left, _, right = torch.linalg.svd(weight, full_matrices=False)
        self.left.copy_(left[:, 0])
        self.right.copy_(right[0])
        self.gamma.copy_(self._spectral_norm(weight, training=False))
        if float(self.gamma) == 0.0:
            raise ConfigurationError(
                "operation 'sigma_reparam': a projection is zero everywhere, and γ / σ(W) is not defined for it"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        return linear(input, self.effective_weight(), self.bias)

    def effective_weight(self) -> Tensor:
        """``(γ / σ(W)) W`` in the dtype of the weight; in training mode after one step of power iteration."""
        # Under autocast a matrix times a vector would be rounded to bfloat16, and γ / σ(W) with it.
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = self._wide()
            factor = self.gamma.to(weight.dtype) / self._spectral_norm(weight, self.training)
            return (factor * weight).to(self.weight.dtype)

    def _wide(self) -> Tensor:
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def _spectral_norm(self, weight: Tensor, training: bool) -> Tensor:
        # Normed again: a model in bfloat16 has its buffers in bfloat16. New tensors too, so that autograd keeps no buffer.
        left, right = (normalize(vector.to(weight.dtype), dim=0) for vector in (self.left, self.right))
        if training:
            with torch.no_grad():
                right = normalize(weight.T @ left, dim=0)
                left = normalize(weight @ right, dim=0)
                self.left.copy_(left)
                self.right.copy_(right)
        # u · W v as a plain sum: matrix kernels round by how the weight lies in memory, which differs in a loaded checkpoint.
        return (weight * (left[:, None] * right)).sum()
