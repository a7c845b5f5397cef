from __future__ import annotations

import pytest

from sinklab.corpora import resolve_corpus
from sinklab.errors import InputError, UnknownNameError


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


def test_an_empty_directory_is_no_corpus(tmp_path):
    with pytest.raises(InputError, match="holds no text: no file with the ending .txt or .md"):
        resolve_corpus(str(tmp_path))
