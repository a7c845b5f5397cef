"""Attending: what caches share that see the attention of their model, layer by layer, as soon as its keys are written."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, ClassVar

from torch import nn
from transformers import PreTrainedModel

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.errors import UnsupportedModelError
from sinklab.policies.base import BoundedPolicy
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.ordered import has_ordered_bias
from sinklab.streaming.recurrent import hybrid_layers, keyless_layers
from sinklab.streaming.rotation import KeyRotations
from sinklab.streaming.table import Table

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

__all__ = ["AttendingCache", "AwaitingTable", "require_unordered"]


def require_unordered(policy: BoundedPolicy, model: PreTrainedModel) -> None:
    """Refuse a model whose bias counts the keys in between.

    Raises:
        UnsupportedModelError: heads that keep different tokens would need a bias each.
    """
    if has_ordered_bias(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} adds a bias that counts the keys between key and query, which is another for every head "
            f"once heads keep different tokens; policy {policy.name!r} needs rotary positions or none"
        )


class AwaitingTable(Table):
    """A table that knows whose attention comes next.

    Attributes:
        waiting: the layer that has written keys, and whose attention has not been seen.
        without: what the policy lacks without it, for the error.
    """

    without: ClassVar[str]
    waiting: object | None = None

    def wait_for(self, layer: object) -> None:
        """The next attention call is of this layer."""
        self.require_seen()
        self.waiting = layer

    def require_seen(self) -> None:
        """Refuse to go on without the attention of a layer.

        Raises:
            UnsupportedModelError: a layer waits still.
        """
        if self.waiting is not None:
            raise UnsupportedModelError(
                f"a layer of {type(self.model).__name__} wrote keys and its attention was not seen, so policy "
                f"{self.policy.name!r} {self.without}"
            )


class AttendingCache(PolicyCache, seam.Observer, abc.ABC):
    """A cache that is an observer of its model's attention while the model is in its forward, and at no other time."""

    table: AwaitingTable
    keys_in_slots: ClassVar[bool] = False  # a session gets nothing to see of it, and is refused for that

    def __init__(
        self, policy: BoundedPolicy, model: PreTrainedModel | None = None, *, chunk: int = 128, rebase_at: int | None = None
    ) -> None:
        self._anatomy: Anatomy | None = None
        self._looking = contextlib.ExitStack()
        super().__init__(policy, model, chunk=chunk, rebase_at=rebase_at)

    def _fit_positions(self, model: PreTrainedModel, policy: BoundedPolicy | None = None) -> KeyRotations:
        """As every cache does, of a model whose heads have keys and values of their own in every layer.

        Raises:
            UnsupportedModelError: latent attention, of which all heads share what is cached, or layers that write no keys.
        """
        rotations = super()._fit_positions(model, policy)
        lacks = {
            "caches a latent that all heads share": rotations.latent,
            "has layers that write no keys": keyless_layers(model),
            "has layers that keep states beside their keys": hybrid_layers(model),
        }
        for lack in (words for words, layers in lacks.items() if layers):
            raise UnsupportedModelError(
                f"{type(model).__name__} {lack}, and under policy {self.policy.name!r} every head of every layer holds keys "
                "of its own. One with the same tokens for all heads works, such as sink_window"
            )
        return rotations

    def close(self, output: ModelOutput | None) -> ModelOutput | None:
        if output is not None:
            self.table.require_seen()
        self._stop_looking()
        return super().close(output)

    def reset(self) -> None:
        self._stop_looking()
        super().reset()

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is one of this model's attention modules."""
        return self._anatomy is not None and id(module) in self._anatomy.names

    @property
    def running(self) -> bool:
        """Whether the model is inside its forward."""
        return self.step is not None

    def _look(self) -> None:
        self._looking.enter_context(seam.shadow(self))

    def _stop_looking(self) -> None:
        self._looking.close()
        if self._table is not None:
            self.table.waiting = None
