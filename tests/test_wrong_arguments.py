"""What a user hands over by mistake in Python: a name for a model, a list for one thing, text or a fraction for a number."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm, make_tokenizer

import sinklab
from sinklab import attend
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import probes
from sinklab.sinks.finding import find_sinks
from sinklab.studies.measure.probing import run_probes

IDS = torch.arange(2, 30)[None]


@pytest.fixture
def model():
    return make_sinklm().eval()


@pytest.mark.parametrize(
    ("name", "says"),
    [(3, "int"), (None, "NoneType"), (["embedded:softmax"], "list"), (torch.nn.Linear(1, 1), "Linear; wrap_model")],
)
def test_a_model_is_loaded_by_its_name(name, says):
    with pytest.raises(InputError, match=f"the name of a model is a text or a path, and this is of {says}"):
        sinklab.load_model(name)


def test_a_device_of_torch_is_one():
    assert sinklab.load_model("embedded:softmax", device=torch.device("cpu")).device == torch.device("cpu")


def test_a_model_is_not_saved_to_a_file(model, tmp_path):
    """transformers says so in its log, and returns as if it had."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is a file; give the directory that the checkpoint goes to"):
        sinklab.save_model(model, tmp_path / "file", make_tokenizer())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_stream_ends_after_a_whole_number_of_tokens(model):
    """After 2.5 it never did."""
    with pytest.raises(ConfigurationError, match=r"max_new_tokens must be a whole number, got 2\.5"):
        sinklab.stream(model, IDS, max_new_tokens=2.5)
    with pytest.raises(ConfigurationError, match="max_new_tokens 0 must be 1 or more"):
        sinklab.stream(model, IDS, max_new_tokens=0)


def test_a_table_may_be_named_by_its_path(tmp_path):
    callback = sinklab.SinkCallback(torch.zeros(1, 64, dtype=torch.int64), table=str(tmp_path / "sinks.parquet"))
    assert callback.table.path == tmp_path / "sinks.parquet"


def test_settings_of_a_stream(model):
    with pytest.raises(
        TypeError, match=r"stream\(\) got an unexpected keyword argument 'foo'; its settings are policy, tokenizer"
    ):
        sinklab.stream(model, IDS, foo=1)
    for settings, says in (
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"top_p": [0.5], "temperature": 1}, "top_p is of list; expected a number"),
        ({"top_k": 2.5, "temperature": 1}, r"top_k must be a whole number, got 2\.5"),
        ({"seed": -1, "temperature": 1}, "seed -1 must be 0 or more"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            sinklab.Stream(model, **settings)


EMPTY = [torch.zeros(shape, dtype=torch.long) for shape in ((0, 5), (2, 0), (0, 0))]
PADDING = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5, dtype=torch.long)}


@pytest.fixture(scope="module")
def small_model():
    return make_sinklm()


@pytest.mark.parametrize("tokens", EMPTY, ids=lambda tokens: str(tuple(tokens.shape)))
def test_no_tokens_are_refused(small_model, tokens):
    for ask in (small_model, lambda ids: find_sinks(small_model, ids), lambda ids: run_probes(small_model, ids, [])):
        with pytest.raises(InputError, match=r"of shape \(\d, \d\) holds? no token; give at least one"):
            ask(tokens)


def test_sinks_are_not_looked_for_in_padding(small_model):
    with pytest.raises(InputError, match=r"attention_mask of shape \(2, 5\) holds no token"):
        find_sinks(small_model, PADDING)


@pytest.mark.parametrize("name", probes.names())
def test_a_probe_that_saw_padding_alone_has_no_rows(small_model, name):
    with torch.no_grad(), attend(small_model, probes=[probes.make(name)]) as session:
        small_model(**PADDING)
    table = session.table()
    assert not len(table) or (table["count"] == 0).all() or not table["value"].notna().any(), table


def test_a_name_is_no_probe(small_model):
    refused = pytest.raises(ConfigurationError, match=r"make one of it with sinklab.registry.probes.make\('entropy'\)")
    with refused, attend(small_model, probes=["entropy"]):
        pass


def test_a_single_token_is_measured(small_model):
    with torch.no_grad(), attend(small_model, probes=[probes.make("sink_rate")]) as session:
        small_model(torch.zeros(1, 1, dtype=torch.long))
    assert (session.table().query("metric == 'gu2024'")["value"] == 100).all()
