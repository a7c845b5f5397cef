"""Audits of models whose sink is known: at position 2, at a delimiter, in a null score, nowhere; all words are about it."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from safetensors import safe_open
from tests.conftest import make_sinklm, make_tokenizer

from sinklab import audit
from sinklab.corpora.base import Identity, TextCorpus
from sinklab.models.loading import wrap_model

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


def loud(*tokens, operation=None, score=0.7):
    """Heads of the first layer attend to the keys of some tokens; those of the second do what their random weights say."""
    model = make_sinklm(operation)
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        attention.q_proj.weight[7::8, 0] = score  # rotary angles of slow frequencies keep the sign
        attention.k_proj.weight[7::8, 1] = score
        model.embed_tokens.weight[:, :2] = torch.tensor([1.0, 0.0])
        model.embed_tokens.weight[list(tokens), 1] = 1.0
    return model


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
    corpus, model = Rows(), loud(*range(40, 40 + SAMPLES))
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
    pinned = [entry for entry in summary["cache"]["policies"] if entry["policy"] == "pinned"]
    assert [list(entry["settings"]["pinned"]) for entry in pinned] == [[2]]


def test_a_sink_at_the_first_delimiter(tmp_path):
    places = (2, 5, 3, 7, 9, 4)
    corpus, model = Rows(places), loud(LOUD)
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
    assert summary["sink_positions"] == []
    assert all(entry["sink_weight"] > 0.5 for entry in summary["causes"]["heads"] if entry["layer"] == 0)
    assert "stands elsewhere in every text" in summary["causes"]["location"]["refused"]
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    assert data["sinks"][0]["name"] == name
    assert data["sinks"][0]["rates"] == [[100.0, 100.0], [0.0, 0.0]]
    check_finding(result, page, name)
    assert "no position of its own" in next(one["reason"] for one in summary["cache"]["left_out"] if one["policy"] == "pinned")


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
    assert summary["sinks"]["sinks"] == summary["sink_positions"] == []
    assert summary["sink_role"] == "none"
    assert about_the_sink(result) == {"position 0 (no sink was found)"}
    assert summary["causes"]["sink"]["place"] is None
    assert not summary["certificate"]["sink_found"]
    check_finding(result, page, "There is no sink")
    reasons = [one["reason"] for one in summary["cache"]["left_out"] if one["policy"] == "pinned"]
    assert reasons == ["no sink was found, so there is nothing to pin"]


def test_a_learned_token_in_front(tmp_path):
    model = loud(operation={"name": "sink_token"})
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
