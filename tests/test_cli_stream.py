"""The command stream: what goes where, that its tokens are the library's, how it ends, and what it refuses."""

import os
import signal
import sys

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.models.loading import load_model
from sinklab.streaming.stream import Stream, stream

PROMPT = "def f(x):"  # ten tokens
SMALL = ["--sinks", "2", "--window", "20", "--temperature", "0.9", "--seed", "7"]
POLICY = {"name": "sink_window", "num_sinks": 2, "window": 20}


def run(*arguments: object, status: int = 0, stdin: str | None = None):
    result = CliRunner().invoke(app, ["stream", *(str(argument) for argument in arguments)], input=stdin)
    assert result.exit_code == status, result.output
    return result


def text_of(tokens):
    return "".join(token.text for token in tokens)


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_model(str(checkpoint))


@pytest.fixture(scope="module")
def expected(loaded):
    tokens = stream(
        loaded.model, PROMPT, policy=POLICY, tokenizer=loaded.tokenizer, temperature=0.9, seed=7, stop_ids=(), max_new_tokens=30
    )
    return list(tokens)


class TestOutput:
    def test_text_on_stdout_and_one_line_on_stderr(self, checkpoint, expected):
        result = run(checkpoint, "--prompt", PROMPT, *SMALL, "--endless", "--max-new-tokens", 30)
        assert result.stdout == text_of(expected)
        (line,) = result.stderr.splitlines()
        assert line.startswith("30 tokens, ")
        assert " tokens/s, position 40; 2+20: 23 of 23 tokens held in " in line
        assert line.endswith("39 seen, 16 evicted, highest position 38, 0 re-bases")

    def test_text_that_waits_is_written_at_the_end_or_goes_on_in_a_saved_state(self, checkpoint, expected, tmp_path):
        """For a stop string that does not come."""
        whole = text_of(expected[:5])
        options = [*SMALL, "--endless", "--max-new-tokens", 5, "--stop", f"{whole}\N{SNOWMAN}"]
        assert run(checkpoint, "--prompt", PROMPT, *options).stdout == whole
        saved = run(checkpoint, "--prompt", PROMPT, *options, "--save", tmp_path / "state").stdout
        again = run(checkpoint, "--resume", tmp_path / "state", "--endless", "--max-new-tokens", 25).stdout
        assert (saved, again) == ("", text_of(expected))

    def test_a_file_and_a_pipe_are_prompts(self, checkpoint, expected, tmp_path):
        options = [*SMALL, "--endless", "--max-new-tokens", 30]
        (tmp_path / "text").write_text("def f(x):")
        text = text_of(expected)
        assert run(checkpoint, "--file", tmp_path / "text", *options).stdout == text
        assert run(checkpoint, *options, stdin="def f(x):").stdout == text
        assert run(checkpoint, *options, "--file=-", stdin="def f(x):").stdout == text

    def test_settings_reach_the_stream(self, checkpoint, loaded):
        options = ["--policy", "pinned:pinned=[0,3]", "--window", 11, "--temperature", 0.9, "--top-k", 40]
        options += ["--top-p", 0.8, "--seed", 7, "--keep", "ab", "--chunk", 5, "--endless", "--max-new-tokens", 20]
        result = run(checkpoint, "--prompt", PROMPT, *options)
        expected = stream(
            loaded.model, PROMPT, policy={"name": "pinned", "pinned": [0, 3], "window": 11}, keep="ab",
            tokenizer=loaded.tokenizer, temperature=0.9, top_k=40, top_p=0.8, seed=7, stop_ids=(), max_new_tokens=20,
        )  # fmt: skip
        assert result.stdout == text_of(expected)
        assert "; {0, 1, 3}+11: " in result.stderr  # <bos> and ab, and what was asked for


class TestStates:
    def test_saving_and_resuming_is_going_on(self, checkpoint, expected, tmp_path):
        first = run(checkpoint, "--prompt", PROMPT, *SMALL, "--endless", "--max-new-tokens", 12, "--save", tmp_path / "state")
        second = run(checkpoint, "--resume", tmp_path / "state", "--endless", "--max-new-tokens", 18)
        assert first.stdout + second.stdout == text_of(expected)
        assert "position 40; " in second.stderr

    def test_another_model_is_refused(self, checkpoint, own_checkpoint, tmp_path):
        from safetensors.torch import load_file, save_file

        run(checkpoint, "--prompt", "def", "--max-new-tokens", 1, "--save", tmp_path / "state")
        weights = own_checkpoint / "model.safetensors"
        save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
        result = run(own_checkpoint, "--resume", tmp_path / "state", status=2)
        assert "load the model that it was written with" in result.stderr


class TestEnds:
    def test_ctrl_c_is_an_end_like_another(self, checkpoint, expected, monkeypatch, tmp_path):
        step = Stream.step

        def interrupted(self):
            if self.position == 10 + 4:
                signal.raise_signal(signal.SIGINT)  # while the fifth token is made
            return step(self)

        monkeypatch.setattr(Stream, "step", interrupted)
        options = [*SMALL, "--endless", "--save", tmp_path / "state"]
        assert run(checkpoint, "--prompt", PROMPT, *options).stdout == text_of(expected[:5])
        monkeypatch.undo()
        assert run(checkpoint, "--resume", tmp_path / "state", "--max-new-tokens", 25).stdout == text_of(expected[5:])

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ctrl_c_within_a_prompt_keeps_what_is_read(self, checkpoint, expected, monkeypatch, tmp_path, number):
        read, state = Stream._read, tmp_path / "state"

        def interrupted(self, ids, valid):
            if self.reader.position == 4:
                signal.raise_signal(number)  # while the third chunk of the ten tokens is read
            read(self, ids, valid)

        monkeypatch.setattr(Stream, "_read", interrupted)
        options = [*SMALL, "--chunk", 2, "--endless", "--save", state]
        result = run(checkpoint, "--prompt", PROMPT, *options, status=143 if number == signal.SIGTERM else 0)
        assert result.stdout == ""
        assert "position 10; 2+20: 6 of 23 tokens held" in result.stderr
        assert "4 of the prompt not read" in result.stderr
        monkeypatch.undo()
        assert run(checkpoint, "--resume", state, "--max-new-tokens", 30).stdout == text_of(expected)
        more = run(checkpoint, "--resume", state, "--prompt", " more", "--max-new-tokens", 5).stdout
        assert more == run(checkpoint, "--prompt", f"{PROMPT} more", *options[:-2], "--max-new-tokens", 5).stdout

    @pytest.mark.slow  # a fresh interpreter
    def test_a_reader_that_has_had_enough(self, checkpoint):
        """As with ``| head``: no traceback, no complaint, status 0."""
        import subprocess

        command = f"{sys.executable} -m sinklab stream {checkpoint} --prompt def --endless --quiet"
        program = f"{command} | head -c 20 | wc -c; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["20", "0"]
        assert done.stderr == ""


class TestChat:
    def test_turns_are_lines(self, checkpoint, loaded):
        result = run(checkpoint, "--chat", *SMALL, "--max-new-tokens", 6, stdin="one\n\ntwo\n")
        assert result.stderr.startswith("12 tokens, ")

    def test_a_turn_that_was_read_in_part_is_answered_first(self, checkpoint, monkeypatch, tmp_path):
        whole = run(checkpoint, "--chat", *SMALL, "--max-new-tokens", 6, stdin="one\ntwo\n")
        read, state = Stream._read, tmp_path / "state"

        def interrupted(self, ids, valid):
            signal.raise_signal(signal.SIGINT)
            read(self, ids, valid)

        monkeypatch.setattr(Stream, "_read", interrupted)
        asked = ["--chat", *SMALL, "--chunk", 2, "--max-new-tokens", 6, "--save", state]
        result = run(checkpoint, *asked, stdin="one\nnever read\n")
        assert result.stdout == ""
        assert " of the prompt not read" in result.stderr
        monkeypatch.undo()
        assert run(checkpoint, "--chat", "--resume", state, "--max-new-tokens", 6, stdin="two\n").stdout == whole.stdout

    def test_the_system_message_is_pinned(self, checkpoint, loaded):
        result = run(checkpoint, "--chat", "--system", "be brief", "--max-new-tokens", 3, stdin="one\n")
        size = len(loaded.tokenizer("be brief\n\n")["input_ids"])
        assert f" {size}+{127 - size}: " in result.stderr


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--prompt", ""], "--prompt is empty; a stream needs a text to go on from"),
            ([], "stdin is empty; a stream needs a text to go on from"),
            (["--prompt", "a", "--file", "b"], "give one of --prompt and --file"),
            (["--file", "nowhere"], "No such file or directory (nowhere)"),
            (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0 must be 1 or more; leave it out for no end"),
            (["--prompt", "a", "--sinks", "200"], "policy 200+1020 leaves no room for a window in the 128 tokens"),
            (["--prompt", "a", "--policy", "window", "--sinks", "4"], "policy 'window' has no setting 'num_sinks'"),
            (["--prompt", "a", "--policy", "window:8"], "'window:8' cannot be read; write name or name:setting=value"),
            (["--prompt", "a", "--top-k", "5"], "top_k has no effect at temperature 0"),
            (["--prompt", "a", "--system", "b"], "--system goes with --chat; to pin a text in front of a prompt, use --keep"),
            (["--chat", "--keep", "b"], "--keep goes with a prompt; what a chat keeps is its --system message"),
            (["--chat", "--prompt", "b"], "--chat takes its turns from stdin, one a line"),
            (["--prompt", "a", "--keep", "b" * 200], "the model was trained to see 128 at once: choose a shorter text"),
            (["--prompt", "a", "--resume", "nowhere"], "there is no state at nowhere; save one first"),
            (["--resume", "s", "--window", "9"], "--window cannot change a state that is resumed: leave it out, or begin anew"),
            (
                ["--prompt", "a", "--policy", "full", "--save", "s"],
                "policy 'full' keeps no cache of slots, so there is no state",
            ),
            (["--prompt", "a", "--save", "nowhere/s"], "there is no directory nowhere to save s in"),
        ],
    )
    def test_one_line_and_status_2(self, checkpoint, options, message):
        result = run(checkpoint, *options, status=2, stdin="")
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
        assert result.stdout == ""

    def test_a_file_that_is_no_text(self, checkpoint, tmp_path):
        (tmp_path / "bytes").write_bytes(b"abc\xff")
        result = run(checkpoint, "--file", tmp_path / "bytes", status=2)
        assert "is no UTF-8 text: invalid start byte at byte 3" in result.stderr

    def test_a_pipe_is_a_file(self, checkpoint, tmp_path):
        """As a shell makes one of ``<(zcat book.gz)``; a byte-order mark is no part of the text."""
        reading, writing = os.pipe()
        os.write(writing, b"\xef\xbb\xbfabc")
        os.close(writing)
        result = run(checkpoint, "--file", f"/dev/fd/{reading}", "--max-new-tokens", 3)
        os.close(reading)
        assert result.stdout == run(checkpoint, "--prompt", "abc", "--max-new-tokens", 3).stdout
        assert "Is a directory" in run(checkpoint, "--file", tmp_path, status=2).stderr
