"""What every corpus shares: samples, splits, encoders, names, and reading."""

import hashlib
import json
import math

import pytest
import torch
from tests.conftest import make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import RUN, corpus_record, count_repeats, read_samples, token_runs, written_corpus
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
from sinklab.corpora.random_tokens import RandomTokens
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError, UnknownNameError
from sinklab.training.tokenizer import train_bpe


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


def test_names_win_over_files_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random_tokens").write_text("a text of the same name")
    assert resolve_corpus("random_tokens").name == "random_tokens"
    assert resolve_corpus("./random_tokens").name == "text_file"
    (tmp_path / "notes").write_text("some words")  # a file needs no suffix
    assert resolve_corpus("notes").name == "text_file"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'python_source'"):
        resolve_corpus("python_sorce")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.txt", "b.md"], "text_folder"),
        (["README.md", "train.parquet"], "hub_dataset"),
        (["a.md", "b.md", "package.json"], "text_folder"),
        (["a.md", "b.md", ".obsidian/app.json", ".obsidian/theme.json"], "text_folder"),
        (["train.jsonl.gz", "test.jsonl.gz"], "hub_dataset"),
    ],
)
def test_a_folder_is_what_it_holds_more_of(tmp_path, names, kind):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("words")
    assert resolve_corpus(str(tmp_path)).name == kind


def test_a_missing_file_is_not_looked_for_on_the_hub():
    with pytest.raises(InputError, match=r"there is no data file 'rows/train\.jsonl'"):
        resolve_corpus("rows/train.jsonl")
    with pytest.raises(InputError, match=r"there is no text file 'notes/book\.txt'"):
        resolve_corpus("notes/book.txt")


def test_a_bare_name_of_the_hub_is_told_how_to_be_written():
    with pytest.raises(UnknownNameError, match=r"no corpus is called 'wikitext'.*a dataset of the hub is given as owner/name"):
        resolve_corpus("wikitext")


def test_settings_of_datasets_are_refused_elsewhere(tmp_path):
    (tmp_path / "book.txt").write_text("words")
    for name in ("python_source", str(tmp_path / "book.txt")):
        with pytest.raises(ConfigurationError, match="subset, revision: only datasets have these settings"):
            resolve_corpus(name, subset="small", revision="main", text_column=None)


def words(*known: str) -> Encoder:
    """One token a word; a word that is not known is the unknown token."""
    level = Tokenizer(
        models.WordLevel({"<unk>": 0, **{word: number for number, word in enumerate(known, 1)}}, unk_token="<unk>")
    )
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    return Encoder(
        vocab_size=len(known) + 1, bos_token_id=0, tokenizer=PreTrainedTokenizerFast(tokenizer_object=level, unk_token="<unk>")
    )


def file(tmp_path, text: str) -> TextFile:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return TextFile(path)


def test_unknown_words_are_counted_in_tokens_and_in_characters(tmp_path):
    """Four words of 1, 2, 3 and 4 characters; that of 3 is unknown, the last is not part of the sample."""
    reading = read_samples(file(tmp_path, "a bb ccc dddd"), words("a", "bb", "dddd"), seq_len=3, samples=1, seed=0, bos=False)
    assert reading.characters_per_token == 8 / 3  # "a bb ccc"
    assert reading.unknown_share == 1 / 3
    assert reading.unread_share == 3 / 6
    assert reading.bytes_per_token == 7 / 2  # " bb ccc": nothing comes before "a"
    assert "cannot read 50 % of the characters of this text (33 % of its tokens are unknown ones)" in reading.warning


def test_with_bos_every_token_is_predicted(tmp_path):
    reading = read_samples(file(tmp_path, "a bb ccc dddd"), words("a", "bb"), seq_len=3, samples=1, seed=0, bos=True)
    assert reading.bytes_per_token == 4 / 2  # "a bb"
    assert reading.warning == ""


def test_characters_that_are_dropped_without_a_token(tmp_path):
    """A vocabulary without an unknown token leaves them out, and the ids look as good as any."""
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    encoder = Encoder(vocab_size=2, tokenizer=PreTrainedTokenizerFast(tokenizer_object=bpe))
    reading = read_samples(file(tmp_path, "axxxbxxxa"), encoder, seq_len=3, samples=1, seed=0, bos=False)
    assert (reading.unknown_share, reading.unread_share) == (0.0, pytest.approx(6 / 9))
    assert reading.characters_per_token == 3.0
    assert "cannot read 67 %" in reading.warning


def test_bytes_are_not_characters(tmp_path):
    reading = read_samples(file(tmp_path, "ä ö ü"), words("ä", "ö", "ü"), seq_len=3, samples=1, seed=0, bos=True)
    assert (reading.characters_per_token, reading.bytes_per_token) == (3 / 2, 5 / 2)
    assert reading.bits_per_byte(math.log(2) * 5) == pytest.approx(2.0)  # 5 bits a token, 2.5 bytes a token


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("length", range(2, 9))
def test_a_character_of_several_tokens_counts_by_those_that_are_predicted(tmp_path, bos, length):
    """A token a byte, and characters of one to four: wherever a sample ends, it stands for as many bytes as it has tokens."""
    encoder = Encoder(vocab_size=258, bos_token_id=0, tokenizer=train_bpe(["a"], 258))
    reading = read_samples(file(tmp_path, "日é😀a本"), encoder, seq_len=length, samples=1, seed=0, bos=bos)
    assert reading.bytes_per_token == pytest.approx(1.0)


def test_it_is_about_the_samples_that_a_corpus_gives(tmp_path):
    tokenizer = make_tokenizer()
    encoder = Encoder(vocab_size=300, bos_token_id=0, tokenizer=tokenizer)
    corpus = file(tmp_path, "\n\n".join(f"Paragraph {number} says äöü, or nothing at all." for number in range(20)))
    tokens = corpus.sample(encoder, seq_len=12, samples=6, seed=3, bos=True)
    texts = [tokenizer.decode(row[1:]) for row in tokens.tolist()]
    reading = read_samples(corpus, encoder, seq_len=12, samples=6, seed=3, bos=True)
    assert reading.unread_share == 0.0
    assert reading.characters_per_token == pytest.approx(sum(map(len, texts)) / (6 * 11), rel=0.02)  # a cut letter counts whole


def test_what_is_no_text_is_not_read(tmp_path):
    assert read_samples(file(tmp_path, "a a"), words("a"), seq_len=1, samples=1, seed=0, bos=True) is None
    assert read_samples(resolve_corpus("random_tokens"), words("a"), seq_len=4, samples=2, seed=0, bos=False) is None


def test_files_are_named_in_records_and_told_apart_by_their_hash(tmp_path):
    first = file(tmp_path, "one text")
    (tmp_path / "else").mkdir()
    second = file(tmp_path / "else", "another text")
    assert first.label == second.label == "text.txt"
    assert corpus_record(first)["revision"] != corpus_record(second)["revision"]
    assert corpus_record(first).items() >= {"name": "text.txt", "kind": "text_file", "source": "text.txt"}.items()
    assert resolve_corpus(str(tmp_path / "else")).label == "else/"
    assert resolve_corpus("python_source").label == "python_source"


@pytest.mark.parametrize(
    ("spec", "written"),
    [
        ("python_source", {"name": "python_source"}),
        ("{}/text.txt", {"name": "{}/text.txt"}),
        ("{}", {"name": "{}"}),
        ("{}/pairs.tsv", {"name": "{}/pairs.tsv"}),
        ("pairs:path={}/pairs.tsv,source=en,target=de", {"name": "{}/pairs.tsv", "source": "en", "target": "de"}),
        ("records:path={}/text.txt", {"name": "records", "path": "{}/text.txt"}),
        ("bigrams:of={}/text.txt,tokens=100", {"name": "bigrams", "of": "{}/text.txt", "tokens": 100}),
        ("org/texts:subset=de", {"name": "org/texts", "subset": "de"}),
        ("hub_dataset:path=texts", {"name": "hub_dataset", "path": "texts"}),
    ],
)
def test_a_corpus_is_written_as_it_is_read(tmp_path, spec, written):
    (tmp_path / "text.txt").write_text("one house\nanother house\n")
    (tmp_path / "other.txt").write_text("a door\n")
    names = "en\tde" if "source=en" in spec else "source\ttarget"
    (tmp_path / "pairs.tsv").write_text(f"{names}\na house\tein Haus\n")
    corpus = resolve_corpus(spec.format(tmp_path))
    found = written_corpus(corpus)
    assert found == {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in written.items()}
    again = resolve_corpus(found)
    assert (type(again), again.label, written_corpus(again)) == (type(corpus), corpus.label, found)


def test_a_corpus_that_cannot_be_written_says_so():
    class Own(RandomTokens):
        """Of a class that is not registered."""

    assert written_corpus(Own()) is None


def test_runs_are_all_of_a_length():
    assert token_runs([1, 2, 3, 4], 3) == {(1, 2, 3), (2, 3, 4)}
    assert token_runs([1, 2], 3) == set()
    assert len(token_runs(range(40))) == 40 - RUN + 1


@pytest.mark.parametrize(("shared", "repeats"), [(RUN - 1, 0), (RUN, 1), (RUN + 5, 1)])
def test_a_text_repeats_another_from_so_many_tokens_on(shared, repeats):
    first = list(range(50))
    second = [*range(100, 110), *first[7 : 7 + shared], *range(200, 210)]
    assert count_repeats([first, second]) == repeats
    assert count_repeats([first, list(range(300, 340)), second, first]) == 1 + repeats


def test_short_texts_repeat_as_a_whole():
    assert count_repeats([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) == 1
