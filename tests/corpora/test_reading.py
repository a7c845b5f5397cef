"""How a tokenizer reads a text: counted by hand on tokenizers whose every token is known."""

import math

import pytest
from tests.conftest import make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import RUN, corpus_record, count_repeats, read_samples, token_runs, written_corpus
from sinklab.corpora.base import Encoder
from sinklab.corpora.random_tokens import RandomTokens
from sinklab.corpora.text_file import TextFile
from sinklab.training.tokenizer import train_bpe


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
