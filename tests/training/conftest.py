"""What the tests of training share: a text, one cache of what is encoded, and a run of eight steps to look at."""

import random
from pathlib import Path

import pytest

from sinklab.configuration import with_overrides
from sinklab.recipes.tiny import tiny
from sinklab.training.config import PretrainingConfig
from sinklab.training.train import run_training

EIGHT_STEPS = (
    *("training.steps=8", "training.save_every=4", "training.log_every=2", "training.evaluate_every=4"),
    *("watch.every=4", "data.held_out_rows=8"),
)


def short(text: Path, *changes: str) -> PretrainingConfig:
    """The tiny recipe on a text, eight steps of it."""
    return with_overrides(tiny(), [f"data.corpus={text}", *EIGHT_STEPS, *changes])


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A file of paragraphs with something to learn: words from a small vocabulary."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(60)]
    paragraphs = [" ".join(generator.choices(words, k=60)) for _ in range(300)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Directory of encoded text, shared by all runs of the session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(tmp_path_factory, text, cache):
    """The result of a run that went well. Shared: copy its folder before changing it."""
    return run_training(short(text), tmp_path_factory.mktemp("runs") / "finished", cache=cache, progress=False)


@pytest.fixture
def run(text, cache, tmp_path):
    """Train the eight steps with changes: ``run("training.steps=4", resume=True)``."""

    def train(*changes: str, folder: str = "run", **options):
        return run_training(short(text, *changes), tmp_path / folder, cache=cache, progress=False, **options)

    return train
