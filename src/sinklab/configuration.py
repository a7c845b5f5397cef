"""What a section of a configuration is: a pydantic model with errors of one sentence; dotted paths into it; and its numbers."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from sinklab.errors import ConfigurationError, SinklabError


def check_numbers(what: str, value: object) -> None:
    """Refuse numbers with which nothing can be computed: NaN, infinities, and integers that 64 bits do not hold.

    Every option of a command, every setting of a plug-in and every field of a configuration goes through this.

    Args:
        what: how the message begins, such as ``"`seed`"``.
        value: a number, a list, a tuple or a dictionary of them, or anything else, which passes.

    Raises:
        ConfigurationError: it is one of these, or has one in it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{what} is {value}; expected a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigurationError(f"{what} has {value.bit_length()} bits; expected a whole number of 64 bits at most")
    if isinstance(value, (list, tuple)):
        for item in value:
            check_numbers(what, item)
    if isinstance(value, dict):
        for name, item in value.items():
            check_numbers(f"{what}: {name}", item)


class Section(BaseModel):
    """A named group of validated fields; an unknown field is refused with the nearest known one.

    Raises:
        ConfigurationError: on construction and on assignment.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True)

    def __init__(self, **fields: object) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _problem(type(self), error) from None

    @field_validator("*")
    @classmethod
    def _check_numbers(cls, value: object) -> object:
        check_numbers("the value", value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise _problem(type(self), error) from None

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> Self:
        """The section that ``model_dump()`` described, from plain nested dictionaries."""
        return cls(**fields)


S = TypeVar("S", bound="Section")


def with_overrides(config: S, overrides: Iterable[str]) -> S:
    """A copy with ``path.to.field=value`` applied, values in YAML: ``model.window=64``, ``optimizer.betas=[0.9,0.99]``.

    ``model.operation.name=sigmoid`` names another operation, so the settings of the former one are dropped.

    Raises:
        ConfigurationError: no equals sign, no such field (did you mean …?), or a value that the field does not take.
    """
    fields = config.model_dump()
    given: list[tuple[list[str], object]] = []
    for item in overrides:
        path, equals, text = item.partition("=")
        if not equals:
            raise ConfigurationError(f"`changes` {item!r}: expected path=value, such as optimizer.learning_rate=1e-3")
        try:
            given += _leaves(path.split("."), read_yaml(text))
        except ValueError:
            raise ConfigurationError(f"`changes` {item!r}: the value is not YAML") from None
    for (*above, last), value in sorted(given, key=lambda one: one[0][-1] != "name"):  # names before the settings of their own
        if last == "name" and _is_free(type(config), above):
            *above, last, value = *above, {"name": value}
        place = fields
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    return type(config).parse(fields)


def read_yaml(text: str) -> Any:
    """A value of the command line in YAML, where ``1e-3`` is a number and a date is a text.

    Raises:
        ValueError: it is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:  # also nesting that Python has no room for
        raise ValueError(f"{text!r} is not YAML") from error


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def _leaves(path: list[str], value: object) -> list[tuple[list[str], object]]:
    """What is set, with its path: a dictionary sets the fields below."""
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves([*path, str(key)], inner)]


def _is_free(section: type[BaseModel], path: list[str]) -> bool:
    """Whether the path leads to a free-form field, a dictionary, and not to a section or a value."""
    for part in path:
        field = section.model_fields.get(part) if isinstance(section, type) and issubclass(section, BaseModel) else None
        if field is None:
            return False
        if getattr(field.annotation, "__origin__", None) is dict:
            return True
        section = field.annotation  # type: ignore[assignment]
    return False


class _FieldError(ConfigurationError):
    """A problem with one field, which may sit in a section of a section."""

    def __init__(self, path: tuple[str, ...], text: str) -> None:
        super().__init__(text.replace("{}", ".".join(path), 1))
        self.path, self.text = path, text


def _problem(section: type[BaseModel], error: ValidationError) -> ConfigurationError:
    """The first problem in one sentence: where, what was given, what is expected."""
    problem = error.errors()[0]
    path = tuple(str(part) for part in problem["loc"])
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, _FieldError):  # a section inside this one has said it
        return _FieldError((*path, *cause.path), cause.text)
    if isinstance(cause, SinklabError):
        return ConfigurationError(f"{'.'.join(path)}: {cause}" if path else str(cause))
    if problem["type"] in ("extra_forbidden", "no_such_attribute"):
        known = list(section.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return _FieldError(path, f"there is no field '{{}}'.{hint} Known: {', '.join(known)}")
    more = f" (and {error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
    given = repr(problem["input"]).replace("{}", "{ }")
    return _FieldError(path, f"{{}} = {given}: {problem['msg'][0].lower()}{problem['msg'][1:]}{more}")
