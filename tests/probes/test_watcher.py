"""A watcher shows what it saw to whoever made it, and to nobody else: no rows, no merging."""

import pytest
import torch

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.errors import ContractError
from sinklab.testing import tiny_models


class Lengths(Watcher):
    name, needs = "lengths", frozenset()

    def __init__(self):
        self.seen = []

    def update(self, call, statistics):
        self.seen.append(call.kv_len)


def test_it_sees_and_gives_no_rows():
    watcher = Lengths()
    with torch.no_grad(), attend(tiny_models()["llama"], [watcher]) as session:
        session.model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    assert watcher.seen == [5, 5]
    assert len(session.table()) == 0
    with pytest.raises(ContractError, match="lengths is read where it was made and cannot be merged"):
        watcher.merge(Lengths())
