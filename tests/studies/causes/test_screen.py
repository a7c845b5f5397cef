"""The screen: exact for small changes, and in the right order for large ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from tests.interventions.edited_runs import Scaled
from tests.studies.causes.planted import sinks_of, words

from sinklab.corpora import resolve_corpus
from sinklab.models.loading import load_model
from sinklab.studies.causes.effects import HeadEdit, make_variants, one_by_one
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples
from sinklab.studies.causes.screen import screen
from sinklab.testing import tiny_models


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_small_change_costs_what_the_screen_says(name):
    """A thousandth of every head: the second order, of which two draws are a noisy sample, is a millionth."""
    model, samples = tiny_models()[name], words(4, 12)
    heads, edits = sinks_of(model, samples, place=0).heads, [HeadEdit("scale", (Scaled(factor=1.001),))]
    exact = one_by_one(model, samples, NextToken(), edits, heads).loss[0, :, :, 0]
    found = screen(model, samples, NextToken(), edits, heads, batch_size=2).loss[0]
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.02 * np.abs(exact).max())


def test_draws_give_the_distance_that_a_small_change_makes():
    """Half their mean square along a change, over many draws, is the distance that the change makes."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 1, 7, generator=generator, dtype=torch.float64)
    change = 1e-3 * torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    at = outputs.expand(20_000, 1, 7).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(NextToken().drawn(at, generator).sum(), at)
    half = float((gradient * change).sum((1, 2)).square().mean()) / 2
    own, other = outputs.log_softmax(-1), (outputs + change).log_softmax(-1)
    assert half == pytest.approx(float((own.exp() * (own - other)).sum()), rel=0.05)  # 20,000 draws: some 1 to 2 %


def test_heads_are_ranked_as_their_exact_effects_are():
    loaded = load_model("embedded:softmax")
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=16, seed=0, bos=True)
    samples = token_samples([("python", tokens)])
    sinks = sinks_of(loaded.model, samples)
    variants = make_variants(loaded.model, sinks, samples)
    exact = measure_effects(loaded.model, samples, NextToken(), variants, sinks.heads).loss.mean((2, 3))
    found = screen(loaded.model, samples, NextToken(), variants, sinks.heads).loss.mean(2)
    for row, variant in enumerate(variants):
        rank = scipy.stats.spearmanr(exact[row], found[row]).statistic
        error = np.sqrt(np.square(exact[row] - found[row]).mean()) / np.sqrt(np.square(exact[row]).mean())
        assert (rank > 0.7, error < 0.8) == (True, True), (variant.name, rank, error)
