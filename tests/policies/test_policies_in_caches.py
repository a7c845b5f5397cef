"""Policies other than sink and window in the cache of slots: padding, chunks, beams and positions counted anew."""

import pytest
import torch
import transformers
from tests.architectures.zoo import VOCAB, enliven, grouped
from tests.streaming.decoders import Gapped
from torch import Tensor

from sinklab.policies.full import Full
from sinklab.policies.pinned import Pinned
from sinklab.policies.window import Window
from sinklab.streaming.reader import open_reader

LENGTH = 44
POLICIES = (
    Window(window=6),
    Pinned(pinned=(0, 5, 20), window=6),
    Pinned(pinned=(3, 30), window=4, positions="original"),
    Gapped(),
)
TOLERANCE = 2e-4
"""float32 at positions below 50: angles are off by up to 3e-6, scores of size ten by up to 4e-5, logits by a few times that."""


@pytest.fixture(scope="module")
def model():
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped()))
    enliven(made, seed=13)
    return made.eval()


def text(rows: int = 1, seed: int = 3) -> Tensor:
    return torch.randint(4, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, tokens, cache, pieces) -> Tensor:
    parts = tokens.split(list(pieces), dim=1)
    return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)


def test_a_padded_batch_in_full(model):
    """Also where positions enter the hidden states: rows are counted from their first token."""
    learned = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )
    enliven(learned, seed=1)
    tokens, mask = text(rows=2), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :9] = 0
    for some in (model, learned.eval()):
        reader = open_reader(some, Full())
        found = torch.cat([reader.read(tokens[:, :20], mask[:, :20]), reader.read(tokens[:, 20:])], dim=1)
        with torch.no_grad():
            for row, start in ((0, 0), (1, 9)):
                alone = some(input_ids=tokens[row : row + 1, start:], use_cache=False).logits[0]
                torch.testing.assert_close(found[row, start:], alone, atol=TOLERANCE, rtol=0)
        reader.reset()
        torch.testing.assert_close(reader.read(tokens, keep=1)[:1], found[:1, -1:], atol=TOLERANCE, rtol=0)
