import pytest

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.corpora.text_folder import TextFolder
from sinklab.errors import ConfigurationError, InputError


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
