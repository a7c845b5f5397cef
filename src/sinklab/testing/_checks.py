"""What every contract check does when it fails: raise, with the name of the check, what was expected and what was found."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.errors import ContractError
from sinklab.models.language_model import SinkLM, SinkLMConfig


class Checks:
    """Raises in the name of one plug-in."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def require(self, condition: bool, check: str, expected: str, got: object) -> None:
        """Raise :class:`ContractError` unless ``condition`` holds."""
        if not condition:
            raise ContractError(f"{self.subject} breaks its contract, check {check!r}: expected {expected}, got {got}")

    def close(self, computed: Tensor, expected: Tensor, tolerance: float, check: str, what: str) -> None:
        """Require that no number differs by more than ``tolerance``."""
        error = float((computed.double() - expected.double()).abs().max())
        self.require(error <= tolerance, check, f"{what} within {tolerance:.1e}", f"a difference of {error:.1e}")


def is_frozen(plugin: object) -> bool:
    """Whether it is, or is an instance of, a frozen dataclass."""
    return bool(getattr(getattr(plugin, "__dataclass_params__", None), "frozen", False))


def tiny_sinklm(operation: dict[str, object], vocab_size: int = 50) -> SinkLM:
    """A model with random weights under an operation, float64: two layers, four heads on two keys; always the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = SinkLMConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            operation=operation,
        )
        return SinkLM(config).double().eval()
