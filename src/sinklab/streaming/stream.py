"""Stream: tokens for ever, from a model that holds no more than a policy lets it; ``generate()`` keeps every id and mask."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.modules import input_device
from sinklab.errors import ConfigurationError, InputError, require_known
from sinklab.models.loading import OPTIONS, GivenModel, model_and_tokenizer
from sinklab.models.tokenizer import GivenTokenizer
from sinklab.policies.base import PolicySpec
from sinklab.results.environment import require_whole
from sinklab.streaming.base import Reader, Telemetry
from sinklab.streaming.decoding import Sampler, Sampling, StreamedToken, TextDecoder, Tokenizer
from sinklab.streaming.host import BOUNDARIES, require_one_text
from sinklab.streaming.limits import fitting_policy, inside
from sinklab.streaming.reader import open_reader
from sinklab.streaming.state import read_state, save_state

Given: TypeAlias = str | Tensor | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Any]
"""What may be fed: a text or its ids, or one of them for each row of a batch."""

_Texts: TypeAlias = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]

_UNREAD = ("unread", "unread_valid")
"""Tensors of a saved state, where a prompt was read in part."""


class Stream:
    """A model that goes on for ever: feed it, take tokens, feed it again; between tokens nothing grows.

    Greedy tokens are those of ``model.generate(cache=SinkCache(…), do_sample=False)`` with the same policy.

    Args:
        model: a decoder with a language-model head, in evaluation mode; its name, or what ``load_model`` gives.
        policy: the policy, its name, ``{"name": …, setting: …}``, or a reader to go on with. By default sinks and a window
            that fit the model, see :func:`fitting_policy`.
        tokenizer: of transformers, needed for text in or out; by default the model's own.
        temperature, top_k, top_p, seed: see :class:`~sinklab.streaming.decoding.Sampling`; by default the likeliest token.
        stop: strings at which a row ends.
        stop_ids: tokens with which a row ends; by default those of the model's generation config, ``()`` for none.
        keep: text (or ids) that begins the stream and is never evicted, such as a system prompt. The policy's ``num_sinks`` is
            raised to its number of tokens, and the window counts besides.
        chunk: most tokens of a prompt that are read at once; the result does not depend on it.
        loading: as of :func:`sinklab.load_model`, for a model that is named.

    Attributes:
        record: a list that every token of the first row is put into as it is given out; ``None`` by default.

    Raises:
        ConfigurationError: settings that do not fit together, or ``keep`` that does not fit the policy or the model.
        UnsupportedModelError: the policy cannot be had with this model.
    """

    def __init__(
        self,
        model: GivenModel,
        *,
        policy: PolicySpec | Reader | None = None,
        tokenizer: Tokenizer | GivenTokenizer | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        keep: str | Sequence[int] | None = None,
        chunk: int = 128,
        **loading: Any,
    ) -> None:
        require_known("Stream", loading, [*inspect.signature(Stream).parameters, *OPTIONS])
        model, tokenizer = model_and_tokenizer(model, tokenizer, **loading)
        model = inside(model)
        require_whole("chunk", chunk, 1)
        if isinstance(stop, str) or "" in stop:
            raise ConfigurationError(f"stop is a list of strings that are not empty; got {stop!r}")
        if stop and tokenizer is None:
            raise ConfigurationError(f"stop strings {list(stop)} need a tokenizer; give one, or stop_ids")
        self.model, self.tokenizer, self.stop, self.chunk = model, tokenizer, tuple(stop), chunk
        if stop_ids is None:
            end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
            stop_ids = [] if end is None else [end] if isinstance(end, int) else list(end)
        self.stop_ids = frozenset(stop_ids)
        self._sampler = Sampler(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed), input_device(model))
        self._decoders: list[TextDecoder] = []
        self._logits: Tensor | None = None  # for the next token, (batch, vocab_size), once all is read
        self._pending: Tensor | None = None  # tokens that were given out and are not read yet, (batch,)
        self._valid = torch.empty(0, dtype=torch.bool)  # rows of which that is a token and no padding
        self._unread: tuple[Tensor, Tensor] | None = None  # what is left of a prompt, and which of it are tokens
        self._ended: list[bool] = []
        self.record: list[int] | None = None
        self._kept = [] if keep is None else self._encode(keep, first=True)
        if isinstance(policy, Reader):
            if self._kept:
                raise ConfigurationError("keep must begin a stream; this one goes on with a reader")
            self.reader = policy
        else:
            self.reader = open_reader(model, fitting_policy(model, policy, pinned=len(self._kept)), chunk=chunk)

    # --- in ------------------------------------------------------------------------------------------------------------------

    def feed(
        self, given: Given, attention_mask: Tensor | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Stream:
        """Read more text, and let rows that had ended go on; returns the stream.

        Args:
            given: text, ids ``(length,)`` or ``(batch, length)``, or a list of texts or of ids, one a row, which are padded on
                the left; or what a tokenizer returns, with its mask. The tokenizer adds its special tokens to a text that
                begins the stream, and to no other.
            attention_mask: ``(batch, length)`` of these ids: 1 for tokens and 0 for padding; the last column has none of it.
            progress: called after every chunk with the columns read and their number. What it raises ends the reading there:
                the stream can be saved, and the next :meth:`read_on`, :meth:`feed` or :meth:`step` reads the rest first.

        Raises:
            InputError: nothing to read, text without a tokenizer, or ids that the model does not have.
            ConfigurationError: another number of rows than before, or several documents packed into a row.
        """
        ids, mask = self._rows(given, attention_mask)
        if self._ended and len(ids) != len(self._ended):
            raise ConfigurationError(f"the stream has {len(self._ended)} rows and is fed {len(ids)}; begin another one")
        if not self._ended:
            self._decoders = [TextDecoder(self.tokenizer, self.stop) for _ in ids] if self.tokenizer is not None else []
        for row, decoder in enumerate(self._decoders):
            decoder.follow(ids[row][mask[row]].tolist())
        if self._unread is not None:
            ids, mask = (torch.cat(pair, dim=1) for pair in zip(self._unread, (ids, mask), strict=True))
        elif self._pending is not None:
            ids = torch.cat((self._pending[:, None], ids), dim=1)
            mask = torch.cat((self._valid[:, None], mask), dim=1)
        self._unread = ids, mask
        return self.read_on(progress=progress)

    def read_on(self, *, progress: Callable[[int, int], None] | None = None) -> Stream:
        """Read what a :meth:`feed` that was ended within has left, if anything, with its ``progress``; returns the stream."""
        total = self.unread
        while self._unread is not None:
            (ids, mask), self._unread = self._unread, None  # what a model refuses is not read again
            size = self.chunk
            self._read(ids[:, :size], mask[:, :size])
            self._ended = [False] * len(ids)
            if ids.shape[1] > size:
                self._unread = ids[:, size:], mask[:, size:]
            if progress is not None:
                progress(total - self.unread, total)
        return self

    def restart(self) -> Stream:
        """Forget what has been read, and what was given out; the next :meth:`feed` begins a text, whose first tokens are pinned
        as before. Draws go on. Returns the stream."""
        self.reader.reset()
        self._decoders, self._ended = [], []
        self._logits = self._pending = self._unread = None
        return self

    def _read(self, ids: Tensor, valid: Tensor) -> None:
        mask = None if bool(valid.all()) else valid.long()
        self._logits, self._pending = self.reader.read(ids, mask, keep=1)[:, -1], None

    def _rows(self, given: Given, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids and which of them are tokens, ``(batch, length)`` on the CPU."""
        given, mask = _unpacked(given, mask)
        ids, valid = _from_ids(given, mask) if isinstance(given, Tensor) else self._from_lists(given, mask)
        if not ids.numel() or not bool(valid.any(dim=1).all()):
            raise InputError("there is nothing to read: a prompt needs a token or more in every row")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise InputError(f"token ids go from {int(ids.min())} to {int(ids.max())}, and the model has 0 to {vocabulary - 1}")
        if self._kept:
            ids, valid = _padded([self._kept + row[real].tolist() for row, real in zip(ids, valid, strict=True)])
            self._kept = []
        return ids.long(), valid

    def _from_lists(self, given: _Texts, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids and which of them are tokens, of a text or a list of ids, or of several, which are padded on the left."""
        if mask is not None:
            raise InputError("an attention_mask goes with a tensor of ids; lists are padded here")
        several = not isinstance(given, str) and len(given) > 0 and not isinstance(given[0], numbers.Integral)
        texts = cast("Sequence[str | Sequence[int]]", given if several else [given])
        first = not self.reader.position and not self._kept
        return _padded([self._encode(text, first=first) for text in texts])

    def _encode(self, given: str | Sequence[int], *, first: bool) -> list[int]:
        """Ids of a text, with special tokens if it is the first, but no second BOS in front of that of a chat template."""
        if not isinstance(given, str):
            return list(given)
        if self.tokenizer is None:
            raise InputError("text needs a tokenizer; give one, or token ids")
        ids, bos = self.tokenizer(given, add_special_tokens=first)["input_ids"], self.tokenizer.bos_token_id
        return ids[1:] if first and bos is not None and ids[:2] == [bos, bos] else ids

    # --- out -----------------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether all rows have ended; :meth:`feed` lets them go on."""
        return bool(self._ended) and all(self._ended)

    @property
    def position(self) -> int:
        """Index of the next token in the stream, prompt and padding counted."""
        return self.reader.position + self.unread + (self._pending is not None)

    @property
    def unread(self) -> int:
        """Columns of a prompt that are still to be read, after a :meth:`feed` that was ended within."""
        return 0 if self._unread is None else self._unread[0].shape[1]

    @property
    def last_ids(self) -> tuple[int | None, ...]:
        """Token that each row was given last, unless more has been fed since; ``None`` in a row that had ended before."""
        if self._pending is None:
            return (None,) * len(self._ended)
        pairs = zip(self._pending.tolist(), self._valid.tolist(), strict=True)
        return tuple(token if valid else None for token, valid in pairs)

    @property
    def stopped_by_text(self) -> tuple[bool, ...]:
        """Whether each row has ended with a stop string."""
        return tuple(decoder.stopped for decoder in self._decoders)

    def step(self) -> StreamedToken:
        """The next token of every row.

        Raises:
            ConfigurationError: nothing has been fed yet, or all rows have ended.
            InputError: the model's logits are not numbers.
        """
        if not self._ended:
            raise ConfigurationError("the stream has nothing to go on from; feed() it a prompt")
        if self.ended:
            raise ConfigurationError("every row of the stream has ended; feed() it more text")
        self.read_on()
        if self._pending is not None:
            self._read(self._pending[:, None], self._valid[:, None])
        assert self._logits is not None
        position, chosen = self.reader.position, self._sampler(self._logits).cpu()
        self._valid = ~torch.tensor(self._ended)
        self._pending, self._logits = chosen.where(self._valid, chosen.new_zeros(())), None
        ids = [None if over else token for over, token in zip(self._ended, chosen.tolist(), strict=True)]
        texts = [""] * len(ids)
        for row, token in enumerate(ids):
            if token is None:
                continue
            stops = token in self.stop_ids
            if self._decoders:
                decoder = self._decoders[row]
                texts[row] = decoder.push(token) + (decoder.rest() if stops else "")
                stops |= decoder.stopped
            self._ended[row] = stops
        if self.record is not None and ids[0] is not None:
            self.record.append(ids[0])
        return StreamedToken(tuple(ids), tuple(texts), position, tuple(self._ended))

    def __iter__(self) -> Iterator[StreamedToken]:
        """Tokens until all rows have ended."""
        while not self.ended:
            yield self.step()

    def generate(self, count: int) -> list[StreamedToken]:
        """The next ``count`` tokens, or fewer if all rows end before."""
        if count < 1:
            raise ConfigurationError(f"count {count} must be 1 or more")
        return list(itertools.islice(self, count))

    def rest(self) -> tuple[str, ...]:
        """Text of each row that waits for the next token, because a character or a stop string may be in the making."""
        return tuple(decoder.rest() for decoder in self._decoders) or ("",) * len(self._ended)

    def __repr__(self) -> str:
        return f"Stream({type(self.model).__name__} at position {self.position:,}; {self.telemetry()})"

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone; see :class:`~sinklab.streaming.base.Telemetry`."""
        return self.reader.telemetry()

    # --- saved ----------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write everything that is needed to go on with the same tokens; see :func:`~sinklab.streaming.state.save_state`."""
        if not self._ended:
            raise ConfigurationError("the stream has read nothing yet, so there is no state to save")
        sampler = self._sampler
        tensors = {"valid": self._valid, "generator": sampler.generator.get_state()}
        tensors |= {"pending": self._pending} if self._pending is not None else {}
        if self._unread is not None:
            tensors |= dict(zip(_UNREAD, self._unread, strict=True))
        elif self._logits is not None:
            tensors["logits"] = self._logits
        settings = {**dataclasses.asdict(sampler.sampling), "stop": self.stop, "stop_ids": sorted(self.stop_ids)}
        settings["chunk"] = self.chunk
        notes = {"settings": settings, "ended": self._ended, "text": [decoder.state() for decoder in self._decoders]}
        save_state(self.reader, path, notes=notes, tensors=tensors, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path, model: GivenModel, *, tokenizer: Tokenizer | None = None, **changes: Any) -> Stream:
        """Go on with a stream that :meth:`save` wrote, with the same model and tokenizer.

        ``changes`` are other settings than before, but for the policy and what is kept; a change of the sampling begins its
        draws anew, and to temperature 0 ends them. A file of another model is an :class:`InputError`.
        """
        if fixed := changes.keys() & {"policy", "keep"}:
            raise ConfigurationError(f"{min(fixed)} cannot change a stream that goes on; begin another one")
        loading = {name: changes.pop(name) for name in OPTIONS & changes.keys()}
        model, tokenizer = model_and_tokenizer(model, tokenizer, **loading)
        reader, notes, tensors = read_state(path, model)
        if "settings" not in notes:
            raise InputError(f"{path} is the state of a cache and not of a stream; load it with load_state()")
        settings = notes["settings"]
        if changes.get("temperature", settings["temperature"]) == 0:  # what was said of draws would have no effect
            settings = {name: value for name, value in settings.items() if name not in ("top_k", "top_p", "seed")}
        loaded = cls(model, policy=reader, tokenizer=tokenizer, **{**settings, **changes})
        loaded._ended, loaded._valid = list(notes["ended"]), tensors["valid"]
        loaded._pending, loaded._logits = tensors.get("pending"), tensors.get("logits")
        if _UNREAD[0] in tensors:
            loaded._unread = tensors[_UNREAD[0]], tensors[_UNREAD[1]]
        if not changes.keys() & {"temperature", "top_k", "top_p", "seed"}:
            loaded._sampler.generator.set_state(tensors["generator"].cpu())
        if tokenizer is not None:
            loaded._decoders = [TextDecoder(tokenizer, loaded.stop) for _ in loaded._ended]
            for decoder, state in zip(loaded._decoders, notes["text"], strict=False):
                decoder.restore(state)
        return loaded


def stream(model: GivenModel, prompt: Given, *, max_new_tokens: int | None = None, **settings: Any) -> Iterator[StreamedToken]:
    """Tokens behind a prompt, for ever, in constant memory; the last one comes with all of its text.

    Args:
        prompt: text or ids, of any length; a list of them makes a batch.
        max_new_tokens: end after so many; otherwise only stop tokens and stop strings end it.
        settings: as :class:`Stream` has them.
    """
    if max_new_tokens is not None:
        require_whole("max_new_tokens", max_new_tokens, 1)
    return _tokens(Stream(model, **settings).feed(prompt), max_new_tokens)


def _tokens(source: Stream, count: int | None) -> Iterator[StreamedToken]:
    """So many tokens of a stream; the last one has what waits of its text."""
    for number, token in enumerate(source, 1):
        if number == count:
            texts = tuple(text + rest for text, rest in zip(token.texts, source.rest(), strict=True))
            yield dataclasses.replace(token, texts=texts)
            return
        yield token


def _unpacked(given: Given, mask: Tensor | None) -> tuple[Tensor | _Texts, Tensor | None]:
    """Ids as a tensor with their mask, of what a tokenizer returns or of an array; texts and lists as they are."""
    if isinstance(given, np.ndarray):
        return torch.as_tensor(given), mask
    if not isinstance(given, Mapping):
        return given, mask
    mask = given.get("attention_mask") if mask is None else mask
    names = ("position_ids", *BOUNDARIES)
    try:
        beside = {name: torch.as_tensor(given[name]) for name in names if given.get(name) is not None}
        ids, mask = torch.as_tensor(given["input_ids"]), None if mask is None else torch.as_tensor(mask)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"what a tokenizer returns is read as rows of `input_ids` of one length ({error}); pad on the left"
        ) from None
    require_one_text({**beside, "attention_mask": mask})
    return ids, mask


def _from_ids(given: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids ``(batch, length)`` and which of them are tokens, on the CPU, of a tensor of one row or more."""
    ids = given.cpu()[None] if given.ndim == 1 else given.cpu()
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids are an integer tensor (batch, length); got {ids.dtype} of shape {tuple(ids.shape)}")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu().bool()
    if valid.shape != ids.shape or not bool(valid[:, -1:].all()):
        raise InputError(
            f"attention_mask must have the shape of the ids, {tuple(ids.shape)}, and end with a token in every row: "
            "pad on the left"
        )
    return ids, valid


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor ``(batch, longest)``, padded on the left, and which of it is no padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], dtype=torch.long)
    return ids, torch.arange(longest) >= torch.tensor([longest - len(row) for row in rows])[:, None]
