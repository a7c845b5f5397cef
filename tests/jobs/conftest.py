"""What the tests of many runs share with those of one, and cells and read-outs in this process."""

import contextlib
import io
from pathlib import Path

import pandas as pd
from tests.training.conftest import cache, finished, run, text

from sinklab.errors import SinklabError
from sinklab.jobs.cell import run_cell
from sinklab_claims.reproduce import store

__all__ = ["cache", "cells_of", "finished", "read_here", "run", "run_here", "text"]


def cells_of(result):
    """The cells of a sweep as a table."""
    return pd.DataFrame(result.summary["cells"])


def run_here(plan, names, *, jobs, retries, watch):
    """What ``run_local`` does, in this process, where everything is imported already."""
    errors = {}
    for name in names:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                run_cell(plan.folder, name)
        except SinklabError as error:
            errors[name] = str(error)
        watch.ended(name, errors.get(name) or plan.outcome(name))
    return errors


def read_here(commands, log, outcome, **options):
    """What ``run_processes`` does with the commands for read-outs and measurements, in this process."""
    for name, (module, folder, batch) in commands.items():
        assert module == store.__name__
        with contextlib.redirect_stderr(io.StringIO()):
            store._work(Path(folder), batch)
        assert outcome(name) == "done"
    return {}
