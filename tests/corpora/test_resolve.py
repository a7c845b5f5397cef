import pytest

from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, InputError, UnknownNameError


def test_names_win_over_files_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random_tokens").write_text("a text of the same name")
    assert resolve_corpus("random_tokens").name == "random_tokens"
    assert resolve_corpus("./random_tokens").name == "text_file"


def test_a_file_needs_no_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("some words")
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
