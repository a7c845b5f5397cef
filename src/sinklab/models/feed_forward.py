"""The feed-forward layer: two linear maps and an activation, or three and a gate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "FeedForward"]

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (nn.functional.relu, False),
    "gelu": (nn.functional.gelu, False),
    "swish": (nn.functional.silu, False),
    "reglu": (nn.functional.relu, True),
    "geglu": (nn.functional.gelu, True),
    "swiglu": (nn.functional.silu, True),
}
"""The values of ``Architecture.feed_forward``: the activation, and whether it is the gate of a third map."""


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or with a gate ``down(act(gate(x)) · up(x))``; no biases. Shazeer 2020 (arXiv 2002.05202).

    GELU is the exact one. The width is ``intermediate_size`` in both forms, as in Gu et al. 2024 (arXiv 2410.10781), so the
    plain form has a third fewer parameters.
    """

    def __init__(self, kind: str, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.activation, gated = ACTIVATIONS[kind]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(batch, seq_len, hidden_size)`` to the same shape."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(hidden_states)))
        return self.down_proj(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
