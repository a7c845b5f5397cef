"""Samples: rows stay together, identities tell them apart, and what they show reaches any model."""

import pytest
import torch

from sinklab.corpora.base import hash_tokens
from sinklab.corpora.samples import Samples
from sinklab.errors import InputError

PIXELS = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1])


def pictures():
    return Samples({"pixel_values": PIXELS}, "image", CLASSES, names=("[CLS]", "a", "b", "c", "d"), sources=tuple("vwxyz"))


def test_text_has_the_hash_of_its_tokens():
    tokens = torch.arange(12).view(3, 4)
    samples = Samples.of_tokens(tokens)
    assert samples.sha256 == hash_tokens(tokens)
    assert (len(samples), samples.positions, samples.kind) == (3, 4, "text")


def test_the_hash_tells_names_and_shapes_apart():
    hashes = {Samples({name: PIXELS.view(shape)}, "image").sha256 for name in "ab" for shape in ((5, 192), (5, 3, 64))}
    assert len(hashes) == 4


def test_rows_stay_together():
    batches = list(pictures().batches(2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([batch.arguments["pixel_values"] for batch in batches]), PIXELS)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), CLASSES)
    assert "".join("".join(batch.sources) for batch in batches) == "vwxyz"
    chosen = pictures().take(torch.tensor([4, 0]))
    assert (chosen.sources, chosen.targets.tolist()) == (("z", "v"), [1, 0])


def test_rows_that_do_not_match_are_refused():
    with pytest.raises(InputError, match=r"one row a sample; here they have .*'pixel_values': 5, 'targets': 2"):
        Samples({"pixel_values": PIXELS}, "image", CLASSES[:2])


def test_samples_without_padding_are_those_padded_alike_together():
    ids = torch.arange(12).view(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    samples = Samples({"input_ids": ids, "attention_mask": mask, "bias": torch.zeros(3, 2)}, targets=ids)
    short, whole = sorted(samples.unpadded(), key=lambda alike: alike.positions)
    assert short.tokens.tolist() == short.targets.tolist() == [[0, 1], [8, 9]]
    assert (short.arguments["attention_mask"].shape, short.arguments["bias"].shape) == ((2, 2), (2, 2))
    assert whole.tokens.tolist() == [[4, 5, 6, 7]]
    assert next(Samples.of_tokens(ids).unpadded()).tokens is ids
    hidden = Samples({"input_ids": ids, "attention_mask": mask * torch.tensor([[0], [1], [1]])})
    assert sum(map(len, hidden.unpadded())) == 2


def test_pairs_without_padding_go_by_both_masks():
    source, target = torch.arange(6).view(2, 3), torch.arange(8).view(2, 4)
    masks = {
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]),
    }
    pairs = Samples({"input_ids": source, "decoder_input_ids": target, **masks}, kind="pairs", targets=target)
    cut = {alike.tokens.shape[1]: alike for alike in pairs.unpadded()}
    assert {length: alike.targets.tolist() for length, alike in cut.items()} == {2: [[0, 1, 2, 3]], 3: [[4]]}
    assert cut[3].arguments["decoder_input_ids"].tolist() == [[4]]
