"""Decoding: from the logits of a step to the next tokens, and from tokens to text; nothing grows from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.environment import require_number, require_whole

_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

_HELD = 16
"""Ids that may wait for the end of a character. One token often begins what the next one ends, and a few in a row may straddle
characters; a longer run is bytes that are no text, and is given out as such."""

_CONTEXT = 8
"""Ids in front of the first piece that it is decoded with."""


class Tokenizer(Protocol):
    """What streams ask of a tokenizer of transformers."""

    @property
    def bos_token_id(self) -> int | None:
        """What a text begins with."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """``input_ids`` of a text."""

    def decode(self, token_ids: Sequence[int], **settings: bool) -> str:
        """The text of ids."""

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        """The text of a conversation."""


DecoderState: TypeAlias = dict[str, Any]
"""What a decoder holds between two tokens, as JSON."""


class TextDecoder:
    """Decodes ids to text as they come: a character appears with its last byte, a space where the tokenizer puts one.

    What might be the beginning of a stop string is held back until it is decided. Special tokens are left out of the text, and
    so are the strings ``stop`` at which it ends.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the words mean what they mean in transformers' ``generate()``.

    Penalties for repetition are not offered: they look at every token so far, and a stream does not keep those.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it before one is drawn.
        top_k: draw from so many of the likeliest tokens.
        top_p: draw from the likeliest tokens that together have this probability, above 0 and at most 1.
        seed: of the draws, which are those of ``generate()`` after ``torch.manual_seed(seed)``.

    Raises:
        ConfigurationError: a value out of range, or one that would have no effect at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature)
        if self.top_k is not None:
            require_whole("top_k", self.top_k, 1)
        if self.top_p is not None:
            require_number("top_p", self.top_p)
        require_whole("seed", self.seed, 0)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(f"temperature {self.temperature} must be 0 (the likeliest token) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p {self.top_p} must be above 0 and at most 1")
        given = next((name for name in ("top_k", "top_p", "seed") if getattr(self, name) not in (None, 0)), None)
        if self.temperature == 0 and given:
            raise ConfigurationError(f"{given} has no effect at temperature 0, which takes the likeliest token")


class Sampler:
    """Chooses tokens as a :class:`Sampling` says; draws go on from call to call.

    Attributes:
        generator: source of the draws; its state is what must be kept to go on with the same ones.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device).manual_seed(sampling.seed)
        self._warpers = LogitsProcessorList()
        # The order of generate(): which tokens top_p leaves depends on what came before it.
        if sampling.temperature not in (0, 1):
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token of every row, int64 ``(batch,)``, from finite logits ``(batch, vocab_size)``."""
        logits = logits.to(torch.float32)
        # NaN wins a maximum, and a row that is hidden altogether has none that is finite.
        if not bool(logits.amax(dim=-1).isfinite().all()):
            raise InputError(
                "the model's logits are NaN or infinite, so there is no next token; try dtype float32, or audit the checkpoint"
            )
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1)
        no_ids = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)  # none of these warpers looks at them
        scores = self._warpers(no_ids, logits)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=self.generator)[:, 0]


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StreamedToken:
    """One new token in every row that has not ended.

    Attributes:
        ids: token of each row; ``None`` in a row that had ended before.
        texts: characters that are complete with it, '' without a tokenizer; together the text of the row up to its stop
            string, special tokens left out.
        position: its index in the stream, prompt and padding counted.
        ended: whether each row has ended, with this token or before.
    """

    ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    position: int
    ended: tuple[bool, ...]

    @property
    def id(self) -> int:
        """The token of the only row."""
        return cast(int, self._only(self.ids))  # it has not ended before

    @property
    def text(self) -> str:
        """The text of the only row."""
        return self._only(self.texts)

    def _only(self, of_rows: tuple[T, ...]) -> T:
        if len(of_rows) > 1:
            raise ConfigurationError(f"this stream has {len(of_rows)} rows; ask for .ids and .texts")
        return of_rows[0]
