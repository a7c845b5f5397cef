"""Text files: passages of one, of a folder, and records, every line a text of its own."""

import hashlib

import pytest

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.corpora.pairs import Pairs
from sinklab.corpora.text_file import TextFile
from sinklab.corpora.text_folder import TextFolder
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


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        path = tmp_path / f"part-{number % 3}" / f"{number}.{'md' if number % 2 else 'TXT'}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}\n\nsecond paragraph of {number}\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "notes.txt").write_text("hidden")
    (tmp_path / "code.py").write_text("x = 1")
    return tmp_path


def test_every_text_is_on_one_side_whole(folder):
    corpus = resolve_corpus(str(folder))
    assert corpus.name == "text_folder"
    train, held_out = list(corpus.documents("train")), list(corpus.documents("held_out"))
    assert len(held_out) == 2  # 5 % of 40
    assert sorted(train + held_out) == sorted(f"text {number}\n\nsecond paragraph of {number}\n" for number in range(40))


def test_sides_and_order_do_not_depend_on_where_the_folder_lies(folder, tmp_path):
    before = [list(TextFolder(folder).documents(split)) for split in ("train", "held_out")]
    assert before[0] != sorted(before[0])  # mixed, so that the first few are a sample
    identity = TextFolder(folder).identity
    moved = folder.rename(tmp_path.parent / "moved")
    assert [list(TextFolder(moved).documents(split)) for split in ("train", "held_out")] == before
    assert TextFolder(moved).identity.revision == identity.revision
    (moved / "part-0" / "0.TXT").write_text("other words")
    assert TextFolder(moved).identity.revision != identity.revision


def test_copies_of_a_text_are_on_one_side(folder):
    before = {split: set(TextFolder(folder).documents(split)) for split in ("train", "held_out")}
    assert TextFolder(folder).identity.source.endswith("(40 files)")
    for path in sorted(folder.rglob("part-*/*")):
        copy = folder / "part-2" / "copies" / f"{path.stem}-again.md"  # behind the first one in the order of names
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    corpus = TextFolder(folder)
    train, held_out = list(corpus.documents("train")), list(corpus.documents("held_out"))
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 80
    assert len(set(held_out)) == len(before["held_out"]) == 2
    assert corpus.identity.source.endswith("(80 files, 40 of them copies)")


def test_passages_begin_at_paragraphs_and_follow_the_seed(folder, tokenizer):
    encoder = Encoder(vocab_size=300, bos_token_id=0, tokenizer=tokenizer)
    rows = [TextFolder(folder).sample(encoder, seq_len=4, samples=6, seed=seed, bos=False) for seed in (0, 0, 1)]
    assert (rows[0] == rows[1]).all()
    assert (rows[0] != rows[2]).any()
    assert all(tokenizer.decode(row).startswith(("text", "seco")) for row in rows[0])


def test_no_two_passages_start_at_the_same_place(folder):
    """Rows that are drawn twice would count as two samples in every interval; a copy of a file has the same starts."""
    (folder / "again.txt").write_bytes((folder / "part-0" / "0.TXT").read_bytes())
    passages = list(TextFolder(folder).passages(0))
    assert len(passages) == len(set(passages)) == 80  # of 40 files, each whole and from its second paragraph on
    assert list(TextFolder(folder).passages(0)) == passages != list(TextFolder(folder).passages(1))


def test_files_of_white_space_are_left_out(folder):
    (folder / "blank.txt").write_text("\n \u3000\n" * 5000)
    (folder / "mark.md").write_bytes(b"\xef\xbb\xbf\n")
    corpus = TextFolder(folder)
    assert corpus.identity.source.endswith("(40 files)")
    assert len(list(corpus.passages(0))) == 80
    assert sum(len(list(corpus.documents(split))) for split in ("train", "held_out")) == 40


def test_what_is_no_folder_of_texts_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="corpus 'text_folder' needs the setting 'path'"):
        resolve_corpus("text_folder")
    with pytest.raises(InputError, match="there is no folder"):
        TextFolder(tmp_path / "nope")
    (tmp_path / "code.py").write_text("x = 1")
    with pytest.raises(InputError, match=r"holds no text: no file with the ending \.txt or \.md"):
        TextFolder(tmp_path)
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(InputError, match=r"holds one text, .* give the file itself, .*one\.txt"):
        list(TextFolder(tmp_path).documents("train"))
    (tmp_path / "two.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"two\.txt is not UTF-8"):
        [list(TextFolder(tmp_path).documents(split)) for split in ("train", "held_out")]


RECORDS = Encoder(vocab_size=0x110000, bos_token_id=1, closing_ids=(2,), tokenizer=Characters())


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("AAA\n\n  BB  \nCCCCCC\r\nDDDD", encoding="utf-8")
    return resolve_corpus(f"records:path={path}")


def whole(lines, seed=0, seq_len=5, samples=3, bos=False, encoder=RECORDS):
    return ["".join(map(chr, row)) for row in lines.whole(encoder, seq_len=seq_len, samples=samples, seed=seed, bos=bos)]


def test_each_line_is_one_text_and_longer_ones_are_passed_over(lines):
    assert sorted(whole(lines)) == ["AAA", "BB", "DDDD"]
    assert sorted(whole(lines, seq_len=6, samples=4)) == ["AAA", "BB", "CCCCCC", "DDDD"]
    assert sorted(whole(lines, bos=True, samples=2)) == ["\x01AAA\x02", "\x01BB\x02"]


def test_the_seed_draws_the_order(lines):
    orders = {tuple(whole(lines, seed=seed)) for seed in range(30)}
    assert len(orders) == 6
    assert whole(lines, seed=7) == whole(lines, seed=7)


def test_too_few_records_are_named_with_what_to_do(lines):
    message = (
        r"'lines.txt' has 3 of 4 records of at most 5 tokens, and 1 longer ones; raise `seq_len`, or ask for fewer `samples`"
    )
    with pytest.raises(InputError, match=message):
        whole(lines, samples=4)
    with pytest.raises(InputError, match=r"4 of 9 records of at most 9 tokens, and 0 longer ones; ask for fewer `samples`"):
        whole(lines, seq_len=9, samples=9)
    with pytest.raises(ConfigurationError, match="no beginning-of-sequence token"):
        whole(lines, bos=True, encoder=Encoder(vocab_size=9, tokenizer=Characters()))


def test_rows_of_one_length_are_beginnings_of_records_that_are_long_enough(lines):
    rows = lines.sample(RECORDS, seq_len=4, samples=2, seed=0, bos=False).tolist()
    assert sorted("".join(map(chr, row)) for row in rows) == ["CCCC", "DDDD"]
    with pytest.raises(InputError, match="too short: it gives 2 of 3 samples of 4 tokens"):
        lines.sample(RECORDS, seq_len=4, samples=3, seed=0, bos=False)


def test_a_record_that_begins_with_bos_gets_no_second(tmp_path):
    """As prompts of a chat template do; without a frame it stays as it is written."""
    (tmp_path / "chats.txt").write_text("\x01AAA\nBBB", encoding="utf-8")
    chats = resolve_corpus(f"records:path={tmp_path / 'chats.txt'}")
    assert sorted(whole(chats, seq_len=9, samples=2, bos=True)) == ["\x01AAA\x02", "\x01BBB\x02"]
    assert sorted(whole(chats, seq_len=9, samples=2)) == ["\x01AAA", "BBB"]
    rows = chats.sample(RECORDS, seq_len=4, samples=2, seed=0, bos=True).tolist()
    assert sorted("".join(map(chr, row)) for row in rows) == ["\x01AA\x02", "\x01BB\x02"]


def test_one_record_in_twenty_is_held_out_and_a_repeated_one_is_on_one_side(tmp_path):
    (tmp_path / "many.txt").write_text("\n".join(f"record {number % 40}" for number in range(80)))
    many = resolve_corpus({"name": "records", "path": tmp_path / "many.txt"})
    train, held_out = (list(many.documents(split)) for split in ("train", "held_out"))
    assert (len(set(train)), len(set(held_out))) == (38, 2)
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 80
    (tmp_path / "one.txt").write_text("the same\nthe same\n")
    with pytest.raises(InputError, match="holds one record, and training needs two or more"):
        list(resolve_corpus(f"records:path={tmp_path / 'one.txt'}").documents("train"))


def test_identity_is_the_hash_of_the_file(lines, tmp_path):
    digest = hashlib.sha256((tmp_path / "lines.txt").read_bytes()).hexdigest()
    assert lines.identity.revision == f"sha256-{digest}"
    assert lines.label == "lines.txt"
    with pytest.raises(InputError, match="there is no text file"):
        resolve_corpus("records:path=/nowhere.txt")


def test_a_line_ends_where_files_end_one(tmp_path):
    """U+2028, U+0085 and form feeds are characters of a record; ``str.splitlines`` would cut it there."""
    path = tmp_path / "lines.txt"
    path.write_text("one\u2028record\ntwo\x85x\x0c\r\nthree", encoding="utf-8")
    assert sorted(whole(resolve_corpus(f"records:path={path}"), seq_len=10)) == sorted(["one\u2028record", "two\x85x", "three"])
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"source": "a\u2028b", "target": "c"}\n', encoding="utf-8")
    assert list(Pairs(pairs).pairs(0)) == [("a\u2028b", "c")]
