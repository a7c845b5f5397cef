"""What pages check of ``summary.json`` is what commands write: same keys, same types."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from sinklab.report import schema
from sinklab.results.summaries import certificate, shared

WRITTEN: dict[type[schema.Record], type] = {
    schema.Interval: shared.Difference,
    schema.CertifiedHead: certificate.CertifiedHead,
    schema.Certificate: certificate.Certificate,
}
"""Class of a page's schema to that of what is written. The audit's own summary has no types of its own."""


def plain(hint: Any) -> Any:
    """A hint that can be compared: no metadata, and classes of the schema as what they stand for."""
    if get_origin(hint) in (Annotated, NotRequired):
        return plain(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset(plain(member) for member in get_args(hint)) - {shared.Refused}
    if get_origin(hint) is Literal:
        return hint
    if get_origin(hint) is not None:
        return (get_origin(hint), *map(plain, get_args(hint)))
    return WRITTEN.get(hint, hint)


def present(hint: Any) -> Any:
    """Of a field that may be missing, what it is where it is there."""
    found = plain(hint)
    if not isinstance(found, frozenset):
        return found
    found -= {type(None)}
    return next(iter(found)) if len(found) == 1 else found


@pytest.mark.parametrize("checked", WRITTEN, ids=lambda checked: checked.__name__)
def test_a_page_checks_what_is_written(checked):
    written = WRITTEN[checked]
    assert is_typeddict(written)
    hints: Mapping[str, Any] = get_type_hints(written, include_extras=True)
    of_page = get_type_hints(checked, include_extras=True)
    differ = {}
    for name, field in checked.model_fields.items():
        assert name in hints, f"{written.__name__} has no {name}"
        form = plain if field.is_required() else present
        if form(of_page[name]) != form(hints[name]):
            differ[name] = (form(of_page[name]), form(hints[name]))
    assert differ == {}


def test_every_class_of_the_schema_is_compared():
    kinds = {kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, schema.Record)}
    of_audit = {schema.Sink, schema.SinkPlaces, schema.Condition, schema.Audit}
    assert kinds - set(WRITTEN) == {schema.Record, *of_audit}


def test_a_difference_is_noticed():
    assert plain(float | None) != plain(float)
    assert present(float | None) is float
    assert plain(list[schema.CertifiedHead]) == (list, certificate.CertifiedHead)
    assert plain(Annotated[list[int], "two of them"]) == plain(NotRequired[list[int]]) != plain(list[str])
