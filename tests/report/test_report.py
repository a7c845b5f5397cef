"""The report: its numbers are those of the table, tiles keep what is bright, hostile text is inert, pages stay small."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import HOSTILE, TableMaker, a_part, a_place, write_audit

from sinklab.errors import InputError, ResultError
from sinklab.report.maps import MAX_BINS, bins_of, pack_maps, pack_unsigned, pool_positions, pool_tiles
from sinklab.results.blocks import percent
from sinklab.results.sections import to_json
from sinklab.results.table import write_table
from sinklab.studies.audit.page import headline, layer_figures, read_audit, write_report


def page_data(path: Path) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert match
    return json.loads(match[1])


def unpack(path: Path, element: str) -> bytes:
    match = re.search(rf'<script type="text/plain" id="{element}">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert match
    return zlib.decompress(base64.b64decode(match[1]))


@pytest.fixture(scope="module")
def audit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_audit(tmp_path_factory.mktemp("audit") / "softmax", layers=4, heads=3)


class TestPage:
    def test_every_number_of_the_summary_stands_in_a_table(self, audit_folder: Path) -> None:
        text = write_report(audit_folder).read_text(encoding="utf-8")
        found = read_audit(audit_folder).found
        assert f'<p class="verdict" id="verdict">{html.escape(found.finding)}</p>' in text
        assert len(found.finding) <= 160
        for condition in found.conditions:
            assert percent(condition.sink_rate_gu2024) in text
        for name in found.definitions:
            assert name in text
        assert len(re.findall(r'<div class="card">', text)) == 8

    def test_needs_nothing_from_outside(self, audit_folder: Path) -> None:
        text = write_report(audit_folder).read_text(encoding="utf-8")
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        assert policy
        assert "default-src 'none'" in policy[1].replace("&#39;", "'")
        assert "unsafe" not in policy[1]
        # The only address is the name of an XML namespace.
        assert set(re.findall(r"\w+://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
        assert not re.findall(r'<(?:img|iframe|link|script)[^>]+(?:src|href)="(?!data:,)', text)

    def test_the_policy_names_the_script_and_the_style_that_are_there(self, audit_folder: Path) -> None:
        import hashlib

        text = write_report(audit_folder).read_text(encoding="utf-8")
        for pattern in (r"<style>(.*?)</style>", r"<script>(.*?)</script>"):
            (body,) = re.findall(pattern, text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"sha256-{digest}" in text.replace("&#43;", "+").replace("&#x2F;", "/")


class TestNumbers:
    def test_heads_of_the_page_are_those_of_the_table(self, audit_folder: Path) -> None:
        path = write_report(audit_folder)
        data = page_data(path)
        audit = read_audit(audit_folder)
        rates = audit.numbers.by_head_and_position("sink_rate", "gu2024", 64)
        assert rates is not None
        assert rates.shape == (4, 3, 64)
        codes = np.frombuffer(unpack(path, "blob-rate"), "<u2").reshape(4, 3, 64)
        # uint16 over the largest value: half a step is scale / 131068, about 8e-4 percent here.
        assert (
            np.abs(codes / 65534 * data["arrays"]["rate"]["scale"] - rates).max()
            <= data["arrays"]["rate"]["scale"] / 131068 + 1e-12
        )
        assert [row["layer"] for row in data["grid"]] == [0, 1, 2, 3]

    def test_maps_of_the_page_are_those_of_the_file(self, audit_folder: Path) -> None:
        path = write_report(audit_folder)
        maps = read_audit(audit_folder).maps
        assert maps is not None
        assert page_data(path)["maps"]["reduced"] == ""
        for sample in range(3):
            raw = np.frombuffer(unpack(path, f"blob-map-{sample}-2"), np.uint8).reshape(2, 3, 64, 64)
            assert (raw[0] == maps.weights[sample, 2]).all()
            assert (raw[1] == maps.scores[sample, 2]).all()

    def test_means_follow_the_counts(self, tmp_path: Path) -> None:
        # Two rows of one coordinate: (1·10 + 3·30) / 4 = 25, not their plain mean 20.
        folder = write_audit(tmp_path / "a", layers=2)
        table = TableMaker(corpus="python_source", bos=1)
        table.add("entropy", "entropy", "nats", 10.0, layer=0, head=0, module="m", count=1)
        table.add("entropy", "entropy", "nats", 30.0, layer=0, head=0, module="m", count=3)
        table.write(folder / "table.parquet")
        numbers = read_audit(folder).numbers
        assert numbers.by_head("entropy", "entropy").tolist() == [[25.0]]  # type: ignore[union-attr]
        assert numbers.by_layer("entropy", "entropy") == {0: 25.0}

    def test_first_and_rest_of_the_positions(self, tmp_path: Path) -> None:
        folder = write_audit(tmp_path / "a", layers=2)
        table = TableMaker(corpus="python_source", bos=1)
        table.add("hidden_norm", "hidden_norm", "norm", [100.0, 1.0, 3.0], layer=-1, key_position=[0, 1, 2], module="m")
        table.write(folder / "table.parquet")
        figure = layer_figures([("", read_audit(folder).views[0])])[0]
        assert figure["labels"] == ["in"]
        assert {series["name"]: series["y"] for series in figure["series"]} == {
            "first position": [100.0],
            "mean of the rest": [2.0],
        }

    def test_other_conditions_and_interventions_stay_apart(self, tmp_path: Path) -> None:
        folder = write_audit(tmp_path / "a", layers=2)
        table = TableMaker(corpus="python_source", bos=1)
        at = {"layer": 0, "head": 0, "module": "m"}
        table.add("entropy", "entropy", "nats", 1.0, **at)
        table.constants["corpus"] = "random_tokens"
        table.add("entropy", "entropy", "nats", np.full(5, 2.0), **at)
        table.constants.update(corpus="python_source", intervention="hide_key")
        table.add("entropy", "entropy", "nats", 3.0, **at)
        table.write(folder / "table.parquet")
        numbers = read_audit(folder).numbers
        assert numbers.by_head("entropy", "entropy").tolist() == [[1.0]]  # type: ignore[union-attr]

    def test_modules_that_share_a_layer_number_are_told_apart(self, tmp_path: Path) -> None:
        folder = write_audit(tmp_path / "a", layers=2)
        table = TableMaker(corpus="python_source", bos=1)
        for module, value in (("decoder.0.self_attn", 1.0), ("decoder.0.cross_attn", 2.0)):
            table.add("entropy", "entropy", "nats", value, layer=0, head=0, module=module)
        table.write(folder / "table.parquet")
        numbers = read_audit(folder).numbers
        assert [row.label for row in numbers.grid] == ["decoder.0.self_attn", "decoder.0.cross_attn"]
        assert numbers.by_head("entropy", "entropy").tolist() == [[1.0], [2.0]]  # type: ignore[union-attr]

    @pytest.mark.parametrize(("position", "shown"), [(5, "Position 5"), (None, "None")])
    def test_the_strongest_sink_comes_first(self, tmp_path: Path, position: int | None, shown: str) -> None:
        label, value, _ = headline(read_audit(write_audit(tmp_path / "a", sink_position=position)))[0]
        assert (label, value.partition(",")[0]) == ("Strongest sink", shown)

    def test_parts_have_sinks_of_their_own(self, tmp_path: Path) -> None:
        parts = [a_part("encoder", a_place(3, rate=12.5)), a_part("decoder")]
        audit = read_audit(write_audit(tmp_path / "a", layers=2, seq_len=16, summary={"parts": parts}))
        values = {label: value for label, value, _ in headline(audit)}
        assert (values["encoder: Strongest sink"], values["decoder: Strongest sink"]) == ("Position 3", "None")
        assert page_data(write_report(audit.folder))["sinks"][0]["name"] == "position 3 of the encoder"


class TestMissing:
    def test_every_section_survives_without_its_metric(self, tmp_path: Path) -> None:
        probes = {"sink_rate", "attention_received", "null_mass", "entropy", "hidden_norm", "key_norm", "value_norm"}
        probes |= {"score_gap", "massive_activation", "outliers", "head_output"}
        for probe in sorted(probes):
            folder = write_audit(tmp_path / probe, layers=2, seq_len=16, omit={probe})
            assert page_data(write_report(folder))["page"] == "report", probe

    def test_not_an_audit(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"run\.json is not there; is .* the output directory of a finished run"):
            write_report(tmp_path)

    def test_maps_that_do_not_belong_together(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        folder = write_audit(tmp_path / "a", layers=2, seq_len=16)
        wrong = {"weights": np.zeros((1, 2, 2, 4, 4), np.uint8), "scores": np.zeros((1, 2, 2, 4, 3), np.uint8)}
        save_file({**wrong, "scores_range": np.zeros((1, 2, 2, 2), np.float32)}, folder / "maps.safetensors")
        with pytest.raises(ResultError, match="do not belong together"):
            write_report(folder)


class TestHostileText:
    def test_nothing_leaves_its_element(self, tmp_path: Path) -> None:
        text = write_report(write_audit(tmp_path / "a", layers=2, hostile=True)).read_text(encoding="utf-8")
        assert HOSTILE not in text
        assert "<img" not in text
        assert text.count("</script>") == text.count("<script")
        tokens = page_data(tmp_path / "a" / "report.html")["tokens"]
        assert tokens[0][3] == HOSTILE

    def test_every_word_of_the_files_is_escaped(self, tmp_path: Path) -> None:
        summary = {"warnings": [HOSTILE], "sink_role": HOSTILE, "finding": HOSTILE, "loss_definition": HOSTILE}
        summary["sinks"] = to_json(read_audit(write_audit(tmp_path / "b", layers=2)).found)["sinks"]
        summary["sinks"]["sinks"] = [to_json(a_place(0, text=HOSTILE, called=HOSTILE, name=HOSTILE, heads=[(0, 0, "m", 50.0)]))]
        definition = dict.fromkeys(("probe", "metric", "text", "paper", "unit"), HOSTILE) | {"version": 1}
        run = {"versions": {HOSTILE: HOSTILE}, "checks": {HOSTILE: HOSTILE}, "definitions": [definition]}
        text = write_report(write_audit(tmp_path / "a", layers=2, summary=summary, run=run)).read_text(encoding="utf-8")
        assert "<img" not in text
        assert text.count("&lt;/script&gt;&lt;img") >= 10


@pytest.mark.parametrize("attending", [(1, 3), (0, 1)])
def test_what_is_of_attention_stands_at_the_layer_that_holds_it(tmp_path, attending):
    """Where every second layer attends, attention module 0 is in layer 1, beside whose hidden states its numbers belong."""
    folder = write_audit(tmp_path / "audit", layers=4, heads=2)
    table = pd.read_parquet(folder / "table.parquet", dtype_backend="numpy_nullable")
    of_attention = table["module"].str.endswith(".self_attn").fillna(False)
    table = table[~of_attention | table["layer"].isin([0, 1])]
    names = {f"model.layers.{number}.self_attn": f"model.layers.{layer}.self_attn" for number, layer in enumerate(attending)}
    write_table(table.assign(module=table["module"].replace(names)), folder / "table.parquet")
    audit = read_audit(folder)
    assert audit.numbers.skips_layers == (attending == (1, 3))
    figures = {figure["title"]: figure for figure in layer_figures([(view.part, view) for view in audit.views])}
    assert figures["Entropy of attention"]["labels"] == list(map(str, attending))
    assert figures["Key norm"]["labels"] == list(map(str, attending))
    assert figures["Hidden state norm"]["labels"] == ["in", "0", "1", "2", "3"]
    page = write_report(folder).read_text(encoding="utf-8")
    assert ("Not every layer attends" in page) == (attending == (1, 3))


def test_unsigned_round_trip_with_gaps() -> None:
    values = np.array([0.0, 0.25, 1.0, np.nan, 3.0])
    text, scale = pack_unsigned(values)
    codes = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2")
    assert scale == 3.0
    assert codes.tolist() == [0, 5461, 21845, 65535, 65534]
    assert np.abs(codes[[0, 1, 2, 4]] / 65534 * scale - values[[0, 1, 2, 4]]).max() <= scale / 131068


@pytest.mark.parametrize("length", [1, 64, MAX_BINS, MAX_BINS + 1, 4096, 100_000])
def test_bins_cover_every_position_once(length: int) -> None:
    bins = bins_of(length, {777, length - 1})
    assert [position for start, stop in bins for position in range(start, stop)] == list(range(length))
    assert len(bins) <= MAX_BINS + 2 * 32
    assert all(stop - start == 1 for start, stop in bins[:64])
    if length > 777:
        assert (777, 778) in bins


def test_a_lone_sink_survives_pooling() -> None:
    values = np.full(4096, 0.001)
    values[3001] = 0.9
    pooled = pool_positions(values, bins_of(4096))
    assert pooled.max() == 0.9
    assert np.isnan(pool_positions(np.full(4, np.nan), [(0, 2), (2, 4)])).all()


def test_a_one_pixel_column_survives_pooling() -> None:
    maps = np.zeros((1, 5, 5), np.uint8)
    maps[0, :, 3] = 200
    pooled = pool_tiles(maps, 2)
    assert pooled.shape == (1, 3, 3)
    assert (pooled[0, :, 1] == 200).all()
    assert (pooled[0, :, [0, 2]] == 0).all()
    assert pool_tiles(maps, 1) is maps


class TestBudget:
    weights = np.random.default_rng(0).integers(0, 256, (4, 3, 2, 32, 32), dtype=np.uint8)
    scores = np.random.default_rng(1).integers(1, 256, (4, 3, 2, 32, 32), dtype=np.uint8)

    def test_everything_when_it_fits(self) -> None:
        packed = pack_maps(self.weights, self.scores, 10**9)
        assert packed is not None
        assert packed[1:] == (1, (4, 3, 2, 32, 32))

    @pytest.mark.parametrize("budget", [60_000, 40_000, 20_000, 10_000, 3_000, 300])
    def test_never_more_than_the_budget(self, budget: int) -> None:
        packed = pack_maps(self.weights, self.scores, budget)
        assert packed is not None
        texts, _, shape = packed
        assert sum(len(text) for sample in texts for text in sample) <= budget
        # Two samples stay as long as anything but a single value a map does.
        assert shape[0] >= 2 or shape[3] == 1

    def test_resolution_before_samples(self) -> None:
        one = pack_maps(self.weights[:1], self.scores[:1], 10**9)
        assert one is not None
        packed = pack_maps(self.weights, self.scores, int(2.5 * sum(map(len, one[0][0]))))
        assert packed is not None
        assert packed[1] == 1
        assert packed[2][0] == 2
