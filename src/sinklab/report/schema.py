"""What a page takes from ``summary.json``: the fields that it relies on, with their types.

Fields that a page does without may be missing (older versions of sinklab did not write all of them), and others may be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sinklab.errors import InputError, ResultError

__all__ = ["require_audit", "require_kind"]


class Record(BaseModel):
    """A JSON object whose known fields have the type that they were written with."""

    model_config = ConfigDict(strict=True, extra="allow")


def _head_and_rate(entry: list[Any]) -> list[Any]:
    layer, head, _, rate = entry
    if not all(type(number) is int for number in (layer, head)) or type(rate) not in (int, float):
        raise ValueError("a head is written as layer, head, module and rate")
    return entry


HeadAndRate = Annotated[list[Any], Field(min_length=4, max_length=4), AfterValidator(_head_and_rate)]
Range = Annotated[list[int], Field(min_length=2, max_length=2)]


def _if_it_has(field: str) -> Callable[[Any], Any]:
    """A part without this field says why it was not measured, and is left to the page."""
    return lambda part: part if isinstance(part, dict) and field in part else None


class Sink(Record):
    """A sink, or a place that is nearly one."""

    kind: str
    name: str
    text: str | None = None
    position: int | None = None
    rate: float
    mass: float | None = None
    token_share: float | None = None
    sinking: int | None = None
    value_ratio: float | None = None
    heads: list[HeadAndRate]


class SinkPlaces(Record):
    """Where the sinks are."""

    sinks: list[Sink]
    silent: list[Sink]
    followed: list[Sink] = []
    weak: list[Sink] = []


class Condition(Record):
    """Another text, with or without the beginning-of-sequence token."""

    corpus: str | None = None
    bos: int | None = None
    loss: float | None = None
    sink_rate_gu2024: float | None = None


class Interval(Record):
    """A mean with its bounds."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None


class CertifiedHead(Record):
    """A head whose output was bounded."""

    module: str
    layer: int
    head: int
    gap: float
    least_output: float
    output: float
    sink_weight: float
    needed_sink_weight: float | None
    forced: bool


class Certificate(Record):
    """Which heads could not be silent without their sink."""

    text: str
    heads: list[CertifiedHead]
    threshold: float
    delta: float
    sink_heads: int
    forced_heads: int
    normalized: bool
    sink_position: int | str


class Audit(Record):
    """``summary.json`` of an audit."""

    model: str | None = None
    operation: str | None = None
    loss: float | None = None
    sinks: SinkPlaces | None = None
    sink_role: str | None = None
    sink_rate_gu2024: float | None = None
    sink_heads_by_weight: int | None = None
    normalized: bool | None = None
    null_mass: float | None = None
    num_heads: int | None = None
    definitions: dict[str, float | None] | None = None
    conditions: list[Condition] | None = None
    finding: str | None = None
    text: list[str] | None = None
    certificate: Annotated[Certificate | None, BeforeValidator(_if_it_has("heads"))] = None

    model: str
    operation: str | None


def require_kind(run: Mapping[str, Any], folder: Path, *expected: str) -> str:
    """Refuse a run of a command that a page does not know, and say where what it found is.

    Args:
        run: its ``run.json``; without a kind, as older versions wrote it, it is an audit's.
        folder: its output directory.
        expected: names of commands.

    Returns:
        The command that made the run.

    Raises:
        InputError: it is none of those expected.
    """
    kind = str(run.get("kind", "audit"))
    if kind not in expected:
        known = [name for name in ("summary.json", "table.parquet") if (folder / name).is_file()]
        more = f"; what it found is in {folder / known[0]}" if known else ""
        if (folder / "model").is_dir():
            more += (
                f", and the trained model, for 'sinklab audit', in {folder / 'model'}; 'sinklab plot' draws trainings together"
            )
        commands = (", ".join(expected[:-1]), expected[-1])
        raise InputError(f"{folder} holds a run of kind {kind!r}, expected {' or '.join(filter(None, commands))}{more}")
    return kind


def require_audit(summary: dict[str, Any], path: Path) -> None:
    """Refuse a summary of an audit that a page cannot be made of.

    Raises:
        ResultError: naming the field, what it holds and what is expected.
    """
    _require(Audit, summary, path)


def _require(kind: type[Record], summary: dict[str, Any], path: Path) -> None:
    try:
        kind.model_validate(summary)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        value = repr(problem["input"]) if problem["type"] != "missing" else "nothing"
        value = value if len(value) <= 60 else f"{value[:60]}…"
        raise ResultError(
            f"{path} does not follow the schema: {where} is {value}; {problem['msg'][0].lower()}{problem['msg'][1:]}. Was it "
            "changed, or written by another version? Run the command again"
        ) from None
