"""The probes give what whole attention matrices come to in float64, a line for each definition and none of their code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.conftest import where_is

from sinklab import attend, load_model
from sinklab.corpora import resolve_corpus
from sinklab.models.loading import LoadedModel
from sinklab.probes.entropy import Entropy
from sinklab.probes.sink_rate import SinkRate

THRESHOLD = 0.3
MODELS = ("embedded:softmax", "embedded:sigmoid", "tiny1m", "rxnmapper-albert")
REACTIONS = (
    "CCO.CC(=O)O>>CC(=O)OCC.O",  # esterification
    "CC(=O)OCC.[Na+].[OH-]>>CC(=O)[O-].[Na+].CCO",  # saponification
    "c1ccccc1.BrBr>>Brc1ccccc1.Br",  # bromination
    "C=CC=C.C=C>>C1CCC=CC1",  # Diels-Alder
    "CC(=O)C.[H][H]>>CC(O)C",  # reduction
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1.Cl",  # amide
    "CBr.[Na+].[C-]#N>>CC#N.[Na+].[Br-]",  # substitution
    "O=Cc1ccccc1.CC(=O)C>>CC(=O)C=Cc1ccccc1.O",  # aldol condensation
)
"""What the encoder reads: reactions of textbooks."""


def dense_numbers(rows) -> dict[str, np.ndarray]:
    """Every definition from whole attention matrices, as its paper states it.

    Args:
        rows: for every row of token ids ``(layers, heads, queries, keys)``: weights, 0 on keys that are not visible; the first
            token is visible to all queries. Rows may have different lengths, of five tokens or more.

    Returns:
        By name ``(layers, heads)``, float64.
    """
    alphas, firsts, largest, on_first, on_all, on_four, entropies = ([] for _ in range(7))
    for row in rows:
        weights = np.asarray(row, dtype=np.float64)
        share = weights / weights.sum(-1, keepdims=True)
        alphas.append(share[..., 0].mean(-1))
        firsts.append(share[..., 0])
        largest.append(weights[..., 0] >= weights.max(-1))
        on_first.append(weights[..., 0].sum(-1))
        on_all.append(weights.sum((-1, -2)))
        on_four.append(weights[..., 4:, :4].sum(-1))
        logarithms = np.log(share, where=share > 0, out=np.zeros_like(share))
        entropies.append(-(share * logarithms).sum(-1))
    return {
        "gu2024": 100.0 * (np.stack(alphas) > THRESHOLD).mean(0),
        "qiu2025_first_attention": np.concatenate(firsts, -1).mean(-1),
        "kaul2024_first_argmax": 100.0 * np.concatenate(largest, -1).mean(-1),
        "first_token_share": np.stack(on_first).sum(0) / np.stack(on_all).sum(0),
        "first_four_share": np.concatenate(on_four, -1).mean(-1),
        "entropy": np.concatenate(entropies, -1).mean(-1),
    }


def test_definitions_on_matrices_that_can_be_worked_out_by_hand():
    """Two rows of one head: even causal attention, and all of it on the first token, of six and of five tokens."""
    even = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    sunk = np.zeros((5, 5))
    sunk[:, 0] = 1.0
    found = {name: float(values[0, 0]) for name, values in dense_numbers([even[None, None], sunk[None, None]]).items()}
    harmonic = sum(1 / count for count in range(1, 7))
    assert_allclose(found["gu2024"], 100.0)  # of even attention over six the first key gets 2.45 / 6 = 0.41
    assert_allclose(found["qiu2025_first_attention"], (harmonic + 5) / 11)
    assert_allclose(found["kaul2024_first_argmax"], 100.0)  # a tie counts for the first
    assert_allclose(found["first_token_share"], (harmonic + 5) / 11)
    assert_allclose(found["first_four_share"], (4 / 5 + 4 / 6 + 1) / 3)
    assert_allclose(found["entropy"], sum(np.log(range(1, 7))) / 11)


def test_weights_that_do_not_sum_to_one_are_shared_out_where_the_definition_says_so():
    weights = 0.1 * np.tril(np.ones((5, 5)))
    weights[:, 0] = 0.3
    found = {name: float(values[0, 0]) for name, values in dense_numbers([weights[None, None]]).items()}
    shares = [0.3 / (0.3 + 0.1 * others) for others in range(5)]
    assert_allclose(found["qiu2025_first_attention"], np.mean(shares))
    assert_allclose(found["gu2024"], 100.0)
    assert_allclose(found["first_token_share"], 1.5 / (1.5 + 1.0))
    assert_allclose(found["first_four_share"], 0.6)  # the weight itself, of the fifth query


def matrices(loaded: LoadedModel, rows: list[list[int]]) -> list[np.ndarray]:
    """Attention of every row in float64, ``(layers, heads, queries, keys)``."""
    model = loaded.model.double()
    if loaded.operation == "softmax":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        read = [model(input_ids=torch.tensor([row]), output_attentions=True).attentions for row in rows]
    return [torch.cat(layers).numpy() for layers in read]


def tolerances(attention: list[np.ndarray]) -> dict[str, float]:
    """How far float32 may be off: 1e-4 for means of weights; a rate by what lies within 1e-4 of where it jumps.

    Weights of float32 are off by some 1e-6 at these sizes, so that 1e-4 leaves room for other orders of summation.
    """
    near, alphas, ties = 1e-4, [], []
    for weights in attention:
        share = weights / weights.sum(-1, keepdims=True)
        alphas.append(abs(share[..., 0].mean(-1) - THRESHOLD) < near)
        others = weights[..., 1:].max(-1)
        # The first query of a causal row sees one key, where nothing can tie.
        ties.append(abs(weights[..., 0] - others) < near)
    rate = 100.0 * np.stack(alphas).mean(0).max()
    argmax = 100.0 * np.concatenate(ties, -1).mean(-1).max()
    means = ("qiu2025_first_attention", "first_token_share", "first_four_share")
    return {"gu2024": rate + near, "kaul2024_first_argmax": argmax + near, "entropy": 10 * near} | dict.fromkeys(means, near)


def rows_of(loaded: LoadedModel) -> list[list[int]]:
    """What a decoder reads with BOS, and the encoder of reactions with its special tokens; no padding."""
    if loaded.model.config.model_type == "albert":
        return [loaded.tokenizer(text)["input_ids"] for text in REACTIONS]
    return resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=16, seed=0, bos=True).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_probes_give_the_numbers_of_whole_matrices(name):
    """In float32, through the seam and the statistics that need no matrix, against the model's own eager attention."""
    source = name if name.startswith("embedded:") else where_is(name)
    if source is None:
        pytest.skip(f"{name} is not there: SINKLAB_REAL_MODELS says where it is")
    loaded = load_model(str(source))
    rows = rows_of(loaded)
    with torch.no_grad(), attend(loaded.model, probes=[SinkRate(), Entropy()]) as session:
        for row in rows:
            loaded.model(input_ids=torch.tensor([row]))
    table, attention = session.table(), matrices(loaded, rows)
    allowed = tolerances(attention)
    for definition, expected in dense_numbers(attention).items():
        found = table[(table["metric"] == definition) & table["head"].notna()]
        if found["key_position"].notna().any():
            found = found[found["key_position"] == 0]
        found = found.pivot_table(index=["module", "layer"], columns="head", values="value", sort=False).to_numpy(float)
        assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=allowed[definition], err_msg=definition)
