"""Tables, metrics and names: schema, one definition under each name, files that are whole, and what cannot be read."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import stat

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import make_sinklm

import sinklab
from sinklab import SinkCache
from sinklab.errors import ConfigurationError, ContractError, InputError, ResultError
from sinklab.registry import KINDS
from sinklab.results import environment
from sinklab.results.blocks import counted, front_names, head_numbering
from sinklab.results.environment import machine_memory, require_memory
from sinklab.results.metric import (
    FRACTION,
    LOSS,
    PERCENTAGE,
    Metric,
    catalogue,
    declared,
    definitions,
    definitions_of,
    metrics_of,
)
from sinklab.results.table import COLUMNS, append, make_table, read_run, read_table, write_json, write_table, write_text
from sinklab.sinks import Sinks

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


@pytest.fixture(scope="module")
def found() -> dict[str, Metric]:
    for registry in KINDS.values():
        for name in registry:
            registry[name]
    for module in pkgutil.walk_packages(sinklab.__path__, "sinklab."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return catalogue()


def test_the_whole_tree_has_one_definition_under_each_name(found):
    assert found["loss"] is LOSS
    assert found["gu2024"] in metrics_of("probes", "sink_rate")
    assert declared("gu2024") is found["gu2024"]
    assert declared("nobody_has_declared_it") is None
    of_tests = {"t", "mean row mass"}  # declared by tests that ran before in this process
    assert all(metric.unit and metric.text.endswith(".") for metric in found.values() if metric.text not in of_tests)


def test_a_share_is_declared_as_one(found):
    """Over seeds its interval stays between its ends, and does so by the declared range alone."""
    shares = {name for name, one in found.items() if one.unit in ("fraction", "percent")}
    ranged = {name for name, one in found.items() if one.range in (FRACTION, PERCENTAGE)}
    gained = {"freed_to_first", "freed_to_own", "freed_to_content"}  # by what it gains, a key can lose
    beyond = {"excess_of_first", "excess_inside", "left_by_one", "deviation"}  # less than an even share, quotients
    others = {"output_gain", "lm_eval_score", "fold_explained"}  # of gates, of others, R² on texts that the fit is not of
    assert shares - ranged <= gained | beyond | others


@pytest.mark.parametrize("plural", ["probes", "read_outs"])
def test_a_plug_in_has_its_metrics(plural, found):
    for name in KINDS[plural]:
        assert metrics_of(plural, name)
        assert all(found[metric.name] is metric for metric in metrics_of(plural, name))


def test_a_name_is_declared_once():
    first = Metric("planted_once", "nats", "t")
    assert Metric("planted_once", "nats", "t") == first  # as where a file is imported again
    with pytest.raises(ContractError, match="metric 'planted_once' is declared twice, as 't' and as 'other'"):
        Metric("planted_once", "nats", "other")
    derived = first.bound("low"), first.of("bits"), first.named("planted_other")
    assert [(one.name, one.unit) for one in derived] == [
        ("planted_once_low", "nats"), ("planted_once", "bits"), ("planted_other", "nats")
    ]  # fmt: skip
    assert catalogue()["planted_once"] is first
    assert not {"planted_once_low", "planted_other"} & catalogue().keys()


def test_definitions_of_a_run():
    metric = Metric("planted_entry", "nats", "What.", paper="P", version=2)
    entry = {"probe": "p", "metric": "planted_entry", "version": 2, "text": "What.", "paper": "P", "unit": "nats"}
    assert definitions({"p": (metric,)}) == [entry]


def test_definitions_of_a_table_are_those_of_what_is_declared(found):
    names = ["gu2024", "loss", "max_abs", "loss_low"]
    table = make_table([{"probe": "p", "metric": found.get(name, LOSS.bound("low")), "value": 1.0} for name in names])
    assert definitions_of(table) == definitions({"p": [found[name] for name in names[:3]]})


@pytest.mark.parametrize(("number", "words"), [(0, "0 texts"), (1, "1 text"), (2, "2 texts"), (12_000, "12,000 texts")])
def test_a_count(number, words):
    assert counted(number, "text") == words


def test_learned_tokens_in_front():
    assert front_names(1) == ["the learned token in front"]
    assert front_names(2) == ["learned token 1 of 2 in front", "learned token 2 of 2 in front"]
    assert front_names(0) == []


def test_heads_are_numbered_by_the_layers_that_attend():
    assert head_numbering([1, 3], 4) == (
        "Of 4 layers 2 have attention (1, 3), and heads are numbered by these: 0.0 is the first head of layer 1."
    )
    assert "2, 5, 8, 11, 14, 17, …" in head_numbering(range(2, 30, 3), 30)
    assert (head_numbering([0, 1], 2), head_numbering([], 2), head_numbering([], 0)) == ("", "", "")


def test_one_sample():
    assert "1 sample of 1 position, threshold" in repr(Sinks(samples=1, seq_len=1))


def test_what_there_is_passes_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(environment, "machine_memory", lambda: 8_000_000_000)
    require_memory(8_000_000_000, "`keys` 5")
    with pytest.raises(ConfigurationError, match=r"`keys` 5: at least 8 GB .* there is 8 GB in all"):
        require_memory(8_000_000_001, "`keys` 5")


def test_limits_of_the_container_count(monkeypatch, tmp_path):
    assert 10**8 < machine_memory() < 10**15
    for name, text in (("none", "max\n"), ("small", "900\n")):
        (tmp_path / name).write_text(text)
    places = (str(tmp_path / "gone"), str(tmp_path / "none"), str(tmp_path / "small"))
    monkeypatch.setattr(environment, "_CGROUP_LIMITS", places)
    assert machine_memory() == 900


def test_sizes_of_the_library():
    model = make_sinklm()
    with pytest.raises(ConfigurationError, match="of memory would be needed"):
        model(torch.zeros(1, 4, dtype=torch.long), past_key_values=SinkCache(model, window=2**40))
