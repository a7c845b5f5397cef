"""What is shown of causes: findings that are short, tables of means, figures, and what could not be had."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.report.synthetic import HOSTILE, write_audit
from tests.studies.causes.planted import planted

from sinklab import find_causes
from sinklab.errors import InputError, ResultError
from sinklab.results.blocks import Facts, Grid, HeadMap, Say
from sinklab.results.html import html
from sinklab.results.sections import from_json, to_json
from sinklab.results.table import write_json
from sinklab.studies.audit.page import write_report
from sinklab.studies.causes import SECTION
from sinklab.studies.causes.found import LABELS as GIVEN
from sinklab.studies.causes.found import Causes, Effect
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.show import LABELS, SHOWN, show


@pytest.fixture(scope="module")
def summary():
    known, settings = planted("two domains", 0, texts=40), {"budget": "1h", "heads": "all,0.0+0.1", "batch_size": 40}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.results.intervals.RESAMPLES", 100)  # intervals decide nothing here
        return find_causes(known.model, samples=known.samples, readout=NextToken(), **settings).summary


@pytest.fixture
def found(summary):
    return from_json(Causes, summary, "summary.json")


def kinds(found, kind):
    return [block for block in show(found) if isinstance(block, kind)]


def test_what_is_written_is_read_back(summary, found):
    assert to_json(found) == {name: summary[name] for name in to_json(found)}
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    with pytest.raises(ResultError, match=r"x is not what this version writes: heads\.0\.label"):
        from_json(Causes, {**summary, "heads": [{**summary["heads"][0], "label": "lazy"}]}, "x")


def test_every_label_has_its_words():
    assert tuple(LABELS) == GIVEN
    assert len({letter for letter, _ in LABELS.values()}) == len(LABELS)


def test_the_finding_is_first_and_no_sentence_is_long(found):
    first, *_ = show(found)
    assert isinstance(first, Say)
    assert first.text.startswith("3 heads: ")
    assert first.text.endswith("; the sink is position 0.")
    assert all(len(block.text) <= 160 for block in kinds(found, Say) if not block.small)


def test_every_domain_has_tables(found):
    (labels,) = kinds(found, HeadMap)
    assert {cell: words[0] for cell, words in labels.cells.items()} == {
        (head.layer, head.head): LABELS[head.label][0] for head in found.heads
    }
    whole = [grid for grid in kinds(found, Grid) if grid.title.startswith("Every head on")]
    assert [len(grid.rows) for grid in whole] == [5, 5]  # three heads, the group that was named, and that of the layer
    together = next(grid for grid in kinds(found, Grid) if grid.headings[0] == "at once")
    assert together.rows[0][0] == "0.0+0.1"


def test_a_large_model_shows_its_decided_and_strongest_heads(found):
    heads = [dataclasses.replace(found.heads[0], layer=layer, label="undecided") for layer in range(60)]
    heads[59] = dataclasses.replace(heads[59], label="dormant")
    (table, *_) = kinds(dataclasses.replace(found, heads=heads), Grid)
    assert len(table.rows) == SHOWN
    assert table.rows[0][:2] == ["59.0", heads[59].domains[found.domains[0]]]


def test_what_is_known_of_a_head_without_a_whole_label_is_said_with_its_cost(found):
    """Of all heads the dearest come first; one that costs less than an even share is not named."""
    dear = {"mean": 2.92, "low": 2.73, "high": 3.10, "p": 1e-5}
    less = {**dear, "mean": 20 * found.minimal_effect, "low": 18 * found.minimal_effect}
    heads = [
        dataclasses.replace(found.heads[0], head=number, label=label, effects={"hide": {"repeated": Effect(**effect)}})
        for number, (label, effect) in enumerate([("undecided", less), ("needs-sink", dear), ("dormant", dear)])
    ]
    facts = dict(kinds(dataclasses.replace(found, heads=heads), Facts)[0].rows)
    assert facts["known"] == "0.1 with sink hidden +2.92 [+2.73, +3.10] nats; what more they do is not decided"


def write_page(folder, summary):
    folder.mkdir()
    write_json(summary, folder / "summary.json")
    write_json({"run_id": "r", "kind": "causes", "config": {"texts": 16}}, folder / "run.json")
    return write_report(folder)


def test_the_page_escapes_and_is_that_of_its_run(tmp_path, summary):
    hostile = {**summary, "model": HOSTILE, "domains": [HOSTILE], "notes": [HOSTILE]}
    hostile |= {"heads": [], "groups": []}
    page = write_page(tmp_path / "a", hostile).read_text(encoding="utf-8")
    assert HOSTILE not in page
    assert " style=" not in page  # the page's policy would drop it
    write_json({"kind": "sweep"}, tmp_path / "run.json")
    with pytest.raises(InputError, match=r"holds a run of kind 'sweep', expected "):
        write_report(tmp_path)


def test_the_section_of_an_audit(tmp_path, summary):
    page = write_report(write_audit(tmp_path / "a", layers=2, seq_len=16, summary={"causes": summary}))
    assert html(SECTION.blocks(summary)) in page.read_text(encoding="utf-8")
    plain = write_report(write_audit(tmp_path / "b", layers=2, seq_len=16)).read_text(encoding="utf-8")
    assert 'id="causes"' not in plain
