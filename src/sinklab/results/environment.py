"""What produced a result, for run.json (versions, commit, hardware, dtype), and refusals of sizes that no memory can hold."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import operator
import os
import platform
import resource
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from sinklab.errors import ConfigurationError
from sinklab.results.progress import say
from sinklab.results.version import __version__

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What ``dtype`` may be, besides ``"auto"``."""

_ALSO = {"double": "float64", "fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow")


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


def dtype_named(dtype: object) -> str:
    """``"auto"`` or one of :data:`DTYPES`, of a dtype of torch, its name or one of the short names (``bf16``, ``fp16``)."""
    name = str(dtype).removeprefix("torch.")
    name = _ALSO.get(name, name)
    if name not in ("auto", *DTYPES):
        raise ConfigurationError(f"there is no dtype {str(dtype)!r} for a model; `dtype` is auto, {', '.join(DTYPES)}")
    return name


def environment(placed: Placed | None = None) -> dict[str, Any]:
    """Versions, commit, hardware and dtype, and of which GGUF file the weights are.

    Args:
        placed: what computed the numbers; by default float32 on a GPU if there is one, else on the CPU.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if placed is None else placed.device
    dtype = torch.float32 if placed is None else placed.dtype
    found: dict[str, Any] = {
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


def cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its control group is given time of."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        bound = min(bound, max(1, int(quota) // int(period)))  # "max" without a limit
    return bound


@functools.cache
def say_threads(threads: int) -> None:
    """Say once that more threads compute than there are cores for them, which makes each wait for the others."""
    if threads > (usable := cores()):
        many = f"{usable} core{'s' * (usable > 1)}"
        say(
            f"note: torch computes with {threads} threads and this process has {many}, which can take many times as long; set "
            f"OMP_NUM_THREADS={usable}, or torch.set_num_threads({usable})"
        )


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


def require_function(name: str, value: object, of: str) -> None:
    """Refuse what is neither a function nor ``None``; ``of`` says in words what it is called with."""
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} is {_shown(value, 'of ')}; expected a function of {of}")


def require_path(name: str, value: object) -> None:
    """Refuse what is no path, as a text or an object of ``pathlib``."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name} is {_shown(value, 'of ')}; expected a path")


def require_number(name: str, value: object) -> None:
    """Refuse what is no number, such as a text with one."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several
        raise ConfigurationError(f"{name} is {_shown(value, 'of ')}; expected a number") from None


def require_whole(name: str, value: object, least: int, why: str = "") -> None:
    """Refuse a setting ``name`` below ``least``, or that is no whole number."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, got {_shown(value)}") from None
    if number < least:
        raise ConfigurationError(f"{name} {number} must be {least} or more{why}")


def _shown(value: object, before: str = "") -> str:
    """A value in a message; of what may have pages, such as a model, its class, with a word before it."""
    return repr(value) if isinstance(value, (str, int, float, type(None))) else f"{before}{type(value).__name__}"


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def require_memory(needed: int, what: str) -> None:
    """Refuse what needs more memory than the machine has in all, whatever else is running.

    Args:
        needed: bytes on the CPU at least, an exact integer however large.
        what: what asks for them, with its value: ``"`keys` 4294967296"``.
    """
    there = machine_memory()
    if needed > there:
        raise ConfigurationError(
            f"{what}: at least {in_units(needed)} of memory would be needed, and there is {in_units(there)} in all; ask for "
            "less"
        )


def machine_memory() -> int:
    """Bytes that this process can have at most: the machine's memory, or a limit on the container or the process below it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


def in_units(size: int) -> str:
    """A number of bytes in the largest unit that leaves a whole number, rounded down: ``12 GB``."""
    for unit in _UNITS:  # noqa: B007
        if size < 1000:
            break
        size //= 1000
    return f"{size:,} {unit}" if size < 10**6 else f"more than {10**6:,} {unit}"
