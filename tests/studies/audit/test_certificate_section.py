"""The no-op certificate in an audit: its numbers are the probe's, forced heads are found, and without it nothing changes."""

from __future__ import annotations

import json

import pytest
import torch
from tests.architectures.zoo import MEASURED, build
from tests.conftest import make_sinklm

from sinklab import audit
from sinklab.attention.session import attend
from sinklab.corpora import resolve_corpus
from sinklab.corpora.samples import Samples
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.loading import load_model, wrap_model
from sinklab.results.blocks import number
from sinklab.results.record import from_json
from sinklab.results.run import silent
from sinklab.results.sections import Context
from sinklab.results.table import read_table
from sinklab.sinks import Sinks
from sinklab.studies.theory.certified_heads import DELTA, QUERIES, SAMPLES, certified
from sinklab.studies.theory.found import Certificate
from sinklab.studies.theory.no_op_certificate import NoOpCertificate
from sinklab.studies.theory.show import show

SETTINGS = {"corpus": "python_source", "seq_len": 16, "samples": 6, "cache": False}


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    """The same audit with the certificate and without."""
    folder = tmp_path_factory.mktemp("certificate")
    return [audit(str(checkpoint), certificate=flag, out=folder / str(flag), **SETTINGS) for flag in (True, False)]


def section_of(model, tokens, sink=0, **changes):
    summary = {"threshold": 0.3, "normalized": True, "operation": "softmax", "corpus": "random_tokens", "bos": 0, **changes}
    context = Context(
        loaded=wrap_model(model), corpus=None, samples=Samples.of_tokens(tokens), sinks=Sinks.at(sink), summary=summary,
        bos=False, run_id="run", seed=0, progress=silent,
    )  # fmt: skip
    section, table = certified(context)
    return section, table, context.probes


def random_tokens(samples=2, length=12):
    return torch.randint(2, 300, (samples, length), generator=torch.Generator().manual_seed(0))


def heads_that_add():
    """Without one projection for all heads, what a head writes is not known."""
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**{**make_sinklm().config.to_dict(), "head_merge": "add"})).eval()


def silent_by_its_sink(**operation):
    """A model whose first layer writes one vector for every token but one, nothing for that one, and attends to it alone."""
    model = make_sinklm(operation or {"name": "softmax"})
    attention = model.layers[0].self_attn
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[:, 0] = 1.0
        model.embed_tokens.weight[7] = torch.nn.functional.one_hot(torch.tensor(1), model.embed_tokens.weight.shape[1])
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        attention.q_proj.weight[7::8, 0] = 40.0  # rotary angles of slow frequencies keep the sign
        attention.k_proj.weight[7::8, 1] = 40.0
        attention.v_proj.weight[:, 1] = 0.0
    tokens = torch.full((2, 12), 20)
    tokens[:, 0] = 7
    return model, tokens


def test_numbers_are_those_of_the_probe(results, checkpoint):
    section = results[0].summary["certificate"]
    loaded = load_model(str(checkpoint))
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=16, samples=6, seed=0, bos=True)
    sink = section["sink_position"]
    probe = NoOpCertificate(sink, max_queries=QUERIES, delta=DELTA)
    with attend(loaded.model, [probe]), torch.no_grad():
        loaded.model(input_ids=tokens[:SAMPLES])
    assert len(section["heads"]) == 4
    for head in section["heads"]:
        layer = probe.found[head["layer"]]
        bounds, counted = layer.certificate, layer.certificate.counted[:, head["head"]]

        def mean(values, head=head, counted=counted):
            return values[:, head["head"]][counted].mean().item()

        expected = {
            "least_output": mean(bounds.with_upper / bounds.scale),
            "least_output_without_sink": mean(bounds.without_lower / bounds.scale),
            "gap": mean(bounds.gap / bounds.scale),
            "output": mean(layer.output_norm / bounds.scale),
            "sink_weight": mean(layer.sink_weight),
        }
        # One batch there, samples one by one here: float32 sums in another order, and bounds that meet to 1e-4.
        assert {name: head[name] for name in expected} == pytest.approx(expected, abs=3e-4)
        needed = bounds.needed_lower[:, head["head"]][counted]
        needed = needed[torch.isfinite(needed)]
        assert (head["queries"], head["needed_queries"]) == (int(counted.sum()), len(needed))
        if len(needed):
            assert head["needed_sink_weight"] == pytest.approx(needed.mean().item(), abs=3e-3)
        else:
            assert head["needed_sink_weight"] is None
    assert section["samples"] == SAMPLES
    assert section["sink_heads"] == sum(head["sink_weight"] > 0.3 for head in section["heads"])


def test_everything_is_written(results):
    result = results[0]
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    table = read_table(result.folder / "table.parquet")
    rows = table[table["probe"] == "no_op_certificate"]
    assert set(rows["metric"]) >= {"no_op_gap", "certified_sink_weight", "least_output", "least_output_without_sink", "output"}
    assert rows["intervention"].isna().all()
    assert set(rows["bos"]) == {1}
    gaps = rows[(rows["metric"] == "no_op_gap") & rows["head"].notna()]["value"].tolist()
    assert gaps == [head["gap"] for head in result.summary["certificate"]["heads"]]
    defined = {entry["metric"] for entry in result.record["definitions"] if entry["probe"] == "no_op_certificate"}
    assert set(rows["metric"]) <= defined
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "Whether the sink is forced" in page
    for head in result.summary["certificate"]["heads"]:
        assert f'<th scope="row">{head["layer"]}.{head["head"]}</th><td class="n">{number(head["sink_weight"])}</td>' in page


def test_without_it_an_audit_is_what_it_was(results):
    certified_one, plain = results
    assert "certificate" not in plain.summary
    assert plain.summary == {key: value for key, value in certified_one.summary.items() if key != "certificate"}
    assert "no_op_certificate" not in set(plain.table["probe"])
    assert "no_op_certificate" not in {entry["probe"] for entry in plain.record["definitions"]}
    assert "Whether the sink is forced" not in (plain.folder / "report.html").read_text(encoding="utf-8")
    rest = certified_one.table[certified_one.table["probe"] != "no_op_certificate"].drop(columns="run_id")
    assert rest.reset_index(drop=True).equals(plain.table.drop(columns="run_id").reset_index(drop=True))


def test_heads_that_are_forced():
    model, tokens = silent_by_its_sink()
    section, _, _ = section_of(model, tokens)
    first = [head for head in section["heads"] if head["layer"] == 0]
    for head in first:
        # Values u, u, … and 0: weight a on the 0 writes (1 - a)|u|, so 0.2 needs 0.8, and without it |u| is the least.
        assert head["needed_sink_weight"] == pytest.approx(0.8, abs=1e-3)
        assert head["least_output_without_sink"] == pytest.approx(1.0, abs=1e-3)
        assert head["least_output"] == pytest.approx(0.0, abs=1e-3)
        assert head["sink_weight"] > 0.99
        assert head["forced"]
    assert section["forced_heads"] >= len(first) == 2
    # A threshold above the need: they sink, and need not sink so much.
    above, _, _ = section_of(model, tokens, threshold=0.9)
    assert [head["forced"] for head in above["heads"] if head["layer"] == 0] == [False, False]
    assert above["sink_heads"] >= 2


def test_a_tie_with_the_threshold_is_not_above_it():
    """As for the rate: what exceeds the threshold by no more than rounding is as large."""
    model, tokens = silent_by_its_sink()
    section, _, _ = section_of(model, tokens)
    least = min(head["sink_weight"] for head in section["heads"])
    tied, _, _ = section_of(model, tokens, threshold=least * (1 - 1e-7))
    above, _, _ = section_of(model, tokens, threshold=least * (1 - 1e-3))
    assert above["sink_heads"] == len(above["heads"]) > tied["sink_heads"]


def test_weights_that_need_not_sum_to_one_force_nothing():
    model, tokens = silent_by_its_sink(name="sigmoid")
    section, _, _ = section_of(model, tokens, normalized=False, operation="sigmoid")
    assert section["forced_heads"] == 0
    (finding, grid, _) = show(from_json(Certificate, section, "section"))
    assert len(finding.text) <= 160
    assert len(grid.rows) == len(section["heads"])


@pytest.mark.parametrize(("samples", "length", "queries"), [(2, 5, 8), (1, 8, 7), (2, 4, 6)])
def test_a_verdict_takes_eight_queries(samples, length, queries):
    model, tokens = silent_by_its_sink()
    section, _, _ = section_of(model, tokens[:samples, :length])
    first = [head for head in section["heads"] if head["layer"] == 0]
    assert [(head["needed_queries"], head["queries"], head["forced"]) for head in first] == [
        (queries, queries, queries >= 8)
    ] * 2


def test_a_null_is_the_sink_where_it_plays_it():
    model = build(next(entry for entry in MEASURED if entry.id == "gpt_oss"), "eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(20.0)
    section = audit(
        wrap_model(model), corpus="random_tokens", seq_len=16, samples=2, bos="none", cache=False, certificate=True
    ).summary["certificate"]
    assert section["sink_position"] == "null"
    assert all(head["sink_weight"] > 0.9 for head in section["heads"])
    assert section["sink"] == "the null (learned sink logit, key bias)"


def test_what_cannot_be_certified_says_why():
    section, table, also = section_of(make_sinklm(), random_tokens(), sink=30)
    assert section == {
        "refused": "no query of the samples sees its sink (position 30) and another key; give longer samples (`seq_len`)"
    }
    assert len(table) == len(also) == 0
    section, _, _ = section_of(heads_that_add(), random_tokens())
    assert "layers.0.self_attn: no output projection of the heads was found" in section["refused"]
