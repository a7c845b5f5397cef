"""Sinks: where the sinks of a model are, found once, as a value that is given to everything that speaks of a sink.

What finds them is imported on first use: a probe that is about a sink needs the value alone, and not transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sinklab.sinks.value import Head, Sink, SinkPlace, Sinks

if TYPE_CHECKING:
    from sinklab.sinks.finder import SinkFinder
    from sinklab.sinks.finding import SinkWeights, find_sinks, weigh_sinks

__all__ = ["Head", "Sink", "SinkFinder", "SinkPlace", "SinkWeights", "Sinks", "find_sinks", "weigh_sinks"]

_HOMES = {
    "SinkFinder": "sinklab.sinks.finder",
    "SinkWeights": "sinklab.sinks.finding",
    "find_sinks": "sinklab.sinks.finding",
    "weigh_sinks": "sinklab.sinks.finding",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sinklab.sinks' has no attribute {name!r}")
