"""What the tests of many runs share with those of one."""

from tests.training.conftest import cache, finished, run, text

__all__ = ["cache", "finished", "run", "text"]
