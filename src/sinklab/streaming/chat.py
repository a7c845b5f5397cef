"""Chat: a conversation in a stream, of which only the new tokens of each turn are read, and the system message stays."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError, InputError
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.stream import Stream

__all__ = ["PLAIN", "Chat"]

PLAIN = "User: {}\nAssistant:"
"""A turn where the tokenizer has no chat template; the model ends its own when it begins the next ``User:``."""

_PLAIN_STOP = "\nUser:"
_MARK = "\u241f"
"""Stands for the model's own words, to see what a template puts behind them."""


class Chat:
    """A conversation with a model, for ever: the system message is pinned, what was said long ago is evicted.

    Turns are written as the tokenizer's chat template has them. Without a template they are written as :data:`PLAIN`, behind
    the system message and an empty line.

    Args:
        model, settings: as :class:`~sinklab.streaming.stream.Stream` has them; a tokenizer is needed.
        system: system message; its tokens are never evicted, and the window counts besides.
        stream: one to go on with, loaded from a file, in place of ``system`` and ``settings``.

    Attributes:
        stream: what the turns are fed to.

    Raises:
        ConfigurationError: no tokenizer, a template that takes no system message, or one that does not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        system: str | None = None,
        stream: Stream | None = None,
        **settings: Any,
    ) -> None:
        tokenizer: Tokenizer | None = settings.get("tokenizer") if stream is None else stream.tokenizer
        if tokenizer is None:
            raise ConfigurationError("a conversation needs a tokenizer")
        if settings.get("keep") is not None or (stream is not None and system is not None):
            raise ConfigurationError("what a conversation keeps is its system message, given at its beginning")
        self.tokenizer, self._system = tokenizer, system
        self._template = bool(getattr(tokenizer, "chat_template", None))
        self._kept = "" if system is None else self._system_text(system)
        if stream is None:
            if not self._template:
                settings["stop"] = [*settings.get("stop", ()), _PLAIN_STOP]
            if self._kept:
                settings["keep"] = self._ids(self._kept, first=True)
            stream = Stream(model, **settings)
        self.stream = stream

    def say(self, text: str) -> Stream:
        """Give the model a turn of the user; the stream, whose next tokens are the answer.

        Raises:
            InputError: an empty turn.
        """
        if not text.strip():
            raise InputError("there is nothing to answer: the turn is empty")
        first = self.stream.position == 0
        written = self._opening(text) if first else self._next(text)
        ids = self._ids(written, first=first and not self._kept)
        # The model has said itself that it is done, with the token that the template puts there.
        if not first and ids[:1] == [self.stream.last_ids[0]] and ids[0] in self.stream.stop_ids:
            ids = ids[1:]
        return self.stream.feed(ids)

    def _opening(self, text: str) -> str:
        """The first turn, behind the system message."""
        if not self._template:
            return PLAIN.format(text)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._rendered([*system, {"role": "user", "content": text}], answer=True)[len(self._kept) :]

    def _next(self, text: str) -> str:
        """A later turn, with what ends the model's own."""
        if not self._template:
            return (" {}\nAssistant:" if self.stream.stopped_by_text[0] else "\n" + PLAIN).format(text)
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        return self._rendered([*before, {"role": "user", "content": text}], answer=True).partition(_MARK)[2]

    def _system_text(self, system: str) -> str:
        """What stands in front of the first turn: the same whatever that turn says."""
        if not self._template:
            return f"{system}\n\n"
        message = {"role": "system", "content": system}
        first, second = (self._rendered([message, {"role": "user", "content": word}], answer=False) for word in ("a", "b"))
        if system.strip() not in first:
            raise ConfigurationError("the tokenizer's chat template leaves the system message out; say it in the first turn")
        try:
            alone = self._rendered([message], answer=False)
        except ConfigurationError:
            alone = ""  # some templates want a user; then the head of the first turn is pinned too
        if alone and first.startswith(alone) and second.startswith(alone):
            return alone
        return first[: next(at for at, (left, right) in enumerate(zip(first, second, strict=False)) if left != right)]

    def _rendered(self, messages: list[dict[str, str]], *, answer: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except Exception as error:
            # A template is a program; what it raises on messages that it does not want is jinja's or anything else.
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error

    def _ids(self, text: str, *, first: bool) -> list[int]:
        # A template writes the special tokens itself.
        return self.tokenizer(text, add_special_tokens=first and not self._template)["input_ids"]
