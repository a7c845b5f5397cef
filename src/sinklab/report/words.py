"""How a number is written; see :mod:`sinklab.results.blocks`."""

from __future__ import annotations

from sinklab.results.blocks import number, percent

__all__ = ["number", "percent"]
