"""sinklab: find attention sinks, test what they do, stream with them, train without them.

The public names are imported on first use, so that ``import sinklab`` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from sinklab.results.version import __version__

if TYPE_CHECKING:
    from sinklab.attention.maps import AttentionMaps
    from sinklab.attention.returned import attend_returned
    from sinklab.attention.session import attend
    from sinklab.models.attach import attach, save_model
    from sinklab.models.loading import load_model, wrap_model
    from sinklab.probes.sink_rate import SinkRate
    from sinklab.sinks import find_sinks
    from sinklab.streaming.cache import PolicyCache, SinkCache
    from sinklab.streaming.chat import Chat
    from sinklab.streaming.reader import open_reader
    from sinklab.streaming.state import load_state, save_state
    from sinklab.streaming.stream import Stream, stream
    from sinklab.studies.audit.audit import audit
    from sinklab.studies.audit.page import write_report
    from sinklab.studies.causes.causes import find_causes
    from sinklab.studies.fold.fold import fold_sinks
    from sinklab.studies.measure.from_weights import from_weights
    from sinklab.studies.measure.measure import measure
    from sinklab.studies.origin.origin import find_origin
    from sinklab.studies.pretrain.pretrain import pretrain
    from sinklab.studies.quantize.quantize import quantize
    from sinklab.studies.show.show import show
    from sinklab.training.callback import SinkCallback
    from sinklab.training.config import PretrainingConfig

_HOMES = {
    "AttentionMaps": "sinklab.attention.maps",
    "Chat": "sinklab.streaming.chat",
    "PolicyCache": "sinklab.streaming.cache",
    "PretrainingConfig": "sinklab.training.config",
    "SinkCache": "sinklab.streaming.cache",
    "SinkCallback": "sinklab.training.callback",
    "SinkRate": "sinklab.probes.sink_rate",
    "Stream": "sinklab.streaming.stream",
    "attach": "sinklab.models.attach",
    "attend": "sinklab.attention.session",
    "attend_returned": "sinklab.attention.returned",
    "audit": "sinklab.studies.audit.audit",
    "find_causes": "sinklab.studies.causes.causes",
    "find_origin": "sinklab.studies.origin.origin",
    "find_sinks": "sinklab.sinks",
    "fold_sinks": "sinklab.studies.fold.fold",
    "from_weights": "sinklab.studies.measure.from_weights",
    "load_model": "sinklab.models.loading",
    "load_state": "sinklab.streaming.state",
    "measure": "sinklab.studies.measure.measure",
    "open_reader": "sinklab.streaming.reader",
    "pretrain": "sinklab.studies.pretrain.pretrain",
    "quantize": "sinklab.studies.quantize.quantize",
    "save_model": "sinklab.models.attach",
    "save_state": "sinklab.streaming.state",
    "show": "sinklab.studies.show.show",
    "stream": "sinklab.streaming.stream",
    "wrap_model": "sinklab.models.loading",
    "write_report": "sinklab.studies.audit.page",
}

__all__ = [
    "AttentionMaps",
    "Chat",
    "PolicyCache",
    "PretrainingConfig",
    "SinkCache",
    "SinkCallback",
    "SinkRate",
    "Stream",
    "__version__",
    "attach",
    "attend",
    "attend_returned",
    "audit",
    "find_causes",
    "find_origin",
    "find_sinks",
    "fold_sinks",
    "from_weights",
    "load_model",
    "load_state",
    "measure",
    "open_reader",
    "pretrain",
    "quantize",
    "save_model",
    "save_state",
    "show",
    "stream",
    "wrap_model",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        _import_tqdm()
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sinklab' has no attribute {name!r}; it has {', '.join(__all__)}")


def _import_tqdm() -> None:
    """In a notebook, import what would warn, when a library imports it, that its own bars need widgets; ours do not."""
    if "ipykernel" in sys.modules and "tqdm.auto" not in sys.modules:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            importlib.import_module("tqdm.auto")


def __dir__() -> list[str]:
    return sorted(__all__)
