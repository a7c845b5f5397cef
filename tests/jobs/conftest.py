"""What the tests of many runs share with those of one."""

import pandas as pd
from tests.training.conftest import cache, finished, run, text

__all__ = ["cache", "cells_of", "finished", "run", "text"]


def cells_of(result):
    """The cells of a sweep as a table."""
    return pd.DataFrame(result.summary["cells"])
