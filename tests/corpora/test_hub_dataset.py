import json

import datasets
import pytest
from tests.conftest import make_tokenizer

from sinklab.corpora import hub_dataset, resolve_corpus
from sinklab.corpora.base import PASSAGES_IN_VAIN, Encoder
from sinklab.corpora.hub_dataset import HubDataset
from sinklab.errors import ConfigurationError, InputError
from sinklab.studies.cache.plan import long_texts

TEXTS = [f"this is text {number}" for number in range(60)]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def saved(tmp_path):
    """Made by save_to_disk, with two splits."""
    train = datasets.Dataset.from_dict({"id": list(range(60)), "text": TEXTS})
    test = datasets.Dataset.from_dict({"id": [0], "text": ["a test"]})
    datasets.disable_progress_bars()
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "saved")
    datasets.enable_progress_bars()
    return tmp_path / "saved"


@pytest.fixture
def files(tmp_path, saved):
    """The same rows in every form that a path can have, and a README beside one of them."""
    rows = datasets.load_from_disk(saved)["train"]
    (tmp_path / "repository" / "data").mkdir(parents=True)
    rows.to_parquet(tmp_path / "repository" / "data" / "train-0.parquet")
    (tmp_path / "repository" / "README.md").write_text("what it is")
    rows.to_csv(tmp_path / "rows.csv")
    jsonl(tmp_path / "rows.jsonl", rows)
    rows.save_to_disk(tmp_path / "one_split")
    return [saved, *(tmp_path / name for name in ("repository", "rows.csv", "rows.jsonl", "one_split"))]


def test_every_form_gives_the_same_documents(files):
    expected = [list(HubDataset(files[0]).documents(split)) for split in ("train", "held_out")]
    train, held_out = expected
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 0 < len(held_out) < 10
    for path in files[1:]:
        corpus = resolve_corpus(str(path))
        assert corpus.name == "hub_dataset"
        assert [list(corpus.documents(split)) for split in ("train", "held_out")] == expected


def test_a_held_out_split_leaves_the_training_split_whole(saved):
    corpus = resolve_corpus(str(saved), held_out_split="test")
    assert list(corpus.documents("train")) == TEXTS
    assert list(corpus.documents("held_out")) == ["a test"]


def test_a_repeated_text_is_on_one_side_and_blank_rows_are_none(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in [*TEXTS, None, "", "  ", *TEXTS]])
    train, held_out = (set(HubDataset(path).documents(split)) for split in ("train", "held_out"))
    assert not train & held_out
    assert train | held_out == set(TEXTS)


def test_a_local_identity_follows_the_contents(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    identity = HubDataset(path).identity
    assert identity == HubDataset(path).identity
    assert (identity.source, identity.licence) == ("dataset rows.jsonl", "the user's own")
    jsonl(path, [{"text": text} for text in reversed(TEXTS)])
    assert HubDataset(path).identity.revision != identity.revision


def test_passages_are_all_rows_of_ones_own_files_mixed(saved, tokenizer):
    encoder = Encoder(vocab_size=300, bos_token_id=0, tokenizer=tokenizer)
    assert list(resolve_corpus(str(saved), held_out_split="test").passages(0)) == ["a test"]
    corpus = resolve_corpus(str(saved))
    orders = [list(corpus.passages(seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(TEXTS)
    (row,) = corpus.sample(encoder, seq_len=8, samples=1, seed=0, bos=True)
    assert tokenizer.decode(row).startswith("<bos>this is")


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"body": "some words"}, None, None),
        ({"title": "T", "text": "some words"}, None, None),
        ({"title": "T", "body": "some words"}, "body", None),
        ({"id": 1, "score": 0.5}, None, r"has no column of text; its columns: id \(int64\), score \(float64\)$"),
        (
            {"title": "T", "body": "some words"},
            None,
            r"no column of text 'text'; its columns: title \(string\), body .*; choose one with text_column: title, body$",
        ),
    ],
)
def test_which_column_is_the_text(tmp_path, row, column, message):
    corpus = HubDataset(jsonl(tmp_path / "rows.jsonl", [row]), text_column=column, held_out_split="other")
    if message is None:
        assert list(corpus.documents("train")) == ["some words"]
    else:
        with pytest.raises(InputError, match=message):
            list(corpus.documents("train"))


def test_columns_that_are_not_declared_are_read_off_the_first_rows(tmp_path):
    (tmp_path / "rows.csv").write_text("number,words\n1,\n2,hello\n")
    assert list(HubDataset(tmp_path / "rows.csv", held_out_split="other").documents("train")) == ["hello"]


class Builder:
    """What the library makes of a name on the hub."""

    hash = "0123456789" * 4

    def as_streaming_dataset(self):
        rows = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
        return datasets.IterableDatasetDict(train=rows, validation=rows)


def test_a_name_on_the_hub_is_streamed_at_a_commit(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: asked.append((args, kwargs)) or Builder())
    corpus = resolve_corpus("someone/stories", subset="short", revision="v2", held_out_split="validation")
    assert asked == []  # nothing is fetched before it is needed
    assert list(corpus.documents("train")) == TEXTS
    assert asked == [(("someone/stories", "short"), {"revision": "v2"})]
    assert corpus.identity.source == "dataset someone/stories, short"
    assert corpus.identity.revision == Builder.hash
    assert corpus.identity.licence == "see https://huggingface.co/datasets/someone/stories"


def test_a_commit_is_an_identity_without_the_network():
    commit = "0123456789" * 4
    assert resolve_corpus("someone/stories", revision=commit).identity.revision == commit


def test_offline_is_one_sentence():
    for ask in (lambda corpus: corpus.identity, lambda corpus: list(corpus.documents("train"))):
        with pytest.raises(
            InputError, match=r"'someone/stories' is no path here, and the hub is out of reach .*HF_HUB_OFFLINE"
        ):
            ask(resolve_corpus("someone/stories"))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"train_split": "tarin"}, InputError, "dataset saved has no split 'tarin'; it has train, test"),
        ({"held_out_split": "train"}, ConfigurationError, "held_out_split and train_split are both 'train'"),
        ({"revision": "main"}, ConfigurationError, "revision 'main' is of a dataset on the hub, and .* is a local path"),
        ({"subset": "small"}, ConfigurationError, "subset 'small' cannot be chosen: .* was made by save_to_disk"),
    ],
)
def test_settings_that_cannot_be(saved, settings, error, message):
    with pytest.raises(error, match=message):
        list(HubDataset(saved, **settings).documents("train"))


def test_files_that_cannot_be_read(tmp_path, capfd):
    for name in ("bad.parquet", "bad.jsonl"):
        (tmp_path / name).write_text("{not data")
        with pytest.raises(InputError, match=rf"dataset {name} cannot be read: "):
            list(HubDataset(tmp_path / name).documents("train"))
    assert capfd.readouterr().err == ""  # the library's own complaints are kept back
    with pytest.raises(InputError, match="BuilderConfig 'small' not found"):
        list(HubDataset(jsonl(tmp_path / "rows.jsonl", [{"text": "a"}]), subset="small").documents("train"))


def test_too_few_rows_are_said_to_be_those_held_out(tmp_path, monkeypatch):
    """Of twenty rows on the hub one is held out, more or less: the text is long enough, and most of it is for training."""
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: Builder())
    encoder = Encoder(vocab_size=300, tokenizer=make_tokenizer())
    held_out = list(HubDataset("someone/stories").documents("held_out"))
    assert sorted(HubDataset("someone/stories").passages(0)) == sorted(held_out)
    with pytest.raises(
        InputError, match=r"the 5 % are read that training does not read, until 1,000 in a row are shorter .*of one that"
    ):
        HubDataset("someone/stories").sample(encoder, seq_len=2, samples=len(TEXTS), seed=0, bos=False)
    assert HubDataset("someone/stories", held_out_split="test").more == "name a held_out_split with more text than 'test'"
    own = HubDataset(jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS[:20]]))
    with pytest.raises(InputError, match=r"of 2,000 samples of 2 tokens; lower `samples` or `seq_len`, or give more rows$"):
        own.sample(encoder, seq_len=2, samples=2000, seed=0, bos=False)


def test_a_split_that_is_named_is_read_to_its_end_and_what_is_not_is_said(tmp_path, monkeypatch):
    """The first long text stands behind more short ones than an endless corpus is searched for."""
    texts = [f"a {number}" for number in range(30 * PASSAGES_IN_VAIN)] + ["b c d e f g h i j"] * 100
    builder = Builder()
    builder.as_streaming_dataset = lambda: {name: datasets.Dataset.from_dict({"text": texts}) for name in ("train", "test")}
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: builder)
    monkeypatch.setattr(hub_dataset, "SHUFFLED", 1)
    encoder, size = Encoder(vocab_size=300, tokenizer=make_tokenizer()), {"seq_len": 8, "samples": 1, "seed": 0, "bos": False}
    named = HubDataset("someone/stories", held_out_split="test")
    assert named.sample(encoder, **size).shape == (1, 8)
    assert len(long_texts(named, encoder, tokens=8, documents=2, seed=0, bos=False)) == 2
    with pytest.raises(InputError, match=r"it gives 0 of 1 samples.* until 1,000 in a row are shorter than a sample; of one"):
        HubDataset("someone/stories").sample(encoder, **size)
