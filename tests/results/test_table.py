from __future__ import annotations

import json
import os
import stat

import numpy as np
import pandas as pd
import pytest

from sinklab.errors import InputError, ResultError
from sinklab.results.table import COLUMNS, append, make_table, read_run, read_table, write_json, write_table, write_text

ROW = {"probe": "p", "metric": "m", "version": 1, "value": 0.5, "count": 4, "unit": "weight"}


def test_absent_coordinates_are_null_and_types_are_those_of_the_schema():
    frame = make_table([{**ROW, "layer": 0, "head": 3}, ROW], model="it", seed=7)
    assert list(frame.columns) == list(COLUMNS)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {name: dtype for name, (dtype, _) in COLUMNS.items()}
    assert frame["layer"].tolist() == [0, pd.NA]
    assert frame["model"].tolist() == ["it", "it"]
    assert frame["seed"].tolist() == [7, 7]
    assert frame["policy"].isna().all()


def test_an_empty_table_has_the_columns():
    assert list(make_table([]).columns) == list(COLUMNS)
    assert len(append([make_table([]), make_table([])])) == 0


def test_a_column_that_the_schema_does_not_have_is_refused():
    with pytest.raises(ResultError, match=r"columns that the schema does not have: colour, laier; known: run_id"):
        make_table([{**ROW, "laier": 1, "colour": "red"}])


@pytest.mark.parametrize("missing", ["metric", "value", "unit"])
def test_a_number_needs_a_name_a_value_and_a_unit(missing):
    with pytest.raises(ResultError, match="needs metric, value and unit"):
        make_table([{name: value for name, value in ROW.items() if name != missing}])


def test_a_row_may_stand_for_many():
    block = {
        "probe": "p",
        "metric": "m",
        "version": 1,
        "unit": "weight",
        "value": np.array([0.5, 0.25]),
        "head": np.array([0, 1]),
    }
    none = {**block, "value": np.array([]), "head": np.array([], dtype=int)}
    frame = make_table([block, {**ROW, "layer": 4}, none, {**block, "layer": 5, "head": 7}])
    assert frame["value"].tolist() == [0.5, 0.25, 0.5, 0.5, 0.25]
    assert frame["head"].tolist() == [0, 1, pd.NA, 7, 7]
    assert frame["layer"].tolist() == [pd.NA, pd.NA, 4, 5, 5]
    assert frame["count"].tolist() == [pd.NA, pd.NA, 4, pd.NA, pd.NA]
    with pytest.raises(ResultError, match="the arrays of a row have 2 and 3 entries; they must be of one length"):
        make_table([{**block, "head": np.arange(3)}])


def test_one_table_has_one_version_of_a_metric():
    with pytest.raises(ResultError, match="metric p/m occurs in two versions"):
        make_table([ROW, {**ROW, "version": 2}])
    assert len(make_table([ROW, {**ROW, "version": 2, "probe": "q"}])) == 2


def test_tables_go_one_below_the_other_unless_a_metric_changed_its_meaning():
    one, two = make_table([ROW]), make_table([{**ROW, "value": 0.75}])
    assert append([one, two])["value"].tolist() == [0.5, 0.75]
    other = make_table([{**ROW, "version": 2}])
    with pytest.raises(ResultError, match="metric p/m occurs in two versions"):
        append([one, other])
    assert len(append([one, make_table([{**ROW, "metric": "n", "version": 2}])])) == 2


def test_what_is_written_is_read(tmp_path):
    frame = make_table([{**ROW, "layer": 2**40, "value": 1 / 3}, ROW], model="Ünïcode · 模型")
    write_table(frame, tmp_path / "deep" / "table.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "deep" / "table.parquet"), frame)


def test_files_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_text("x", tmp_path / "page.html")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    write_table(make_table([ROW]), tmp_path / "table.parquet")
    before = (tmp_path / "table.parquet").read_bytes()

    def fail(self, path, **_):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    with pytest.raises(type(error)):
        write_table(make_table([ROW, ROW]), tmp_path / "table.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]
    assert (tmp_path / "table.parquet").read_bytes() == before


def test_json_is_strict(tmp_path):
    write_json({"name": "模型", "rate": 0.25}, tmp_path / "run.json")
    assert read_run(tmp_path) == {"name": "模型", "rate": 0.25}
    assert "模型" in (tmp_path / "run.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON"):
        write_json({"rate": float("nan")}, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["rate"] == 0.25


def test_what_cannot_be_read_says_so(tmp_path):
    with pytest.raises(InputError, match=r"table\.parquet is not there; is .* the output directory of a finished run"):
        read_table(tmp_path / "table.parquet")
    with pytest.raises(InputError, match=r"summary\.json is not there"):
        read_run(tmp_path, "summary.json")
    page = tmp_path / "report.html"
    page.write_text("<html>")
    for place in (page,):
        with pytest.raises(
            InputError, match=r"report\.html is a file, and run\.json is looked for in a directory; give the dir"
        ):
            read_run(place)
    for content in ("{", "[1]", "3"):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(InputError, match=r"run\.json is damaged"):
            read_run(tmp_path)
    (tmp_path / "table.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ResultError, match="is not a parquet table"):
        read_table(tmp_path / "table.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "table.parquet")
    with pytest.raises(ResultError, match="does not follow the schema; its columns: a"):
        read_table(tmp_path / "table.parquet")
