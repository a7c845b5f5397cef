"""The text of a token: what it decodes to, and the vocabulary's own spelling of a space that decodes to nothing."""

from __future__ import annotations

import pytest
from tests.conftest import real

from sinklab.attention.maps import token_text


class Llama:
    """Decodes as the tokenizers of Llama do, which take away the space in front of a text."""

    pieces = ("▁", "▁the", "\n", "<0x20>", "the", "▁▁")

    def decode(self, token_ids):
        (token,) = token_ids
        return self.pieces[token].replace("▁", " ").replace("<0x20>", " ").removeprefix(" ")

    def convert_ids_to_tokens(self, token):
        return self.pieces[token]


class Letters:
    """Has no pieces of its own."""

    def decode(self, token_ids):
        return "" if token_ids == [0] else "a"


def test_a_token_that_decodes_to_nothing_is_written_as_in_the_vocabulary():
    assert [token_text(Llama(), token) for token in range(6)] == ["▁", " the", "\n", "<0x20>", "the", " "]
    assert [token_text(Letters(), token) for token in range(2)] == ["", "a"]
    assert token_text(None, 17) == "17"


@pytest.mark.real
def test_no_token_of_a_llama_is_shown_as_nothing():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real("tiny1m"))
    texts = [token_text(tokenizer, token) for token in range(len(tokenizer))]
    assert "" not in texts
    text = "Once upon a time there was a cat"
    assert "".join(token_text(tokenizer, token) for token in tokenizer(text)["input_ids"]) == f"<s> {text}"
    assert "" in [tokenizer.decode([token]) for token in range(len(tokenizer))]  # the space in front of a word
