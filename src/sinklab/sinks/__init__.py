"""Sinks: where the sinks of a model are, found once, as a value that is given to everything that speaks of a sink."""

from sinklab.sinks.finder import SinkFinder
from sinklab.sinks.finding import SinkWeights, find_sinks, weigh_sinks
from sinklab.sinks.value import Head, Sink, SinkPlace, Sinks

__all__ = ["Head", "Sink", "SinkFinder", "SinkPlace", "SinkWeights", "Sinks", "find_sinks", "weigh_sinks"]
