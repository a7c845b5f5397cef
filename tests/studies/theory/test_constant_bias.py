"""A constant key–value bias in the place of a sink: the identity, the bounds and when they are attained, and real heads."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tests.conftest import real

from sinklab.corpora import resolve_corpus
from sinklab.corpora.samples import Samples
from sinklab.models.attach import attach_folded, head_shapes
from sinklab.models.loading import load_model
from sinklab.operations.folded_sink import FoldedSink
from sinklab.results.progress import silent
from sinklab.studies.fold.calibration import calibrate, parameters_of


def weight_change(weight, error):
    """How much more a key has whose score is off by ``e``, all other scores as they are."""
    grown = torch.expm1(error.clamp(max=700.0))
    return weight * (1 - weight) * grown / (1 + weight * grown)


def weight_change_bound(error):
    """Attained at ``p = σ(-e / 2)``, which becomes ``σ(e / 2)``: the logistic function is steepest at 0 and even about it."""
    return torch.tanh(error.abs() / 4)


def output_change(weight, score_error, content, value, constant):
    """What a head writes with the bias in the place of its sink, less what it writes with the sink, of float64 tensors."""
    changed = weight_change(weight, score_error)[..., None] * (constant - content)
    return changed + weight[..., None] * (constant - value)


def output_change_bound(weight, score_error, content, value, constant):
    """Attained where ``p = σ(-e/2)``, and ``v' - v`` points where ``v' - c`` does, or against it where ``e < 0``."""
    return weight_change_bound(score_error) * (constant - content).norm(dim=-1) + weight * (constant - value).norm(dim=-1)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def attended(queries, keys, values, bias=None):
    """Plain softmax over keys, float64; a bias is one more key with a score of its own and a value."""
    scores = queries @ keys.T
    if bias is not None:
        score, value = bias
        scores, values = torch.cat((score[:, None], scores), 1), torch.cat((value[None], values))
    weights = torch.softmax(scores, -1)
    return weights @ values, weights[:, 0]


@pytest.fixture(scope="module")
def head():
    """A head of which key 0 is the sink: its output with it, its weight on it, and what the other keys say."""
    queries, keys, values = drawn(50, 8), drawn(20, 8), drawn(20, 6)
    out, weight = attended(queries, keys, values)
    content, _ = attended(queries, keys[1:], values[1:])
    return queries, keys, values, out, weight, content


def test_the_change_of_the_output_is_an_identity(head):
    queries, keys, values, out, weight, content = head
    error, constant = 3 * drawn(51)[:50], drawn(6)
    folded, folded_weight = attended(queries, keys[1:], values[1:], (queries @ keys[0] + error, constant))
    torch.testing.assert_close(weight_change(weight, error), folded_weight - weight, atol=1e-12, rtol=0)
    change = output_change(weight, error, content, values[0], constant)
    torch.testing.assert_close(change, folded - out, atol=1e-12, rtol=0)
    assert bool((output_change_bound(weight, error, content, values[0], constant) >= change.norm(dim=-1)).all())


@pytest.mark.parametrize("error", [-5.0, -0.3, 1e-3, 0.7, 4.0, 40.0])
def test_the_bounds_are_attained_and_never_passed(error):
    given = torch.tensor(error, dtype=torch.float64)
    bound = weight_change_bound(given)
    weights = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    assert float(weight_change(weights, given).abs().max()) <= bound + 1e-15
    steepest = torch.sigmoid(-given / 2)
    assert float(weight_change(steepest, given).abs()) == pytest.approx(float(bound), abs=1e-12)
    assert float(bound) <= abs(error) / 4
    content, constant = drawn(6), drawn(7)[1:]
    value = constant - 0.5 * given.sign() * (constant - content)
    change = output_change(steepest, given, content, value, constant).norm()
    assert float(change) == pytest.approx(float(output_change_bound(steepest, given, content, value, constant)), abs=1e-12)


def turned(tensor, angles):
    """Rotary positions, written out: coordinate ``j`` turns with ``j + size / 2``."""
    first, second = tensor.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


# --- real heads ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def inside(model, rows, module):
    """Outputs of the projections of a layer, ``(batch, heads, tokens, size)``, and what enters its last one."""
    attention, kept = model.get_submodule(module), {}
    handles = [
        attention.get_submodule(name).register_forward_hook(lambda *given, name=name: kept.update({name: given[2]}))
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    handles.append(attention.o_proj.register_forward_pre_hook(lambda *given: kept.update(out=given[1][0])))
    model(input_ids=rows, use_cache=False)
    for handle in handles:
        handle.remove()
    return kept


def folded_layer(name, layer, corpus, base):
    """Of one layer of a model, by plain code in float64: what enters the identity, and the measured change of every head.

    Constants are of four texts, all else is of four others; ``base`` is that of the rotary frequencies.
    """
    loaded = load_model(str(name))
    model, module = loaded.model, f"{'' if name == 'embedded:softmax' else 'model.'}layers.{layer}.self_attn"
    rows = resolve_corpus(corpus).sample(loaded.encoder, seq_len=96, samples=8, seed=0, bos=loaded.encoder.adds_bos)
    shapes = head_shapes(model, {"input_ids": rows[:1]}, sources=True)
    fit = calibrate(model, Samples.of_tokens(rows[:4]), shapes, [0], batch_size=4, progress=silent)[module]
    rows, shape = rows[4:], shapes[module]
    kept = inside(model, rows, module)
    q, k, v = (
        kept[name].double().unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj")
    )
    groups = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    half = shape.head_dim // 2
    angles = torch.arange(96.0).double()[:, None] * base ** (-torch.arange(half).double() / half)
    scaling = shape.head_dim**-0.5
    scores = turned(q, angles) @ turned(k, angles).transpose(2, 3) * scaling
    scores = scores.masked_fill(torch.ones(96, 96).triu(1).bool(), float("-inf"))
    weights = torch.softmax(scores, -1)
    others = torch.softmax(scores[..., 1:, 1:], -1)  # queries behind the sink
    parts = {
        "weight": weights[..., 1:, 0],
        "score_error": ((q @ fit.key[:, :, None])[..., 0] + fit.constant[:, None] - scores[..., 0])[..., 1:],
        "content": others @ v[:, :, 1:],
        "value": v[:, :, :1],
        "constant": fit.value.repeat_interleave(groups, 0)[:, None],
    }
    out = (weights @ v)[:, :, 1:]
    measured = kept["out"].double().unflatten(-1, (shape.num_heads, -1)).transpose(1, 2)[:, :, 1:]
    torch.testing.assert_close(out, measured, atol=5e-5, rtol=0)
    everything = tuple(range(shape.num_kv_heads))
    chosen = {other: dataclasses.replace(of, folded=everything if other == module else ()) for other, of in shapes.items()}
    folded = attach_folded(copy.deepcopy(model), FoldedSink(), chosen, {module: parameters_of(fit, everything)})
    after = inside(folded, rows, module)["out"].double().unflatten(-1, (shape.num_heads, -1)).transpose(1, 2)[:, :, 1:]
    return parts, after - measured


def check_layer(name, layer, corpus, base):
    parts, measured = folded_layer(name, layer, corpus, base)
    change, bound = output_change(**parts), output_change_bound(**parts)
    # Differences of float32 outputs of norm 1 to 7.
    torch.testing.assert_close(change, measured, atol=5e-5, rtol=0)
    assert bool((measured.norm(dim=-1) <= bound + 5e-5).all())
    return parts, measured, bound


def test_heads_of_the_embedded_model_change_as_the_identity_says():
    parts, measured, bound = check_layer("embedded:softmax", 5, "python_source", 10_000.0)
    assert float(parts["weight"][:, 0].mean()) > 0.3  # the head that rests
    assert float(measured[:, 0].norm(dim=-1).mean() / bound[:, 0].mean()) > 0.5  # 0.61


@pytest.mark.real
def test_heads_of_smollm2_change_as_the_identity_says():
    parts, measured, bound = check_layer(real("smollm2-135m"), 18, "python_manual", 100_000.0)
    resting = parts["weight"].mean((0, 2)) > 0.3
    assert int(resting.sum()) == 8
    ratio = (measured.norm(dim=-1).mean((0, 2)) / bound.mean((0, 2)))[resting]
    assert float(ratio.min()) > 0.25  # 0.32 to 0.74
