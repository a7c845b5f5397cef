"""Gates on the output of heads, as Qiu et al. 2025 compare them."""

from __future__ import annotations

from sinklab.claims._architecture import operation

__all__ = ["ELEMENT_WISE", "HEAD_WISE", "INDEPENDENT", "SHARED", "SQUEEZED"]

ELEMENT_WISE = operation("gate, element-wise", "gated")
HEAD_WISE = operation("gate, head-wise", "gated", element_wise=False)
SHARED = operation("gate, shared by heads", "gated", shared=True)
INDEPENDENT = operation("gate, input-independent", "gated", input_dependent=False)
SQUEEZED = operation("gate, at least a half", "gated", floor=0.5)
