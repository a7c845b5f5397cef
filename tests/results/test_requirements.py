"""Refusals by the name of an argument: sizes that the machine does not have are refused, and nothing is allocated for them."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab import SinkCache
from sinklab.errors import ConfigurationError
from sinklab.results import requirements
from sinklab.results.requirements import machine_memory, require_memory


def test_what_there_is_passes_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(requirements, "machine_memory", lambda: 8_000_000_000)
    require_memory(8_000_000_000, "`keys` 5")
    with pytest.raises(ConfigurationError, match=r"`keys` 5: at least 8 GB .* there is 8 GB in all"):
        require_memory(8_000_000_001, "`keys` 5")


def test_limits_of_the_container_count(monkeypatch, tmp_path):
    assert 10**8 < machine_memory() < 10**15
    for name, text in (("none", "max\n"), ("small", "900\n")):
        (tmp_path / name).write_text(text)
    places = (str(tmp_path / "gone"), str(tmp_path / "none"), str(tmp_path / "small"))
    monkeypatch.setattr(requirements, "_CGROUP_LIMITS", places)
    assert machine_memory() == 900


HUGE = 2**40


@pytest.mark.parametrize(
    "ask",
    [
        lambda: make_sinklm()(torch.zeros(1, 4, dtype=torch.long), past_key_values=SinkCache(make_sinklm(), window=HUGE)),
    ],
)
def test_sizes_of_the_library(ask):
    with pytest.raises(ConfigurationError, match="of memory would be needed"):
        ask()
