"""Rows by hand: the BPE of these tests has no merges, so one letter is one token; ``^`` is BOS, ``$`` is EOS."""

import json
import multiprocessing
import os
import resource
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sinklab.corpora.base import Identity, TextCorpus
from sinklab.errors import ConfigurationError, InputError, SinklabError
from sinklab.training import data as module
from sinklab.training import tokenizer as tokenizer_module
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab.training.tokenizer import TokenStream, cached_folder, train_bpe, write_stream

TRAIN = ["abcde", "fg", "hijklmn"]
HELD_OUT = ["ABCD", "EFGHIJ", "KLMNOPQRSTUVW"]


class Documents(TextCorpus):
    """Documents from lists; counts how often they are read."""

    name = "documents"
    identity = Identity("lists", "1", "none")

    def __init__(self, train, held_out):
        self.given = {"train": train, "held_out": held_out}
        self.read = {"train": 0, "held_out": 0}

    def passages(self, seed):
        raise NotImplementedError

    def documents(self, split):
        for document in self.given[split]:
            self.read[split] += 1
            yield document


@pytest.fixture
def corpus(monkeypatch):
    """Stands in for whatever corpus the configuration names."""
    documents = Documents(TRAIN, HELD_OUT)
    monkeypatch.setattr(module, "resolve_corpus", lambda name, **settings: documents)
    return documents


def configuration(context=4, batch_size=1, **data):
    return PretrainingConfig(
        model={"max_position_embeddings": context},
        data={"vocab_size": 258, "held_out_rows": 1, **data},
        training={"batch_size": batch_size},
        watch={"seq_len": 3, "window": 1},
    )


def prepare(tmp_path, **settings):
    return prepare_data(configuration(**settings), tmp_path / "cache")


def spell(prepared, row) -> str:
    tokens = prepared.tokenizer.convert_ids_to_tokens(row)
    return "".join({"<|bos|>": "^", "<|eos|>": "$"}.get(token, token) for token in tokens)


def rows(prepared) -> list[str]:
    return [spell(prepared, row["input_ids"]) for row in prepared.train]


# --- packing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"bos": "rows"}, ["^abc", "^de$", "^fg$", "^hij", "^klm"]),
        ({"bos": "rows", "eos": False}, ["^abc", "^def", "^ghi", "^jkl"]),
        ({"bos": "documents"}, ["^abc", "de$^", "fg$^", "hijk", "lmn$"]),
        ({"bos": "documents", "eos": False}, ["^abc", "de^f", "g^hi", "jklm"]),
        ({"bos": "none"}, ["abcd", "e$fg", "$hij", "klmn"]),
        ({"bos": "none", "eos": False}, ["abcd", "efgh", "ijkl"]),
        ({"bos": "none", "max_tokens": 9}, ["abcd", "e$fg"]),
    ],
)
def test_rows_are_cut_from_the_stream(tmp_path, corpus, policy, expected):
    prepared = prepare(tmp_path, **policy)
    assert rows(prepared) == expected
    for row in prepared.train:
        assert set(row) == {"input_ids", "labels"}
        assert row["input_ids"].dtype == row["labels"].dtype == torch.int64
        assert row["input_ids"].shape == (4,)
        assert torch.equal(row["labels"], row["input_ids"])


def test_held_out_rows_follow_the_policy_and_are_spread_over_the_text(tmp_path, corpus):
    # ABCD$EFGHIJ$KLMNOPQRSTUVW$: 26 tokens, 8 rows of 3 behind a BOS, of which the rows 0, 2 and 5 are taken.
    prepared = prepare(tmp_path, held_out_rows=3)
    assert [spell(prepared, row) for row in prepared.held_out] == ["^ABC", "^FGH", "^NOP"]
    assert prepared.held_out.dtype == torch.int64


# --- interventions ---------------------------------------------------------------------------------------------------------


LONG = ["".join(chr(97 + (3 * number + k) % 26) for k in range(50)) for number in range(20)]


def test_a_share_of_the_rows_is_kept_and_part_of_any_larger_share(tmp_path, corpus):
    corpus.given["train"] = LONG
    everything = rows(prepare(tmp_path))
    assert len(everything) == 20 * 51 // 3
    shares = {fraction: set(prepare(tmp_path, unique_fraction=fraction).train.numbers) for fraction in (0.1, 0.5, 0.9)}
    assert {fraction: len(numbers) for fraction, numbers in shares.items()} == {0.1: 34, 0.5: 170, 0.9: 306}
    assert shares[0.1] < shares[0.5] < shares[0.9]
    half = prepare(tmp_path, unique_fraction=0.5)
    assert rows(half) == [everything[number] for number in half.train.numbers]
    assert (half.identity["rows"], half.identity["unique_rows"], half.identity["unique_tokens"]) == (340, 170, 510)
    assert set(prepare(tmp_path, unique_fraction=0.5, seed=1).train.numbers) != shares[0.5]


def test_random_positions_hold_other_tokens_in_every_row_and_the_same_ones_in_every_epoch(tmp_path, corpus):
    corpus.given["train"] = LONG
    plain = prepare(tmp_path)
    drawn = prepare(tmp_path, random_positions=(1, 3))
    ids = torch.stack([row["input_ids"] for row in drawn.train])
    unchanged = torch.stack([row["input_ids"] for row in plain.train])
    assert torch.equal(ids[:, [0, 3]], unchanged[:, [0, 3]])
    assert (ids[:, 1:3] > 1).all()  # no special token
    assert len(set(map(tuple, ids[:, 1:3].tolist()))) > 330  # of 340 draws from 65,536 pairs, about one meets another
    assert torch.equal(ids, torch.stack([row["labels"] for row in drawn.train]))
    assert torch.equal(ids, torch.stack([row["input_ids"] for row in drawn.train]))
    assert torch.equal(drawn.held_out, plain.held_out)
    other = prepare(tmp_path, random_positions=(1, 3), seed=1)
    assert not torch.equal(other.train[0]["input_ids"], drawn.train[0]["input_ids"])
    # The same row of the corpus is the same with less unique data.
    few = prepare(tmp_path, random_positions=(1, 3), unique_fraction=0.1)
    assert all(torch.equal(few.train[k]["input_ids"], ids[number]) for k, number in enumerate(few.train.numbers))


def test_a_fixed_token_is_in_every_row_training_held_out_and_probe(tmp_path, corpus):
    prepared = prepare(tmp_path, fixed_position=2, fixed_token=30, held_out_rows=2)
    plain = prepare(tmp_path, held_out_rows=2)
    for ids, others in (
        (torch.stack([row["input_ids"] for row in prepared.train]), torch.stack([row["input_ids"] for row in plain.train])),
        (prepared.held_out, plain.held_out),
        (prepared.probe_rows(2, 3), plain.probe_rows(2, 3)),
    ):
        assert (ids[:, 2] == 30).all()
        others[:, 2] = 30
        assert torch.equal(ids, others)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"random_positions": (0, 2)},
            "random_positions takes position 0, where bos = rows puts the BOS token; set data.bos=none",
        ),
        ({"fixed_position": 0}, "fixed_position takes position 0, where bos = rows puts the BOS token; set data.bos=none"),
        ({"random_positions": (2, 2)}, "random_positions is start and stop, and 2, 2 hold no position"),
        ({"random_positions": (-1, 2)}, "random_positions is start and stop, and -1, 2 hold no position"),
        ({"random_positions": (1, 3), "fixed_position": 2}, "fixed_position 2 is one of random_positions 1 to 2"),
        ({"random_positions": (1, 5)}, "random_positions reaches to 5 tokens, beyond model.max_position_embeddings 4"),
        ({"fixed_position": 1, "fixed_token": 258}, "fixed_token 258 is no token: the vocabulary has 258 ids"),
    ],
)
def test_interventions_that_contradict(tmp_path, corpus, settings, message):
    with pytest.raises(ConfigurationError, match=message.replace(".", r"\.")):
        prepare_data(configuration(**settings), tmp_path)


# --- probe rows ------------------------------------------------------------------------------------------------------------


def test_probe_rows_begin_as_those_of_the_training(tmp_path, corpus):
    prepared = prepare(tmp_path, held_out_rows=3)
    assert [spell(prepared, row) for row in prepared.probe_rows(2, 3)] == ["^AB", "^FG"]
    with pytest.raises(ConfigurationError, match="probe rows of 5 tokens are longer than those of training, 4"):
        prepared.probe_rows(1, 5)
    with pytest.raises(InputError, match=r"4 probe rows of 3 held-out rows; lower watch\.samples or raise data\.held_out"):
        prepared.probe_rows(4, 4)


# --- the same for everybody ------------------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_workers_or_on_what_was_read_before(tmp_path, corpus):
    corpus.given["train"] = LONG
    train = prepare(tmp_path, random_positions=(1, 3), unique_fraction=0.5).train
    expected = torch.stack([row["input_ids"] for row in train])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    assert all(torch.equal(train[index]["input_ids"], expected[index]) for index in order)
    batches = DataLoader(train, batch_size=17, num_workers=2)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), expected)


def test_what_was_encoded_is_found_again_and_shared_by_what_it_does_not_depend_on(tmp_path, corpus):
    first = prepare(tmp_path)
    corpus.read = {"train": 0, "held_out": 0}
    again = prepare(tmp_path)
    assert again.identity == first.identity
    assert rows(again) == rows(first)
    prepare(tmp_path, bos="none", seed=3, unique_fraction=0.5, batch_size=2, random_positions=(0, 2))
    assert corpus.read == {"train": 0, "held_out": 0}
    prepare(tmp_path, eos=False)  # other tokens, the same tokenizer: every document read once
    assert corpus.read == {"train": 3, "held_out": 3}
    prepare(tmp_path, eos=False, max_tokens=12)
    assert corpus.read["held_out"] == 3


def test_identity_says_what_is_needed_to_get_the_tokens_again(tmp_path, corpus):
    identity = prepare(tmp_path, held_out_rows=2).identity
    assert json.loads(json.dumps(identity)) == identity
    assert {name: identity[name] for name in ("source", "revision", "licence")} == {
        "source": "lists",
        "revision": "1",
        "licence": "none",
    }
    counts = ("documents", "characters", "tokens", "rows", "tokens_per_row", "unique_rows", "unique_tokens", "dtype")
    assert [identity[name] for name in counts] == [3, 14, 17, 5, 3, 5, 15, "<u2"]
    assert identity["held_out"]["tokens"] == 26
    assert identity["held_out"]["rows"] == 2
    assert identity["tokenizer"]["vocab_size"] == 258


@pytest.mark.parametrize(("limit", "characters"), [(9, 7), (8, 7), (3, 3), (None, 14)])
def test_characters_are_those_of_the_tokens_that_are_kept(tmp_path, corpus, limit, characters):
    # "abcde$fg$hijklmn$", a token each: of the text that a limit cuts, only what is left of it counts.
    identity = prepare(tmp_path, max_tokens=limit, batch_size=1).identity
    assert (identity["tokens"], identity["characters"]) == (limit or 17, characters)


def test_only_as_many_documents_are_read_as_are_needed(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "CHUNK", 200)
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 1)
    corpus.given = {"train": LONG * 1000, "held_out": LONG * 1000}
    prepare(tmp_path, max_tokens=1000)
    assert corpus.read["train"] < 40  # 258 characters for the BPE, then 1,000 tokens
    assert corpus.read["held_out"] < 20  # 8 rows of 4


def test_a_corpus_that_never_ends_needs_a_number_of_tokens(tmp_path):
    config = configuration(corpus="bigram_backcopy", batch_size=2)
    said = rf"'bigram_backcopy' never ends: .* data\.max_tokens={config.training.steps * 2 * 4}, "
    with pytest.raises(ConfigurationError, match=said):
        prepare_data(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- the cache among processes, and when things go wrong ---------------------------------------------------------------------


def in_processes(*functions, timeout=60):
    """Run functions in forked processes; the exit codes."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function) for function in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        assert not process.is_alive()
    return [process.exitcode for process in processes]


def slow_build(log):
    def build(folder):
        with log.open("a") as file:
            file.write("built\n")
        (folder / "one").write_text("1")
        time.sleep(0.3)
        (folder / "two").write_text("2")

    return build


def test_processes_that_want_the_same_folder_build_it_once(tmp_path):
    log = tmp_path / "log"

    def want():
        folder = cached_folder(tmp_path / "cache", "name", slow_build(log))
        assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]

    assert in_processes(*[want] * 4) == [0] * 4
    assert log.read_text() == "built\n"


def test_a_build_that_was_killed_leaves_nothing_that_is_read(tmp_path):
    def killed():
        def build(folder):
            (folder / "one").write_text("1")
            os.kill(os.getpid(), signal.SIGKILL)

        cached_folder(tmp_path / "cache", "name", build)

    assert in_processes(killed) == [-signal.SIGKILL]
    assert not (tmp_path / "cache" / "name").exists()
    assert list((tmp_path / "cache").glob(".name.*.partial"))
    folder = cached_folder(tmp_path / "cache", "name", slow_build(tmp_path / "log"))
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize("limit", [100, 40_000], ids=["tokenizer", "tokens"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half(tmp_path, corpus, limit):
    corpus.given["train"] = LONG * 100
    cache = tmp_path / "cache"

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # no file may be larger
        try:
            prepare_data(configuration(), cache)
        except InputError as error:
            os._exit(0 if f"the encoded text could not be written to {cache}: File too large" in str(error) else 2)
        os._exit(3)

    assert in_processes(full) == [0]
    left = [path.name for path in cache.iterdir()]
    assert [name.split("-")[0] for name in left] == ([] if limit == 100 else ["tokenizer"])
    prepare_data(configuration(), cache)


def test_a_damaged_folder_is_named(tmp_path, corpus):
    stream = prepare(tmp_path).train.stream
    (stream.folder / "tokens.bin").write_bytes(b"\0" * 32)
    with pytest.raises(InputError, match=r"is damaged: tokens\.bin has 32 of 34 bytes; delete the folder"):
        prepare(tmp_path)
    (stream.folder / "identity.json").unlink()
    with pytest.raises(InputError, match=r"is damaged .*identity\.json.*; delete the folder"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch_size": 6},
            r"too little data for one batch: data\.corpus 'python_source' gives 17 training tokens, 5 rows of 4 tokens, and "
            r"training\.batch_size is 6; lower training\.batch_size or model\.max_position_embeddings, or give more text$",
        ),
        ({"batch_size": 6, "max_tokens": 9}, r"gives 9 training tokens, 3 rows .* or raise data\.max_tokens, which is 9$"),
        (
            {"batch_size": 3, "unique_fraction": 0.4},
            r"5 rows of 4 tokens, of which data\.unique_fraction 0\.4 keeps 2, and training",
        ),
        (
            {"held_out_rows": 9},
            r"too little held-out text: data\.corpus 'python_source' holds out 26 tokens, 8 rows of 4, and "
            r"data\.held_out_rows is 9; lower it, or give more text$",
        ),
    ],
)
def test_too_little_data_says_how_much_there_is(tmp_path, corpus, settings, message):
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, **settings)


@pytest.mark.parametrize(("policy", "role"), [({"bos": "rows", "eos": False}, "bos"), ({"bos": "none"}, "eos")])
def test_a_tokenizer_without_the_token_that_is_asked_for(tmp_path, corpus, policy, role):
    tokenizer = train_bpe(["x"], 258)
    setattr(tokenizer, f"{role}_token", None)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = {"tokenizer": str(tmp_path / "tokenizer"), **policy}
    with pytest.raises(ConfigurationError, match=rf"data\.{role} asks for .* this tokenizer has none; set data\.{role}="):
        prepare(tmp_path, **given)
    without = prepare(tmp_path, **{**given, "bos": "none", "eos": False})
    assert rows(without) == ["abcd", "efgh", "ijkl"]


def test_the_width_of_an_id_follows_the_vocabulary(tmp_path):
    pieces = [(np.array([7, 65_536]), 2)]

    def write(vocab_size):
        write_stream(tmp_path, pieces, bos=None, eos=None, vocab_size=vocab_size, limit=None, progress=lambda tokens: None)
        return TokenStream.open(tmp_path)

    assert write(65_537).identity["dtype"] == "<u4"
    assert write(65_537).tokens().tolist() == [7, 65_536]
    with pytest.raises(InputError, match="the tokenizer gave the id 65536, beyond its vocabulary of 65536 ids"):
        write(65_536)


# --- real corpora ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": "python_sauce"}, "no corpus is called 'python_sauce'. Did you mean 'python_source'"),
        ({"corpus": "random_tokens"}, "corpus 'random_tokens' has no documents to train on"),
        ({"subset": "small", "train_split": "all"}, "subset, train_split: only datasets have these settings"),
        ({"tokenizer": "nowhere/tokenizer"}, "data.tokenizer 'nowhere/tokenizer' cannot be loaded"),
    ],
)
def test_sources_that_are_not_there(tmp_path, settings, message):
    with pytest.raises(SinklabError, match=message):
        prepare_data(configuration(**settings), tmp_path)


def test_a_dataset_at_a_commit_needs_no_network_once_it_is_encoded(tmp_path, monkeypatch):
    import datasets

    texts = [f"story number {number} of a few words" for number in range(100)]

    class Builder:
        def as_streaming_dataset(self):
            return datasets.IterableDatasetDict(train=datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset())

    config = configuration(corpus="someone/stories", revision="0123456789" * 4)
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: Builder())
        online = prepare_data(config, tmp_path)
    offline = prepare_data(config, tmp_path)
    assert offline.identity == online.identity
    assert torch.equal(offline.held_out, online.held_out)
