"""Records: every line a text of its own, whole, in an order drawn from the seed."""

import hashlib

import pytest

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Encoder
from sinklab.corpora.pairs import Pairs
from sinklab.errors import ConfigurationError, InputError


class Letters:
    """A tokenizer whose ids are code points: what a record holds can be read off its ids."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


ENCODER = Encoder(vocab_size=0x110000, bos_token_id=1, closing_ids=(2,), tokenizer=Letters())


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("AAA\n\n  BB  \nCCCCCC\r\nDDDD", encoding="utf-8")
    return resolve_corpus(f"records:path={path}")


def whole(lines, seed=0, seq_len=5, samples=3, bos=False, encoder=ENCODER):
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
        whole(lines, bos=True, encoder=Encoder(vocab_size=9, tokenizer=Letters()))


def test_rows_of_one_length_are_beginnings_of_records_that_are_long_enough(lines):
    rows = lines.sample(ENCODER, seq_len=4, samples=2, seed=0, bos=False).tolist()
    assert sorted("".join(map(chr, row)) for row in rows) == ["CCCC", "DDDD"]
    with pytest.raises(InputError, match="too short: it gives 2 of 3 samples of 4 tokens"):
        lines.sample(ENCODER, seq_len=4, samples=3, seed=0, bos=False)


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
