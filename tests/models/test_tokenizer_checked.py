"""Tokenizers of a checkpoint that are damaged, or of another model."""

from __future__ import annotations

import json

import pytest

from sinklab.errors import InputError
from sinklab.models.loading import load_model


def change(folder, edit, name="tokenizer.json"):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    edit(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_a_tokenizer_that_cannot_be_read(own_checkpoint):
    change(own_checkpoint, lambda content: content["added_tokens"][0].update(id="x"))
    with pytest.raises(InputError, match=r"the tokenizer of .* cannot be loaded: ") as raised:
        load_model(str(own_checkpoint))
    assert "\n" not in str(raised.value)


def test_ids_that_the_model_does_not_have(own_checkpoint):
    change(
        own_checkpoint,
        lambda content: content["model"].update(vocab={word: 7 * number for word, number in content["model"]["vocab"].items()}),
    )
    encoder = load_model(str(own_checkpoint)).encoder
    with pytest.raises(InputError, match=r"gives token \d+, and the model's embedding has 300 rows"):
        encoder.encode("return self")


def test_a_bos_token_beyond_the_embedding_is_none(own_checkpoint):
    change(own_checkpoint, lambda content: content.update(bos_token="<new>"), "tokenizer_config.json")
    encoder = load_model(str(own_checkpoint)).encoder
    assert encoder.tokenizer.bos_token_id >= encoder.rows == 300
    assert encoder.bos_token_id == 0  # what the config says
