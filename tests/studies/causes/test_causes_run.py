"""find_causes() on small models: what it writes, how it resumes, own samples, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import make_sinklm
from tests.studies.causes.planted import (
    PlantedLM,
    SquaredError,
    always_the_same,
    inert,
    killed_behind,
    no_op,
    planted,
    repeated,
    sinks_of,
    zipf,
)
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from sinklab import find_causes
from sinklab.corpora.base import Encoder
from sinklab.corpora.random_tokens import RandomTokens
from sinklab.corpora.records import Records
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions.zero_head import ZeroHead
from sinklab.models.loading import load_model, wrap_model
from sinklab.results.run import silent
from sinklab.results.store import Store
from sinklab.results.table import read_run, read_table
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes import measurement as causes_measure
from sinklab.studies.causes.domains import Texts, texts_of
from sinklab.studies.causes.effects import HeadEdit, make_variants, one_by_one
from sinklab.studies.causes.engine import Engine, measure_effects
from sinklab.studies.causes.labels import label_heads
from sinklab.studies.causes.measurement import Resumable
from sinklab.studies.causes.readout import ClassLogits, NextToken
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import Samples, token_samples

QUICK = {"domains": ["random_tokens"], "texts": 11, "seq_len": 24, "sink": 0}
"""Random weights have no sink, so a place is named; eleven texts are enough for the hypotheses of four heads on two domains."""


@pytest.fixture(scope="module")
def result(checkpoint, tmp_path_factory):
    return find_causes(str(checkpoint), **QUICK, out=tmp_path_factory.mktemp("causes") / "out")


def test_files_and_summary(result):
    assert sorted(path.name for path in result.folder.iterdir()) == ["report.html", "run.json", "summary.json", "table.parquet"]
    assert list(result.folder.parent.iterdir()) == [result.folder]  # what a killed run would need is gone
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    assert [(head["layer"], head["head"]) for head in result.summary["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first = result.summary["heads"][0]
    assert set(first) == {
        "layer", "head", "module", "label", "domains", "sink_weight", "sink_weights", "value_ratio", "effects",
        "needs_sink", "undecided", "estimates",
    }  # fmt: skip
    assert first["domains"] == {"random_tokens": first["label"]}
    assert set(first["effects"]["redirect"]["random_tokens"]) == {"mean", "low", "high", "p"}
    assert sum(result.summary["counts"].values()) == 4
    assert list(result.summary["counts"]) == [
        "text-dependent", "constant", "dormant", "bias", "broadcast", "unneeded", "switch", "active", "needs-sink", "slight",
        "mixed", "undecided", "not-run",
    ]  # fmt: skip
    assert result.summary["sink"]["place"] == 0
    assert result.summary["budget"] is None


def test_the_table_has_the_means_of_the_effects(result):
    table = read_table(result.folder / "table.parquet")
    assert set(table["probe"]) == {"causes"}
    effects = table[(table["probe"] == "causes") & (table["metric"] == "loss_change")]
    assert len(effects) == 4 * len(result.summary["variants"])
    assert set(effects["count"]) == {11}
    for head in result.summary["heads"]:
        (value,) = effects[
            (effects["layer"] == head["layer"]) & (effects["head"] == head["head"]) & (effects["intervention"] == "redirect")
        ]["value"]
        assert value == pytest.approx(head["effects"]["redirect"]["random_tokens"]["mean"], rel=1e-12)


def test_the_run_record_says_what_was_done(result):
    run = read_run(result.folder)
    assert run["kind"] == "causes"
    assert run["config"]["heads"] == "all"
    assert (run["config"]["texts"], run["config"]["positions"]) == (11, 24)
    (domain,) = run["domains"]
    assert domain["domain"] == "random_tokens"
    assert len(domain["token_sha256"]) == 64
    assert list(run["measured"]) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert run["dtype"] == "float32"


def test_the_same_seed_gives_the_same_numbers(result, checkpoint):
    again = find_causes(str(checkpoint), **QUICK)
    assert again.summary == result.summary
    assert again.folder is None


def test_a_killed_run_goes_on_where_it_was(result, checkpoint, tmp_path, monkeypatch):
    calls, out = killed_behind(monkeypatch, 3), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        find_causes(str(checkpoint), **QUICK, out=out)
    assert not out.exists()
    again = find_causes(str(checkpoint), **QUICK, out=out)
    assert [edited for edited, _ in calls[1:]] == [["0.0"], ["0.1"], ["1.0"], ["1.0"], ["1.1"]]
    assert again.summary == result.summary
    assert list(tmp_path.iterdir()) == [out]


def test_a_budget_is_spent_on_the_most_informative_heads_and_what_is_left_is_said(checkpoint, tmp_path, monkeypatch):
    calls = killed_behind(monkeypatch, 10**6)
    options = {**QUICK, "budget": 1e-6}  # spent before the first group: of each stage one piece is done
    found = find_causes(str(checkpoint), **options, out=tmp_path / "out").summary
    (first,) = ((edited, chosen) for edited, chosen in calls if "+" not in edited[0])
    sizes = [0.0, 0.0]
    for head in found["heads"]:
        sizes[head["layer"]] += max(map(abs, head["estimates"].values())) / (2 - head["layer"])
    layer = int(np.argmax(sizes))
    assert first == ([f"{layer}.0", f"{layer}.1"], ["redirect", "hide"])  # the heads of a layer at once
    left = [head for head in found["heads"] if head["label"] == "not-run"]
    assert [head["layer"] for head in left] == [1 - layer] * 2
    assert found["counts"]["not-run"] == 2
    assert all(head["effects"] == {} and head["undecided"] == {} for head in left)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Not measured: what the screen expects, which is no verdict" in page


def test_what_another_configuration_of_the_same_weights_left_is_not_taken(own_checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    alone = find_causes(str(own_checkpoint), **QUICK, minimal_effect=0.01).summary
    with monkeypatch.context() as patched:
        patched.setattr(causes_measure, "label_heads", lambda *given, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            find_causes(str(own_checkpoint), **QUICK, minimal_effect=0.01, out=out)
    config = json.loads((own_checkpoint / "config.json").read_text())
    (own_checkpoint / "config.json").write_text(json.dumps({**config, "position": {"name": "rotary", "theta": 20.0}}))
    other = find_causes(str(own_checkpoint), **QUICK, minimal_effect=0.01, out=out).summary
    assert other["clean_loss"] != alone["clean_loss"]


def test_sinks_that_were_found_elsewhere_are_not_looked_for(result, checkpoint):
    options = {name: value for name, value in QUICK.items() if name != "sink"}
    given = Sinks.at(0)
    again = find_causes(str(checkpoint), **options, sinks=given)
    assert again.summary == result.summary
    assert again.record["config"]["sinks"] == given.to_dict()
    with pytest.raises(ConfigurationError, match="`sink` 0 and `sinks` both say where the sink is; give one of them"):
        find_causes(str(checkpoint), **QUICK, sinks=given)


def test_two_domains_and_no_sink(checkpoint):
    found = find_causes(
        str(checkpoint), domains=["random_tokens", "repeated_token"], texts=10, seq_len=16, sink="none", heads=[(0, 1)]
    )
    (head,) = found.summary["heads"]
    assert set(head["domains"]) == {"random_tokens", "repeated_token"}
    assert head["sink_weight"] is None
    assert "redirect" not in head["effects"]
    assert {"random_tokens", "repeated_token"} == set(found.summary["clean_loss"])
    assert found.summary["sink"]["place"] is None


def test_a_domain_that_is_predicted_worse_than_by_a_guess_is_named(checkpoint):
    """Logits of random weights, a hundred times as large, are sure of what is not there."""
    model = load_model(str(checkpoint))
    with torch.no_grad():
        model.model.get_output_embeddings().weight *= 100
    said = find_causes(model, **{**QUICK, "domains": ["random_tokens"]}, heads=[(0, 1)]).summary
    assert (
        f"A loss of {said['clean_loss']['random_tokens']:.3f} nats on random_tokens is above that of a guess"
        in said["notes"][0]
    )


def test_what_a_head_gives_to_the_sink_is_of_each_domain(checkpoint):
    options = {**QUICK, "heads": [(0, 1)], "texts": 24}
    (head,) = find_causes(str(checkpoint), **{**options, "domains": ["random_tokens", "repeated_token"]}).summary["heads"]
    for domain in ("random_tokens", "repeated_token"):
        (alone,) = find_causes(str(checkpoint), **{**options, "domains": [domain]}).summary["heads"]
        # float32 weights of batches of the same texts
        assert head["sink_weights"][domain] == pytest.approx(alone["sink_weight"], rel=1e-5)
    assert len(set(head["sink_weights"].values())) == 2


def test_texts_have_room_in_the_model(tokenizer):
    """Longer ones than a table of positions are refused, and ones longer than it was trained on are said to be that."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = RobertaForCausalLM(RobertaConfig(**sizes, max_position_embeddings=34, is_decoder=True)).eval()
    loaded = wrap_model(model, tokenizer)
    quick = {name: value for name, value in QUICK.items() if name != "seq_len"}
    found = find_causes(loaded, **quick)
    assert found.record["config"]["positions"] == 32  # RoBERTa counts its positions from 2 on
    with pytest.raises(ConfigurationError, match="has embeddings for 32 positions and a text has 33 tokens"):
        find_causes(loaded, **QUICK | {"seq_len": 33})
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=20)).eval()
    said = "The samples have {} tokens and the model was made for 20"
    for length in (20, 21):
        notes = find_causes(wrap_model(model, tokenizer), **QUICK | {"seq_len": length}).summary["notes"]
        assert any(said.format(length) in note for note in notes) == (length > 20)


def test_a_masked_model_is_scored_at_masked_tokens(tokenizer):
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    ends = [(token, own.token_to_id(token)) for token in ("<bos>", "e")]
    own.post_processor = TemplateProcessing(single="<bos> $A e", special_tokens=ends)
    tokenizer = type(tokenizer)(tokenizer_object=own, bos_token="<bos>", mask_token="<eos>", sep_token="e")
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=64,
        )
    )  # fmt: skip
    found = find_causes(wrap_model(model, tokenizer), **QUICK)
    assert found.summary["unit"] == "nats"
    assert len(found.summary["heads"]) == 2
    given = texts_of(wrap_model(model, tokenizer), [("r", RandomTokens())], texts=10, seq_len=24, seed=0, bos=True)
    tokens = given.samples.inputs["input_ids"]
    assert set(tokens[:, -1].tolist()) == {tokenizer.sep_token_id}
    assert set(tokens[:, 0].tolist()) == {0}
    assert torch.equal(given.samples.domains >= 0, tokens == tokenizer.mask_token_id)
    assert (given.samples.domains >= 0).sum(1).tolist() == [3] * 10  # 15 % of 22, without the two at the ends
    assert found.summary["clean_loss"]["random_tokens"] == pytest.approx(np.log(300), abs=0.3)
    with pytest.raises(ConfigurationError, match="predicts masked tokens, and its tokenizer has no mask token"):
        find_causes(wrap_model(model), **QUICK)


def test_records_are_read_whole_and_no_padding_is_seen(checkpoint, tmp_path):
    """Losses of padded records, unedited and with a head at 0, are those of each record alone."""
    lines = ["def read(path):", "x = 1", "import os, sys", "return a + b", "for k in range(8): print(k)", "pass", "a = b", "y"]
    (tmp_path / "lines.txt").write_text("\n\n".join(lines))
    loaded = load_model(str(checkpoint))
    texts = texts_of(loaded, [("lines", Records(tmp_path / "lines.txt"))], texts=6, seq_len=24, seed=3, bos=True)
    lengths = texts.samples.inputs["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) > 1
    edits = [HeadEdit("zero", (ZeroHead(),))]
    found = measure_effects(loaded.model, texts.samples, texts.readout, edits, [Head(0, 1), Head(1, 0)])
    for number, length in enumerate(lengths.tolist()):
        row = texts.samples.inputs["input_ids"][number : number + 1, :length]
        alone = one_by_one(loaded.model, token_samples([("one", row)]), texts.readout, edits, [Head(0, 1), Head(1, 0)])
        # float32 losses of about 5.7: rounding of sums in another order is a few times 1e-7 of that.
        assert found.clean_loss[number] == pytest.approx(alone.clean_loss[0], abs=1e-5)
        assert found.loss[:, :, number] == pytest.approx(alone.loss[:, :, 0], abs=1e-5)


def test_a_vision_model_from_python():
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
            num_labels=3,
        )
    )  # fmt: skip
    images = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    samples = Samples({"pixel_values": images}, torch.zeros(12, 1, dtype=torch.int64), torch.arange(12) % 3, ("images",))
    found = find_causes(model, samples=samples, readout=ClassLogits(), sink=0)
    assert len(found.summary["heads"]) == 4
    assert found.summary["domains"] == ["images"]
    with pytest.raises(
        UnsupportedModelError, match="ViTForImageClassification is not a model of texts; from Python, find_causes"
    ):
        find_causes(model, **QUICK)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"sink": "auto"},
            r"no sink found: .*tried.*position 0 \(0\.\d\d\).*\(see `threshold`, `sink` as a position, null or none\)",
        ),
        ({"sink": 99}, "place 99: no such place; on these texts the model has positions 0 to 23"),
        ({"sink": "null"}, "place 'null': no such place; .*not a null score in every module"),
        ({"sink": -1}, "`sink` -1 must be auto, a position from 0, null or none"),
        ({"texts": 4}, r"4 texts .* too few: 32 hypotheses .* take 10 texts or more.*`texts`, `heads`, `level`\)"),
        ({"heads": [(0, 0), (2, 1)]}, r"`heads` 2\.1: there is no such head; the model has 2 layers of 2 heads, .* to 1\.1"),
        ({"budget": "slow"}, "`budget` slow must be a time above 0, such as 90s, 10m or 1.5h"),
        ({"budget": "0m"}, "`budget` 0m must be a time above 0"),
        ({"minimal_effect": 0.0}, "`minimal_effect` 0.0 must be auto or above 0"),
        ({"batch_size": 1}, "`batch_size` must be at least 2, got 1: a head is given its output of another text of the batch"),
        ({"domains": ["random_tokens", "random_tokens"]}, "`domains` random_tokens,random_tokens: name .* each once"),
        ({"readout": SquaredError()}, "samples and readout go together"),
        ({"texts": 0}, "`seq_len` must be at least 2 and `texts` at least 1, got 24 and 0"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint, settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        find_causes(str(checkpoint), **{**QUICK, **settings})


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"device": "cuda"}, {"revision": "main"}, {"device_map": "auto"}])
def test_a_module_is_not_loaded_as_it_is_asked_to_be(option):
    """It is none of transformers, and was taken as it is without a word."""
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    samples = Samples({"input": torch.zeros(4, 3, 2)}, tokens, torch.zeros(4, 3, 2))
    (name,) = option
    with pytest.raises(ConfigurationError, match=f"`{name}` .* has no effect on a model in memory, .* make it so yourself"):
        find_causes(torch.nn.Linear(2, 2), samples=samples, readout=SquaredError(), **option)


def test_a_null_score_as_the_sink():
    model = make_sinklm({"name": "sink_logit"})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.fill_(4.0)  # exp(4) against 24 keys of about exp(0): two thirds of the mass
    loaded = wrap_model(model)
    assert isinstance(loaded.encoder, Encoder)
    found = find_causes(loaded, **{**QUICK, "sink": "auto"})
    assert found.summary["sink"]["place"] == "null"
    assert found.summary["sink"]["name"] == "the null score"


def test_the_example_of_the_document_runs(capsys):
    text = (Path(__file__).parents[3] / "docs" / "explain.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (program,) = (program for program in programs if "causes.location" in program)
    exec(program, {})
    assert "goes with the token" in capsys.readouterr().out


def test_effects_by_a_readout_of_ones_own_are_not_kept(checkpoint, tmp_path, monkeypatch):
    """Those by another one of its class would look the same."""

    class Doubled(NextToken):
        def loss(self, outputs, samples):
            return 2 * super().loss(outputs, samples)

        def compare_hidden(self, *given):
            return None

    tokens = torch.randint(2, 300, (10, 12), generator=torch.Generator().manual_seed(1))
    options = {"samples": token_samples([("words", tokens)]), "sink": 0, "heads": [(0, 0)]}
    kept = []
    monkeypatch.setattr("sinklab.results.store.Store.put", lambda store, *given: kept.append(store.folder is not None))
    doubled = find_causes(str(checkpoint), readout=Doubled(), **options, out=tmp_path / "out").summary
    assert not any(kept)
    find_causes(str(checkpoint), readout=NextToken(), **options, out=tmp_path / "other")
    assert any(kept)
    plain = find_causes(str(checkpoint), readout=NextToken(), **options).summary
    assert doubled["clean_loss"]["words"] == pytest.approx(2 * plain["clean_loss"]["words"], rel=1e-6)


@pytest.mark.parametrize("name", ["trigger", "key bias", "sigmoid"])
def test_planted_heads_get_their_labels_from_the_whole_run(name, tmp_path, monkeypatch):
    known = planted(name, 0)
    monkeypatch.setattr("sinklab.results.intervals.RESAMPLES", 100)
    readout = SquaredError() if name == "trigger" else NextToken()
    sink = "none" if name == "sigmoid" else "auto"
    settings = {"sink": sink, "batch_size": 64, "out": tmp_path / "out"}
    found = find_causes(known.model, samples=known.samples, readout=readout, **settings)
    expected = known.labels
    assert [head["label"] for head in found.summary["heads"]] == expected
    assert found.summary["sink"]["place"] == known.place
    assert (found.record["dtype"], found.record["versions"]["torch"]) == ("float64", importlib.metadata.version("torch"))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for label in set(expected):
        assert f'class="l-{label}"' in page


@pytest.mark.parametrize(("pieces", "needs"), [(1, "undecided"), (2, "yes")])
def test_a_head_whose_hidden_sink_costs_much_is_never_undecided(monkeypatch, pieces, needs):
    """What it needs of its sink is asked before anything is asked of heads that are next, and the time may end before both."""
    model = PlantedLM([no_op(), inert(), always_the_same(zipf())]).eval()
    samples = token_samples([("repeated", repeated(20, 0))])
    sinks, (dear, idle, other) = sinks_of(model, samples), sinks_of(model, samples).heads
    clock, calls, real = [0], [], Engine.measure

    def measure(self, edited, chosen=None, **options):
        clock[0] += 1
        calls.append((list(edited), list(chosen)))
        return real(self, edited, chosen, **options)

    monkeypatch.setattr(Engine, "measure", measure)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    texts, variants = Texts(samples, NextToken(), []), make_variants(model, sinks, samples)
    measured = Resumable(model, texts, Request(), variants, {}, Store(None), silent)
    options = {"level": 0.05, "minimal_effect": 0.01}
    effects = causes_measure._in_rounds(
        measured, "heads", [[dear, idle], [other]], sinks.heads, pieces - 0.5, sinks=sinks, **options
    )
    assert calls == [([dear, idle], ["redirect", "hide"]), ([dear], ["zero_value"])][:pieces]
    found = label_heads(effects, sinks, many=True, **options)
    assert [one.label for one in found] == ["needs-sink", "slight", "not-run"]
    assert found[0].needs_sink == {"repeated": needs}
    assert found[0].effects["hide"]["repeated"].low > 0.2
