import numpy as np
import pytest
from transformers import ByT5Tokenizer

from sinklab.errors import InputError
from sinklab.training import tokenizer as module
from sinklab.training.tokenizer import (
    BOS,
    EOS,
    beginning_as_rows,
    encode,
    hash_tokenizer,
    load_tokenizer,
    special_ids,
    train_bpe,
    vocabulary_size,
)

TEXTS = ["the cat sat on the mat\n", "the hat of the cat\n"] * 5


def ids_of(tokenizer, documents):
    return [piece.ids.tolist() for piece in encode(tokenizer, documents)]


def test_the_bpe_is_of_bytes_and_puts_its_bos_in_front():
    tokenizer = train_bpe(TEXTS, 270)
    assert len(tokenizer) == 270
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (BOS, EOS, EOS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert special_ids(tokenizer) == {0, 1}
    assert tokenizer("the cat")["input_ids"][0] == 0
    for text in ("the cat", "naïve \t日本\r\n  🙂"):
        (ids,) = ids_of(tokenizer, [text])
        assert tokenizer.decode(ids) == text
    assert len(ids_of(tokenizer, ["the cat"])[0]) < len("the cat")


def test_the_hash_follows_what_decides_the_ids_only(tmp_path):
    tokenizer = train_bpe(TEXTS, 270)
    before = hash_tokenizer(tokenizer)
    tokenizer("a b c", padding="max_length", truncation=True, max_length=2)  # leaves its settings in the Rust object
    assert hash_tokenizer(tokenizer) == before
    assert ids_of(tokenizer, ["the cat sat on the mat"]) == [tokenizer("the cat sat on the mat")["input_ids"][1:]]
    tokenizer.save_pretrained(tmp_path)
    assert hash_tokenizer(load_tokenizer(str(tmp_path))) == before


@pytest.mark.parametrize("adds", [True, False])
def test_a_tokenizer_begins_a_text_as_the_rows_of_the_training(tmp_path, adds):
    tokenizer = train_bpe(TEXTS, 270)
    if not adds:
        tokenizer = beginning_as_rows(tokenizer, False)
    before, ids = tokenizer("the cat")["input_ids"], ids_of(tokenizer, ["the cat"])[0]
    assert before == ([0] if adds else []) + ids
    assert beginning_as_rows(tokenizer, adds) is tokenizer
    changed = beginning_as_rows(tokenizer, not adds)
    assert tokenizer("the cat")["input_ids"] == before, "the one that was given is as it was"
    changed.save_pretrained(tmp_path)
    for one in (changed, load_tokenizer(str(tmp_path))):
        front = [] if adds else [0]
        assert one("the cat")["input_ids"] == front + ids
        assert one("the cat", "the hat")["input_ids"] == front + ids + front + ids_of(tokenizer, ["the hat"])[0]
        assert (one.bos_token, one.eos_token, one.decode(ids)) == (BOS, EOS, "the cat")
        assert ids_of(one, ["the cat"]) == [ids]


def test_special_tokens_in_a_text_are_characters():
    tokenizer = train_bpe(TEXTS, 270)
    (ids,) = ids_of(tokenizer, [f"the {BOS} cat {EOS}"])
    assert not special_ids(tokenizer) & set(ids)
    assert tokenizer.decode(ids) == f"the {BOS} cat {EOS}"


def test_blank_documents_are_left_out_and_each_other_one_is_whole():
    tokenizer = train_bpe(TEXTS, 270)
    pieces = list(encode(tokenizer, ["the", "", " \n", "cat"]))
    assert [(piece.characters, piece.first, piece.last) for piece in pieces] == [(3, True, True)] * 2
    assert all(piece.ids.dtype == np.int64 for piece in pieces)


def test_a_long_document_is_cut_after_line_ends(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 10)
    tokenizer = train_bpe(["x"], 258)  # no merges: one id a byte, so pieces and the whole must agree exactly
    document = "one\ntwo\nthree four five\nunbreakablewordthatgoeson"
    pieces = list(encode(tokenizer, ["ab", document, "cd"]))
    texts = [tokenizer.decode(piece.ids) for piece in pieces]
    assert texts == ["ab", "one\ntwo\n", "three ", "four five\n", "unbreakabl", "ewordthatg", "oeson", "cd"]
    assert [piece.first for piece in pieces] == [True, True, *[False] * 5, True]
    assert [piece.last for piece in pieces] == [True, *[False] * 5, True, True]
    assert [piece.characters for piece in pieces] == [len(text) for text in texts]


def test_a_tokenizer_without_rust_works_too():
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    assert ids_of(tokenizer, ["ab", "</s>"]) == [[100, 101], [63, 50, 118, 65]]  # bytes + 3
    assert vocabulary_size(tokenizer) == 384
    assert hash_tokenizer(tokenizer) == hash_tokenizer(ByT5Tokenizer())


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"data\.tokenizer 'nobody/nothing' cannot be loaded; it is a directory or a hub id: "):
        load_tokenizer("nobody/nothing")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"is a directory without the files of a tokenizer, such as tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
