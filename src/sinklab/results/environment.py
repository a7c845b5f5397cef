"""What produced a result: versions, commit, hardware and dtype, for ``run.json``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

from sinklab.results.version import __version__

__all__ = ["Environment", "Placed", "environment", "installed"]

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow")


class Environment(TypedDict):
    """What ``run.json`` says of the machine and the software."""

    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | None]
    dtype: str
    gguf: NotRequired[dict[str, object]]


class Placed(Protocol):
    """What has a device and a dtype: a loaded model."""

    @property
    def device(self) -> Any:
        """The ``torch.device`` of its parameters."""

    @property
    def dtype(self) -> object:
        """The ``torch.dtype`` of its parameters."""


def installed(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of sinklab, Python and packages, from what pip has written down: none of them is imported."""
    versions = {"sinklab": __version__, "python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def environment(placed: Placed | None = None) -> Environment:
    """Versions, commit, hardware and dtype, and of which GGUF file the weights are.

    Args:
        placed: what computed the numbers; by default float32 on a GPU if there is one, else on the CPU.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if placed is None else placed.device
    dtype = torch.float32 if placed is None else placed.dtype
    found: Environment = {
        "versions": installed(),
        "commit": _commit(),
        "hardware": {
            "device": str(device),
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "dtype": str(dtype).removeprefix("torch."),
    }
    if packed := getattr(placed, "gguf", None):  # the file that the weights were unpacked from
        found["gguf"] = dict(packed)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of the checkout that sinklab runs from; ``None`` for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None
