"""Claims on trainings, with one made for the test: what is kept, what is done again, and what is written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.claims.made_results import numbers_of

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.metric import Metric
from sinklab.results.table import read_run, read_table
from sinklab.results.version import __version__
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.reproduce import on_trainings, store
from sinklab_claims.reproduce.on_trainings import reproduce
from sinklab_claims.reproduce.store import measurement, reading, version_of
from sinklab_claims.verdict.records import read_results

CALLS: list[int] = []


HALF = 4.302652729911275 / 3**0.5
"""Half of the interval of 10, 11 and 12: t(0.975, 2) times their standard error."""


def measure(seed: int, scale: str) -> dict[str, dict[str, float]]:
    """Numbers of the made-up claim; one of them is not finite."""
    CALLS.append(seed)
    return {"more": {"sink_rate": 10.0 + 2 * seed, "lost": float("nan")}, "less": {"sink_rate": float(seed)}}


def made_up(**changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "statement": "More is more than less.",
        "source": "nobody2026",
        "reference": "Nobody 2026 (arXiv 2601.00000), table 1",
        "published": "10 and 0.",
        "parts": (Part("it is more", Difference("sink_rate", "more", "less"), more_than=5.0),),
        "measure": measure,
        "costs": {"tiny": "seconds"},
        "evidence": {"tiny": "Nothing was trained."},
    }
    return Claim(**(fields | changes))


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> dict[str, Claim]:
    """Claims by name, in place of the registered ones; measured in this process."""
    known = {"made_up": made_up()}
    monkeypatch.setattr(store, "claim_called", lambda name: known[name])
    monkeypatch.setattr(on_trainings, "claim_called", lambda name: known[name])

    def here(tasks: Any, **_: Any) -> dict[str, str]:
        for task in tasks:
            if task.cached() is None:
                task.take()
        return {}

    monkeypatch.setattr(store, "run_missing", here)
    CALLS.clear()
    return known


def test_a_claim_is_measured_judged_and_written_down(claims: dict[str, Claim], tmp_path: Path) -> None:
    (found,) = reproduce(["made_up"], out=tmp_path, progress=False)
    assert found.summary["verdict"] == "reproduced"
    assert numbers_of(found.table)[2] == {"more": {"sink_rate": 14.0}, "less": {"sink_rate": 2.0}}
    assert found.summary["errors"] == []
    record = read_run(tmp_path / "tiny" / "made_up")
    assert record["kind"] == "claim"
    assert (record["verdict"], record["seeds"], record["cost"]) == ("reproduced", [0, 1, 2], "seconds")
    assert record["parts"][0]["interval"] == pytest.approx([11.0 - HALF, 11.0 + HALF])
    assert record["evidence"] == "Nothing was trained."
    assert record["environment"]["versions"]["sinklab"]
    table = read_table(tmp_path / "tiny" / "made_up" / "table.parquet")
    assert sorted(zip(table["model"], table["seed"], table["value"], strict=True)) == sorted(
        (label, seed, base + rise * seed) for seed in range(3) for label, base, rise in (("more", 10.0, 2), ("less", 0.0, 1))
    )
    assert set(table["unit"]) == {"percent"}
    assert set(table["probe"]) == {"claim"}


def test_a_result_is_not_replaced_by_one_of_fewer_seeds(claims: dict[str, Claim], tmp_path: Path) -> None:
    reproduce(["made_up"], seeds=[0, 1, 2, 3], out=tmp_path, progress=False)
    before = read_run(tmp_path / "tiny" / "made_up")
    with pytest.raises(InputError, match="made_up holds a result with `seeds` 2, 3, which would be lost: ask for them too"):
        reproduce(["made_up"], seeds=[1, 0, 4], out=tmp_path, progress=False)
    assert CALLS == [0, 1, 2, 3]
    assert read_run(tmp_path / "tiny" / "made_up") == before
    (found,) = reproduce(["made_up"], seeds=[3, 2, 1, 0], out=tmp_path, progress=False)
    assert found.record["seeds"] == [3, 2, 1, 0]
    (tmp_path / "tiny" / "made_up" / "run.json").write_text("{")  # of which nothing can be lost
    reproduce(["made_up"], seeds=[0], out=tmp_path, progress=False)


def test_an_interruption_says_where_what_was_measured_is_kept(claims: dict[str, Claim], tmp_path, monkeypatch) -> None:
    measured, some = store.run_missing, [0]
    kept = f"what was trained and measured is kept in {tmp_path}: the same command goes on from there"

    def stops(tasks: Any, **options: Any) -> dict[str, str]:
        measured(tasks[: some[0]], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "run_missing", stops)
    for some[0], notes in ((0, []), (1, [kept])):
        with pytest.raises(KeyboardInterrupt) as caught:
            reproduce(["made_up"], out=tmp_path, progress=False)
        assert getattr(caught.value, "__notes__", []) == notes
    monkeypatch.setattr(store, "run_missing", measured)
    monkeypatch.setattr(on_trainings, "write_table", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as full:
        reproduce(["made_up"], out=tmp_path, progress=False)
    assert full.value.__notes__ == [kept]


def test_the_result_on_the_base_of_the_source_is_that_of_the_claim(claims: dict[str, Claim], tmp_path, monkeypatch) -> None:
    variants, given = (Variant("baseline"),), {"seeds": [0], "out": tmp_path, "progress": False}
    part = Part("it is learned", Value("held_out_loss", "baseline"), less_than=2.0)
    claims["both"] = made_up(measure=None, evidence={}, variants=variants, parts=(part,), bases=("no-bos", "bos"))
    monkeypatch.setattr(store, "train_cells", lambda *_, **__: {})
    (own,) = reproduce(["both"], **given)
    (other,) = reproduce(["both"], base="bos", **given)
    assert (own.folder, own.record["base"]) == (tmp_path / "tiny" / "both", "no-bos")
    assert (other.folder, other.record["base"]) == (tmp_path / "tiny-bos" / "both", "bos")
    assert own.record["config"]["data"]["bos"] == "none"
    assert other.record["config"]["data"]["bos"] == "rows"
    cells = [result.record["conditions"]["baseline"]["cells"]["0"] for result in (own, other)]
    assert cells[0] != cells[1]
    # Which of the two is newer is a matter of the second in which each was written.
    assert sorted(kept.record.base for kept in read_results(tmp_path)) == ["bos", "no-bos"]
    (measured,) = reproduce(["made_up"], **given)
    assert measured.record["base"] is None
    with pytest.raises(ConfigurationError, match="'made_up' is run on bos at scale tiny, and `base` is 'no-bos'"):
        reproduce(["made_up"], base="no-bos", **given)


def test_what_another_version_has_measured_is_measured_again(claims: dict[str, Claim], tmp_path: Path) -> None:
    reproduce(["made_up"], seeds=[0], out=tmp_path, progress=False)
    (path,) = (tmp_path / "measured" / "tiny").iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "sources": "0.0.1"}))
    assert measurement(tmp_path, "made_up", 0, "tiny").cached() is None
    reproduce(["made_up"], seeds=[0], out=tmp_path, progress=False)
    assert CALLS == [0, 0]
    assert json.loads(path.read_text())["sources"] == kept["sources"]


def test_numbers_belong_to_the_version_and_to_definitions_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = (Metric("old", "nats", "One."), Metric("new", "nats", "Two.", version=3))
    monkeypatch.setattr(measure, "metrics", metrics, raising=False)
    assert version_of([measure]) == f"{__version__} new=3"


def test_a_scale_without_a_cost_is_not_tested(claims: dict[str, Claim], tmp_path: Path) -> None:
    (found,) = reproduce(["made_up"], scale="small", out=tmp_path, progress=False)
    assert found.summary["verdict"] == "not tested at this scale"
    assert found.summary["reason"] == "the claim can be run at tiny only"
    assert found.folder is None
    assert CALLS == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": []}, "reproduce: 0 claims"),
        ({"names": ["made_up"], "seeds": [1, 1]}, r"seeds \[1, 1\]; expected one or more, and no seed twice"),
        ({"names": ["made_up"], "scale": "huge"}, "there is no scale 'huge'; scales: tiny, small, medium, 60m, 1b"),
        ({"names": ["made_up"], "jobs": 0}, "`jobs` must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_run_is_refused(
    claims: dict[str, Claim], tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        reproduce(**arguments, out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ()}, "has no parts"),
        ({"reference": "somebody said so"}, "names no 'arXiv NNNN.NNNNN'"),
        ({"measure": None}, "has neither variants nor measure"),
        ({"costs": {}}, "has no costs"),
        ({"bases": ("bos", "bos")}, "bases are bos, bos; expected one or more of bos, no-bos, each once"),
        ({"bases": ("no-bos", "bos")}, "measures by itself, which no base decides, and names several bases"),
        ({"measure": None, "variants": (Variant("baseline"),), "natural_text": True}, "says `natural_text` and measures noth"),
    ],
)
def test_claims_that_say_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made_up(**changes)


def test_only_finished_models_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "cell"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "stopped"}))
    assert reading(folder, "sinks") is reading(tmp_path / "runs" / "nobody", "sinks") is None
