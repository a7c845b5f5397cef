"""SigmaLinear: a linear map whose largest singular value is a parameter of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from sinklab.errors import ConfigurationError


class SigmaLinear(nn.Linear):
    """``y = (γ / σ(W)) W x + b`` with ``σ(W) = u · W v`` and the singular vectors u, v from power iteration.

    Each forward in training mode does one step of power iteration, in float32 or wider; in evaluation mode nothing changes, nor
    where gradient checkpointing runs a forward again, which has to be the one that was. The gradient flows through ``W`` in
    ``σ(W)``; u and v are constants to it.

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
        # Not inside a backward pass, asked as torch's own FSDP does; a compiled forward is traced before, and asks nothing.
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if training and not recomputing:
            with torch.no_grad():
                right = normalize(weight.T @ left, dim=0)
                left = normalize(weight @ right, dim=0)
                self.left.copy_(left)
                self.right.copy_(right)
        # u · W v as a plain sum: matrix kernels round by how the weight lies in memory, which differs in a loaded checkpoint.
        return (weight * (left[:, None] * right)).sum()
