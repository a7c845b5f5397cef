"""Chat: a conversation in a stream, of which only the new tokens of each turn are read, and the system message stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.loading import OPTIONS, GivenModel, model_and_tokenizer
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.stream import Stream

Messages: TypeAlias = list[dict[str, str]]

PLAIN = "User: {}\nAssistant:"
"""A turn where the tokenizer has no chat template; the model ends its own when it begins the next ``User:``."""

_PLAIN_STOP = "\nUser:"
_MARK = "\u241f"
"""Stands for the model's own words, to see what a template puts behind them."""


class Chat:
    """A conversation with a model, for ever: the system message is pinned, what was said long ago is evicted.

    Turns are written as the tokenizer's chat template has them. Without a template they are written as :data:`PLAIN`, behind
    the system message and an empty line. Of every turn only what is new is read, as long as the template writes the
    conversation so far as it has written it before. Some do not: they drop the thoughts of earlier answers, or what they put
    in front of the answer to come. Then all of it is read again, as it is written now (``rereads`` counts).

    A template that refuses a system message, or leaves it out, gets it in front of the first turn, and an empty line. One that
    moves it along to the newest turn has it in the first turn and there it stays, in front of all.

    Args:
        model, settings: as :class:`~sinklab.streaming.stream.Stream` has them.
        system: system message; its tokens are never evicted, and the window counts besides.
        stream: one to go on with, loaded from a file, in place of ``system`` and ``settings``. What was said in it is not
            known, so its earlier turns stay as they were read.

    Raises:
        ConfigurationError: no tokenizer, or a template that does not fit.
    """

    def __init__(self, model: GivenModel, *, system: str | None = None, stream: Stream | None = None, **settings: Any) -> None:
        tokenizer: Tokenizer | None = None if stream is None else stream.tokenizer
        if stream is None:
            loading = {name: settings.pop(name) for name in OPTIONS & settings.keys()}
            model, tokenizer = model_and_tokenizer(model, settings.get("tokenizer"), **loading)
            settings["tokenizer"] = tokenizer
        if tokenizer is None:
            raise ConfigurationError("a conversation needs a tokenizer")
        if settings.get("keep") is not None or (stream is not None and system is not None):
            raise ConfigurationError("what a conversation keeps is its system message, given at its beginning")
        self.tokenizer, self._system, self.rereads = tokenizer, system, 0
        self._template = bool(getattr(tokenizer, "chat_template", None))
        self._said: Messages = []  # all turns so far, which are text and take little room
        self._written: str | None = None  # how the template wrote them last; None where that is not known
        self._folded = self._moved = False
        self._kept = "" if system is None else self._head(system)
        self._kept_ids = self._ids(self._kept, first=True) if self._kept else []
        if stream is None:
            if not self._template:
                settings["stop"] = [*settings.get("stop", ()), _PLAIN_STOP]
            if self._kept:
                settings["keep"] = self._kept_ids
            stream = Stream(model, **settings)
        self.stream = stream

    def __repr__(self) -> str:
        return f"Chat({self.stream!r})"

    def say(self, text: str, *, progress: Callable[[int, int], None] | None = None) -> Stream:
        """Give the model a turn of the user; the stream, whose next tokens are the answer. See :meth:`Stream.feed`.

        Raises:
            InputError: an empty turn.
        """
        if not text.strip():
            raise InputError("there is nothing to answer: the turn is empty")
        first, turn = self.stream.position == 0, {"role": "user", "content": text}
        behind: str | None
        if not self._template:
            more = "" if first else " {}\nAssistant:" if self.stream.stopped_by_text[0] else "\n" + PLAIN
            behind = (more or PLAIN).format(text)
        elif first:
            self._said = [turn]
            self._written = self._render(self._said)
            behind = self._written[len(self._kept) :]
        elif self._written is None:
            behind = self._next(text)
        else:
            answer = self._answer()
            said: Messages = [*self._said, {"role": "assistant", "content": answer}, turn]
            written = self._render(said)
            behind = _behind(written, self._written, answer)
            self._said, self._written = said, written
            if behind is None:
                return self._read_again(written, progress)
        ids = self._ids(behind, first=first and not self._kept)
        # The model has said itself that it is done, with the token that the template puts there.
        if not first and ids[:1] == [self.stream.last_ids[0]] and ids[0] in self.stream.stop_ids:
            ids = ids[1:]
        self.stream.record = []
        return self.stream.feed(ids, progress=progress)

    def _answer(self) -> str:
        """What the model has said since the last turn, without the token that ended it."""
        ids = self.stream.record or []
        if ids and ids[-1] in self.stream.stop_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def _read_again(self, written: str, progress: Callable[[int, int], None] | None) -> Stream:
        """Begin the stream anew with the conversation as it is written now."""
        self.rereads += 1
        head = self._kept
        if not written.startswith(head) and self._system is not None:
            head = self._head(self._system)  # it may have the date in it; what is pinned stays as it was
        self.stream.record = []
        ids = [*self._kept_ids, *self._ids(written[len(head) :], first=False)]
        return self.stream.restart().feed(ids, progress=progress)

    # --- how it is written ---------------------------------------------------------------------------------------------------

    def _render(self, turns: Messages) -> str:
        """The conversation as the template has it, the system message in front, up to where the answer begins."""
        if self._system is None:
            return self._rendered(turns, answer=True)
        if self._folded:
            return self._rendered(_folded(self._system, turns), answer=True)
        if self._moved:
            return self._kept + self._rendered(turns, answer=True)[len(self._common([])) :]
        return self._rendered([{"role": "system", "content": self._system}, *turns], answer=True)

    def _next(self, text: str) -> str:
        """A later turn, with what ends the model's own, whatever was said before."""
        return self._rendered(_turns(".", _MARK, text), answer=True).partition(_MARK)[2]

    def _head(self, system: str) -> str:
        """What stands in front of the first turn, the system message in it: the same whatever that turn says."""
        if not self._template:
            return f"{system}\n\n"
        message = {"role": "system", "content": system}
        try:
            head = self._common([message])
        except ConfigurationError:
            head = ""
        if system.strip() not in head:
            self._folded = True
            head = self._common([], system)
            if system.strip() not in head:
                raise ConfigurationError(
                    "the tokenizer's chat template leaves the system message out, also in front of the first turn; say it there"
                )
            return head
        try:
            alone = self._rendered([message], answer=False)
        except ConfigurationError:
            alone = ""  # some templates want a user; then the head of the first turn is pinned too
        head = alone if system.strip() in alone and head.startswith(alone) else head
        self._moved = not self._rendered([message, *_turns(".", ".", ".")], answer=True).startswith(head)
        return head

    def _common(self, before: Messages, system: str | None = None) -> str:
        """The beginning of a conversation with these messages in front that does not depend on its first turn."""
        turns = [_turns(word) if system is None else _folded(system, _turns(word)) for word in ("a", "b")]
        first, second = (self._rendered([*before, *turn], answer=False) for turn in turns)
        differs = (at for at, (left, right) in enumerate(zip(first, second, strict=False)) if left != right)
        return first[: next(differs, min(len(first), len(second)))]

    def _rendered(self, messages: Messages, *, answer: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except Exception as error:
            # A template is a program; what it raises on messages that it does not want is jinja's or anything else.
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error

    def _ids(self, text: str, *, first: bool) -> list[int]:
        # A template writes the special tokens itself.
        return self.tokenizer(text, add_special_tokens=first and not self._template)["input_ids"]


def _turns(*contents: str) -> Messages:
    """What user and assistant say by turns."""
    return [{"role": "assistant" if at % 2 else "user", "content": content} for at, content in enumerate(contents)]


def _folded(system: str, turns: Messages) -> Messages:
    """Turns of which the first has the system message in front."""
    return [{**turns[0], "content": f"{system.strip()}\n\n{turns[0]['content']}"}, *turns[1:]]


def _behind(written: str, before: str, answer: str) -> str | None:
    """What a template puts behind an answer, in a conversation that it wrote as ``before`` until then."""
    if not written.startswith(before):
        return None
    rest, said = written[len(before) :], answer.strip()
    if rest.startswith(answer):
        return rest[len(answer) :]
    rest = rest.lstrip()
    return rest[len(said) :] if rest.startswith(said) else None
