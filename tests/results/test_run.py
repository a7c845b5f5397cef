"""Run: what is in its way, one process a folder, whole or not at all; Store and Result."""

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

from sinklab.errors import InputError
from sinklab.results.folder import in_use, partial_folder
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

    def test_places_for_no_folder(self, tmp_path, monkeypatch):
        (tmp_path / "a" / "b").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "a")
        for out in ("", ".", "..", "/", "b/..", str(tmp_path), "../a"):
            with pytest.raises(InputError, match="is the working directory or one above it, which no result takes"):
                run(Path(out))
        Path("link").symlink_to("b")
        Path("loop").symlink_to("loop")
        Path("gone").symlink_to("nowhere")
        for name, target in (("link", "b"), ("gone", "nowhere"), ("loop", "loop")):
            with pytest.raises(InputError, match=rf"{name} is a symbolic link to {target}; give that directory with `out`"):
                run(Path(name), overwrite=True)
        assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", "link", "gone", "loop"}
        run(Path("link/out"))
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

    @pytest.mark.parametrize(
        "ending", [KeyboardInterrupt(), OSError(28, "No space left"), Exception("I/O error: No space left (os error 28)")]
    )
    def test_what_ends_it_from_outside_says_what_is_kept(self, tmp_path, ending):
        with pytest.raises(type(ending)) as caught:
            interrupted(tmp_path / "out", copy.copy(ending))
        store = tmp_path / ".out.partial" / "store"
        assert caught.value.__notes__ == [f"what was computed is kept in {store}: the same command goes on from there"]
        with pytest.raises(type(ending)) as caught, Run("trial", out=tmp_path / "other"):
            raise copy.copy(ending)
        assert not hasattr(caught.value, "__notes__")

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_process_that_was_killed_at_its_first_file_is_in_nobodys_way(self, tmp_path, overwrite):
        for folder in (partial_folder(tmp_path / "out") / STORE, tmp_path / "out"):
            folder.mkdir(parents=True)
            (folder / ".sinklab-0123.partial").write_text("half")
        run(tmp_path / "out", overwrite=overwrite)
        assert not list(tmp_path.rglob("*.partial"))


class TestLock:
    def test_a_second_run_is_refused_and_the_first_is_whole(self, tmp_path):
        out = tmp_path / "out"
        with Run("trial", out=out) as first:
            with pytest.raises(InputError, match=rf"is in use by process {os.getpid()} on .*; wait for it"):
                run(out, overwrite=True)
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


def test_the_lock_file_of_a_dead_process_holds_nothing(tmp_path):
    line = "import os, sys; from sinklab.results.folder import FolderLock, Path; FolderLock(Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", line, tmp_path / "out"], check=False).returncode == 9
    assert (tmp_path / ".out.lock").is_file()
    assert not in_use(tmp_path / "out")
