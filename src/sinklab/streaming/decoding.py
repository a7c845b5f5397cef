"""Decoding: the text of a stream of token ids, piece by piece, from the last few ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypedDict

__all__ = ["DecoderState", "TextDecoder", "Tokenizer"]

_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

_HELD = 16
"""Ids that may wait for the end of a character. One token often begins what the next one ends, and a few in a row may straddle
characters; a longer run is bytes that are no text, and is given out as such."""

_CONTEXT = 8
"""Ids in front of the first piece that it is decoded with."""


class Tokenizer(Protocol):
    """What streams ask of a tokenizer of transformers."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """``input_ids`` of a text."""

    def decode(self, token_ids: Sequence[int], **settings: bool) -> str:
        """The text of ids."""

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        """The text of a conversation."""


class DecoderState(TypedDict):
    """What a decoder holds between two tokens, as JSON."""

    ids: list[int]
    known: int
    back: str
    stopped: bool


class TextDecoder:
    """Decodes ids to text as they come: a character appears with its last byte, a space where the tokenizer puts one.

    What might be the beginning of a stop string is held back until it is decided.

    Args:
        tokenizer: of transformers; special tokens are left out of the text.
        stop: strings at which the text ends; they are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self._ids: list[int] = []  # those last given out, as context, and those that wait
        self._known = 0  # so many of them are context
        self._back = ""  # characters held back for the sake of a stop string
        self.stopped = False

    def follow(self, ids: Sequence[int]) -> None:
        """What comes next follows these ids, whose text is not repeated."""
        self._ids, self._back, self.stopped = list(ids)[-_CONTEXT:], "", False
        while self._ids and self._text(self._ids).startswith(_UNFINISHED):  # cut in the middle of a character
            del self._ids[0]
        self._known = len(self._ids)
        while self._known and self._text(self._ids[: self._known]).endswith(_UNFINISHED):  # and what comes may end one
            self._known -= 1

    def push(self, token: int) -> str:
        """Characters that are complete with this token; '' if there are none."""
        self._ids.append(token)
        text = self._text(self._ids)
        if text.endswith(_UNFINISHED) and len(self._ids) - self._known < _HELD:
            return ""
        # The next piece is separated from the text of these ids, not from nothing: some tokenizers drop a space in front.
        new = text[len(self._text(self._ids[: self._known])) :]
        self._ids = self._ids[self._known :] if new else self._ids[-_HELD:]  # special tokens have no text to go on from
        self._known = len(self._ids)
        return self._until_stop(new)

    def rest(self) -> str:
        """What is still held back, now that nothing follows."""
        text = self._back + self._text(self._ids)[len(self._text(self._ids[: self._known])) :]
        self._known, self._back = len(self._ids), ""
        return "" if self.stopped else text

    def state(self) -> DecoderState:
        """What :meth:`restore` takes; JSON."""
        return {"ids": self._ids, "known": self._known, "back": self._back, "stopped": self.stopped}

    def restore(self, state: DecoderState) -> None:
        """Go on where another decoder was."""
        self._ids, self._known, self._back = list(state["ids"]), state["known"], state["back"]
        self.stopped = state["stopped"]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _until_stop(self, new: str) -> str:
        text = self._back + new
        ends = [end for end in map(text.find, self.stop) if end >= 0]
        if ends:
            self.stopped, self._back = True, ""
            return text[: min(ends)]
        beginnings = (string[:size] for string in self.stop for size in range(1, len(string)))
        self._back = max((start for start in beginnings if text.endswith(start)), key=len, default="")
        return text.removesuffix(self._back)
