"""Whole commands on the device: their numbers are those of the CPU, and what they train, resumes."""

import copy
import shutil

import numpy as np
import pytest
import torch
from tests.test_real_models import real
from tests.training.conftest import short

import sinklab
from sinklab.attention.session import attend
from sinklab.corpora import resolve_corpus
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.models.loading import load_model
from sinklab.registry import interventions
from sinklab.sinks import find_sinks
from sinklab.studies.cache.cache import compare_policies
from sinklab.studies.causes.effects import HeadEdit
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples
from sinklab.training.train import run_training

MODELS = ["embedded:softmax", "embedded:sigmoid"]
COORDINATES = ["probe", "metric", "module", "layer", "head", "query_position", "key_position", "corpus", "bos"]

NOISE = 1e-4
"""Relative. float32 networks of up to 12 layers: products sum up to 1,024 numbers in another order, a layer adds some dozen
roundings of 2⁻²⁴ relative to the residual, and softmax multiplies an error of scores by their size, up to 10:
12 · 64 · 10 · 2⁻²⁴ = 5e-4 at the worst, and roundings do not all point one way."""


def same_numbers(found, expected, noise=NOISE):
    """Two tables, row by row; errors relative to the largest number of the metric in the layer."""
    keys = [name for name in COORDINATES if name in expected.columns]
    assert len(found) == len(expected) > 0
    left, right = (table.reset_index(drop=True) for table in (found, expected))
    assert left[keys].astype("string").fillna("-").equals(right[keys].astype("string").fillna("-"))
    scale = right.groupby([right["metric"], right["layer"].fillna(-1)])["value"].transform(lambda column: column.abs().max())
    wrong = (left["value"] - right["value"]).abs() > noise * scale.clip(lower=1e-6)
    wrong |= left["value"].isna() != right["value"].isna()
    assert not wrong.any(), right[wrong].assign(found=left["value"][wrong])[[*keys, "value", "found"]].head(20).to_string()


def audits(device, model, **options):
    options = {"dtype": "float32", "samples": 16, "seq_len": 64, "cache": False, **options}
    return [sinklab.audit(model, device=where, **options) for where in (str(device), "cpu")]


@pytest.mark.parametrize("model", MODELS)
def test_an_audit(device, model):
    found, expected = audits(device, model)
    same_numbers(found.table, expected.table)
    assert found.summary["finding"] == expected.summary["finding"]
    assert found.summary.get("sink_rate") == pytest.approx(expected.summary.get("sink_rate"), rel=NOISE)


@pytest.mark.parametrize("model", ["tiny1m", "rxnmapper-albert"])
def test_an_audit_of_a_real_model(device, model):
    path = real(model)
    corpus = {"corpus": str(path / "reactions.txt")} if (path / "reactions.txt").is_file() else {}
    found, expected = audits(device, str(path), **corpus, samples=8)
    same_numbers(found.table, expected.table)
    assert found.summary["finding"] == expected.summary["finding"]


def test_head_edits(device):
    """Replayed on stacked samples; the same numbers as on the CPU, and as one edit after the other."""
    results = []
    for where in (str(device), "cpu"):
        loaded = load_model("embedded:softmax", device=where, dtype="float32")
        tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=48, samples=8, seed=0, bos=True)
        tokens = tokens.to(loaded.model.device)
        samples = token_samples([("code", tokens)])
        heads = find_sinks(loaded.model, tokens).heads[:4]
        variants = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
        results.append(measure_effects(loaded.model, samples, NextToken(), variants, heads))
    found, expected = results
    assert found.record == expected.record
    assert all(how == "replayed" for how in found.record.values())
    # Effects are differences of two losses of some nats, each with roundings of 2⁻²⁴ of itself that the layers multiply by
    # some ten: absolute, and a hundredth of the smallest effect here.
    np.testing.assert_allclose(found.loss, expected.loss, rtol=NOISE, atol=1e-5)


@pytest.mark.parametrize("name", list(interventions))
@torch.no_grad()
def test_interventions(device, name):
    """Every one, with its example settings, in the middle of a model: logits are those of the CPU, and not those without."""
    cls = interventions[name]
    own = load_model("embedded:softmax", device="cpu", dtype="float32")
    tokens = resolve_corpus("python_source").sample(own.encoder, seq_len=32, samples=4, seed=0, bos=True)
    edits = [cls(**cls.example)]
    logits = {}
    try:
        for where in ("cpu", device):
            model = copy.deepcopy(own.model).to(where)
            with attend(model, [], edits):
                logits[str(where)] = model(input_ids=tokens.to(where)).logits.cpu()
    except sinklab.errors.SinklabError as error:
        if "cpu" in logits:
            raise  # the device is what it does not work on
        pytest.skip(f"{error}")
    found, expected = logits[str(device)], logits["cpu"]
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 10 * NOISE * float(expected.abs().max())
    if expected.shape[1] == tokens.shape[1]:
        plain = own.model(input_ids=tokens).logits
        assert float((plain - expected).abs().max()) > 1e-3, "the edit changes nothing, so its device was not tried"


def test_an_edit_of_no_head_in_bfloat16(device):
    loaded = load_model("embedded:softmax", device=str(device), dtype="bfloat16")
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=4, seed=0, bos=True).to(device)
    with torch.no_grad():
        before = loaded.model(input_ids=tokens).logits
        with attend(loaded.model, [], [ZeroHead(heads={})]):
            during = loaded.model(input_ids=tokens).logits
        with attend(loaded.model, [sinklab.SinkRate()], []):
            watched = loaded.model(input_ids=tokens).logits
    assert torch.equal(before, during)
    assert torch.equal(before, watched)


def test_cache_policies(device):
    options = {"corpus": "python_source", "windows": [48], "sinks": (0, 4), "tokens": 200, "documents": 1, "dtype": "float32"}
    options["policies"] = ["full", "window", "sink_window", "recompute"]
    found, expected = (compare_policies("embedded:softmax", device=where, **options) for where in (str(device), "cpu"))
    by_name = [{(entry["policy"], entry["num_sinks"]): entry for entry in one.summary["policies"]} for one in (found, expected)]
    assert by_name[0].keys() == by_name[1].keys()
    for key, entry in by_name[1].items():
        assert by_name[0][key]["loss"] == pytest.approx(entry["loss"], rel=NOISE), key
        assert by_name[0][key]["bytes_held"] == entry["bytes_held"]


def test_origin_and_causes(device):
    options = {"samples": 8, "seq_len": 48, "controls": 2, "dtype": "float32"}
    found, expected = (sinklab.find_origin("embedded:softmax", device=where, **options) for where in (str(device), "cpu"))
    for one, other in zip(found.summary["origins"], expected.summary["origins"], strict=True):
        assert (one["positions"], one["block"], one["sublayer"]) == (other["positions"], other["block"], other["sublayer"])
        assert one["norm"] == pytest.approx(other["norm"], rel=10 * NOISE)
    options = {"heads": [(4, 0), (5, 0)], "texts": 16, "seq_len": 32, "dtype": "float32"}
    found, expected = (sinklab.find_causes("embedded:softmax", device=where, **options) for where in (str(device), "cpu"))
    assert len(found.table) == len(expected.table) > 0


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A file with something to learn."""
    import random

    generator = random.Random(0)
    known = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(60)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(" ".join(generator.choices(known, k=60)) for _ in range(300)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("operation", "compiled"), [("softmax", True), ("softmax_plus_one", False), ("sigmoid", True), ("softpick", False)]
)
def test_training(device, words, tmp_path, operation, compiled):
    """bfloat16 under autocast: the loss falls, and a run that goes on from its checkpoint ends where the whole one does."""
    changes = (
        f"model.operation.name={operation}",
        "training.steps=24",
        "training.save_every=12",
        "training.evaluate_every=12",
        "training.log_every=4",
        "watch.every=12",
        f"training.device={device.type}",
        f"training.dtype={'bfloat16' if device.type == 'cuda' else 'float32'}",
        f"training.compile={str(compiled and device.type == 'cuda').lower()}",
        # Heads that CUDA kernels take, and rows of which they are worth it.
        "model.hidden_size=64",
        "model.max_position_embeddings=160",
    )
    config = short(words, *changes)
    whole = run_training(config, tmp_path / "whole", cache=tmp_path / "cache", progress=False)
    assert whole.summary["status"] == "finished"
    assert whole.record["hardware"]["device"].split(":")[0] == device.type
    losses = whole.table[(whole.table["metric"] == "held_out_loss") & whole.table["layer"].isna()].set_index("step")["value"]
    assert np.isfinite(losses).all()
    first = whole.table[whole.table["metric"] == "train_loss"].set_index("step")["value"]
    assert first.iloc[-1] < first.iloc[0] - 0.1
    # As a killed run leaves it: the checkpoint of step 12 and nothing behind it.
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    shutil.rmtree(killed / "checkpoints" / "checkpoint-24")
    shutil.rmtree(killed / "model", ignore_errors=True)
    record = (killed / "run.json").read_text().replace('"status": "finished"', '"status": "running"')
    (killed / "run.json").write_text(record)
    resumed = run_training(config, killed, resume=True, cache=tmp_path / "cache", progress=False)
    assert resumed.record["resumed"] == [{"from": "checkpoint-12"}]
    # On a GPU sums of gradients are not the same twice: each step's rounding of bfloat16 products, 2⁻⁹ of a gradient, is
    # averaged over all of them, and twelve steps of Adam move the loss by tenths.
    assert resumed.summary["held_out_loss"] == pytest.approx(whole.summary["held_out_loss"], abs=0.02)
