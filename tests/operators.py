"""How many operators of torch some code starts: a cost that neither a busy machine nor the size of tensors changes."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts every operator inside its ``with`` block but those that only look at a tensor anew."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += not function.is_view
        return function(*arguments, **(keywords or {}))
