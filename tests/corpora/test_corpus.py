import hashlib
import json

import pytest
import torch

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import (
    PASSAGES_IN_VAIN,
    Encoder,
    Identity,
    TextCorpus,
    drawable_ids,
    hash_files,
    hash_order,
    hash_tokens,
    held_out_keys,
    is_held_out,
)
from sinklab.errors import ConfigurationError, InputError


class Passages(TextCorpus):
    name = "passages"
    identity = Identity("a list", "1", "none")

    def __init__(self, passages):
        self.given = passages

    def passages(self, seed):
        yield from self.given


class Words:
    """One id a word; whether the last word is whole can be seen, as with a real tokenizer."""

    def __init__(self):
        self.longest = 0

    def __call__(self, text, **_):
        self.longest = max(self.longest, len(text))
        return {"input_ids": [len(word) for word in text.split()]}


def test_short_passages_are_passed_over_and_long_ones_cut():
    encoder = Encoder(vocab_size=99, tokenizer=Words())
    corpus = Passages(["a bb", "a bb ccc dddd", "a", "aaaa bbb cc"])
    assert list(corpus.rows(encoder, 3, 0)) == [[1, 2, 3], [4, 3, 2]]


def test_the_last_id_is_never_half_a_word():
    # The first cut falls at 8 * 2 + 64 = 80 characters, in the middle of the second word.
    text = "a " + "b" * 200 + " c"
    assert list(Passages([text]).rows(Encoder(vocab_size=999, tokenizer=Words()), 2, 0)) == [[1, 200]]


def test_only_as_much_of_a_long_passage_is_encoded_as_is_needed():
    words = Words()
    assert len(next(Passages(["word " * 100_000]).rows(Encoder(vocab_size=9, tokenizer=words), 100, 0))) == 100
    assert words.longest <= 4 * (8 * 100 + 64)


def test_an_endless_corpus_of_short_passages_ends():
    def endless():
        while True:
            yield "a b"

    corpus = Passages([])
    corpus.passages = lambda seed: endless()
    assert list(corpus.rows(Encoder(vocab_size=9, tokenizer=Words()), 3, 0)) == []
    corpus.passages = lambda seed: iter(["a b"] * (PASSAGES_IN_VAIN - 1) + ["a b c"])
    assert list(corpus.rows(Encoder(vocab_size=9, tokenizer=Words()), 3, 0)) == [[1, 1, 1]]


@pytest.mark.parametrize("corpus", ["records:path={}/texts.txt", "{}/texts.jsonl", "{}/texts"])
def test_your_own_texts_are_read_to_their_end(corpus, tmp_path):
    """A long text behind more short ones than an endless corpus is searched through."""
    texts = [*(f"a {number}" for number in range(PASSAGES_IN_VAIN + 200)), "a b c"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    encoder = Encoder(vocab_size=9, tokenizer=Words())
    for seed in range(8):
        assert list(resolve_corpus(corpus.format(tmp_path)).rows(encoder, 3, seed)) == [[1, 1, 1]]


def test_text_without_a_tokenizer_names_what_works():
    with pytest.raises(InputError, match=r"no tokenizer.*`corpus` random_tokens or repeated_token"):
        list(Passages(["a b c"]).rows(Encoder(vocab_size=9), 3, 0))


def test_adds_bos_asks_the_tokenizer(tokenizer):
    assert Encoder(vocab_size=300, bos_token_id=0, tokenizer=tokenizer).adds_bos
    assert not Encoder(vocab_size=300, bos_token_id=1, tokenizer=tokenizer).adds_bos
    assert not Encoder(vocab_size=300, bos_token_id=None, tokenizer=tokenizer).adds_bos
    assert not Encoder(vocab_size=300, bos_token_id=0).adds_bos


def test_drawable_ids_leave_the_special_ones_out():
    assert drawable_ids(Encoder(vocab_size=5, special_ids=frozenset({0, 3}))) == [1, 2, 4]


def test_hash_is_that_of_little_endian_int64():
    tokens = torch.tensor([[1, 2], [3, 256]], dtype=torch.int32)
    spelled_out = bytes([1] + [0] * 7 + [2] + [0] * 7 + [3] + [0] * 7 + [0, 1] + [0] * 6)
    assert hash_tokens(tokens) == hashlib.sha256(spelled_out).hexdigest()


def test_a_corpus_without_documents_says_which_have_them():
    with pytest.raises(ConfigurationError, match="corpus 'passages' has no documents to train on; python_source, text files"):
        Passages([]).documents("train")


def test_one_document_in_twenty_is_held_out_whatever_the_others_are():
    keys = [f"document {number}" for number in range(2000)]
    share = sum(map(is_held_out, keys)) / 2000
    assert abs(share - 0.05) < 4 * (0.05 * 0.95 / 2000) ** 0.5  # four standard deviations
    digest = hashlib.sha256(b"document 7").hexdigest()
    assert is_held_out("document 7") == (int(digest, 16) % 100 < 5)


def test_a_small_collection_always_holds_something_out():
    assert len(held_out_keys(["a"])) == len(held_out_keys("ab")) == len(held_out_keys("aabbcc")) == 1
    assert len(held_out_keys(map(str, range(100)))) == 5
    order = hash_order(map(str, range(100)))
    assert held_out_keys(map(str, range(100))) == set(order[:5])
    assert [key for key in order if int(key) < 50] == hash_order(map(str, range(50)))


def test_the_hash_of_files_is_of_names_and_contents(tmp_path):
    def files(contents):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        for name, text in contents.items():
            (root / name).write_text(text)
        return hash_files(root, sorted(root.iterdir(), reverse=True))

    assert files({"a": "1", "b": "2"}) == files({"b": "2", "a": "1"})
    assert len({files({"a": "1", "b": "2"}), files({"a": "2", "b": "1"}), files({"a": "12", "b": ""}), files({"a": "1"})}) == 4


class Framed:
    """A tokenizer of which nothing but the names of tokens is asked."""

    def convert_ids_to_tokens(self, ids):
        return [{2: "[CLS]", 3: "[SEP]"}[token] for token in ids]


def test_an_encoder_gets_its_first_and_last_tokens_or_neither():
    encoder = Encoder(vocab_size=50, bos_token_id=2, closing_ids=(3,), special_ids=frozenset({2, 3}), tokenizer=Framed())
    drawn = resolve_corpus("random_tokens")
    framed, bare = (drawn.sample(encoder, seq_len=8, samples=3, seed=0, bos=bos) for bos in (True, False))
    assert framed.shape == bare.shape == (3, 8)
    assert framed[:, 0].tolist() == [2] * 3
    assert framed[:, -1].tolist() == [3] * 3
    assert not (torch.isin(framed[:, 1:-1], torch.tensor([2, 3])) | torch.isin(bare[:, 2:], torch.tensor([2, 3]))).any()
    assert encoder.bos_name == "[CLS] and [SEP]"
    with pytest.raises(ConfigurationError, match=r"`seq_len` 2 holds \[CLS\] and \[SEP\] and no token of a text; take 3"):
        drawn.sample(encoder, seq_len=2, samples=1, seed=0, bos=True)


def test_a_model_with_closing_tokens_alone_always_gets_them():
    encoder = Encoder(vocab_size=50, closing_ids=(1,), special_ids=frozenset({1}))
    assert encoder.frame(False) == ((), (1,))
    assert encoder.bos_name == ""
    assert Encoder(vocab_size=50, bos_token_id=0).frame(True) == ((0,), ())
    assert Encoder(vocab_size=50, bos_token_id=0, closing_ids=(1,)).frame(False) == ((), ())
    assert Encoder(vocab_size=50, bos_token_id=0).bos_name == "BOS"
