"""What the hub refuses, in one line with what to do: gated, private, misspelt, disabled, busy, or out of reach."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sinklab.models.embedded import PREFIX, embedded_names

__all__ = ["refusal"]

BUSY = 429
"""HTTP status of a server that has had too many requests."""


def refusal(error: Exception, name: str, revision: str | None) -> str:
    """Why a model could not be fetched, and what to do about it.

    Args:
        error: of huggingface_hub.
        name: the model, as a user wrote it.
        revision: what was asked for of it.
    """
    known = f"{_meant(name)}models that need no download: {', '.join(embedded_names())}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return (
            f"{name} is gated on the hub: accept its terms there ({constants.ENDPOINT}/{name}), then run: hf auth login. Where "
            "that is done already, the owner has not let you in yet"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the hub repository {name} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{name!r} is neither a local directory nor a public hub repository; check the spelling, or log in if it is "
            f"private (hf auth login); {known}"
        )
    if isinstance(error, DisabledRepoError):
        return f"{name} has been disabled on the hub, so nobody can fetch it; choose another model"
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return (
            f"{name!r} is not a local directory and not in the hub cache, and HF_HUB_OFFLINE is set; unset it, or run "
            f"'hf download {name}' where there is a network and give the directory; {known}"
        )
    if status is not None and isinstance(error, HfHubHTTPError):
        what = "asks to wait" if status == BUSY else "answered with an error"
        return f"{name!r} could not be fetched: the hub {what} (HTTP {status}); try again later, or give a directory; {known}"
    if isinstance(error, HFValidationError):
        return f"{name!r} is no name that the hub knows; a hub id looks like org/model; {known}"
    return (
        f"{name!r} is not a local directory, not in the hub cache and could not be fetched from the hub (offline?); "
        f"check the network, or run 'hf download {name}' where there is one and give the directory; {known}"
    )


def _meant(name: str) -> str:
    """The nearest of what is here already: embedded models, what the hub cache holds, directories beside a path."""
    near = difflib.get_close_matches(name, [*embedded_names(), *_cached(), *_directories(name)], n=1, cutoff=0.75)
    near = [PREFIX + name] if PREFIX + name in embedded_names() else near
    return f"did you mean {near[0]!r}? Else " if near else ""


def _cached() -> Iterator[str]:
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*/snapshots"):
        yield folder.parent.name.removeprefix("models--").replace("--", "/")


def _directories(name: str) -> Iterator[str]:
    parent = Path(name).expanduser().parent
    for config in parent.glob("*/config.json"):
        yield str(config.parent)
