"""``sinklab pretrain``: what it prints, where it writes, how it ends."""

import json

import pytest
from tests.command_line import CliRunner
from tests.training.conftest import EIGHT_STEPS

from sinklab.cli.app import app
from sinklab.training.bookkeeping import Bookkeeper


@pytest.fixture
def sinklab(text, cache, tmp_path, monkeypatch):
    """Run ``sinklab pretrain`` in an empty directory; gives status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, changes: tuple[str, ...] = ()):
        changed = [f"--set={change}" for change in (f"data.corpus={text}", *EIGHT_STEPS, *changes)]
        done = CliRunner().invoke(app, ["pretrain", *arguments, *changed, "--cache", str(cache)])
        return done.exit_code, done.stdout, done.stderr

    return call


def test_a_run_says_how_it_went_and_where_it_is(sinklab, tmp_path):
    status, out, err = sinklab("tiny")
    assert status == 0, err
    folder = tmp_path / "sinklab-runs" / "tiny"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("sink rate"))
    assert lines["status"] == "finished after 8 steps"
    assert lines["model"] == "sinklab-runs/tiny/model"
    (rate,) = (line for line in out.splitlines() if line.startswith("sink rate"))
    assert rate.endswith(" % at position 0 (Gu et al. 2024, threshold 0.3)")
    # Not a terminal: a line per record.
    assert [line.split()[1] for line in err.splitlines() if "tokens/s" in line] == ["2/8", "4/8", "6/8", "8/8"]
    assert "step 8/8  sink rate" in err

    again, out, err = sinklab("tiny", "--resume", "--json")
    assert again == 0
    assert "has finished already" in err
    result = json.loads(out)
    assert (result["status"], result["steps"], result["folder"]) == ("finished", 8, "sinklab-runs/tiny")
    assert set(result) == {"folder", "status", "held_out_loss", "sink_rate", "tokens_per_second", "steps"}


@pytest.mark.parametrize(
    ("ending", "status", "word"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "", "disk"), 2, "error: no space left on the disk (disk); free some, or write elsewhere with --out"),
    ],
)
def test_what_ends_it_at_once_names_the_checkpoint_that_is_kept(sinklab, monkeypatch, ending, status, word):
    on_step_end = Bookkeeper.on_step_end

    def ends(self, arguments, state, *more, **options):
        if state.global_step > 4:
            raise ending
        return on_step_end(self, arguments, state, *more, **options)

    monkeypatch.setattr(Bookkeeper, "on_step_end", ends)
    code, _, err = sinklab("tiny", "--out", "out")
    assert (code, err.splitlines()[-1]) == (status, f"{word}; checkpoint-4 is kept in out: go on with --resume")


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (["tinny"], (), "error: no recipe is called 'tinny'. Did you mean 'tiny'? Known: "),
        (["tiny"], ("training.stepps=3",), "error: there is no field 'training.stepps'. Did you mean 'steps'?"),
        (["tiny"], ("training.device=cuda",), "error: training.device is cuda and this machine's torch "),
        (["tiny"], ("data.corpus=nowhere.txt",), "error: there is no text file 'nowhere.txt'"),
        (["./mine.py"], (), "error: there is no file mine.py"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line_and_status_two(sinklab, arguments, changes, said, tmp_path):
    import torch

    if "cuda" in said and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, out, err = sinklab(*arguments, changes=changes)
    assert status == 2
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert not (tmp_path / "sinklab-runs").exists()


def test_the_card_of_a_training_says_what_the_run_says(finished):
    done = CliRunner().invoke(app, ["card", str(finished.folder)])
    assert done.exit_code == 0, done.output
    assert f"{finished.summary['held_out_loss']:.3f} nats per held-out token" in done.stdout
    assert "| gu2024 |" in done.stdout
    assert finished.record["weights_sha256"][:16] in done.stdout
