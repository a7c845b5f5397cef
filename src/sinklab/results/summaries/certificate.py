"""The no-op certificate of an audit."""

from __future__ import annotations

from typing import NotRequired, TypedDict

__all__ = [
    "Certificate",
    "CertifiedHead",
]


class CertifiedHead(TypedDict):
    """One head of a no-op certificate; a number that no query has is null."""

    module: str
    layer: int
    head: int
    sink_weight: float
    needed_sink_weight: float | None
    least_output: float
    least_output_without_sink: float
    gap: float
    output: float
    queries: int
    needed_queries: int
    forced: bool


class Certificate(TypedDict):
    """The entry ``certificate`` of an audit's ``summary.json``."""

    sink_position: int | str
    sink: NotRequired[str]
    sink_found: NotRequired[bool]
    delta: float
    threshold: float
    samples: int
    normalized: bool
    sink_heads: int
    forced_heads: int
    heads: list[CertifiedHead]
    text: NotRequired[str]
