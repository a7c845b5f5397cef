import hashlib

import pytest

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError


class Characters:
    """A tokenizer whose ids are code points: what a passage holds can be read off its ids."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


ENCODER = Encoder(vocab_size=0x110000, tokenizer=Characters())


def read(path, seed=0, seq_len=4, samples=1) -> list[str]:
    tokens = TextFile(path).sample(ENCODER, seq_len=seq_len, samples=samples, seed=seed, bos=False)
    return ["".join(map(chr, row)) for row in tokens.tolist()]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("AAAA first\n  aaaa second\n\n\nBBBB first\nbbbb second\n \nCCCC first\n", encoding="utf-8")
    return path


def test_paragraphs_come_first_then_the_other_lines_each_once(book):
    rows = read(book, samples=5)
    assert sorted(rows[:3]) == ["AAAA", "BBBB", "CCCC"]
    assert sorted(rows[3:]) == ["  aa", "bbbb"]


def test_a_line_without_end_gives_samples_from_inside(tmp_path):
    """After the beginnings of lines: at the first word behind every thousand characters, or there, without blanks."""
    (tmp_path / "one line.txt").write_text(" ".join(f"{number:04}" for number in range(1000)) + "\n" + "x" * 2500)
    rows = read(tmp_path / "one line.txt", samples=8)
    assert rows[:2] == ["0000", "xxxx"]
    assert sorted(rows[2:]) == ["0200", "0400", "0600", "0800", "xxxx", "xxxx"]
    with pytest.raises(InputError, match="gives 8 of 9 samples"):
        read(tmp_path / "one line.txt", samples=9)


def test_the_seed_decides_the_order(book):
    orders = {tuple(read(book, seed=seed, samples=3)) for seed in range(20)}
    assert len(orders) == 6
    assert read(book, seed=7, samples=3) == read(book, seed=7, samples=3)


def test_a_passage_goes_on_across_lines(book):
    assert "AAAA first\n  aaaa second\n\n\nBBBB" in read(book, seq_len=31, samples=2)


def test_identity_is_the_name_and_the_hash_of_the_bytes(book):
    identity = resolve_corpus(str(book)).identity
    assert identity.source == "book.txt"
    assert identity.revision == f"sha256-{hashlib.sha256(book.read_bytes()).hexdigest()}"


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfABCDEF")
    assert read(tmp_path / "bom.txt") == ["ABCD"]


def test_too_short_says_how_many_of_how_many(book):
    length = len(book.read_text()) - 5  # only the passage that starts with the file is as long
    with pytest.raises(InputError, match=rf"book\.txt\) is too short: it gives 1 of 3 samples of {length} tokens; lower `sam"):
        read(book, seq_len=length, samples=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\t\n", "is empty: it holds no text in its 4 bytes"),
        ("Käse".encode("latin1"), "is not UTF-8 text: byte 0xe4 at offset 1; .*iconv"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        resolve_corpus(str(tmp_path / "bad.txt"))


def test_missing_file(tmp_path):
    with pytest.raises(
        InputError, match=r"there is no text file '.*nope\.txt'; corpora by name: .*bigram_backcopy, .*python_source"
    ):
        resolve_corpus(str(tmp_path / "nope.txt"))
    with pytest.raises(InputError, match="there is no text file"):
        TextFile(tmp_path / "nope.txt")


def test_the_name_alone_asks_for_the_path():
    with pytest.raises(ConfigurationError, match="corpus 'text_file' needs the setting 'path'; write text_file:path="):
        resolve_corpus("text_file")


def test_documents_are_runs_of_paragraphs_of_one_side(tmp_path):
    paragraphs = [f"  paragraph {number}\nof two lines" for number in range(60)]
    paragraphs += paragraphs[:5]  # repeated ones go to the side of the first
    path = tmp_path / "book.txt"
    path.write_text("\n\n\n".join(paragraphs) + "\n")
    train, held_out = (list(TextFile(path).documents(split)) for split in ("train", "held_out"))
    pieces = {side: [part for run in runs for part in run.split("\n\n\n")] for side, runs in (("t", train), ("h", held_out))}
    assert sorted(pieces["t"] + pieces["h"]) == sorted(paragraphs)
    assert not set(pieces["t"]) & set(pieces["h"])
    assert len(set(pieces["h"])) == 3  # 5 % of 60
    assert [path.read_text().index(run) for run in train] == sorted(path.read_text().index(run) for run in train)
    assert len(train) < 10  # neighbours stay together


def test_one_paragraph_cannot_be_divided(tmp_path):
    (tmp_path / "line.txt").write_text("only one\nparagraph")
    with pytest.raises(InputError, match="holds one paragraph, and training needs two or more, with blank lines between"):
        list(TextFile(tmp_path / "line.txt").documents("train"))


def test_a_book_begins_with_its_first_paragraph_of_prose(tmp_path):
    prose = "\n".join(["It is a truth universally acknowledged, that a man of a large fortune wants a wife."] * 5)
    marks = ("*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***", "*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***")
    contents = "\n\n".join(f"CHAPTER {number}" for number in range(9))
    path = tmp_path / "book.txt"
    path.write_text(
        f"The Project Gutenberg eBook\n\n{marks[0]}\n\nA TITLE\n\n{contents}\n\n{prose}\n\nThe end.\n\n{marks[1]}\nLicence\n"
    )
    assert TextFile(path).body == f"{prose}\n\nThe end.\n\n"
    path.write_text(f"{contents}\n\n{prose}")
    assert TextFile(path).body == TextFile(path).text
