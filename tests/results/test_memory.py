"""Memory: sizes that the machine does not have are refused with both numbers, and nothing is allocated for them."""

from __future__ import annotations

import resource

import pytest
import torch
from tests.command_line import CliRunner
from tests.conftest import make_sinklm

from sinklab import SinkCache
from sinklab.attention.operation import HeadShape
from sinklab.cli.app import app
from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.operations.gated_heads import GatedHeads
from sinklab.results import memory
from sinklab.results.memory import machine_memory, require_memory
from sinklab.studies.arguments import parse_seeds
from sinklab.studies.cache.long_texts import long_texts


class TestRequireMemory:
    def test_what_there_is_passes_and_one_byte_more_does_not(self, monkeypatch):
        monkeypatch.setattr(memory, "machine_memory", lambda: 8_000_000_000)
        require_memory(8_000_000_000, "`keys` 5")
        with pytest.raises(ConfigurationError) as caught:
            require_memory(8_000_000_001, "`keys` 5")
        assert str(caught.value) == "`keys` 5: at least 8 GB of memory would be needed, and there is 8 GB in all; ask for less"

    def test_numbers_of_any_size_are_shown(self, monkeypatch):
        monkeypatch.setattr(memory, "machine_memory", lambda: 1)
        for needed, shown in [(999, "999 B"), (4_096, "4 kB"), (10**14, "100 TB"), (10**40, "more than 1,000,000 EB")]:
            with pytest.raises(ConfigurationError, match=f"at least {shown} of memory would be needed, and there is 1 B"):
                require_memory(needed, "x")

    def test_limits_of_the_process_and_of_the_container_count(self, monkeypatch, tmp_path):
        monkeypatch.setattr(memory, "_CGROUP_LIMITS", ())
        monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        whole = machine_memory()
        assert 10**8 < whole < 10**15
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 2000))
        assert machine_memory() == 1000
        for name, text in (("none", "max\n"), ("small", "900\n")):
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(tmp_path / "gone"), str(tmp_path / "none"), str(tmp_path / "small")))
        assert machine_memory() == 900


HUGE = 2**40
CORPUS = resolve_corpus("random_tokens")
ENCODER = Encoder(vocab_size=8)

SIZES = {
    "samples": (lambda: CORPUS.sample(ENCODER, seq_len=8, samples=HUGE, seed=0, bos=False), "`samples` 1099511627776 of"),
    "seq_len": (lambda: CORPUS.sample(ENCODER, seq_len=HUGE, samples=1, seed=0, bos=False), "`seq_len` 1099511627776"),
    "tokens": (lambda: long_texts(CORPUS, ENCODER, tokens=HUGE, documents=1, seed=0, bos=False), "`tokens` 1099511627776"),
    "seeds": (lambda: parse_seeds(f"0..{HUGE}"), "`seeds` 0..1099511627776"),
    "hidden": (lambda: GatedHeads(hidden=HUGE).parameters(HeadShape(1, 1, 4, 4, 4)), "hidden = 1099511627776"),
    "layers": (lambda: SinkLM(SinkLMConfig(num_hidden_layers=HUGE)), "num_hidden_layers 1099511627776"),
    "width": (lambda: SinkLM(SinkLMConfig(hidden_size=HUGE)), "hidden_size 1099511627776"),
    "vocabulary": (lambda: SinkLM(SinkLMConfig(vocab_size=HUGE)), "vocab_size 1099511627776"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_the_library(name):
    ask, message = SIZES[name]
    with pytest.raises(ConfigurationError, match="of memory would be needed") as caught:
        ask()
    assert message in str(caught.value)


def test_a_cache_that_cannot_be():
    model = make_sinklm()
    with pytest.raises(ConfigurationError, match=r"policy 'sink_window' with \d+ tokens to hold: at least .* of memory"):
        model(torch.zeros(1, 4, dtype=torch.long), past_key_values=SinkCache(model, num_sinks=1, window=HUGE))


def test_the_least_memory_of_a_model_is_that_of_its_maps():
    architecture = Architecture(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    weights, objects = architecture.least_memory
    model = SinkLM(SinkLMConfig.from_architecture(architecture))
    there = sum(parameter.nbytes for parameter in model.parameters())
    norms = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    assert (weights, objects) == (there - norms, 50_000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("retrieval --keys 4294967296", "retrieval task: batch 128 of length 16 with 4294967303 coordinates: at least 70 TB"),
        ("retrieval --samples 99999999999", "99999999999 --samples of length 16 with 23 coordinates: at least 294 TB"),
        ("trigger --heads 2147483648", "a model for 16 coordinates, with 2,199,023,257,114 numbers: at least 35 TB"),
        ("trigger --layers 2147483648", "a model for 16 coordinates"),
        ("trigger --width 2147483648", "with 2147483648 coordinates: at least 35 TB"),
        ("trigger --batch 99999999999999", "batch 99999999999999 of length 16"),
        ("trigger --seeds 0..99999999999999", "--seeds 0..99999999999999: at least 3 PB"),
    ],
)
def test_sizes_on_the_command_line(line, message):
    done = CliRunner().invoke(app, line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.endswith("; ask for less\n")
    assert done.stderr.count("\n") == 1
