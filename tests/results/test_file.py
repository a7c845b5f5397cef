"""Output files: what is in their way, whole or not at all, and that nothing but a regular file is ever replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.errors import InputError
from sinklab.results.file import check_file, clear_partial, write_atomically, write_file


def write(path: Path, text: str = "new", **options) -> None:
    write_file(path, lambda temporary: temporary.write_text(text), **{"overwrite": False, **options})


def test_what_a_killed_process_was_writing_is_cleared_and_what_is_being_written_is_not(tmp_path):
    def seen(temporary: Path) -> None:
        (tmp_path / "folder" / ".sinklab-0123.partial").write_text("half")
        write(tmp_path / "folder" / "other")
        clear_partial(tmp_path)
        assert names(tmp_path / "folder") == [temporary.name, "other"]
        temporary.write_text("new")

    (tmp_path / ".sinklab-4567.partial").write_text("half")
    write(tmp_path / "elsewhere")
    assert names(tmp_path) == ["elsewhere"]
    write_atomically(tmp_path / "folder" / "whole", seen)
    assert names(tmp_path / "folder") == ["other", "whole"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def a_file(path):
    path.write_text("mine")


def a_link(path):
    (path.parent / "target").write_text("mine")
    path.symlink_to("target")


def a_dangling_link(path):
    path.symlink_to("nowhere")


def a_folder(path):
    path.mkdir()


NEVER = {
    a_link: "is a symbolic link to target; give the path of the file itself",
    a_dangling_link: "is a symbolic link to nowhere; give",
    a_folder: "is a directory, which is not replaced; give the path of a file",
}
"""What is refused whatever is said."""


def unread(path):
    """What the file system says of a path, but for when it was looked at last."""
    found = os.lstat(path)
    return (*found[:7], found.st_mtime_ns, found.st_ctime_ns)


class TestWritten:
    def test_a_file_is_replaced_with_overwrite_only(self, tmp_path):
        out = tmp_path / "out"
        a_file(out)
        with pytest.raises(
            InputError, match=r"output file .*out exists; choose another with `out`, or replace it with `overwr"
        ):
            write(out)
        assert out.read_text() == "mine"
        write(out, overwrite=True)
        assert out.read_text() == "new"
        assert names(tmp_path) == ["out"]

    def test_a_failure_leaves_what_was_there(self, tmp_path):
        def half(temporary):
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

        a_file(tmp_path / "old")
        for path in (tmp_path / "new", tmp_path / "old"):
            with pytest.raises(OSError, match="No space"):
                write_file(path, half, overwrite=True)
        assert names(tmp_path) == ["old"]
        assert (tmp_path / "old").read_text() == "mine"

    def test_what_appears_meanwhile_is_not_replaced_and_the_work_not_lost(self, tmp_path):
        out = tmp_path / "out.txt"

        def slowly(temporary):
            temporary.write_text("new")
            a_file(out)

        with pytest.raises(InputError, match=r"exists; choose .*\. What was to be written there is in"):
            write_file(out, slowly, overwrite=False)
        assert out.read_text() == "mine"
        (rescued,) = [path for path in tmp_path.iterdir() if path != out]
        assert (rescued.read_text(), rescued.suffix) == ("new", ".txt")

    @pytest.mark.parametrize("kind", NEVER)
    def test_what_is_no_file_is_never_replaced(self, tmp_path, kind):
        out = tmp_path / "out"
        kind(out)
        before = unread(out)
        for put in (write, lambda path: write(path, overwrite=True), lambda path: write_atomically(path, print)):
            with pytest.raises(InputError) as caught:
                put(out)
            assert NEVER[kind] in str(caught.value)
        assert unread(out) == before
        assert set(names(tmp_path)) <= {"out", "target"}

    def test_a_place_that_cannot_be_written(self, tmp_path):
        a_file(tmp_path / "file")
        (tmp_path / "gone").symlink_to("nowhere")
        for place in ("file", "gone"):
            with pytest.raises(InputError, match=rf"cannot be made: .*{place} is not a directory"):
                check_file(tmp_path / place / "out", overwrite=True)

    def test_a_look_leaves_nothing(self, tmp_path):
        check_file(tmp_path / "new" / "out", overwrite=False)
        assert names(tmp_path) == []


class TestCommands:
    """Every command that writes a file looks before it works: what it would work on here is not even there."""

    LINES = {"compare": ["compare", "nowhere", "nothing", "--out"], "stream": ["stream", "nowhere", "--prompt", "a", "--save"]}

    def run(self, *line: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in line])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        return done.stderr

    @pytest.mark.parametrize("command", LINES)
    def test_an_existing_file(self, tmp_path, command):
        out, line = tmp_path / "out.png", self.LINES[command]
        a_file(out)
        assert f"exists; choose another with {line[-1]}, or replace it with --overwrite" in self.run(*line, out)
        assert "nowhere" in self.run(*line, out, "--overwrite")  # now it looks for what it needs
        assert out.read_text() == "mine"

    def test_a_page_that_is_not_ours_is_not_replaced(self, tmp_path):
        from sinklab.report.page import write_page

        page = tmp_path / "report.html"
        page.write_text("<!doctype html><title>My own</title>")
        with pytest.raises(InputError, match=r"report\.html is no page of sinklab, and is not replaced; move it away"):
            write_page("new", page)
        page.write_text('<meta name="generator" content="sinklab">')
        assert write_page("new", page).read_text() == "new"
