"""The comparison: numbers as they were measured, differences in settings said, one page without network."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import HOSTILE, a_condition, write_audit

from sinklab.errors import ConfigurationError
from sinklab.results.sections import to_json
from sinklab.results.table import read_run
from sinklab.studies.audit.compare import Comparison
from sinklab.studies.audit.page import read_audit


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("compare")
    sigmoid = {"loss": 3.2456}
    return [
        write_audit(base / "a", layers=4, heads=2),
        write_audit(
            base / "b", model="embedded:sigmoid", operation="sigmoid", layers=4, heads=2, sink_position=None, summary=sigmoid
        ),
    ]


def test_values_are_those_of_the_audits(folders: list[Path]) -> None:
    table = Comparison(folders).table
    assert list(table.columns) == ["embedded:softmax", "embedded:sigmoid"]
    summary = read_run(folders[0], "summary.json")
    softmax, sigmoid = table["embedded:softmax"], table["embedded:sigmoid"]
    assert (softmax["operation"], sigmoid["operation"]) == ("softmax", "sigmoid")
    assert (softmax["loss (nats per token)"], sigmoid["loss (nats per token)"]) == (3.2134, 3.2456)
    assert softmax["sink rate at position 0, gu2024 (%)"] == summary["sink_rate_gu2024"]
    # The audit gives a fraction; the comparison has one unit for all definitions.
    share = softmax["first-token share, first_token_share (%)"]
    assert share == pytest.approx(100 * summary["definitions"]["first_token_share"], rel=1e-12)
    assert softmax["first token is the arg-max, kaul2024_first_argmax (%)"] == summary["definitions"]["kaul2024_first_argmax"]
    assert (softmax["strongest sink: position"], sigmoid["strongest sink: position"]) == (0, "none")
    assert softmax["strongest sink: token"] == "<s>"
    assert sigmoid["strongest sink: heads"] == "0 of 8"
    assert sigmoid["entropy without the sink (nats)"] is None  # there is none to leave out
    assert softmax["entropy without the sink (nats)"] > softmax["entropy (nats)"]
    assert softmax["massive activations (most in a layer)"] == 2.0
    assert softmax["largest activation"] == 180.0
    assert softmax["outliers: kurtosis"] == 41.5
    assert softmax["null mass (%)"] == 0.0
    under = {row: value for row, value in softmax.items() if row.startswith("sink rate at position 0, ")}
    assert list(under.values())[1:] == [condition["sink_rate_gu2024"] for condition in summary["conditions"]]


def test_what_was_not_measured_is_none_and_a_dash(tmp_path: Path, folders: list[Path]) -> None:
    bare = write_audit(
        tmp_path / "c",
        model="bare",
        layers=2,
        omit={"entropy", "sink_rate"},
        summary={"conditions": [to_json(a_condition("x", 1, 1.0))]},
    )
    compared = Comparison([folders[0], bare])
    for row in (
        "entropy (nats)",
        "sink rate at position 0, one token repeated, with BOS (%)",
        "first-four share, first_four_share (%)",
    ):
        assert compared.table["bare"][row] is None
        assert compared.as_text()["bare"][row] == "–"


def test_models_of_one_name_are_told_apart(folders: list[Path]) -> None:
    names = list(Comparison([folders[0], folders[0]]).table.columns)
    assert names == ["embedded:softmax · a (1)", "embedded:softmax · a (2)"]


def test_one_is_not_a_comparison(folders: list[Path]) -> None:
    with pytest.raises(ConfigurationError, match="needs two or more output directories of audits; got 1"):
        _ = Comparison(folders[:1]).table


def test_page(folders: list[Path], tmp_path: Path) -> None:
    path = Comparison(folders).write(tmp_path / "compare.html")
    text = path.read_text(encoding="utf-8")
    for folder in folders:
        assert read_audit(folder).found.finding.replace("“<s>”", "“&lt;s&gt;”") in text
    assert "are not comparable" not in text
    assert path.read_bytes() == Comparison(folders).write(tmp_path / "again.html").read_bytes()


def test_different_settings_are_said(folders: list[Path], tmp_path: Path) -> None:
    config = read_run(folders[0])["config"] | {"threshold": 0.5, "seq_len": 32}
    other = write_audit(tmp_path / "d", model="other", layers=2, run={"config": config})
    text = Comparison([folders[0], other]).write(tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "These audits differ in threshold and seq_len: their rates are not comparable as they stand." in text


def test_numbers_of_two_definitions_are_said_not_to_compare(tmp_path: Path) -> None:
    versions = {"a": (1, 1), "b": (2, 1)}
    audits = [
        write_audit(
            tmp_path / name, model=name, layers=2,
            run={"definitions": [
                {"probe": "sink_rate", "metric": metric, "version": version, "text": "", "paper": "", "unit": "percent"}
                for metric, version in zip(("gu2024", "kaul2024_first_argmax"), of, strict=True)
            ]},
        )
        for name, of in versions.items()
    ]  # fmt: skip
    assert "gu2024 (versions 1 and 2)" in Comparison(audits).warning


def test_other_texts_are_said_whatever_they_are_called(folders: list[Path], tmp_path: Path) -> None:
    """Two files of one name: the losses are not ranked, and the warning shows what differs."""
    config = read_run(folders[0])["config"] | {"corpus": "text.txt"}
    a, b = (
        write_audit(tmp_path / name, model=name, layers=2, run={"config": config, "corpus": {"revision": f"sha256-{digest}"}})
        for name, digest in (("one", "0123456789ab"), ("two", "ba9876543210"))
    )
    warning = Comparison([a, b]).warning
    assert "text.txt (sha256-01234567) and text.txt (sha256-ba987654)" in warning
    assert warning in Comparison([a, b]).write(tmp_path / "compare.html").read_text(encoding="utf-8")
    assert Comparison([a, a]).warning == ""


def test_losses_of_other_tokenizers_compare_per_byte(tmp_path: Path) -> None:
    audits = [write_audit(tmp_path / name, model=name, layers=2, run={"token_sha256": name * 64}) for name in "ab"]
    assert "bits per byte" in Comparison(audits).warning
    assert Comparison([audits[0], audits[0]]).warning == ""


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    folders = [write_audit(tmp_path / name, layers=2, seq_len=8, hostile=True) for name in ("a", "b")]
    text = Comparison(folders).write(tmp_path / "compare.html").read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert "<img" not in text
