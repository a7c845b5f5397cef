"""sinklab: find attention sinks, test what they do, stream with them, train without them.

The public names are imported on first use, so that ``import sinklab`` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.attention.session import attend
    from sinklab.audit import audit, measure
    from sinklab.models.loading import load_model
    from sinklab.report.html import write_report

__version__ = "0.1.0"

_HOMES = {
    "attend": "sinklab.attention.session",
    "audit": "sinklab.audit",
    "load_model": "sinklab.models.loading",
    "measure": "sinklab.audit",
    "write_report": "sinklab.report.html",
}

__all__ = ["__version__", "attend", "audit", "load_model", "measure", "write_report"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sinklab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(types.ModuleType):
    """Keeps ``sinklab.audit`` the function: importing the sub-package of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
