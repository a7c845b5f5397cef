"""Padding: a row of a batch reads what it would read alone, whatever the other rows hold; several ragged turns too."""

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.architectures.zoo import PAD_TOKEN
from tests.streaming.decoders import FAMILIES, SINKS, TOLERANCE, WINDOW, backends_of, decoder, gap, one_by_one, text

from sinklab.streaming.cache import SinkCache
from sinklab.streaming.traits import has_states

CASES = [(family, backend) for family in FAMILIES for backend in backends_of(family)]


def padded(rows, side="left"):
    """Token lists as one batch with its mask."""
    width = max(len(row) for row in rows)
    tokens = torch.full((len(rows), width), PAD_TOKEN)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[index, columns], mask[index, columns] = row, 1
    return tokens, mask


@torch.no_grad()
def read_turns(model, turns, *, whole_mask=True, sides=None, **settings):
    """Logits of every row's tokens, in one list a row; ``turns`` are lists of rows, each a tensor of tokens or an empty one.

    ``whole_mask``: the mask covers what was read before as generate() has it, and not only what is new.
    """
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW, **settings)
    found, masks = [[] for _ in turns[0]], []
    for number, rows in enumerate(turns):
        tokens, mask = padded(rows, "left" if sides is None else sides[number])
        masks.append(mask)
        given = torch.cat(masks, dim=1) if whole_mask else mask
        logits = model(input_ids=tokens, attention_mask=given, past_key_values=cache, use_cache=True).logits
        assert logits.isfinite().all()
        for index, row in enumerate(mask.bool()):
            found[index].append(logits[index, row])
    return [torch.cat(row) for row in found]


def alone(model, turns):
    whole = [torch.cat([turn[index] for turn in turns])[None] for index in range(len(turns[0]))]
    return [one_by_one(model, row)[0] if row.shape[1] else torch.zeros(0) for row in whole]


def turns_of(*lengths, seed=0):
    """One tensor of tokens for every row of every turn."""
    random = torch.Generator().manual_seed(seed)
    return [[torch.randint(4, 40, (length,), generator=random) for length in turn] for turn in lengths]


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_every_family(family, backend):
    """A long row, a padded one, one that is shorter than the sinks; then single tokens and another ragged turn.

    Layers of linear attention take padding between the tokens of a row into their state: see test_kinds.py.
    """
    model = decoder(family, backend)
    turns = turns_of((20, 13, 1), (1, 1, 1), (1, 1, 1), (6, 6, 6) if has_states(model) else (3, 6, 5))
    for mine, expected in zip(read_turns(model, turns), alone(model, turns), strict=True):
        assert gap(mine, expected) < TOLERANCE


lengths = strategies.integers(0, 16)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    strategies.lists(strategies.tuples(lengths, lengths, lengths).filter(any), min_size=1, max_size=5),
    strategies.integers(1, 20),
    strategies.lists(strategies.sampled_from(("left", "right")), min_size=5, max_size=5),
    strategies.booleans(),
    strategies.booleans(),
)
def test_any_ragged_turns(turns, chunk, sides, tight, whole_mask):
    model = decoder("llama")
    turns = turns_of(*turns)
    settings = {"chunk": chunk, "rebase_at": SINKS + WINDOW + 1 + chunk if tight else None}
    found = read_turns(model, turns, whole_mask=whole_mask, sides=sides, **settings)
    for mine, expected in zip(found, alone(model, turns), strict=True):
        if len(expected):
            assert gap(mine, expected) < TOLERANCE


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(beams):
    model = decoder("llama")
    settings = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": None, "pad_token_id": PAD_TOKEN, "num_beams": beams}
    (rows,) = turns_of((20, 13, 4))
    tokens, mask = padded(rows)
    cache = SinkCache(num_sinks=SINKS, window=WINDOW, chunk=6)
    found = model.generate(tokens, attention_mask=mask, past_key_values=cache, **settings)
    for index, row in enumerate(rows):
        single = model.generate(row[None], past_key_values=SinkCache(num_sinks=SINKS, window=WINDOW), **settings)
        assert (found[index, 20:] == single[0, len(row) :]).all()
    if beams == 1:  # another turn of the same talk
        turn, turn_mask = padded(turns_of((2, 5, 5), seed=7)[0])
        tokens = torch.cat((found, turn), dim=1)
        whole = torch.cat((mask, torch.ones(3, 14, dtype=torch.long), turn_mask), dim=1)
        again = model.generate(tokens, attention_mask=whole, past_key_values=cache, **settings)
        for index in range(3):
            row = tokens[index, whole[index].bool()][None]
            everything = torch.ones_like(row)  # or generate() takes the padding token, which it may have said, for padding
            small = SinkCache(num_sinks=SINKS, window=WINDOW)
            single = model.generate(row, attention_mask=everything, past_key_values=small, **settings)
            assert (again[index, -14:] == single[0, -14:]).all()


@torch.no_grad()
def test_rows_that_are_reordered_keep_their_tables():
    model = decoder("llama")
    turns = turns_of((20, 13, 4))
    tokens, mask = padded(turns[0])
    cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
    rows = [2, 0, 0]
    cache.reorder_cache(torch.tensor(rows))
    new = text(15, rows=3)
    found = model(input_ids=new, past_key_values=cache, use_cache=True).logits
    for index, row in enumerate(rows):
        whole = torch.cat((turns[0][row], new[index]))[None]
        assert gap(found[index], one_by_one(model, whole)[0, -15:]) < TOLERANCE
