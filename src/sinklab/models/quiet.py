"""What a command sets up before it imports the heavy libraries."""

from __future__ import annotations

import os
import sys

__all__ = ["quiet_libraries"]


def quiet_libraries() -> None:
    """Keep the libraries' own chatter off the screen; what matters reaches the user as an error or in the report."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
