"""Policy cache: a key-value cache for transformers decoders that holds what a policy says, however long the text gets."""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar, cast

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.registry import policies
from sinklab.streaming.host import Planner, generating_model, hook, kept_logits, kept_tensors, split, tokens_of
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.ordered import OrderedBooks, OrderedLayer, has_ordered_bias, require_ordered
from sinklab.streaming.policy import Policy, SlotPolicy
from sinklab.streaming.quantized import QuantizedLayer
from sinklab.streaming.refusals import extent, require_decoder, require_positions
from sinklab.streaming.rotation import KeyRotations, read_rotations
from sinklab.streaming.static import StaticStep, static_step
from sinklab.streaming.step import Books
from sinklab.streaming.telemetry import Telemetry, cache_telemetry, describe_slots, note_ids

__all__ = ["PolicyCache", "SinkCache"]

_REBASE, _REBASE_HALF = 2_048, 32_768
"""Position at which positions are counted anew. Models compute angles in float32, off by up to 6e-8 times the position: below
2,048 that moves the logits of the small models of the tests by 1e-4 at most, and by 3e-2 at a million. Keys of 16 bits are
rounded by more than the angles are up to 32,768, and once more whenever they are moved."""


class PolicyCache(Cache, Planner):
    """The cache of a policy, for one model; pass it as ``past_key_values``.

    One forward may hold one token or many, a prompt longer than the cache included: it is processed in chunks, and the
    result does not depend on their size. Rows of a batch may be padded on either side, given a 2-D ``attention_mask``.
    Positions are the cache's own: whatever ``position_ids`` a caller gives are replaced.

    Args:
        policy: what is held, a :class:`SlotPolicy`.
        model: the model; if it is left out, the first one that is given the cache.
        chunk: most tokens that are processed at once; more make a prompt faster and take more memory.
        rebase_at: positions are counted from the oldest token held as soon as they would reach this. By default 2,048, or
            twice what the policy holds and a chunk, 32,768 for keys of 16 bits; less where the model's frequencies change with
            the position or come from a table.

    Raises:
        ConfigurationError: sizes that do not fit together, a cache used with another model or batch size, gradients.
        UnsupportedModelError: see :func:`read_rotations`; also linear attention, encoder-decoders, sliding windows smaller than
            what the policy holds, and attention functions that take no 4-D mask.

    Attributes:
        ids: token id in every slot, int64 ``(batch, slots)``, -1 where embeddings were given.
        static: whether the forward at hand is compiled; its steps are then those of :mod:`sinklab.streaming.static`.
    """

    takes: ClassVar[Any] = SlotPolicy

    def __init__(
        self,
        policy: Policy,
        model: PreTrainedModel | None = None,
        *,
        chunk: int = 128,
        rebase_at: int | None = None,
        quantized: bool = False,
    ) -> None:
        if not isinstance(policy, self.takes):
            raise ConfigurationError(
                f"{type(self).__name__} takes a {self.takes.__name__}, and policy {policy.name!r} is none; "
                "open_reader(model, policy) picks what a policy needs"
            )
        if chunk < 1:
            raise ConfigurationError(f"chunk {chunk} must be 1 or more")
        super().__init__(layers=[])
        self.policy: Any = policy
        self.chunk, self.rebase_at, self.quantized = chunk, rebase_at, quantized
        self.step: Any = None
        self.ids: Tensor | None = None
        self._books: Any = None
        self._model: weakref.ref[PreTrainedModel] | None = None
        self._parts: list[Any] = []
        self._kept = 0
        self._unfinished = False
        self.static = False
        self._static: StaticStep | None = None
        if model is not None:
            self.bind(model)

    # --- the model -----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that the cache belongs to."""
        return None if self._model is None else self._model()

    @property
    def books(self) -> Any:
        """Which token is in which slot, :class:`Books` or what does its work."""
        if self._books is None:
            self.bind(generating_model())
        assert self._books is not None
        return self._books

    def bind(self, model: PreTrainedModel) -> PolicyCache:
        """Take the model's layers, rotations and limits; its forward is told what this cache sees from now on.

        Raises:
            ConfigurationError: it is bound to another model, or ``rebase_at`` leaves no room.
            UnsupportedModelError: as the class says.
        """
        if self.model is model:
            return self
        if self._model is not None:
            raise ConfigurationError(self._belongs())
        require_decoder(model, self.policy)
        self._fit(model)
        self._model = weakref.ref(model)
        hook(model)
        return self

    def _fit(self, model: PreTrainedModel) -> None:
        """Make layers and books for a model."""
        if has_ordered_bias(model):
            require_ordered(self.policy, model)
            if self.quantized:
                raise ConfigurationError(
                    f"quantized is for keys in slots; {type(model).__name__} needs them in the order of the text"
                )
            self.layers = [OrderedLayer(self) for _ in range(model.config.get_text_config().num_hidden_layers)]
            self._books, self.rebase_at = OrderedBooks(self.policy, model.device), sys.maxsize
            return
        rotations = self._fit_positions(model)
        kind = QuantizedLayer if self.quantized else SlotLayer
        self.layers = [kind(self, rotation) for rotation in rotations.layers.values()]
        self._books = Books(self.policy, model.device)

    def _fit_positions(self, model: PreTrainedModel) -> KeyRotations:
        """Rotations of the keys of all layers; from now on positions stay below what the model can tell apart."""
        config = model.config.get_text_config()
        rotations = read_rotations(model)
        require_positions(self.policy, rotations.limit, type(model).__name__)
        reach = self.policy.reach
        room = reach + self.chunk
        usual = max(2 * room, _REBASE_HALF if model.dtype in (torch.float16, torch.bfloat16) else _REBASE)
        limit = min(self.rebase_at or usual, rotations.limit or sys.maxsize)
        if limit < room:
            self.chunk = max(1, limit - reach) if self.rebase_at is None else self.chunk
            limit = max(limit, reach + self.chunk)
            if limit > (rotations.limit or sys.maxsize) or self.rebase_at is not None:
                raise ConfigurationError(
                    f"positions up to {limit} are too few: the policy holds {extent(self.policy)} and a chunk has "
                    f"{self.chunk}; choose a smaller window or chunk"
                )
        self.rebase_at = limit
        missing = [index for index in range(config.num_hidden_layers) if index not in rotations.layers]
        if missing:
            raise UnsupportedModelError(
                f"layers {missing} of {type(model).__name__} write no keys to the cache (shared or linear attention); a policy "
                "must hold for every layer"
            )
        return rotations

    def _belongs(self) -> str:
        whose = "a model that is gone" if self.model is None else f"another model, a {type(self.model).__name__}"
        return f"this cache belongs to {whose}; make one for each model"

    def misuse(self, length: int) -> str:
        """What went wrong when a layer is given ``length`` keys that no step was planned for."""
        if self.step is None:
            return (
                f"the cache was given keys outside of its model's forward; pass it to the {type(self.model).__name__} that it "
                "belongs to as past_key_values"
            )
        return f"a layer writes {length} keys where {self.step.length} tokens were given"

    # --- one forward ---------------------------------------------------------------------------------------------------------

    def open(self, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Plan a forward of ``module`` with these keyword arguments; those with which it is to go on.

        Of more tokens than a chunk has, all but the last chunk are processed here and now.
        """
        if arguments.get("use_cache") is False:
            raise ConfigurationError(
                f"{type(module).__name__} is given a cache and use_cache=False, with which generate() feeds the whole text "
                "again at every step; pass use_cache=True"
            )
        batch, length = tokens_of(arguments).shape[:2]
        static = self.static  # the chunks before the last are not
        self._require_ready(module, arguments, batch)
        parts: list[Any] = []
        kept = kept_logits(arguments)
        while (size := self._room(arguments.get("attention_mask"), batch, length)) < length:
            piece, arguments = split(arguments, size)
            length -= size
            wanted = kept is None or kept > length
            if kept is not None:
                piece["logits_to_keep"] = 0 if wanted else 1
            output = module(**piece)
            if wanted:
                parts.append(output)
        if kept is not None and parts:
            arguments = dict(arguments, logits_to_keep=0)
        valid = self._valid(arguments.get("attention_mask"), batch, length)
        self._unfinished = True  # until the forward returns: in between, some layers hold its tokens and others do not
        with kept_tensors():
            if self.books.next_position + length > cast(int, self.rebase_at):
                self.rebase()
            self.step, self._parts, self._kept = self.books.plan(length, valid), parts, kept or 0
            self._note(arguments.get("input_ids"), batch)
            if static:
                self._static = static_step(self, self._static)
                self.step = self._static or self.step
        return self._told(module, arguments)

    def _require_ready(self, module: nn.Module, arguments: dict[str, Any], batch: int) -> None:
        """Refuse what cannot go well, before anything is written."""
        books, model = self.books, self.model
        if model is None or model.base_model is not module:
            raise ConfigurationError(self._belongs())
        if self._unfinished:
            raise ConfigurationError(
                "a forward with this cache was interrupted: some of its layers hold the tokens of that forward and others do "
                "not; reset() it, or make another"
            )
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError("a bounded cache is written in place and has no gradient; run under torch.no_grad()")
        name = str(getattr(module.config, "_attn_implementation", "eager"))
        if ("flash" in name or "flex" in name) and not isinstance(books, OrderedBooks):
            raise UnsupportedModelError(
                f"attention {name!r} takes no 4-D mask, which prompts and padded batches need; load the model with "
                'attn_implementation="sdpa"'
            )
        held = self.layers[0].batch_size
        if held in (-1, batch):
            return
        if books.columns:
            raise ConfigurationError(f"the cache holds {held} rows and is given {batch}; reset() it or make another")
        self._release()

    def _release(self) -> None:
        """Give the buffers back: the next text has another number of rows."""
        self.ids = None
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    def _room(self, mask: Tensor | None, batch: int, length: int) -> int:
        """How many of ``length`` new columns can be taken at once."""
        size = min(length, self.chunk)
        if not isinstance(self.books, OrderedBooks):
            return size
        head = None if mask is None or length == size else mask[:, : size - length]
        return self.books.room(size, self._valid(mask if head is None else head, batch, size))

    def _note(self, ids: Tensor | None, batch: int) -> None:
        """Keep which token ids are held behind this step."""
        self.ids = note_ids(self.ids, self.step, ids, batch, self.policy.num_slots)

    def _told(self, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the mask and the positions of this step."""
        step = self.step
        if isinstance(self.books, OrderedBooks):  # these models count positions along the columns of a 2-D mask
            told = {name: given for name, given in arguments.items() if name != "position_ids"}
            return dict(told, attention_mask=step.attention_mask)
        tokens = tokens_of(arguments)
        return dict(
            arguments, attention_mask=self._mask(module, tokens), position_ids=step.position_ids.expand(len(tokens), -1)
        )

    def close(self, output: Any) -> Any:
        """The forward is over; its output with those of the chunks before it in front."""
        self.step = None
        parts, self._parts = self._parts, []
        if output is None:  # an exception is on its way up
            return None
        self._unfinished = False
        if not parts:
            return output
        name = "last_hidden_state" if hasattr(output, "last_hidden_state") else "logits"
        output[name] = torch.cat([*(part[name] for part in parts), output[name]], dim=1)[:, -self._kept :]
        return output

    def _valid(self, mask: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Which new columns are tokens, or ``None`` if all rows have always agreed that all of them are."""
        if mask is None:
            valid = None
        elif mask.ndim != 2 or mask.shape[1] < length:
            raise ConfigurationError(
                f"the cache makes its own mask and needs a 2-D attention_mask that covers the {length} new tokens; got "
                f"{tuple(mask.shape)}"
            )
        else:
            valid = mask[:, -length:].bool().cpu()
            valid = None if bool(valid.all()) else valid
        if valid is not None:
            with kept_tensors():
                self.books.spread(batch)
        if self.books.rows > 1:
            return torch.ones(batch, length, dtype=torch.bool) if valid is None else valid
        return valid

    def _mask(self, module: nn.Module, tokens: Tensor) -> Tensor | None:
        assert self.step is not None
        visible = self.step.visible
        if visible is None:
            return None
        visible = visible.expand(len(tokens), -1, -1, -1)
        name = str(getattr(module.config, "_attn_implementation", "eager"))
        if name == "eager":
            dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
            return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
        return visible

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a layer returns in this step, and the offset by which the last query sees them all."""
        step = self.step
        if step is None:
            return query_length, 0
        if isinstance(self.books, OrderedBooks):
            return step.held + step.length, 0
        keys = step.visible.shape[-1] if step.slot is None else step.filled
        return keys, self.books.columns - keys

    def rebase(self) -> None:
        """Count positions from the oldest token in the ring; scores stay what they are up to rounding."""
        steps = self.books.rebase()
        for layer in self.layers:
            layer.move(-steps)

    # --- what it holds -------------------------------------------------------------------------------------------------------

    def bytes_held(self) -> int:
        """Bytes of keys and values, and of what is kept beside them, as allocated."""
        return sum(layer.bytes_held() for layer in self.layers)

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone, in figures."""
        return cache_telemetry(self)

    def describe(self, tokenizer: Any = None) -> pd.DataFrame:
        """The tokens held, one a line, with slot, position and distance; see :func:`describe_slots`."""
        return describe_slots(self, tokenizer)

    # --- what transformers asks of a cache -----------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included; during a forward, those before it: a tensor, as static caches have it, if compiled."""
        books, step = self.books, self.step
        if step is None:
            return cast(int, books.columns)
        if isinstance(step, StaticStep):
            return cast(int, step.seen)
        return cast(int, step.held if isinstance(books, OrderedBooks) else books.columns - step.length)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """See :meth:`mask_sizes`."""
        return self.mask_sizes(query_length if isinstance(query_length, int) else len(query_length))

    def reset(self) -> None:
        """Forget everything; buffers stay as long as the number of rows does."""
        self._unfinished, self.step, self._parts = False, None, []
        if self._books is not None:
            with kept_tensors():
                self._books.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in another order, as beam search wants them."""
        with kept_tensors():
            self.books.take(beam_idx)
            self.ids = self.ids[beam_idx.to(self.ids.device)] if self.ids is not None else None
            for layer in self.layers:
                layer.take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch ``repeats`` times."""
        rows = max(self.layers[0].batch_size, self.books.rows)
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, counted as transformers does: a negative number of them, or the length to keep.

        Raises:
            ConfigurationError: tokens that would be held again have been evicted, or a padded batch.
        """
        columns, count = self.books.columns, int(tokens_to_remove)  # some releases hand in a tensor
        keep = columns + count if count <= 0 else count
        if 0 <= keep < columns:
            with kept_tensors():
                self.books.crop(keep)


class SinkCache(PolicyCache):
    """The first ``num_sinks`` tokens and the last ``window``; the cache of :class:`~sinklab.policies.sink_window.SinkWindow`.

    ``model.generate(**inputs, past_key_values=SinkCache(num_sinks=4, window=1020))`` is StreamingLLM (arXiv 2309.17453) with
    4+1020 tokens. Other arguments and errors are those of :class:`PolicyCache`.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        *,
        num_sinks: int = 4,
        window: int = 1020,
        positions: str = "in_cache",
        chunk: int = 128,
        rebase_at: int | None = None,
        quantized: bool = False,
    ) -> None:
        policy = policies["sink_window"](num_sinks=num_sinks, window=window, positions=positions)
        super().__init__(policy, model, chunk=chunk, rebase_at=rebase_at, quantized=quantized)
