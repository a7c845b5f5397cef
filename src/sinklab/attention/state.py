"""The learned parameters of an operation, as a submodule of the attention module they belong to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinklab.attention.operation import EMPTY, HeadShape, Operation, State
from sinklab.errors import ConfigurationError

__all__ = ["ATTRIBUTE", "OperationState", "bind", "state_of"]

ATTRIBUTE = "operation_state"
"""Name of the submodule; parameters are saved as ``<attention module>.operation_state.<name>``."""


class OperationState(nn.Module):
    """Parameters of one operation in one attention layer, under the names that :meth:`Operation.parameters` gives them."""

    def __init__(self, operation: Operation, shape: HeadShape) -> None:
        super().__init__()
        self.operation, self.shape = operation, shape
        for name, value in operation.parameters(shape).items():
            self.register_parameter(name, nn.Parameter(value))
        self.layer_input: Tensor | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values again, for the parameters that were not read from a checkpoint."""
        for name, value in self.operation.parameters(self.shape).items():
            parameter = getattr(self, name)
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.copy_(value)

    def read(self, layer_input: Tensor | None = None) -> State:
        """What the operation is given: its parameters and, if it needs it, what entered the layer.

        Raises:
            ConfigurationError: the operation needs the layer's input and nobody passed it.
        """
        state: dict[str, Tensor] = {name: value for name, value in self._parameters.items() if value is not None}
        if self.operation.needs_layer_input:
            given = self.layer_input if layer_input is None else layer_input
            if given is None:
                raise ConfigurationError(
                    f"operation {self.operation.name!r} reads what enters the attention layer, and nothing was "
                    "passed; attach it with sinklab.attach(model, operation)"
                )
            state["layer_input"] = given
        return state


def bind(module: nn.Module, operation: Operation, shape: HeadShape) -> None:
    """Give an attention module its operation: the settings, the learned parameters, and prepared projections."""
    module.operation = operation  # type: ignore[assignment]
    operation.prepare(module)
    state = OperationState(operation, shape)
    if operation.needs_layer_input or len(list(state.parameters())):
        setattr(module, ATTRIBUTE, state)


def state_of(module: nn.Module, operation: Operation, layer_input: Tensor | None = None) -> State:
    """State of ``operation`` on ``module``; empty for an operation without parameters.

    Raises:
        ConfigurationError: the operation has parameters and the module does not carry them.
    """
    own = getattr(module, ATTRIBUTE, None)
    if isinstance(own, OperationState) and own.operation == operation:
        return own.read(layer_input)
    cls = type(operation)
    learned = cls.parameters is not Operation.parameters or operation.needs_layer_input
    # Learned numbers may also sit in the projections or in front of the sequence; a module that is bound has been given them.
    elsewhere = cls.prepare is not Operation.prepare or operation.tokens_in_front > 0
    if learned or (elsewhere and getattr(module, "operation", None) != operation):
        raise ConfigurationError(
            f"operation {operation.name!r} has learned parameters, which {type(module).__name__} does not carry; attach it "
            f"first: sinklab.attach(model, {operation.name!r})"
        )
    return EMPTY
