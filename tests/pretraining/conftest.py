"""What the tests of training share: one cache of encoded text, and a run of ten steps to look at."""

from __future__ import annotations

import pytest

from sinklab.configuration import with_overrides
from sinklab.pretraining.train import pretrain
from sinklab.recipes.tiny import tiny

SHORT = ("training.steps=8", "training.save_every=4", "training.log_every=2", "training.evaluate_every=4", "watch.every=4")


def short(*changes: str):
    """The tiny recipe, eight steps of it."""
    return with_overrides(tiny(), [*SHORT, *changes])


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Directory of encoded text, shared by all runs of the session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(tmp_path_factory, cache):
    """The result of a run that went well. Shared: copy its folder before changing it."""
    return pretrain(short(), tmp_path_factory.mktemp("runs") / "finished", cache=cache, progress=False)


@pytest.fixture
def run(cache, tmp_path):
    """Train the tiny recipe with changes: ``run("training.steps=4", resume=True)``."""

    def train(*changes: str, folder: str = "run", **options):
        return pretrain(short(*changes), tmp_path / folder, cache=cache, progress=False, **options)

    return train
