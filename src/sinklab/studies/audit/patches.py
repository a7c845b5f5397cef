"""What the patches of pictures receive, and how long their hidden states are, for the page of an audit."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, LayerOutput, Statistics
from sinklab.attention.probe import Watcher

__all__ = ["OnPatches"]


class OnPatches(Watcher):
    """What every position receives in each head, and how long its hidden state is behind each layer, for every sample."""

    name: ClassVar[str] = "on_patches"
    needs: ClassVar[frozenset[str]] = frozenset({"columns", "hidden_states"})

    def __init__(self) -> None:
        self._received: dict[str, Tensor] = {}
        self._norms: dict[int, Tensor] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind == "self":
            assert statistics.column_share is not None  # asked for in ``needs``
            assert statistics.column_count is not None
            mean = statistics.column_share / statistics.column_count.clamp_min(1)
            self._received[call.site.module] = mean.float().cpu()

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "layer":
            self._norms[output.site.layer] = output.hidden_states.float().norm(dim=-1).cpu()

    def arrays(self) -> dict[str, np.ndarray]:
        """``received`` ``(samples, modules, heads, positions)`` and ``norms`` ``(samples, layers + 1, positions)``, float32.

        Nothing where modules differ in their heads or positions.
        """
        received, norms = list(self._received.values()), [self._norms[layer] for layer in sorted(self._norms)]
        if len({tensor.shape for tensor in received}) != 1 or len({tensor.shape for tensor in norms}) != 1:
            return {}
        return {"received": torch.stack(received, 1).numpy(), "norms": torch.stack(norms, 1).numpy()}
