"""Spelling: how names with settings are written on the command line, ``name(setting=value, …)``, and lists of them."""

from __future__ import annotations

import re
from typing import Any

import yaml

from sinklab.errors import ConfigurationError

__all__ = ["parse_call", "split_list"]


def split_list(text: str) -> list[str]:
    """The parts between commas that stand outside of brackets, without blanks around them; empty parts are dropped."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parse_call(text: str, expected: str) -> dict[str, Any]:
    """``{"name": …, setting: value, …}`` of ``name`` or ``name(setting=value, …)``; values are read as YAML.

    Args:
        expected: what the message says should have been written, after "write".

    Raises:
        ConfigurationError: it reads like neither.
    """
    call = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    parts = split_list(call[2]) if call is not None and call[2] else []
    if call is None or not all("=" in part for part in parts):
        raise ConfigurationError(f"{text!r} cannot be read; write {expected}")
    settings = (part.partition("=") for part in parts)
    try:
        return {"name": call[1], **{name.strip(): yaml.safe_load(value) for name, _, value in settings}}
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{text!r}: a value cannot be read; write {expected}") from error
