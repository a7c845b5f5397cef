"""What results come to: planted records of every kind land in the list they belong to, and in no other."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sinklab.report.claims_page import write_claims_page
from sinklab.studies.reproduce.entries import entries_of, in_group
from sinklab.studies.reproduce.overview import summary_of_entries
from tests.studies.reproduce.made_results import write_claim

from sinklab.results.table import read_run
from sinklab_claims.contract.claim import Part
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.verdict.records import StoredClaim

TRAINED = {"baseline": {"changes": {}}}
"""What makes a record one of trainings."""

RISES = Part("it rises", Value("loss", "a"), more_than=0.1)
ROOM = Part("there is room", Value("room", "a"), more_than=1)


def numbers(*losses: float, room: tuple[float, ...] = ()) -> dict:
    rooms = room or (5.0,) * len(losses)
    return {
        seed: {"a": {"loss": loss, "room": of}, "b": {"loss": 0.0}}
        for seed, (loss, of) in enumerate(zip(losses, rooms, strict=True))
    }


HIGH, LOW, WIDE = numbers(0.30, 0.31, 0.32), numbers(0.01, 0.02, 0.03), numbers(0.05, 0.15, 0.25)


def kept_in(out: Path) -> list[StoredClaim]:
    """Every record, the second base of a scale too."""
    return [StoredClaim(path.parent, read_run(path.parent)) for path in sorted(out.glob("*/*/run.json"))]


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """Records of every kind, in folders as ``reproduce`` leaves them."""
    out = tmp_path_factory.mktemp("planted")
    trained = {"conditions": TRAINED, "base": "no-bos", "source_base": "no-bos"}
    write_claim(out / "tiny" / "toy_holds", (RISES,), HIGH, **trained)
    write_claim(out / "tiny" / "toy_fails", (RISES,), LOW, **trained)
    write_claim(out / "tiny" / "toy_open", (RISES,), WIDE, **trained)
    write_claim(out / "tiny-bos" / "toy_holds", (RISES,), WIDE, **{**trained, "scale": "tiny", "base": "bos"})
    write_claim(out / "small-bos" / "toy_holds", (RISES,), HIGH, **{**trained, "base": "bos"})
    write_claim(out / "tiny" / "untested", (RISES,), LOW, verdict="not tested at this scale", **trained)
    write_claim(out / "tiny" / "one_holds", (RISES,), HIGH, verdict="holds for this model", one_model="embedded:softmax")
    write_claim(out / "tiny" / "one_fails", (RISES,), LOW, verdict="does not hold for this model", one_model="embedded:softmax")
    write_claim(out / "tiny" / "read_text", (RISES,), HIGH, natural_text=True)
    write_claim(out / "tiny" / "proof", (RISES,), HIGH, verdict="agrees with the proof")
    record = write_claim(
        out / "checkpoint" / "few", (RISES,), HIGH, verdict="inconclusive", reason="2 models; a verdict needs 3"
    )
    model = {"revision": "0", "kind": "decoder", "operation": "softmax", "parameters": 1, "text": "", "reason": "",
             "effect": 0.31, "interval": [0.29, 0.33], "unit": "number", "presupposes": []}  # fmt: skip
    models = [
        {**model, "name": "org/yes", "verdict": "reproduced", "parts": record["parts"]},
        {
            **model,
            "name": "org/no",
            "verdict": "not reproduced",
            "parts": [{**record["parts"][0], "verdict": "not reproduced"}],
        },
        {**model, "name": "org/none", "verdict": "not applicable", "parts": [], "reason": "it reads no text"},
    ]
    write_claim(out / "checkpoint" / "few", (RISES,), HIGH, verdict="inconclusive", models=models)
    write_claim(out / "checkpoint" / "many", (RISES,), HIGH, models=[{**models[0], "name": f"org/{name}"} for name in "abc"])
    return out


@pytest.fixture(scope="module")
def entries(planted):
    return entries_of(kept_in(planted))


def names(entries) -> set[tuple[str, str, str]]:
    return {(entry.claim, entry.folder, entry.model) for entry in entries}


def test_every_verdict_is_in_the_list_of_its_kind_and_in_no_other(entries):
    groups = {group: names(in_group(entries, group)) for group in ("holds", "fails", "open", "untested", "one model", "proof")}
    assert groups == {
        "holds": {
            *(("read_text", "tiny", ""), ("toy_holds", "tiny", "")),
            *(("toy_holds", "small-bos", ""), ("many", "checkpoint", "")),
        },
        "fails": {("toy_fails", "tiny", "")},
        "open": {("toy_open", "tiny", ""), ("toy_holds", "tiny-bos", "")},
        "untested": {("untested", "tiny", "")},
        "one model": {
            ("one_holds", "tiny", "embedded:softmax"), ("one_fails", "tiny", "embedded:softmax"),
            ("few", "checkpoint", "org/yes"), ("few", "checkpoint", "org/no"),
            *(("many", "checkpoint", f"org/{name}") for name in "abc"),
        },
        "proof": {("proof", "tiny", "")},
    }  # fmt: skip
    assert sum(map(len, groups.values())) == len(entries)


def test_the_evidence_is_what_the_models_have_read(entries):
    kinds = {(entry.claim, entry.folder): entry.evidence for entry in entries}
    assert kinds["toy_holds", "tiny"] == kinds["toy_holds", "tiny-bos"] == kinds["proof", "tiny"] == "toy"
    assert kinds["toy_holds", "small-bos"] == kinds["one_holds", "tiny"] == kinds["read_text", "tiny"] == "natural"
    assert kinds["many", "checkpoint"] == "checkpoint"


def test_the_strongest_evidence_and_the_base_of_the_source_come_first(entries):
    assert [entry.evidence for entry in in_group(entries, "holds")] == ["checkpoint", "natural", "natural", "toy"]
    of_claim = [(entry.folder, entry.own) for entry in entries if entry.claim == "toy_holds"]
    assert of_claim == [("tiny", True), ("tiny-bos", False), ("small-bos", False)]


def test_counts_are_those_of_the_lists(entries):
    (_, columns, rows), (_, _, apart) = summary_of_entries(entries).counts
    assert columns == ("evidence", "reproduced", "not reproduced", "open", "not tested")
    assert {row[0].split(":")[0]: row[1:] for row in rows if "source" not in row[0]} == {
        "◆ checkpoint": ("1", "0", "0", "0"),
        "■ natural": ("1", "0", "0", "0"),
        "● toy": ("1", "1", "1", "1"),
    }
    assert [row[1:] for row in rows if "source" in row[0]] == [("1", "0", "0", "0"), ("0", "0", "1", "0")]
    counted = {row[0]: row[1:3] for row in apart}
    assert counted["□ natural: `embedded:softmax`"] == ("1", "1")
    assert counted["◇ checkpoint: `org/yes`"] == ("1", "0")
    assert counted["theory: checks of what is proved"] == ("1", "0")


def test_no_line_about_one_model_says_that_the_claim_holds(entries):
    lists = {one.title: one.lines for one in summary_of_entries(entries).lists}
    assert not {line.claim for line in lists["Reproduced"]} & {"one_holds", "one_fails", "few", "proof", "toy_open"}
    said = {line.says for line in lists["One model does, or does not"]}
    assert said == {"yes: it rises", "no: it rises"}


def test_what_is_open_says_what_would_decide_it(entries):
    (line,) = next(one for one in summary_of_entries(entries).lists if one.title == "Open").lines
    seeds, needed, side = re.fullmatch(r"(\d+) → (\d+), (\w+)", line.count).groups()
    assert (int(seeds), side) == (3, "for")
    assert int(needed) > 3
    note = next(one.note for one in summary_of_entries(entries).lists if one.title == "Open")
    assert note.endswith("next to a result on its own, and not listed: 1.")


def test_an_open_premise_is_what_is_open(tmp_path):
    record = write_claim(tmp_path / "tiny" / "held_up", (RISES,), HIGH, conditions=TRAINED)
    premise = write_claim(tmp_path / "tiny" / "other", (ROOM,), numbers(1.0, 1.0, 1.0, room=(0.5, 2.0, 5.0)))["parts"]
    assert premise[0]["verdict"] == "inconclusive"
    write_claim(tmp_path / "tiny" / "held_up", (RISES,), HIGH, conditions=TRAINED, verdict="inconclusive", presupposes=premise)
    entry = next(entry for entry in entries_of(kept_in(tmp_path)) if entry.claim == "held_up")
    assert (entry.premise, entry.part["says"]) == (True, "there is room")
    assert entry.deciding == record["parts"][0]


def test_a_claim_that_waits_for_a_premise_and_fails_in_a_part_is_foretold_to_fail(tmp_path):
    premise = write_claim(tmp_path / "tiny" / "other", (ROOM,), numbers(1.0, 1.0, 1.0, room=(0.5, 2.0, 5.0)))["parts"]
    waits = {"conditions": TRAINED, "verdict": "inconclusive", "presupposes": premise}
    write_claim(tmp_path / "tiny" / "fails", (RISES,), LOW, **waits)
    write_claim(tmp_path / "tiny" / "holds", (RISES,), HIGH, **waits)
    found = {entry.claim: entry for entry in entries_of(kept_in(tmp_path))}
    assert [(found[name].premise, found[name].leans, found[name].fails) for name in ("fails", "holds")] == [
        (True, False, "it rises"),
        (True, True, ""),
    ]
    lists = {one.title: one.lines for one in summary_of_entries(entries_of(kept_in(tmp_path))).lists}
    lines = {line.claim: line for line in lists["Open"]}
    assert lines["fails"].says == "premise: there is room (once shown, the claim fails: it rises)"
    assert lines["fails"].count.endswith(", against")
    assert (lines["holds"].says, lines["holds"].count[-5:]) == ("premise: there is room", ", for")


def test_what_is_open_on_another_base_alone_is_in_the_list(tmp_path):
    """A claim with a result on the base of its source has the other beside it; one without has nothing else."""
    elsewhere = {"conditions": TRAINED, "base": "bos", "source_base": "no-bos"}
    write_claim(tmp_path / "tiny" / "beside", (RISES,), WIDE, **{**elsewhere, "base": "no-bos", "scale": "tiny"})
    write_claim(tmp_path / "tiny-bos" / "beside", (RISES,), WIDE, **elsewhere, scale="tiny")
    write_claim(tmp_path / "small-bos" / "beside", (RISES,), WIDE, **elsewhere, scale="small")
    write_claim(tmp_path / "60m" / "alone", (RISES,), WIDE, **{**elsewhere, "source_base": "other", "scale": "60m"})
    summary = summary_of_entries(entries_of(kept_in(tmp_path)))
    found = next(one for one in summary.lists if one.title == "Open")
    assert {(line.claim, line.on) for line in found.lines} == {
        ("beside", "● toy: `tiny`, no BOS"),
        ("beside", "■ natural: `small`, with BOS (the other base)"),
        ("alone", "■ natural: `60m`, with BOS (the other base)"),
    }
    assert found.note.endswith("next to a result on its own, and not listed: 1.")
    (_, _, rows), _ = summary.counts
    assert [row[3] for row in rows] == ["2", "1", "1"], "natural on another base, toy, toy on another base"


def test_of_several_open_parts_the_one_on_which_the_verdict_waits_is_shown(tmp_path):
    """Against a claim one part is enough, and so the first to be decided; for it all are needed, and so the last."""
    near, far = (Part(name, Value("loss", "a"), more_than=bound) for name, bound in (("near", 0.14), ("far", 0.05)))
    write_claim(tmp_path / "tiny" / "for", (far, near), WIDE, conditions=TRAINED)
    above, beyond = (Part(name, Value("loss", "a"), more_than=bound) for name, bound in (("above", 0.16), ("beyond", 0.3)))
    write_claim(tmp_path / "tiny" / "against", (above, far, beyond), WIDE, conditions=TRAINED)
    found = {entry.claim: entry for entry in entries_of(kept_in(tmp_path))}
    assert (found["for"].part["says"], found["for"].leans) == ("near", True)
    assert (found["against"].part["says"], found["against"].leans) == ("beyond", False)


def test_the_figure_has_an_axis_for_every_unit_and_every_estimate_with_its_verdict(entries, tmp_path):
    figure = summary_of_entries(entries).figure
    root = ElementTree.fromstring(figure)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "proof" not in texts
    assert "untested" not in texts
    assert texts.count("toy_holds") == 1, "one effect is one row"
    assert {"tiny: reproduced", "tiny, BOS: open", "small, BOS: reproduced", "embedded: yes", "yes: yes", "no: no"} <= set(
        texts
    )
    assert "0.310 [0.285, 0.335]" in texts
    assert summary_of_entries(entries).figure == figure, "the same results give the same bytes"
    units = (
        ("points", Part("a", Difference("sink_rate", "a", "b"), more_than=1)),
        ("number", Part("b", Value("loss", "a"), more_than=-9, less_than=9)),
    )
    drawn = {str(seed): {"a": {"sink_rate": 10.0 + seed, "loss": 0.5 + seed / 9}, "b": {"sink_rate": 1.0}} for seed in range(3)}
    for name, part in units:
        write_claim(tmp_path / "tiny" / name, (part,), {int(seed): of for seed, of in drawn.items()}, conditions=TRAINED)
    both = summary_of_entries(entries_of(kept_in(tmp_path))).figure
    assert "Differences of rates, in points" in both
    assert both.count('text-anchor="middle"') > 6, "each axis has ticks of its own"


def test_a_row_has_every_estimate_of_its_part_and_brackets_where_another_part_decides(tmp_path):
    low = Part("it is low", Value("loss", "b"), less_than=1)
    small = {seed: {"a": of["a"], "b": {"loss": seed / 100}} for seed, of in WIDE.items()}
    write_claim(tmp_path / "tiny" / "two_parts", (low, RISES), small, conditions=TRAINED, base="no-bos")
    changed = {"conditions": TRAINED, "base": "bos", "scale": "tiny"}
    lifted = {seed: {"a": of["a"], "b": {"loss": 0.9 + seed / 10}} for seed, of in HIGH.items()}
    write_claim(tmp_path / "tiny-bos" / "two_parts", (low, RISES), lifted, **changed)
    of_own, of_other = entries_of(kept_in(tmp_path))
    assert (of_own.deciding["says"], of_other.deciding["says"]) == ("it rises", "it is low")
    figure = summary_of_entries([of_own, of_other]).figure
    found = re.findall(r">(tiny[^:<]*: [^<]*)<", figure)
    assert sorted(found) == ["tiny, BOS: (reproduced)", "tiny, BOS: open", "tiny: (reproduced)", "tiny: open"]


def test_a_page_about_proofs_alone_has_no_empty_table_and_no_empty_figure(planted, entries, tmp_path):
    proofs = [entry for entry in entries if entry.group == "proof"]
    assert proofs
    results = [(one.folder, one.record) for one in kept_in(planted)]
    page = write_claims_page(results, tmp_path / "claims.html", summary_of_entries(proofs)).read_text(encoding="utf-8")
    assert "theory: checks of what is proved" in page
    assert "Verdicts about a kind of model" not in page
    assert "Every effect" not in page


def test_the_page_begins_with_the_summary_and_links_every_base_to_its_own_details(planted, entries, tmp_path):
    results = [(one.folder, one.record) for one in kept_in(planted)]
    page = write_claims_page(results, tmp_path / "claims.html", summary_of_entries(entries)).read_text(encoding="utf-8")
    assert page.index('id="summary"') < page.index('id="all"')
    ids = re.findall(r'<section id="([^"]+)"', page)
    assert {"tiny-toy_holds", "tiny-bos-toy_holds", "small-bos-toy_holds"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert page.count("<svg xmlns") == 1
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
