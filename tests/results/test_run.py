"""Run: what is in its way, one process a folder, whole or not at all, resuming; Store and Result."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.folder import partial_folder
from sinklab.results.run import STORE, Result, Run, silent
from sinklab.results.store import Store
from sinklab.results.table import COLUMNS, make_table, read_run, read_table

TABLE = make_table([{"metric": "m", "value": 1.0, "unit": "weight", "count": 1}])


def display(result):
    yield f"[bold]{result.kind}[/bold]"


def write_its_kind(folder):
    (folder / "report.html").write_text(read_run(folder)["kind"])
    return folder / "report.html"


def run(out, number=1, **options):
    """A run that stores one entry and finishes."""
    with Run("trial", out=out, **options) as one:
        stored = one.store.cached("part", {"number": number}, "code", lambda: [number])
        return one.finish(table=TABLE, display=display, summary={"stored": stored})


def interrupted(out, ending=KeyboardInterrupt, **options):
    """A run that is interrupted after it has stored one entry."""
    with Run("trial", out=out, **options) as one:
        one.store.put("part", {"number": 1}, "code", ["from before"])
        raise ending


def lab(out, seeds, operations, ending=None, *, resume=False, **options):
    """A run over a grid that stores one entry and finishes, or ends at once."""
    grid = {"seeds": seeds, "operation": operations}
    with Run("trial", out=out, resume=resume, grid=grid, grid_of=lambda summary: summary, **options) as one:
        if ending is not None:
            one.store.put("part", {"seeds": seeds}, "code", seeds)
            raise ending
        return one.finish(table=TABLE, display=display, summary=grid)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class TestWhole:
    def test_files_and_record(self, tmp_path):
        with Run("trial", out=tmp_path / "a" / "out", settings={"x": 1}) as one:
            assert one.progress is silent
            result = one.finish(
                table=TABLE,
                display=display,
                summary={"answer": 42},
                config={"y": [2]},
                files=lambda folder: (folder / "more.txt").write_text("more"),
                seeds=[0],
            )
        out = tmp_path / "a" / "out"
        assert names(tmp_path) == {f"a/out/{name}" for name in ("table.parquet", "summary.json", "run.json", "more.txt")}
        assert read_run(out) == result.record
        assert read_run(out, "summary.json") == result.summary == {"answer": 42}
        assert result.record["config"] == {"x": 1, "y": [2]}
        assert result.record["run_id"] == one.id
        assert {"kind", "seeds", "versions", "commit", "hardware", "dtype", "wall_seconds"} <= result.record.keys()
        assert len(read_table(out / "table.parquet")) == 1
        assert result.folder == out

    def test_a_failure_leaves_what_was_there(self, tmp_path):
        def fail(folder):
            raise OSError(28, "No space left on device")

        out = tmp_path / "new" / "out"
        with pytest.raises(OSError, match="No space"), Run("trial", out=out) as one:
            one.finish(table=TABLE, display=display, files=fail)
        assert not (tmp_path / "new").exists()
        run(out)
        before = names(tmp_path)
        with pytest.raises(OSError, match="No space"), Run("trial", out=out, overwrite=True) as one:
            one.finish(table=TABLE, display=display, files=fail)
        assert names(tmp_path) == before

    def test_what_is_in_the_way(self, tmp_path):
        run(tmp_path / "out")
        with pytest.raises(InputError, match="out exists; choose another with `out`, or replace it with `overwrite`"):
            run(tmp_path / "out")
        run(tmp_path / "out", overwrite=True)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("years")
        with pytest.raises(InputError, match=r"holds no run\.json, so it is no earlier result"):
            run(tmp_path / "mine", overwrite=True)
        with pytest.raises(InputError, match="is a file"):
            run(tmp_path / "mine" / "thesis.tex", overwrite=True)
        with pytest.raises(InputError, match=r"thesis\.tex is not a directory;"):
            run(tmp_path / "mine" / "thesis.tex" / "out")
        assert names(tmp_path / "mine") == {"thesis.tex"}

    @pytest.mark.parametrize("resume", [None, False])
    def test_places_for_no_folder(self, tmp_path, monkeypatch, resume):
        (tmp_path / "a" / "b").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "a")
        for out in ("", ".", "..", "/", "b/..", str(tmp_path), "../a"):
            with pytest.raises(InputError, match="is the working directory or one above it, which no result takes"):
                run(Path(out), resume=resume)
        Path("link").symlink_to("b")
        Path("loop").symlink_to("loop")
        Path("gone").symlink_to("nowhere")
        for name, target in (("link", "b"), ("gone", "nowhere"), ("loop", "loop")):
            with pytest.raises(InputError, match=rf"{name} is a symbolic link to {target}; give that directory with `out`"):
                run(Path(name), resume=resume, overwrite=True)
        assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", "link", "gone", "loop"}
        run(Path("link/out"), resume=resume)
        assert names(tmp_path / "a" / "b") >= {"out/run.json"}

    def test_what_appears_meanwhile_is_not_replaced_and_the_result_not_lost(self, tmp_path):
        out = tmp_path / "out"
        with Run("trial", out=out) as one:
            out.mkdir()
            (out / "thesis.tex").write_text("years")
            with pytest.raises(InputError, match=r"out exists; .* The result of this run is in"):
                one.finish(table=TABLE, display=display)
        assert names(out) == {"thesis.tex"}
        assert names(tmp_path / f"out-{one.id}") == {"run.json", "table.parquet"}

    def test_what_was_moved_aside_by_a_killed_process_is_put_back(self, tmp_path):
        out = tmp_path / "out"
        run(out)
        partial_folder(out).mkdir()
        out.rename(partial_folder(out) / "replaced")
        with pytest.raises(InputError, match="exists"):
            run(out)
        assert read_run(out)["kind"] == "trial"
        assert list(tmp_path.iterdir()) == [out]

    def test_the_store_is_taken_up_and_removed(self, tmp_path):
        out = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            interrupted(out)
        assert not out.exists()
        assert run(out).summary == {"stored": ["from before"]}
        assert list(tmp_path.iterdir()) == [out]
        assert STORE not in {path.name for path in out.iterdir()}


class TestInPlace:
    def test_resume(self, tmp_path):
        out, settings = tmp_path / "out", {"shape": (2, 3)}
        with pytest.raises(KeyboardInterrupt):
            interrupted(out, resume=False, settings=settings)
        assert not (out / "run.json").exists()
        with pytest.raises(InputError, match=r"holds a run of trial that was not finished; go on with `resume`, or replace"):
            run(out, resume=False, settings=settings)
        with pytest.raises(
            ConfigurationError, match=r"other settings: shape was \[2, 3\], is \[2, 4\]. Resume it with its own"
        ):
            run(out, resume=True, settings={"shape": (2, 4)})
        with pytest.raises(ConfigurationError, match="`overwrite` begins anew and `resume` goes on"):
            run(out, resume=True, overwrite=True, settings=settings)
        with pytest.raises(InputError, match="holds a run of trial, not of other"), Run("other", out=out, resume=True):
            pass
        assert run(out, resume=True, settings=settings).summary == {"stored": ["from before"]}
        assert (out / "run.json").is_file()
        with pytest.raises(InputError, match="out exists; choose another with `out`, or replace it with `overwrite`"):
            run(out, resume=False, settings=settings)
        assert run(out, 2, resume=True, settings=settings).summary == {"stored": [2]}
        assert run(out, resume=True, settings=settings).summary == {"stored": ["from before"]}
        assert run(out, resume=False, overwrite=True).summary == {"stored": [1]}
        assert len(list((out / STORE).glob("part-*"))) == 1
        assert list(tmp_path.iterdir()) == [out]

    def test_a_grid_grows_and_does_not_shrink(self, tmp_path):
        out = tmp_path / "out"
        lab(out, [0, 1], ["relu"])
        record = (out / "run.json").read_bytes()
        with pytest.raises(InputError, match=r"out holds a result with `seeds` 1, which would be lost: ask for them too"):
            lab(out, [0, 2], ["relu"], resume=True)
        assert (out / "run.json").read_bytes() == record
        lab(out, [2, 1, 0], ["relu", "softmax"], resume=True)
        with pytest.raises(InputError, match=r"holds a result with `seeds` 2 and `operation` softmax, which"):
            lab(out, [0, 1], ["relu"], resume=True)
        lab(out, [0], ["relu"], overwrite=True)

    @pytest.mark.parametrize("ending", [KeyboardInterrupt(), ValueError("a bug")])
    def test_a_result_stays_whole_until_the_one_that_goes_on_with_it_takes_its_place(self, tmp_path, ending):
        out = tmp_path / "out"
        lab(out, [0, 1], ["relu"])
        before = {name: (out / name).read_bytes() for name in names(out)}
        with pytest.raises(type(ending)):
            lab(out, [0, 1, 2], ["relu"], ending, resume=True)
        stored = names(out) - before.keys()
        assert [name[: len("store/part-")] for name in stored] == ["store/part-"]
        assert {name: (out / name).read_bytes() for name in before} == before
        with pytest.raises(InputError, match=r"out holds a result with `seeds` 1, which would be lost: ask for them too"):
            lab(out, [0], ["relu"], resume=True)
        assert lab(out, [0, 1, 2], ["relu"], resume=True).summary == {"seeds": [0, 1, 2], "operation": ["relu"]}
        assert names(out) == before.keys() | stored
        assert list(tmp_path.iterdir()) == [out]

    def test_folders_of_a_result_are_replaced_and_others_stay(self, tmp_path):
        def write(folder):
            (folder / "pictures").mkdir()
            (folder / "pictures" / f"{len(made)}.png").write_text("picture")
            made.append(folder)

        out, made = tmp_path / "out", []
        for resume in (False, True):
            with Run("trial", out=out, resume=resume) as one:
                one.store.put("part", {}, "code", [1])
                one.finish(table=TABLE, display=display, files=write)
            (out / "notes.txt").write_text("mine")
        assert names(out / "pictures") == {"1.png"}
        assert {"notes.txt", "run.json", "table.parquet", "store/settings.json"} < names(out)
        assert out not in made

    def test_resume_takes_nothing_that_is_not_its_own(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match=r"holds no store/settings\.json, so there is no run to go on with"):
            run(tmp_path, resume=True)
        with pytest.raises(InputError, match=r"holds no run\.json, so it is no earlier result"):
            run(tmp_path, resume=False, overwrite=True)
        assert names(tmp_path) == {"notes.txt"}

    def test_nothing_is_left_of_a_run_that_could_not_begin(self, tmp_path):
        out = tmp_path / "new" / "out"

        def begin(**options):
            with pytest.raises(ConfigurationError, match="no such layer"), Run("trial", out=out, **options):
                raise ConfigurationError("no such layer")

        begin(resume=False)
        assert list(tmp_path.iterdir()) == []
        first = run(out, resume=False).record["run_id"]
        begin(resume=False, overwrite=True)
        assert read_run(out)["run_id"] == first
        assert list(out.parent.iterdir()) == [out]
        with pytest.raises(KeyboardInterrupt):
            interrupted(out, resume=False, overwrite=True)  # it has something to go on with
        assert not (out / "run.json").exists()
        assert list(out.parent.iterdir()) == [out]

    @pytest.mark.parametrize(
        "ending", [KeyboardInterrupt(), OSError(28, "No space left"), Exception("I/O error: No space left (os error 28)")]
    )
    @pytest.mark.parametrize(
        ("options", "note"),
        [
            ({}, "what was computed is kept in {parent}/.out.partial/store: the same command goes on from there"),
            ({"resume": False}, "what was computed is kept in {parent}/out/store: go on with `resume`"),
            ({"resume": True}, "what was computed is kept in {parent}/out/store: the same command goes on from there"),
        ],
    )
    def test_what_ends_it_from_outside_says_what_is_kept(self, tmp_path, options, note, ending):
        again = copy.copy(ending)
        with pytest.raises(type(ending)) as caught:
            interrupted(tmp_path / "out", again, **options)
        assert caught.value.__notes__ == [note.format(parent=tmp_path)]
        again = copy.copy(ending)
        with pytest.raises(type(ending)) as caught, Run("trial", out=tmp_path / "other", **options):
            raise again
        assert not hasattr(caught.value, "__notes__")

    @pytest.mark.parametrize("options", [{}, {"resume": False}, {"resume": True}, {"resume": False, "overwrite": True}])
    def test_a_process_that_was_killed_at_its_first_file_is_in_nobodys_way(self, tmp_path, options):
        store = tmp_path / "out" / STORE
        store.mkdir(parents=True)
        for folder in (store, store.parent):
            (folder / ".sinklab-0123.partial").write_text("half")
        run(tmp_path / "out", **options)
        assert not list(tmp_path.rglob("*.partial"))


class TestLock:
    @pytest.mark.parametrize("resume", [None, False])
    def test_a_second_run_is_refused_and_the_first_is_whole(self, tmp_path, resume):
        out = tmp_path / "out"
        with Run("trial", out=out, resume=resume) as first:
            with pytest.raises(InputError, match=rf"is in use by process {os.getpid()} on .*; wait for it"):
                run(out, resume=resume, overwrite=True)
            first.finish(table=TABLE, display=display)
        assert read_run(out)["run_id"] == first.id
        assert list(tmp_path.iterdir()) == [out]

    def test_another_process_is_refused_and_a_killed_one_leaves_no_half_folder(self, tmp_path):
        out, marker = tmp_path / "out", tmp_path / "marker"
        code = f"""
import pathlib, sys, time
from tests.results.test_run import *
with Run("trial", out=pathlib.Path({str(out)!r})) as one:
    one.store.put("part", {{"number": 1}}, "code", ["from before"])
    def slow(folder):
        pathlib.Path({str(marker)!r}).touch()
        time.sleep(600)
    one.finish(table=TABLE, display=display, files=slow)
"""
        process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        deadline = time.monotonic() + 300
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(InputError, match=f"in use by process {process.pid} on"):
            run(out)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists()
        assert run(out).summary == {"stored": ["from before"]}
        assert {path.name for path in tmp_path.iterdir()} == {"out", "marker"}


class TestStore:
    def test_an_entry_is_of_its_settings_and_sources(self, tmp_path):
        store = Store(tmp_path / "store")
        calls = []
        for settings, sources, expected in [
            ({"a": (1, 2)}, "s", 1),
            ({"a": [1, 2]}, "s", 1),
            ({"a": 3}, "s", 2),
            ({"a": 3}, "t", 3),
        ]:
            assert store.cached("sub/name", settings, sources, lambda: calls.append(0) or len(calls)) == expected
        assert len(list((tmp_path / "store" / "sub").iterdir())) == 2  # other code takes the place of the earlier
        assert store.get("sub/name", {"a": 3}, "s") is None

    def test_arrays(self, tmp_path):
        store = Store(tmp_path)
        arrays = {"x": np.arange(6.0).reshape(2, 3).T, "y": np.array([np.nan, 1.0], dtype=np.float32), "z": np.zeros((0, 2))}
        store.put("n", {}, "s", {"steps": 3}, arrays)
        found = store.get("n", {}, "s")
        assert found.record == {"steps": 3}
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)
            assert found.arrays[name].dtype == array.dtype

    @pytest.mark.parametrize("arrays", [None, {"x": np.ones(3)}])
    def test_damage_is_said(self, tmp_path, arrays):
        store = Store(tmp_path)
        for seed in (0, 1):
            store.put("n", {"seed": seed}, "s", 0, arrays)
        one, other = (store.paths("n", {"seed": seed})[arrays is not None] for seed in (0, 1))
        other.write_bytes(one.read_bytes())
        with pytest.raises(InputError, match=r"cannot be used for settings .*: it is of settings \{'seed': 0\}; remove it"):
            store.get("n", {"seed": 1}, "s")
        one.write_bytes(one.read_bytes()[:-9])
        with pytest.raises(InputError, match=r"cannot be used .*; remove it to have it computed again"):
            store.get("n", {"seed": 0}, "s")


class TestResult:
    def test_json_lines_have_the_numbers_of_the_table(self):
        values = [1 / 3, 1.2345678901234567e-13, None, float("inf")]
        table = make_table({"metric": "m", "value": value, "unit": "weight", "count": 2} for value in values)
        lines = [json.loads(line) for line in Result({}, table, {"kind": "trial"}, None, display).to_json().splitlines()]
        assert [line["value"] for line in lines] == [*values[:3], None]
        assert [list(line) for line in lines] == 4 * [list(COLUMNS)]
        assert lines[0] == {**dict.fromkeys(COLUMNS), "metric": "m", "value": 1 / 3, "unit": "weight", "count": 2}

    def test_page(self, tmp_path):
        def page(folder):
            (folder / "report.html").write_text(f'<p class="x">{read_run(folder)["kind"]} &amp; more</p>')
            return folder / "report.html"

        with Run("trial", out=tmp_path / "out") as one:
            result = one.finish(table=TABLE, display=display, page=page)
        assert result.report() == tmp_path / "out" / "report.html"
        result.report().unlink()
        assert result.report().is_file()
        assert """<iframe srcdoc='<p class="x">trial &amp;amp; more</p>' """ in result._repr_html_()
        with pytest.raises(InputError, match="a result of trial has no page"):
            run(None).report()
        unwritten = Run("trial").finish(table=TABLE, display=display, page=page)
        with pytest.raises(InputError, match="was not written, so it has no page; give a directory with `out`"):
            unwritten.report()
        assert unwritten._repr_html_() == result._repr_html_()

    def test_pickled_and_copied(self):
        """A result travels to another process, with what its page in a notebook is made of."""
        result = Run("trial").finish(table=TABLE, summary={"loss": 1.5}, display=display, page=write_its_kind)
        for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
            assert (other.summary, other.record, repr(other)) == (result.summary, result.record, repr(result))
            assert other._repr_html_() == result._repr_html_()
