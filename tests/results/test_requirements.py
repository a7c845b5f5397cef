"""Refusals by the name of an argument: sizes that the machine does not have are refused, and nothing is allocated for them."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab import SinkCache
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.results import requirements
from sinklab.results.requirements import machine_memory, require_memory


def test_what_there_is_passes_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(requirements, "machine_memory", lambda: 8_000_000_000)
    require_memory(8_000_000_000, "`keys` 5")
    with pytest.raises(ConfigurationError, match="`keys` 5: at least 8 GB .* there is 8 GB in all"):
        require_memory(8_000_000_001, "`keys` 5")


def test_limits_of_the_container_count(monkeypatch, tmp_path):
    assert 10**8 < machine_memory() < 10**15
    for name, text in (("none", "max\n"), ("small", "900\n")):
        (tmp_path / name).write_text(text)
    places = (str(tmp_path / "gone"), str(tmp_path / "none"), str(tmp_path / "small"))
    monkeypatch.setattr(requirements, "_CGROUP_LIMITS", places)
    assert machine_memory() == 900


HUGE = 2**40
CORPUS, ENCODER = resolve_corpus("random_tokens"), Encoder(vocab_size=8)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: CORPUS.sample(ENCODER, seq_len=8, samples=HUGE, seed=0, bos=False),
        lambda: SinkLM(SinkLMConfig(hidden_size=HUGE)),
        lambda: make_sinklm()(torch.zeros(1, 4, dtype=torch.long), past_key_values=SinkCache(make_sinklm(), window=HUGE)),
    ],
)
def test_sizes_of_the_library(ask):
    with pytest.raises(ConfigurationError, match="of memory would be needed"):
        ask()


def test_the_least_memory_of_a_model_is_that_of_its_maps():
    architecture = Architecture(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    weights, objects = architecture.least_memory
    model = SinkLM(SinkLMConfig.from_architecture(architecture))
    there = sum(parameter.nbytes for parameter in model.parameters())
    norms = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    assert (weights, objects) == (there - norms, 50_000)
