"""What an attention operation is: a frozen dataclass that turns scores into weights."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError

__all__ = ["Operation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation(abc.ABC):
    """How scores become weights; its fields are its parameters, all of them numbers.

    An operation is stateless. It is registered with transformers as ``sinklab_<name>`` and may then replace the attention
    of any model on the seam. ``normalized`` says whether every row of weights sums to one.
    """

    name: ClassVar[str]
    normalized: ClassVar[bool]

    @abc.abstractmethod
    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Weights from scaled scores.

        Args:
            scores: ``(batch, num_heads, q_len, kv_len)``, scaled, before mask and normalisation.
            visible: boolean, broadcastable to ``scores``; ``None`` when every key is visible.

        Returns:
            Weights of the same shape, in float32 or wider; exactly 0 where not visible; a row without a visible key is 0.
        """

    def head_outputs(
        self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Plain reference of the whole operation: weights times values.

        Args:
            queries: ``(batch, num_heads, q_len, head_dim)``.
            keys, values: ``(batch, num_kv_heads, kv_len, head_dim)``; repeated here for grouped queries.
            visible: as in :meth:`weights`.
            scaling: factor on the scores.

        Returns:
            Head outputs ``(batch, num_heads, q_len, value_dim)`` and weights, both in the dtype of ``queries``.
        """
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        scores = torch.matmul(queries, keys.transpose(2, 3)) * scaling
        weights = self.weights(scores, visible).to(queries.dtype)
        return torch.matmul(weights, values), weights

    def to_dict(self) -> dict[str, Any]:
        """Name and parameters, as they are written into a model's config."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Operation:
        """The operation that :meth:`to_dict` described.

        Raises:
            UnknownNameError: no such operation.
            ConfigurationError: a parameter that the operation does not have.
        """
        from sinklab.registry import operations

        parameters = dict(fields)
        cls = operations[parameters.pop("name", "softmax")]
        allowed = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in parameters if name not in allowed]
        if unknown:
            raise ConfigurationError(
                f"operation {cls.name!r} has no parameter {', '.join(unknown)}; its parameters: {', '.join(allowed) or 'none'}"
            )
        return cls(**parameters)
