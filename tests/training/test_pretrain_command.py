"""sinklab pretrain: what it asks for and writes, and the tokenizer it trains."""

import json

import numpy as np
import pytest
from tests.command_line import CliRunner
from tests.training.conftest import EIGHT_STEPS
from transformers import ByT5Tokenizer

from sinklab.cli.app import app
from sinklab.errors import InputError
from sinklab.training import tokenizer as module
from sinklab.training.bookkeeping import Bookkeeper
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


@pytest.fixture
def sinklab(text, cache, tmp_path, monkeypatch):
    """Run ``sinklab pretrain`` in an empty directory; gives status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, changes: tuple[str, ...] = ()):
        changed = [f"--set={change}" for change in (f"data.corpus={text}", *EIGHT_STEPS, *changes)]
        done = CliRunner().invoke(app, ["pretrain", *arguments, *changed, "--cache", str(cache)])
        return done.exit_code, done.stdout, done.stderr

    return call


def test_a_run_says_how_it_went_and_where_it_is(sinklab, tmp_path):
    status, out, err = sinklab("tiny")
    assert status == 0, err
    folder = tmp_path / "sinklab-runs" / "tiny"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("sink rate"))
    assert lines["status"] == "finished after 8 steps"
    assert lines["model"] == "sinklab-runs/tiny/model"
    (rate,) = (line for line in out.splitlines() if line.startswith("sink rate"))
    assert rate.endswith(" % at position 0 (Gu et al. 2024, threshold 0.3)")
    # Not a terminal: a line per record.
    assert [line.split()[1] for line in err.splitlines() if "tokens/s" in line] == ["2/8", "4/8", "6/8", "8/8"]
    assert "step 8/8  sink rate" in err

    again, out, err = sinklab("tiny", "--resume", "--json")
    assert again == 0
    assert "has finished already" in err
    result = json.loads(out)
    assert (result["status"], result["steps"], result["folder"]) == ("finished", 8, "sinklab-runs/tiny")
    assert set(result) == {"folder", "status", "held_out_loss", "sink_rate", "tokens_per_second", "steps"}


@pytest.mark.parametrize(
    ("ending", "status", "word"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "", "disk"), 2, "error: no space left on the disk (disk); free some, or write elsewhere with --out"),
    ],
)
def test_what_ends_it_at_once_names_the_checkpoint_that_is_kept(sinklab, monkeypatch, ending, status, word):
    on_step_end = Bookkeeper.on_step_end

    def ends(self, arguments, state, *more, **options):
        if state.global_step > 4:
            raise ending
        return on_step_end(self, arguments, state, *more, **options)

    monkeypatch.setattr(Bookkeeper, "on_step_end", ends)
    code, _, err = sinklab("tiny", "--out", "out")
    assert (code, err.splitlines()[-1]) == (status, f"{word}; checkpoint-4 is kept in out: go on with --resume")


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (["tinny"], (), "error: no recipe is called 'tinny'. Did you mean 'tiny'? Known: "),
        (["tiny"], ("training.stepps=3",), "error: there is no field 'training.stepps'. Did you mean 'steps'?"),
        (["tiny"], ("training.device=cuda",), "error: training.device is cuda and this machine's torch "),
        (["tiny"], ("data.corpus=nowhere.txt",), "error: there is no text file 'nowhere.txt'"),
        (["./mine.yaml"], (), "error: there is no file mine.yaml"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line_and_status_two(sinklab, arguments, changes, said, tmp_path):
    import torch

    if "cuda" in said and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, out, err = sinklab(*arguments, changes=changes)
    assert status == 2
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert not (tmp_path / "sinklab-runs").exists()


TEXTS = ["the cat sat on the mat\n", "the hat of the cat\n"] * 5


def ids_of(tokenizer, documents):
    return [ids.tolist() for ids, _ in encode(tokenizer, documents)]


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


def test_blank_documents_are_left_out_and_others_come_in_order(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 10)
    tokenizer = train_bpe(["x"], 258)  # no merges: one id a byte
    documents = ["the", "", " \n", "unbreakablewordthatgoeson", "cat"]
    encoded = list(encode(tokenizer, documents))
    assert [tokenizer.decode(ids) for ids, _ in encoded] == [documents[0], *documents[3:]]
    assert [(ids.dtype, len(ids)) for ids, _ in encoded] == [(np.int64, characters) for _, characters in encoded]


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
