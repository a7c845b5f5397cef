"""Quiet libraries: what a command sets up before it imports the heavy ones, and bars of progress that nobody asked for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator


def quiet_libraries() -> None:
    """Keep the libraries' own chatter off the screen; what matters reaches the user as an error or in the report."""
    for name in ("TRANSFORMERS_VERBOSITY=error", "TOKENIZERS_PARALLELISM=false", "HF_HUB_DISABLE_PROGRESS_BARS=1"):
        os.environ.setdefault(*name.split("="))


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Keep warnings of transformers, and of accelerate, off the screen for a ``with`` block."""
    from transformers.utils import logging as of_transformers

    accelerate = logging.getLogger("accelerate")
    before = of_transformers.get_verbosity(), accelerate.level
    of_transformers.set_verbosity_error()
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        of_transformers.set_verbosity(before[0])
        accelerate.setLevel(before[1])


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keep the bars that transformers draws while it reads or writes weights off the screen for a ``with`` block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
