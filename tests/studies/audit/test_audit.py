"""The audit end to end on a tiny checkpoint, and its summary and findings on tables with known answers."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors import safe_open
from tests.architectures.zoo import ZOO, build
from tests.conftest import make_sinklm
from tests.report.synthetic import a_place, sinks_found

from sinklab import audit, from_weights, measure
from sinklab.attention.maps import AttentionMaps
from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.models.loading import load_model, wrap_model
from sinklab.registry import probes
from sinklab.results.table import COLUMNS, read_table
from sinklab.studies.audit.found import SinksFound, finding
from sinklab.studies.audit.page import head_data, read_audit
from sinklab.studies.measure.probing import check_identity, run_probes

SMALL = {"corpus": "random_tokens", "seq_len": 8, "samples": 2, "cache": False}


@pytest.fixture(scope="module")
def result(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("audit") / "result"
    return audit(str(checkpoint), seq_len=16, samples=6, out=out)


@pytest.mark.parametrize(("seq_len", "candidates"), [(16, 9), (40, 0)])
def test_a_window_that_hides_every_position_from_half_of_the_queries(seq_len, candidates, tmp_path):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        sliding_window=8,
    )  # fmt: skip
    model = wrap_model(transformers.MistralForCausalLM(config).eval(), None, name="mistral")
    summary = audit(model, out=tmp_path / "out", **SMALL | {"seq_len": seq_len}).summary
    assert summary["candidate_positions"] == candidates
    assert summary["candidates_by_module"] == {f"model.layers.{layer}.self_attn": candidates for layer in range(2)}
    for condition in summary["conditions"]:
        assert (condition["top_position"] is None) is (condition["top_rate"] is None) is (candidates == 0)
    assert len(summary["finding"]) <= 160
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_rate_without_a_sink_is_explained_by_the_layers_whose_window_is_short(tmp_path):
    """Of Gemma 2 every second layer has a window: too few queries see position 0 there for it to count, and its rate does."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, sliding_window=4,
    )  # fmt: skip
    model = wrap_model(transformers.Gemma2ForCausalLM(config).eval(), None, name="gemma2")
    summary = audit(model, **SMALL | {"seq_len": 24}, threshold=0.2, out=tmp_path / "out").summary
    assert (summary["windowed_modules"], summary["num_modules"]) == (1, 2)
    assert summary["candidates_by_module"] == {"model.layers.0.self_attn": 0, "model.layers.1.self_attn": 13}
    own = head_data(read_audit(tmp_path / "out"))[0]["ownSink"]
    assert max(own[1]) < 13
    assert own[0] == [0, 0]  # none can be the sink there, whatever few queries give it
    assert summary["sink_rate_gu2024"] > 0
    assert summary["longest_sample"] == 8
    at_most = audit(model, **SMALL | {"seq_len": 8}).summary
    assert (at_most["windowed_modules"], at_most["longest_sample"]) == (0, None)


def test_samples_for_a_window_to_both_sides_are_as_long_as_it_shows_the_first_position():
    """Local attention of 8 tokens shows the first position to 5 queries, not 8: the first position counts up to 10 tokens."""
    config = transformers.ModernBertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, local_attention=8,
        global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = wrap_model(transformers.ModernBertForMaskedLM(config).eval(), None, name="modernbert")
    summary = audit(model, **SMALL | {"seq_len": 16}).summary
    assert (summary["windowed_modules"], summary["longest_sample"]) == (1, 10)
    assert audit(model, **SMALL | {"seq_len": 10}).summary["windowed_modules"] == 0


def test_table_follows_the_schema_and_has_every_probe(result):
    table = read_table(result.folder / "table.parquet")
    assert list(table.columns) == list(COLUMNS)
    assert set(table.loc[table["policy"].isna(), "probe"]) == set(probes)
    assert set(table["bos"]) == {0, 1}
    assert set(table["corpus"]) == {"python_source", "random_tokens", "repeated_token"}
    assert table[["run_id", "model", "revision", "operation", "seed", "version"]].notna().all().all()


def test_loss_is_the_models_own(result, checkpoint):
    loaded = load_model(str(checkpoint))
    from sinklab.corpora import resolve_corpus

    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=16, samples=6, seed=0, bos=True)
    with torch.no_grad():
        own = loaded.model(input_ids=tokens, labels=tokens).loss.item()
    assert result.summary["loss"] == pytest.approx(own, rel=1e-5)


def test_batch_size_does_not_matter(checkpoint, result):
    other = audit(str(checkpoint), seq_len=16, samples=6, batch_size=2, cache=False)
    keys = ["probe", "metric", "corpus", "bos", "module", "layer", "head", "query_position", "key_position"]
    left, right = (one.table[one.table["policy"].isna()] for one in (result, other))  # policies are timed too
    left = left.sort_values(keys).reset_index(drop=True)
    right = right.sort_values(keys).reset_index(drop=True)
    pd.testing.assert_frame_equal(left[keys], right[keys])
    # Batches change the order of float32 sums and the shapes of matrix products, no more: a few units in the last place.
    np.testing.assert_allclose(left["value"].astype(float), right["value"].astype(float), rtol=2e-4, atol=1e-5)
    assert (left["count"] == right["count"]).all()


def test_sigmoid_is_measured_with_the_proxy(tmp_path):
    model = make_sinklm({"name": "sigmoid", "bias": -2.0})
    result = audit(wrap_model(model), **SMALL, bos="none", out=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Mass of a row" in page  # mass on nothing is not defined where rows need not sum to one
    assert result.summary["operation"] == "sigmoid"
    assert not result.summary["normalized"]
    # sigmoid(-2) for scores near 0: the raw weight on the first position is far below its share of a row.
    assert result.summary["first_token_mean_weight"] == pytest.approx(torch.sigmoid(torch.tensor(-2.0)).item(), rel=0.05)


def test_measure_needs_a_probe(checkpoint):
    with pytest.raises(ConfigurationError, match=r"name at least one probe; known: attention_received"):
        measure(str(checkpoint), probes=[])
    with pytest.raises(ConfigurationError, match=r"`probes` has 'entropy' 2 times; expected it once"):
        measure(str(checkpoint), probes=["entropy", "entropy:sink_position=2"])
    with pytest.raises(ConfigurationError, match=r"probe 'entropy': sink_position 40 lies behind 16 positions"):
        measure(str(checkpoint), probes=["entropy:sink_position=40"], seq_len=16, samples=2)


def test_a_model_that_is_not_deterministic_is_refused():
    model = make_sinklm()
    model.lm_head.register_forward_hook(lambda module, args, output: output + torch.rand(()))
    with pytest.raises(MeasurementError, match=r"is its computation deterministic"):
        check_identity(model, torch.arange(8)[None])


def test_maps_are_the_models_own_weights():
    model = make_sinklm()
    model.set_attn_implementation("eager")
    tokens = torch.randint(2, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    maps = AttentionMaps(tiles=64)
    run_probes(model, tokens, [maps])
    with torch.no_grad():
        own = torch.stack(model(input_ids=tokens, output_attentions=True).attentions, dim=1)
    arrays = maps.arrays()
    assert arrays["weights"].shape == (2, 2, 2, 12, 12)
    shown = (arrays["weights"] / 255.0) ** 2
    # Eight bits of the square root: half a step of 1/255 at slope 2·sqrt(w) ≤ 2.
    np.testing.assert_allclose(shown, own.numpy(), atol=1 / 255 + 1e-5)
    hidden = np.triu(np.ones((12, 12), dtype=bool), 1)
    assert (arrays["scores"][..., hidden] == 0).all()
    assert (arrays["scores"][..., ~hidden] > 0).all()


def test_tiles_keep_a_single_bright_column():
    model = make_sinklm()
    tokens = torch.randint(2, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    fine, coarse = AttentionMaps(tiles=40), AttentionMaps(tiles=8)
    run_probes(model, tokens, [fine])
    run_probes(model, tokens, [coarse])
    tiles = fine.arrays()["weights"].reshape(1, 2, 2, 8, 5, 8, 5).max((4, 6))
    np.testing.assert_array_equal(coarse.arrays()["weights"], tiles)


def test_maps_file_speaks_of_its_tokens(result):
    with safe_open(result.folder / "maps.safetensors", "np") as file:
        metadata = file.metadata()
        assert file.get_tensor("weights").shape == (3, 2, 2, 16, 16)
    tokens = json.loads(metadata["tokens"])
    assert [len(row) for row in tokens] == [16, 16, 16]
    assert tokens[0][0] == "<bos>"
    assert json.loads(metadata["modules"]) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_the_record_counts_what_was_proved(result):
    checks = result.record["checks"]
    # Logits are the only output; 16 tokens are the whole sample; two layers, each seen and verified on four rows a sample.
    assert (checks["outputs_found_bit_identical"], checks["tokens_of_identity_check"]) == (1, 16)
    assert (checks["attention_modules_seen"], checks["calls_verified"], checks["rows_verified"]) == (2, 2, 2 * 4 * 6)
    assert 0.0 <= checks["largest_error"] <= 1.0


def test_layers_without_attention_are_named():
    """Of a hybrid the heads are those of its layers of attention, and the others are counted."""
    summary = audit(wrap_model(build(ZOO["qwen3_next"])), **SMALL).summary
    assert summary["layers_without_attention"] == {"linear_attention": 3}
    assert any("0.0 is the first head of layer 3" in note for note in summary["notes"])
    assert summary["num_heads"] == 4


def numbers_of(result):
    return result.table.drop(columns=["run_id"])


def test_one_pass_gives_the_numbers_of_two(checkpoint, monkeypatch):
    """A sink that the first samples did not show is looked at in a second pass, as if nobody had guessed."""
    settings = SMALL | {"seq_len": 16, "samples": 12, "threshold": 0.05}
    said = []
    once = audit(str(checkpoint), **settings, say=said.append)
    monkeypatch.setattr("sinklab.studies.audit.measurement._place", lambda sinks: object())
    twice = audit(str(checkpoint), **settings)
    assert len(said) == 1
    assert said[0].endswith("on the first 8 samples")
    pd.testing.assert_frame_equal(numbers_of(once), numbers_of(twice))
    assert once.summary == twice.summary


def test_quick_reads_few_samples_and_no_studies(checkpoint):
    quick = audit(str(checkpoint), corpus="random_tokens", seq_len=8, quick=True)
    assert (quick.summary["samples"], "cache" in quick.summary) == (20, False)
    assert {condition["samples"] for condition in quick.summary["conditions"][1:]} == {5}


@pytest.mark.parametrize(("stage", "without"), [("repeated", "repeated_token"), ("sink_window", "cache")])
def test_an_interruption_behind_the_main_condition_keeps_what_there_is(checkpoint, tmp_path, stage, without):
    def interrupt(at, done, total):
        if stage in at:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    found = audit(str(checkpoint), corpus="random_tokens", seq_len=8, samples=2, progress=interrupt, out=out).summary
    assert found["status"] == "stopped"
    assert found["warnings"][-1].startswith("Stopped before its end: without ")
    assert without in found["warnings"][-1]
    assert (read_audit(out).found.status, read_audit(out).run["stopped_by"]) == ("stopped", "SIGINT")
    assert (out / "report.html").is_file()


def test_what_stands_in_front_is_worth_the_difference_of_its_losses(checkpoint):
    found = audit(str(checkpoint), seq_len=16, samples=8, cache=False).summary
    main, without = found["conditions"][:2]
    assert (main["bos"], without["bos"], main["samples"]) == (1, 0, 8)
    gain = without["loss"] - main["loss"]  # samples are equally long
    assert found["front_worth"]["gain"] == pytest.approx(gain, abs=1e-6)
    assert found["front_worth"]["samples"] == 8


LONG = "x" * 200
LAYERS = [10, 11, 33, 34, 66, 67, 98, 99]
NULL = a_place(None, kind="null", name="the null score")
FOLLOWED = a_place(None, kind="token", name="“.” wherever it stands", text=".", sinking=1)


@pytest.mark.parametrize(
    ("sinks", "others", "begins"),
    [
        ([a_place(0, text=LONG, sinking=2), a_place(3)], {}, "The sink is position 0, “xxx"),
        ([a_place(None, kind="group", name="the corner patches", positions=[1, 7])], {}, "The sink is the corner patches"),
        ([NULL], {}, "The sink is the null score, which takes 52.0\u202f%"),
        ([], {"silent": [a_place(0)]}, "There is no sink: position 0 passes 0.3 only where rows are divided"),
        ([], {"followed": [FOLLOWED]}, "There is no sink that stays at a place; 1 of 12,345 heads"),
        ([], {"weak": [a_place(5, rate=2.0)]}, "There is no sink: no head sinks at one place often enough"),
        ([], {}, "There is no sink: no position holds more than 0.3"),
    ],
)
def test_a_finding_is_one_short_sentence_on_the_place(sinks, others, begins):
    for part in ("", "cross-attention"):
        found = SinksFound(**sinks_found(sinks, 12_345, **others) | {"null_mass": 0.52, "part": part, "sink_layers": LAYERS})
        text = finding(found, 0.3)
        assert len(text) <= 160
        assert text.endswith(".")
        assert text.startswith(f"{part.capitalize()}: " if part else begins)


def test_a_head_that_gives_much_to_other_keys_makes_no_sink_of_silent_ones():
    """Head 0 gives 0.9 to every key but the first; head 1 gives 0.002 to the first and 0.0001 to the others."""
    weights = torch.stack((torch.full((16, 16), 0.9), torch.full((16, 16), 1e-4))).tril()
    weights[0, :, 0], weights[1, :, 0] = 0.0, 2e-3
    found = from_weights(weights, row_sums="any").sinks
    assert (found.main, [sink.place for sink in found.silent], found.heads_by_weight) == (None, [0], 1)
    # Of the head that gives 0.9 to every key the first one is no sink, so that this makes none of the other head's.
    weights[0, :, 0] = 0.9
    again = from_weights(weights.tril(), row_sums="any").sinks
    assert (again.main, [sink.place for sink in again.silent], again.silent[0].sinking) == (None, [0], 1)
