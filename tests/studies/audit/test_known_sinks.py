"""Audits of models whose sink is known: at a position, at a delimiter, in a null score, forced by a certificate, nowhere."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from safetensors import safe_open
from tests.conftest import make_loud, make_sinklm, make_tokenizer

from sinklab import audit
from sinklab.attention.session import attend
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Identity, TextCorpus
from sinklab.corpora.samples import Samples
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.loading import load_model, wrap_model
from sinklab.results.blocks import number
from sinklab.results.run import silent
from sinklab.results.sections import Context, from_json
from sinklab.results.table import read_table
from sinklab.sinks import Sinks
from sinklab.studies.theory.found import Certificate, show
from sinklab.studies.theory.no_op_certificate import DELTA, QUERIES, NoOpCertificate, certified
from sinklab.studies.theory.no_op_certificate import SAMPLES as CERTIFIED

SEQ_LEN, SAMPLES = 24, 12
LOUD = 13


class Rows(TextCorpus):
    """Rows of ids between 60 and 290: with the loud token at one of some places of each row, or one of twelve at position 2."""

    name = "rows"

    def __init__(self, places=None):
        self.places = places

    @property
    def identity(self):
        return Identity(source="made up", revision="1", licence="none")

    def passages(self, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            words = "".join(chr(97 + int(letter)) for letter in torch.randint(0, 26, (400,), generator=generator))
            yield " ".join(re.findall(".{1,3}", words))

    def sample(self, encoder, *, seq_len, samples, seed, bos):
        tokens = torch.randint(60, 290, (samples, seq_len), generator=torch.Generator().manual_seed(seed))
        if self.places is None:
            tokens[:, 2] = 40 + torch.arange(samples) % SAMPLES
        else:
            tokens[torch.arange(samples), [self.places[row % len(self.places)] for row in range(samples)]] = LOUD
        return tokens


def examined(model, corpus, tmp_path):
    out = tmp_path / "out"
    result = audit(
        wrap_model(model, make_tokenizer()), corpus=corpus, seq_len=SEQ_LEN, samples=SAMPLES, bos="none", certificate=True,
        causes=True, out=out,
    )  # fmt: skip
    return result, (out / "report.html").read_text(encoding="utf-8")


def entropies(model, tokens, columns, layer=0):
    """Dense oracle: mean row entropy by head with a column per text taken out, and the mean weight on it."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=tokens, output_attentions=True).attentions[layer].double()
    index = torch.as_tensor(columns)[:, None, None, None].expand(-1, weights.shape[1], weights.shape[2], 1)
    on_sink = weights.gather(3, index)[..., 0]
    rest = weights.scatter(3, index, 0.0)
    left = rest.sum(-1)
    rest = rest / left[..., None].clamp_min(1e-300)
    entropy = -torch.xlogy(rest, rest).sum(-1)
    kept = left >= 1e-3
    return [float(entropy[:, h][kept[:, h]].mean()) for h in range(weights.shape[1])], on_sink.mean((0, 2)).tolist()


def of_heads(result, probe, metric, layer=0):
    table = result.table
    rows = table[(table["probe"] == probe) & (table["metric"] == metric) & (table["layer"] == layer)]
    rows = rows[rows["corpus"] == result.summary["corpus"]].sort_values("head")
    return rows


def about_the_sink(result):
    """The words of the column ``sink`` in the rows of the audit."""
    return set(result.table["sink"].dropna())


def check_oracle(result, model, tokens, columns):
    without, on_sink = entropies(model, tokens, columns)
    assert of_heads(result, "entropy", "entropy_without_sink")["value"].tolist() == pytest.approx(without, abs=1e-3)
    assert of_heads(result, "entropy", "sink_column_weight")["value"].tolist() == pytest.approx(on_sink, abs=1e-5)


def check_finding(result, page, place):
    """The finding is one sentence on the place, the same in JSON and on the page; the terminal begins with the place."""
    found, (label, first, *_) = result.summary["finding"], result.blocks()[0].rows[0]
    assert place in found
    assert place in first
    assert len(found) <= 160
    assert label == "sink"
    assert html.unescape(page).count(found) == 1


def test_a_sink_at_position_2(tmp_path):
    """Twelve tokens take turns at position 2, so that it is the position that counts."""
    corpus, model = Rows(), make_loud(*range(40, 40 + SAMPLES))
    tokens = corpus.sample(None, seq_len=SEQ_LEN, samples=SAMPLES, seed=0, bos=False)
    result, page = examined(model, corpus, tmp_path)
    summary = result.summary
    (main, *_) = summary["sinks"]["sinks"]
    assert (main["kind"], main["position"], main["rate"]) == ("position", 2, 50.0)  # one of two layers
    assert about_the_sink(result) == {"position 2"}
    check_oracle(result, model, tokens, [2] * SAMPLES)
    assert (of_heads(result, "score_gap", "gap")["value"] > 4).all()
    assert summary["sink_role"] == "position 2"
    assert summary["certificate"]["sink_position"] == 2
    assert summary["causes"]["sink"]["place"] == 2
    check_finding(result, page, "position 2")
    assert "without position 2" in page


def test_a_sink_at_the_first_delimiter(tmp_path):
    places = (2, 5, 3, 7, 9, 4)
    corpus, model = Rows(places), make_loud(LOUD)
    tokens = corpus.sample(None, seq_len=SEQ_LEN, samples=SAMPLES, seed=0, bos=False)
    result, page = examined(model, corpus, tmp_path)
    summary = result.summary
    (main, *_) = summary["sinks"]["sinks"]
    name = f"the first “{main['text']}”"
    assert (main["kind"], main["token"], main["rate"]) == ("token", LOUD, 50.0)
    assert about_the_sink(result) == {name}
    check_oracle(result, model, tokens, [places[row % len(places)] for row in range(SAMPLES)])
    assert (of_heads(result, "score_gap", "gap")["value"] > 4).all()
    assert summary["sink_role"] == summary["certificate"]["sink"] == summary["causes"]["sink"]["name"] == name
    assert all(entry["sink_weight"] > 0.5 for entry in summary["causes"]["heads"] if entry["layer"] == 0)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    assert data["sinks"][0]["name"] == name
    assert data["sinks"][0]["rates"] == [[100.0, 100.0], [0.0, 0.0]]
    check_finding(result, page, name)


def test_a_learned_sink_logit(tmp_path):
    model = make_sinklm({"name": "sink_logit"})
    with torch.no_grad():
        for layer in model.layers:
            next(p for n, p in layer.self_attn.named_parameters() if n.startswith("operation_state")).fill_(6.0)
    corpus = Rows((2, 5, 3))
    result, page = examined(model, corpus, tmp_path)
    summary = result.summary
    assert summary["sinks"]["sinks"][0]["kind"] == "null"
    assert about_the_sink(result) == {"null score (learned sink logit)"}
    # Nothing of the rows of real keys is taken out: they are divided by their own sum as they are.
    whole = of_heads(result, "entropy", "entropy")["value"].tolist()
    assert of_heads(result, "entropy", "entropy_without_sink")["value"].tolist() == pytest.approx(whole, rel=1e-6)
    null = of_heads(result, "null_mass", "null_mass")["value"].tolist()
    for probe, metric in (("entropy", "sink_column_weight"), ("score_gap", "sink_weight")):
        assert of_heads(result, probe, metric)["value"].tolist() == pytest.approx(null, rel=1e-4)
    assert of_heads(result, "score_gap", "sink_score")["value"].tolist() == pytest.approx([6.0, 6.0])
    assert (summary["sink_role"], summary["certificate"]["sink_position"]) == ("null score", "null")
    assert summary["causes"]["sink"]["place"] == "null"
    check_finding(result, page, "the null score")


def test_no_sink(tmp_path):
    result, page = examined(make_sinklm(), Rows((2, 5, 3)), tmp_path)
    summary = result.summary
    assert summary["sinks"]["sinks"] == []
    assert summary["sink_role"] == "none"
    assert about_the_sink(result) == {"position 0 (no sink was found)"}
    assert summary["causes"]["sink"]["place"] is None
    assert not summary["certificate"]["sink_found"]
    check_finding(result, page, "There is no sink")


def test_a_learned_token_in_front(tmp_path):
    model = make_loud(operation={"name": "sink_token"})
    with torch.no_grad():
        model.front_tokens.weight[0, :2] = 1.0
    corpus = Rows()
    result, page = examined(model, corpus, tmp_path)
    name = "the learned token in front"
    assert result.summary["sink_role"] == f"{name} (position 0)"
    assert (result.summary["sinks"]["front"], result.summary["sinks"]["sinks"][0]["called"]) == (1, name)
    check_finding(result, page, name)
    assert about_the_sink(result) == {f"{name} (position 0)"}
    assert any("the text begins at position 1" in warning for warning in result.summary["warnings"])
    with safe_open(tmp_path / "out" / "maps.safetensors", "np") as file:
        about = file.metadata()
        assert json.loads(about["seq_len"]) == file.get_slice("weights").get_shape()[-1] == SEQ_LEN + 1
    (first, *texts), tokens = json.loads(about["tokens"])[0], corpus.sample(None, seq_len=SEQ_LEN, samples=1, seed=0, bos=False)
    assert first == name
    assert texts == [make_tokenizer().decode([token]) for token in tokens[0].tolist()]


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
        loaded.model(input_ids=tokens[:CERTIFIED])
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
    assert section["samples"] == CERTIFIED
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


def test_what_cannot_be_certified_says_why():
    section, table, also = section_of(make_sinklm(), random_tokens(), sink=30)
    assert section == {
        "refused": "no query of the samples sees its sink (position 30) and another key; give longer samples (`seq_len`)"
    }
    assert len(table) == len(also) == 0
    section, _, _ = section_of(heads_that_add(), random_tokens())
    assert "layers.0.self_attn: no output projection of the heads was found" in section["refused"]
