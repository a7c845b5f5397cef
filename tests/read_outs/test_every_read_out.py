"""What holds for every read-out: numbers that it declares, finite and the same twice, a model left alone, and its page."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest
import torch

from sinklab.registry import read_outs
from sinklab.results.metric import Metric

PAGE = Path(__file__).parents[2] / "docs" / "read-outs.md"


def metrics_of(name: str) -> dict[str, Metric]:
    return {metric.name: metric for metric in importlib.import_module(f"sinklab.read_outs.{name}").METRICS}


@pytest.mark.parametrize("name", read_outs.names())
def test_contract(trained, name):
    model = trained.loaded.model
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = read_outs[name](trained)
    assert set(found) <= set(metrics_of(name))
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert read_outs[name](trained) == found
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not model.training


def test_no_two_read_outs_share_a_metric():
    names = [metric for name in read_outs.names() for metric in metrics_of(name)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", read_outs.names())
def test_the_page_has_every_metric(name):
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    part = next((part for part in parts if part.startswith(f"`{name}`")), None)
    assert part is not None, f"docs/claims.md#read-outs has no part '## `{name}`'"
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| .* \| \d+ \|$", part, flags=re.MULTILINE)
    assert rows == [(one.name, one.text.replace("|", chr(92) + "|"), one.unit) for one in metrics_of(name).values()]
