"""Evaluation: scores of a model under several cache policies, and whether they depend on the sink tokens."""

from sinklab.evaluation.depend import depend

__all__ = ["depend"]
