"""trigger() beyond the command: names of operations, runs that diverge, and labs that were interrupted."""

from __future__ import annotations

import pytest

from sinklab.errors import ConfigurationError, InputError
from sinklab.operations.relu import Relu
from sinklab.operations.sink_token import SinkToken
from sinklab.studies.trigger import lab
from sinklab.studies.trigger.lab import as_released, label_of
from sinklab.studies.trigger.problem import train
from sinklab.studies.trigger.trigger import trigger


def test_names_are_those_of_the_paper():
    assert as_released("relu") == Relu(uncounted=1)
    assert as_released({"name": "relu", "uncounted": 0}) == Relu()
    assert as_released({"name": "relu", "power": 0.5}) == Relu(power=0.5)
    assert label_of(Relu(uncounted=1)) == "relu"
    assert label_of(Relu()) == "relu:uncounted=0"
    assert label_of(SinkToken(count=3)) == "sink_token:count=3"
    for text in ("relu", "sink_token"):
        assert label_of(as_released(text)) == text


def test_models_that_diverged_have_no_heads_that_sink():
    """Weights that are left may be finite, infinite or nothing, with a value map that is none."""
    result = trigger(operation="relu,qk_norm,sink_logit", seeds=[0], cap=3, learning_rate=1e19, samples=8)
    wide = trigger(operation="relu,softmax", layers=2, heads=2, seeds=[0], cap=3, learning_rate=1e5, samples=8)
    for run in result.summary["runs"] + wide.summary["runs"]:
        assert run["outcome"] == "diverged"
        assert run["bos_weight_mean"] is run["bos_weight_bound"] is run["sinking_heads"] is run["nothing_mean"] is None


def test_a_lab_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    def call(chosen="softmax,sigma_reparam", seeds=(0, 1), **fields):
        return trigger(operation=chosen, seeds=seeds, **{"cap": 4, "samples": 8, **fields})

    whole = call()
    trained = []

    def killed_at_the_third(operation, problem, seed, progress):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append((operation, seed))
        return train(operation, problem, seed, progress)

    monkeypatch.setattr(lab, "train", killed_at_the_third)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        call(out=out)
    assert {path.name for path in out.iterdir()} == {"store"}
    with pytest.raises(InputError, match="holds a run of trigger that was not finished; go on with `resume`, or replace it"):
        call(out=out)
    monkeypatch.setattr(lab, "train", lambda operation, *others: trained.append(operation) or train(operation, *others))
    result = call(out=out, resume=True)
    assert len(trained) == 4  # two before and two after
    timeless = [[{**run, "cpu_seconds": 0} for run in result.summary["runs"]] for result in (whole, result)]
    assert timeless[0] == timeless[1]
    assert (out / "run.json").is_file()
    # Seeds may be added; what there is stays.
    more = call(out=out, seeds=(0, 1, 2), resume=True)
    assert len(trained) == 6
    assert more.summary["runs"][:2] == result.summary["runs"][:2]
    with pytest.raises(ConfigurationError, match=r"has other settings: cap was 4, is 5. Resume it with its own"):
        call(out=out, cap=5, resume=True)
    with pytest.raises(ConfigurationError, match="`overwrite` begins anew and `resume` goes on"):
        call(out=out, resume=True, overwrite=True)
    with pytest.raises(InputError, match="exists; choose another with `out`"):
        call(out=out)
    call("softmax", [0], cap=5, out=out, overwrite=True)
    assert [path.name[:14] for path in (out / "store").glob("*.safetensors")] == ["softmax-seed0-"]


def test_a_result_is_not_replaced_by_a_smaller_one(tmp_path):
    out = tmp_path / "out"
    fields = {"cap": 1, "samples": 8, "out": out}
    first = trigger(operation="softmax,relu,sigma_reparam", seeds=[0, 1, 2], **fields)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(
        InputError,
        match=r"out holds a result with `operation` sigma_reparam and `seeds` 1, 2, which would be lost: ask for them",
    ):
        trigger(operation="relu,softmax", seeds=[0, 3], resume=True, **fields)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    more = trigger(operation="relu,softmax,sigma_reparam", seeds=[2, 1, 0, 3], resume=True, **fields)
    assert len(more.summary["runs"]) == len(first.summary["runs"]) + 3
    # What no choice of maps can do is trained when that is said, and left out when it is not; it is named by the option.
    operations = "relu,softmax,sigma_reparam,sigmoid"
    trigger(operation=operations, seeds=[0, 1, 2, 3], anyway=True, resume=True, **fields)
    with pytest.raises(InputError, match=r"out holds a result with `anyway` sigmoid, which would be lost"):
        trigger(operation=operations, seeds=[0, 1, 2, 3], resume=True, **fields)
    # An interruption leaves the result and what is refused for its sake.
    finished = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    def interrupt(stage, done, total):
        if stage == "runs" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trigger(operation=operations, seeds=[0, 1, 2, 3, 4], anyway=True, resume=True, progress=interrupt, **fields)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == finished
    with pytest.raises(
        InputError, match=r"out holds a result with `operation` relu, sigma_reparam, sigmoid and `seeds` 0, 2, 3"
    ):
        trigger(operation="softmax", seeds=[1], resume=True, **fields)
    # What is not finished is no result: the run may end with less than it was begun with.
    (out / "run.json").unlink()
    assert len(trigger(operation="softmax", seeds=[1], resume=True, **fields).summary["runs"]) == 1


@pytest.mark.parametrize(
    ("operations", "seeds", "error"),
    [
        ("softmax,softmax", "0", "`operation` has softmax twice; name it once"),
        ("relu:uncounted=0,relu:uncounted=0", "0", "`operation` has relu:uncounted=0 twice"),
        ([Relu(uncounted=1), "relu"], [0], "`operation` has relu twice"),
        ("softmax", "0..2,1", "`seeds` has 1 twice"),
    ],
)
def test_nothing_counts_twice(operations, seeds, error, tmp_path):
    with pytest.raises(ConfigurationError, match=error):
        trigger(operation=operations, seeds=seeds, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_operation_without_a_solution_stands_beside_the_others():
    summary = trigger(operation=[Relu(), Relu(uncounted=1)], seeds=[0], cap=1, samples=8).summary
    assert [run["operation"] for run in summary["runs"]] == ["relu"]
    (entry,) = summary["cannot"]
    assert entry["operation"] == "relu:uncounted=0"
    assert entry["least_error"] == pytest.approx(1 / 30)
