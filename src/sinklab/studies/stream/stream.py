"""The command ``sinklab stream``: text from a model, for as long as you like, in memory that does not grow."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.quiet import quiet_libraries
from sinklab.results.file import check_file
from sinklab.results.progress import bars, say
from sinklab.studies.arguments import WHOLE, Known, Loading, OverwriteFile, command

if TYPE_CHECKING:
    from sinklab.streaming.chat import Chat
    from sinklab.streaming.stream import Stream


@command
def stream(
    model: str,
    *,
    prompt: str | None = None,
    file: Path | None = None,
    chat: bool = False,
    system: str | None = None,
    keep: str | None = None,
    policy: Annotated[str | None, Known("policies")] = None,
    sinks: int | None = None,
    window: int | None = None,
    max_new_tokens: int | None = None,
    endless: bool = False,
    stop: Annotated[list[str] | None, WHOLE] = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    chunk: int = 128,
    save: Path | None = None,
    overwrite: OverwriteFile = False,
    resume: Path | None = None,
    loading: Loading = Loading(),
) -> None:
    """Generate without end in bounded memory, from a prompt, a file, a pipe or a conversation; tokens appear as they are made.

    The cache holds the first tokens, which carry the sink, and the most recent ones. Positions are counted within the cache, so
    neither memory nor the model's longest position limits the length. For policies see 'sinklab list policies', for their
    fields 'sinklab show NAME'. The policy full evicts nothing and grows; recompute reads its window again for every token. At
    the end, or after Ctrl-C, one line on stderr shows the speed and what the cache holds.

    Args:
        model: embedded:softmax, embedded:sigmoid, a directory, a GGUF file, or a hub id.
        prompt: Text to continue; by default stdin, if piped.
        file: UTF-8 text to continue, of any length.
        chat: Hold a conversation: each line of stdin is a turn, in the model's chat template.
        system: With --chat: a system message, which is never evicted.
        keep: Text in front of the prompt, which is never evicted.
        policy: What the cache holds: a name from 'sinklab list policies', optionally with settings, as in blocks:block=64 or
            sink_window:positions=original; by default sink_window.
        sinks: Number of first tokens to keep (num_sinks of the policy); by default 4.
        window: Number of most recent tokens to keep besides; by default 1020, or the trained length if that is less.
        max_new_tokens: Stop after this many tokens (in a chat: end the answer); by default no limit.
        endless: Continue past the model's end-of-text token.
        stop: Stop before this text; repeatable.
        temperature: 0, the default, takes the most likely token; higher values vary more.
        top_k: Sample from this many most likely tokens.
        top_p: Sample from the most likely tokens of this total probability.
        seed: Seed of the sampling, with a temperature; by default 0.
        chunk: Tokens of a prompt read at once; the result does not depend on it.
        save: At the end, write the state from which --resume continues with the same tokens.
        resume: Continue from a saved state, with its policy and sampling; a prompt is appended.

    Examples:
        sinklab stream embedded:softmax --prompt 'import os' --max-new-tokens 200
        sinklab stream embedded:softmax --prompt 'import os' --endless --temperature 0.8 --top-k 50  (until Ctrl-C)
        sinklab stream ORG/MODEL --sinks 4 --window 1020 --file book.txt --max-new-tokens 300 --save book.safetensors
        sinklab stream ORG/MODEL --resume book.safetensors --prompt 'Who was that?' --max-new-tokens 300
        sinklab stream ORG/MODEL --chat --system 'You answer in one sentence.' --temperature 0.7
        cat log.txt | sinklab stream ./my-checkpoint --policy window:window=256 > more.txt
    """
    _check_arguments(max_new_tokens, chat, system, keep, has_prompt=prompt is not None or file is not None)
    check_file(save, overwrite, "save")
    if save is not None and not save.absolute().parent.is_dir():
        raise InputError(f"there is no directory {save.parent} to save {save.name} in")
    fixed = _given(policy=policy, sinks=sinks, window=window, keep=keep, system=system)
    if resume is not None and fixed:
        raise ConfigurationError(f"`{next(iter(fixed))}` cannot change a state that is resumed: leave it out, or begin anew")
    text = None if chat else _text(prompt, file, needed=resume is None)
    quiet_libraries()
    from sinklab.registry import policies
    from sinklab.streaming.chat import Chat
    from sinklab.streaming.limits import length_known, length_note
    from sinklab.streaming.state import require_slots
    from sinklab.streaming.stream import Stream

    loaded = loading.open(model)
    if loaded.tokenizer is None:
        raise InputError(f"{model} has no tokenizer, and text goes in and out; use sinklab.streaming.stream with token ids")
    sampling = _given(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    ends = _given(stop=stop or None, stop_ids=() if endless else None)
    settings: dict[str, Any] = {"tokenizer": loaded.tokenizer, "chunk": chunk, **sampling, **ends}
    if resume is None:
        # The two sizes hold, whatever is written with the name.
        settings["policy"] = policies.read(policy or "sink_window") | _given(num_sinks=sinks, window=window)
        settings |= {"system": system} if chat else {"keep": keep}
    with length_known():  # it is said below, in a line
        if resume is not None:
            source = Stream.load(resume, loaded.model, **settings)
            conversation = Chat(loaded.model, stream=source) if chat else None
        else:
            conversation = Chat(loaded.model, **settings) if chat else None
            source = Stream(loaded.model, **settings) if conversation is None else conversation.stream
    if save is not None:
        require_slots(source.reader)  # what cannot be saved is said before anything is generated
    kept = source.reader.policy
    if not kept.bounded:
        say(f"note: policy {kept.name!r} evicts nothing, so memory grows with every token")
    elif note := length_note(source.model, kept):
        say(f"note: {note}")
    writer = _Writer(source, max_new_tokens, goes_on=save is not None and not chat)
    # A conversation begins with a turn of the user, unless the last one was read in part: its answer comes first.
    generates_first = conversation is None or source.unread > 0
    writer.read(source.read_on if text is None else functools.partial(source.feed, text))
    with _reader_may_leave():
        if generates_first and not source.unread:
            writer.write()
            writer.out("" if conversation is None else "\n")
        if conversation is not None:
            _converse(conversation, writer)
        if save is not None:
            _save(source, save, overwrite)
        writer.finish()
        if writer.terminated:
            signal.raise_signal(signal.SIGTERM)  # which ends the process, now that all is in order


def _check_arguments(most: int | None, chat: bool, system: str | None, keep: str | None, *, has_prompt: bool) -> None:
    """Refuse an answer of no token, arguments of a prompt for a conversation, and of a conversation for a prompt."""
    if most is not None and most < 1:
        raise ConfigurationError(f"`max_new_tokens` {most} must be 1 or more; leave it out for no end")
    if system is not None and not chat:
        raise ConfigurationError("`system` goes with `chat`; to pin a text in front of a prompt, use `keep`")
    if keep is not None and chat:
        raise ConfigurationError("`keep` goes with a prompt; what a chat keeps is its `system` message")
    if chat and has_prompt:
        raise ConfigurationError("`chat` takes its turns from stdin, one a line; leave out `prompt` and `file`")


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that were given; the others keep their defaults, or what a resumed stream was saved with."""
    return {name: value for name, value in arguments.items() if value is not None}


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Whoever reads the tokens may have had enough; that is an end like another, and nothing more can be said on stdout."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _save(source: Stream, save: Path, overwrite: bool) -> None:
    """Save the state; under another name where something has appeared at its place, since it is not come by again."""
    try:
        check_file(save, overwrite, "save")
    except InputError as error:
        rescued = save.with_name(f"{save.stem}-{secrets.token_hex(3)}{save.suffix}")
        source.save(rescued)
        raise InputError(f"{error}. The state is in {rescued}") from None
    source.save(save, overwrite=overwrite)


def _converse(conversation: Chat, writer: _Writer) -> None:
    """Turns from stdin until its end, or Ctrl-C."""
    asking = sys.stdin.isatty()
    while not writer.interrupted:
        if asking:
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        if not line.strip():
            continue
        rereads_before = conversation.rereads
        writer.read(functools.partial(conversation.say, line.strip()))
        if rereads_before == 0 and conversation.rereads == 1:
            note = "note: the chat template writes earlier turns anew; where it does, the whole conversation is read again"
            print(note, file=sys.stderr)
        if conversation.stream.unread:
            return
        writer.write()
        writer.out("\n")


class _Ended(Exception):
    """Reading ends between two chunks."""


class _Writer:
    """Writes tokens as they come, and at the end what there is to say of them."""

    def __init__(self, source: Stream, most: int | None, *, goes_on: bool) -> None:
        self.source, self.most, self.goes_on = source, most, goes_on
        self.tokens, self.seconds = 0, 0.0
        self.interrupted, self.terminated = False, False

    def read(self, reading: Callable[..., object]) -> None:
        """Read with a bar; Ctrl-C and SIGTERM wait for the chunk at hand, and what is behind it stays unread."""

        def progress(done: int, total: int) -> None:
            update("prompt", done, total)
            if self.interrupted and done < total:
                raise _Ended

        with self._until_interrupted(), bars() as update, suppress(_Ended):
            reading(progress=progress)

    def write(self) -> None:
        """Tokens until the stream ends, the number is reached, or Ctrl-C or SIGTERM, which wait for the token at hand."""
        before, started, end = self.tokens, time.perf_counter(), ""
        with self._until_interrupted():
            for token in self.source:
                self.tokens += 1
                end, last = token.text, self.interrupted or self.tokens - before == self.most
                self.out(end)
                if last:
                    break
        self.seconds += time.perf_counter() - started
        # No token follows that would show what waits; a state that is saved goes on with it.
        waiting = "" if self.goes_on else self.source.rest()[0]
        self.out(waiting)
        if sys.stdout.isatty() and not (waiting or end).endswith("\n"):
            self.out("\n")

    def finish(self) -> None:
        """One line on stderr."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        left = f", {self.source.unread:,} of the prompt not read" if self.source.unread else ""
        place = f"position {self.source.position:,}; {self.source.telemetry()}{left}"
        say(f"{self.tokens:,} tokens, {speed:,.1f} tokens/s, {place}")

    def out(self, text: str) -> None:
        """Text on stdout, at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    @contextmanager
    def _until_interrupted(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the loop between two tokens, so that the state can be saved; the next interrupts."""

        def note(number: int, frame: object) -> None:
            if self.interrupted:
                signal.signal(number, before[signal.Signals(number)])
                signal.raise_signal(number)
            self.interrupted, self.terminated = True, number == signal.SIGTERM

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _text(prompt: str | None, file: Path | None, *, needed: bool) -> str | None:
    """The text to go on from; ``None`` if there is none and none is needed."""
    if prompt is not None and file is not None:
        raise ConfigurationError("give one of `prompt` and `file`")
    if prompt is not None:
        text, origin = prompt, "`prompt`"
    elif file is not None and str(file) != "-":
        text, origin = _text_of(file), str(file)
    elif not needed and file is None:
        return None
    elif sys.stdin.isatty():
        raise ConfigurationError("there is nothing to go on from; give `prompt`, `file` or `chat`, or pipe a text in")
    else:
        text, origin = sys.stdin.read(), "stdin"
    if not text:
        raise InputError(f"{origin} is empty; a stream needs a text to go on from")
    return text


def _text_of(file: Path) -> str:
    """The text of a file, or of a pipe, as shells make of ``<(…)``."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no UTF-8 text: {error.reason} at byte {error.start}") from error
