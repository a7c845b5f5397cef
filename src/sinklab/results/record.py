"""What a study found, as JSON: dataclasses are written and read back by pydantic, so a stored result has one definition."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from sinklab.errors import ResultError

__all__ = ["from_json", "to_json"]

T = TypeVar("T")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def to_json(found: object) -> dict[str, Any]:
    """A dataclass as plain JSON values, under the names of its fields; numbers that are not finite become ``None``."""
    values: dict[str, Any] = _adapter(cast(Any, type(found))).dump_python(found, mode="python")
    plain: dict[str, Any] = _plain(values)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def from_json(kind: type[T], values: Mapping[str, Any], where: object) -> T:
    """The dataclass that was written; fields that it does not know are left out, so newer results can be read.

    Args:
        where: names the file in the message.

    Raises:
        ResultError: a field is missing or of another type.
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(cast(Any, kind)).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResultError(f"{where} is not what this version writes: {place}: {first['msg']}") from None
    return found
