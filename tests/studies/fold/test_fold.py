"""sinklab fold: a planted model in which constants are exact, the folder that it leaves, and what it refuses."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.command_line import CliRunner
from tests.conftest import make_sinklm, make_tokenizer, real

import sinklab
from sinklab.attention.operation import ATTRIBUTE
from sinklab.cli.app import app
from sinklab.corpora.samples import Samples
from sinklab.models.attach import attach, head_shapes
from sinklab.results.progress import silent
from sinklab.sinks import Sink, Sinks, find_sinks
from sinklab.studies.fold.calibration import calibrate, check_fits
from sinklab.studies.fold.measurement import fold, folded_copies, prefix_cache
from sinklab.studies.measure.probing import sample_losses
from sinklab.studies.origin.measurement import birth_neurons

SHORT = ["--corpus", "random_tokens", "--samples", "4", "--seq-len", "40"]


def run(*words, status=0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == status, done.output
    return done


def planted():
    """A GPT-2 whose queries all point at the key of <bos>: its heads rest there, and since nothing turns queries and the first
    token sees itself alone, score and value are the same constants in every text."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=3, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for layer in range(3):
        with torch.no_grad():
            kept = []
            part = model.transformer.h[layer].attn.c_attn
            hook = part.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
            model(torch.zeros(1, 1, dtype=torch.long))
            hook.remove()
            key = kept[0][0, 0, 32:64].unflatten(0, (2, 16))
            model.transformer.h[layer].attn.c_attn.bias[:32] += (16 * key / key.square().sum(-1, keepdim=True)).flatten()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The planted model with its tokenizer, which puts <bos> in front."""
    folder = tmp_path_factory.mktemp("planted") / "model"
    planted().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def done(folder):
    out = folder.with_name("folded")
    return run("fold", folder, *SHORT, "--out", out), out


def test_constants_are_exact_where_nothing_depends_on_the_text(done):
    summary = json.loads((done[1] / "summary.json").read_text())
    forms = {form["name"]: form for form in summary["forms"]}
    assert summary["positions"] == [0]
    assert all(head["folded"] and head["explained"] > 1 - 1e-8 and head["error"] < 1e-6 for head in summary["heads"])
    assert abs(forms["constants"]["change"]["mean"]) < 1e-6
    assert [form["name"] for form in summary["forms"] if form["chosen"]] == ["constants"]
    assert abs(forms["nothing"]["change"]["mean"]) > 1e-4
    assert max(head["value_spread"] for head in summary["heads"]) < 1e-3


def test_the_folder_is_a_model_and_a_result(done, folder):
    result, out = done
    assert "6 of 6 heads folded" in result.stdout
    assert "constants" in result.stdout
    assert {"report.html", "summary.json", "table.parquet", "run.json", "config.json", "model.safetensors"} <= {
        path.name for path in out.iterdir()
    }
    before, after = (sinklab.load_model(str(one)) for one in (folder, out))
    assert (after.operation, after.tokenizer is not None) == ("folded_sink", True)
    tokens = torch.cat((torch.zeros(2, 1, dtype=torch.long), torch.randint(2, 300, (2, 30))), 1)
    with torch.no_grad():
        torch.testing.assert_close(after.model(tokens).logits, before.model(tokens).logits, atol=1e-5, rtol=1e-5)
        new = after.model.generate(tokens[:, :5], max_new_tokens=12, do_sample=False)
        assert torch.equal(new, before.model.generate(tokens[:, :5], max_new_tokens=12, do_sample=False))


def test_the_mass_that_rested_is_null_mass(done, folder):
    tables = [sinklab.measure(str(one), probes=["sink_rate", "null_mass"], corpus="random_tokens", samples=3, seq_len=40).table
              for one in (folder, done[1])]  # fmt: skip
    rates = [
        table[(table.metric == "gu2024") & (table.key_position == 0) & table["head"].isna()].value.mean() for table in tables
    ]
    assert rates[0] > 50
    assert rates[1] < 1
    assert tables[1][tables[1].metric == "null_mass"].value.mean() > 0.3


def test_a_model_in_memory_is_changed_and_handed_back():
    model = planted()
    tokens = Samples.of_tokens(torch.cat((torch.zeros(6, 1, dtype=torch.long), torch.randint(2, 300, (6, 30))), 1))
    shapes = head_shapes(model, None, sources=True)
    fits = calibrate(model, tokens.take(slice(0, 3)), shapes, [0], batch_size=2, progress=silent)
    residuals = check_fits(model, tokens.take(slice(3, 6)), shapes, [0], fits, batch_size=2, progress=silent)
    assert min(float(own.explained.min()) for own in residuals.values()) > 1 - 1e-8
    result = sinklab.fold_sinks(sinklab.wrap_model(model, make_tokenizer()), corpus="random_tokens", samples=3, seq_len=30)
    assert result.loaded.model is model
    assert getattr(model.transformer.h[0].attn, ATTRIBUTE).shape.folded == (0, 1)


def test_numbers_of_a_query_that_are_always_zero_are_left_out():
    """As those that the norm of queries of Gemma 3 sets to zero; they once made constants of 1e150."""
    model = planted()
    tokens = Samples.of_tokens(torch.cat((torch.zeros(4, 1, dtype=torch.long), torch.randint(2, 300, (4, 30))), 1))
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.attn.c_attn.weight[:, 3] = layer.attn.c_attn.bias[3] = 0.0
    fits = calibrate(model, tokens, head_shapes(model, None, sources=True), [0], batch_size=2, progress=silent)
    assert all(not fit.key[0, 3] and fit.key.abs().max() < 100 for fit in fits.values())


def test_a_sinklm_is_built_anew():
    result = sinklab.fold_sinks("embedded:softmax", samples=4, seq_len=64)
    assert type(result.loaded.model).__name__ == "SinkLM"
    assert result.loaded.model.config.operation["name"] == "folded_sink"
    forms = {form["name"]: form["change"]["mean"] for form in result.summary["forms"]}
    assert abs(forms["constants"]) < 0.3 * forms["nothing"]


def test_neurons_that_write_the_sink_are_silenced_where_the_loss_allows_it():
    """Neuron 5 of block 0 answers to <bos> alone and writes nearly all of its state; heads of the later blocks rest there."""
    model = planted()
    block = model.transformer.h[0].mlp
    with torch.no_grad():
        embedded = model.transformer.wte.weight[0] + model.transformer.wpe.weight[0]
        block.c_fc.weight[:, 5] = 100 * embedded / embedded.norm()
        block.c_proj.weight[5] = 0.0
        block.c_proj.weight[5, 3] = 20.0
    tokens = Samples.of_tokens(torch.cat((torch.zeros(6, 1, dtype=torch.long), torch.randint(2, 300, (6, 30))), 1))
    sinks = find_sinks(model, tokens.tokens)
    (path, units), *_ = birth_neurons(model, tokens, sinks)
    assert (path, units) == ("transformer.h.0.mlp.c_proj", [5])
    names = [name for name, _, _ in folded_copies(model, tokens, sinks, "softmax")]
    assert names == ["folded", "folded, silent"]
    *_, (_, _, silent_model) = folded_copies(model, tokens, sinks, "softmax")
    assert not silent_model.transformer.h[0].mlp.c_proj.weight[5].any()
    assert not silent_model.transformer.h[0].mlp.c_fc.weight[:, 5].any()
    assert model.transformer.h[0].mlp.c_proj.weight[5].any()
    plain = sample_losses(model, tokens).double()
    made, found, _ = fold(model, tokens, tokens, sinks, margin=10.0, neurons=[(path, units)], progress=silent)
    (silent_unit,) = found.silenced  # constants keep what the sink itself predicts: its change is all of the neuron
    assert silent_unit.kept
    own = (sample_losses(made, tokens).double() - plain)[:, 0].mean()
    assert abs(float(own)) > 1e-3
    assert silent_unit.at_sinks == pytest.approx(float(own), abs=1e-5)


def test_without_a_sink_there_is_nothing_to_fold(tmp_path):
    make_sinklm().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    done = run("fold", tmp_path / "model", *SHORT, "--out", tmp_path / "out")
    assert "Nothing to fold: no sink was found." in done.stdout
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_sink_that_moves_with_the_text_is_left():
    texts, moving = Samples({"input_ids": torch.randint(1, 300, (2, 40))}), Sinks(sinks=(Sink(kind="token", token=7),))
    _, found, _ = fold(planted(), texts, texts, moving, margin=0.01, neurons=[], progress=silent)
    assert (found.text, found.notes[0][:9]) == ("Nothing to fold: no sink at a fixed position.", "The first")


def test_what_cannot_be_folded_is_one_line(done, tmp_path):
    attach(planted(), "sigmoid").save_pretrained(tmp_path / "sigmoid")
    make_tokenizer().save_pretrained(tmp_path / "sigmoid")
    lines = {
        (done[1],): "are folded already",
        (tmp_path / "sigmoid",): "folded into softmax attention, and this model has sigmoid",
        ("embedded:softmax", "--samples", "1"): "needs two or more",
        (done[1].with_name("model"), *SHORT[:4], "--seq-len", "8"): "have 28 queries that see position 0, and a fit takes 32",
        ("embedded:softmax", "--margin", "0"): "--margin 0.0 must be above 0 nats",
    }
    for words, message in lines.items():
        error = run("fold", *words, status=2).stderr
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.real
def test_smollm2_keeps_its_loss_and_streams_without_a_sink():
    loaded = sinklab.load_model(str(real("smollm2-135m")))
    result = sinklab.fold_sinks(loaded, samples=4, seq_len=128)
    forms = {form["name"]: form["change"]["mean"] for form in result.summary["forms"]}
    chosen = next(form for form in result.summary["forms"] if form["chosen"])
    assert abs(chosen["change"]["mean"]) < 0.03
    assert forms["nothing"] > 0.2
    assert forms["learned sink logit (gpt-oss)"] > 0.1
    assert sum(head["folded"] for head in result.summary["heads"]) > 200


def test_a_cached_entry_stands_for_the_first_token_of_the_model_as_it_is(done, folder):
    loaded = sinklab.load_model(str(folder))
    tokens = torch.cat((torch.zeros(2, 1, dtype=torch.long), torch.randint(2, 300, (2, 20))), 1)
    cache = prefix_cache(load_file(done[1] / "prefix.safetensors"), batch=2)
    with torch.no_grad():
        found = loaded.model(tokens[:, 1:], position_ids=torch.arange(1, 21)[None], past_key_values=cache).logits
        torch.testing.assert_close(found, loaded.model(tokens).logits[:, 1:], atol=1e-5, rtol=1e-5)
    forms = {form["name"]: form for form in json.loads((done[1] / "summary.json").read_text())["forms"]}
    assert abs(forms["a cached entry, not folded"]["change"]["mean"]) < 1e-6


@pytest.mark.real
def test_the_output_of_an_encoder_without_a_loss_changes_little():
    """MiniLM folded at [CLS]: constants with a value change its token vectors by a tenth of what hiding the key does."""
    folded = sinklab.fold_sinks(str(real("all-minilm-l6-v2")), samples=4, seq_len=96)
    assert folded.summary["loss"] is None
    assert sum(head["folded"] for head in folded.summary["heads"]) >= 48
    forms = {form["name"]: form["change"]["mean"] for form in folded.summary["forms"]}
    assert forms["constants"] < 0.1 * forms["nothing"]
    assert forms["constants"] < 0.06


@pytest.mark.real
def test_a_model_of_pictures_is_judged_by_its_output():
    """ViT-Tiny: what its class token and corner patches say depends on the picture, so that constants are off."""
    folded = sinklab.fold_sinks(str(real("vit-tiny-patch16-224")), samples=4)
    assert folded.summary["seq_len"] == 197
    assert {1, 14, 183, 196} <= set(folded.summary["positions"])
    forms = {form["name"]: form["change"]["mean"] for form in folded.summary["forms"]}
    assert 0.1 < forms["constants"] < forms["nothing"]
