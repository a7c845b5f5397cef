"""Reference sinks: what is recorded is what whole matrices come to, the probes give it, and a wrong tool is told apart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.references import FOLDER, MODELS, matrices, tolerances, where

from sinklab import attend, load_model
from sinklab.errors import ContractError, InputError
from sinklab.probes.entropy import Entropy
from sinklab.probes.sink_rate import SinkRate
from sinklab.results.metric import declared
from sinklab.testing import dense_numbers, load_references
from sinklab.testing.references import DEFINITIONS, Reference

ROOT = Path(__file__).parents[1]
REFERENCES = {reference.model: reference for reference in load_references()}


def loaded_of(name: str):
    source = where(name)
    if source is None:
        pytest.skip(f"{name} is not there: make models, or SINKLAB_REAL_MODELS says where it is")
    return load_model(source)


def test_there_is_a_file_for_every_model_and_no_other():
    assert REFERENCES.keys() == MODELS.keys()
    assert len(list(FOLDER.iterdir())) == len(MODELS)
    for reference in REFERENCES.values():
        assert reference.numbers.keys() == reference.tolerances.keys() == DEFINITIONS.keys()
        assert all(declared(name) for name in DEFINITIONS)
        assert len({array.shape for array in reference.numbers.values()}) == 1
    assert all(len(row) == 64 for row in REFERENCES["shibatch/tiny1m"].rows)


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


@pytest.mark.parametrize("name", MODELS)
def test_recorded_numbers_are_those_of_the_model(name):
    """Rounded to eight places; whole matrices of float64 from the model's own eager attention."""
    reference, loaded = REFERENCES[name], loaded_of(name)
    assert loaded.revision == reference.revision
    attention = matrices(loaded, [list(row) for row in reference.rows])
    for definition, values in dense_numbers(attention).items():
        assert_allclose(values, reference.numbers[definition], atol=1e-8, err_msg=definition)
    for definition, allowed in tolerances(attention).items():
        assert_allclose(allowed, reference.tolerances[definition], rtol=6e-3, err_msg=definition)


@pytest.mark.parametrize("name", MODELS)
def test_the_probes_give_the_recorded_numbers(name):
    """In float32, through the seam and the statistics that need no matrix."""
    reference, loaded = REFERENCES[name], loaded_of(name)
    with torch.no_grad(), attend(loaded.model, probes=[SinkRate(), Entropy()]) as session:
        for row in reference.rows:
            loaded.model(input_ids=torch.tensor([row]))
    table = session.table()
    for definition in DEFINITIONS:
        rows = table[(table["metric"] == definition) & table["head"].notna()]
        if rows["key_position"].notna().any():
            rows = rows[rows["key_position"] == 0]
        found = rows.pivot_table(index=["module", "layer"], columns="head", values="value", sort=False).to_numpy(float)
        reference.check(definition, found.reshape(reference.numbers[definition].shape))


@pytest.fixture
def small() -> Reference:
    numbers = {"gu2024": np.array([[0.0, 50.0], [100.0, 0.0]])}
    return Reference("a/model", "sha256-0", "decoder", ((1, 2),), numbers, {"gu2024": 0.5})


def test_another_number_is_named_with_its_head(small):
    small.check("gu2024", [[0.4, 50.0], [100.0, 0.0]])
    with pytest.raises(ContractError, match=re.escape("head 1.0 is 90, expected 100 within 5.0e-01; 2 of 4 heads differ")):
        small.check("gu2024", [[0.0, 51.0], [90.0, 0.0]])
    with pytest.raises(ContractError, match=re.escape("within 1.0e-01; 1 of 4 heads differ")):
        small.check("gu2024", [[0.4, 50.0], [100.0, 0.0]], tolerance=0.1)
    with pytest.raises(ContractError, match=re.escape("head 0.1 is nan")):
        small.check("gu2024", [[0.0, float("nan")], [100.0, 0.0]])


def test_what_cannot_be_compared_is_an_input_error(small):
    with pytest.raises(InputError, match="no definition is called 'sink_rate'; known: gu2024"):
        small.check("sink_rate", [[0.0]])
    with pytest.raises(InputError, match=re.escape("shape (4,); expected (layers, heads) (2, 2)")):
        small.check("gu2024", [0.0, 50.0, 100.0, 0.0])
    with pytest.raises(InputError, match="5 keys or more"):
        dense_numbers([np.ones((1, 1, 4, 4))])


def test_the_page_checks_the_embedded_models():
    page = (ROOT / "docs" / "measure.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "load_references" in one)
    exec(block, {})
