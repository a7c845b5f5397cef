"""Policy cache: a key-value cache for transformers decoders that holds what a policy says, however long the text gets."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.registry import policies
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.policy import Policy, SlotPolicy
from sinklab.streaming.rotation import read_rotations
from sinklab.streaming.step import Books, Step

__all__ = ["PolicyCache", "SinkCache"]

_REBASE = 32_768
"""Position at which positions are counted anew: up to there float32 angles move a score of size 1 by less than 3e-4."""


class PolicyCache(Cache):
    """The cache of a policy, for one model; pass it as ``past_key_values``.

    One forward may hold one token or many, a prompt longer than the cache included: it is processed in chunks, and the
    result does not depend on their size. Rows of a batch may be padded on either side, given a 2-D ``attention_mask``.
    Positions are the cache's own: whatever ``position_ids`` a caller gives are replaced.

    Args:
        policy: what is held, a :class:`SlotPolicy`.
        model: the model; if it is left out, the first one that is given the cache.
        chunk: most tokens that are processed at once; more make a prompt faster and take more memory.
        rebase_at: positions are counted from the oldest token held as soon as they would reach this. By default 32,768, or less
            where the model's frequencies change with the position or come from a table.

    Raises:
        ConfigurationError: sizes that do not fit together, a cache used with another model or batch size, gradients.
        UnsupportedModelError: see :func:`read_rotations`; also linear attention, encoder-decoders, sliding windows smaller than
            what the policy holds, and attention functions that take no 4-D mask.
    """

    def __init__(
        self,
        policy: Policy,
        model: PreTrainedModel | None = None,
        *,
        chunk: int = 128,
        rebase_at: int | None = None,
    ) -> None:
        if not isinstance(policy, SlotPolicy):
            raise ConfigurationError(
                f"policy {policy.name!r} is no rule of positions; make its cache with make_cache(model, policy)"
            )
        if chunk < 1:
            raise ConfigurationError(f"chunk {chunk} must be 1 or more")
        super().__init__(layers=[])
        self.policy, self.chunk, self.rebase_at = policy, chunk, rebase_at
        self.step: Step | None = None
        self._books: Books | None = None
        self._model: weakref.ref[PreTrainedModel] | None = None
        self._parts: list[Any] = []
        if model is not None:
            self.bind(model)

    # --- the model -----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that the cache belongs to."""
        return None if self._model is None else self._model()

    @property
    def books(self) -> Books:
        """Which token is in which slot."""
        if self._books is None:
            self.bind(_generating_model())
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
            raise ConfigurationError(f"this cache belongs to another {type(self.model).__name__}; make one for each model")
        config = model.config.get_text_config()
        _require_decoder(model, self.policy)
        rotations = read_rotations(model)
        _require_positions(self.policy, rotations.limit, type(model).__name__)
        room = self.policy.num_slots + self.chunk
        limit = min(self.rebase_at or _REBASE, rotations.limit or sys.maxsize)
        if limit < room:
            self.chunk = max(1, limit - self.policy.num_slots) if self.rebase_at is None else self.chunk
            limit = max(limit, self.policy.num_slots + self.chunk)
            if limit > (rotations.limit or sys.maxsize) or self.rebase_at is not None:
                raise ConfigurationError(
                    f"positions up to {limit} are too few: the policy holds {self.policy.num_slots} tokens and a chunk has "
                    f"{self.chunk}; choose a smaller window or chunk"
                )
        self.rebase_at = limit
        missing = [index for index in range(config.num_hidden_layers) if index not in rotations.layers]
        if missing:
            raise UnsupportedModelError(
                f"layers {missing} of {type(model).__name__} write no keys to the cache (shared or linear attention); a policy "
                "must hold for every layer"
            )
        self.layers = [SlotLayer(self, rotations.layers[index]) for index in range(config.num_hidden_layers)]
        self._books = Books(self.policy, model.device)
        self._model = weakref.ref(model)
        _hook(model)
        return self

    def misuse(self, length: int) -> str:
        """What went wrong when a layer is given ``length`` keys that no step was planned for."""
        if self.step is None:
            return "the cache was given keys outside of its model's forward; pass it to the model as past_key_values"
        return f"a layer writes {length} keys where {self.step.length} tokens were given"

    # --- one forward ---------------------------------------------------------------------------------------------------------

    def open(self, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Plan a forward of ``module`` with these keyword arguments; those with which it is to go on.

        Of more tokens than a chunk has, all but the last chunk are processed here and now.
        """
        tokens = _tokens(arguments)
        held = self.layers[0].batch_size if self.layers else -1
        if held not in (-1, len(tokens)) and self.books.columns:
            raise ConfigurationError(f"the cache holds {held} rows and is given {len(tokens)}; reset() it or make another")
        *pieces, arguments = _pieces(arguments, self.chunk)
        parts = [module(**piece) for piece in pieces]
        kept = arguments.get("logits_to_keep")
        if parts and kept:  # a model that makes its logits itself
            if not isinstance(kept, int) or kept > _tokens(arguments).shape[1]:
                raise ConfigurationError(
                    f"logits_to_keep must be a number up to the {self.chunk} tokens of a chunk; got {kept}"
                )
            parts = []
        tokens = _tokens(arguments)
        batch, length = tokens.shape[:2]
        valid = self._valid(arguments.get("attention_mask"), batch, length)
        if self.books.next_position + length > cast(int, self.rebase_at):
            self.rebase()
        self.step, self._parts = self.books.plan(length, valid), parts
        return dict(arguments, attention_mask=self._mask(module, tokens), position_ids=self.step.position_ids.expand(batch, -1))

    def close(self, output: Any) -> Any:
        """The forward is over; its output with those of the chunks before it in front."""
        self.step = None
        parts, self._parts = self._parts, []
        if not parts or output is None:
            return output
        name = "last_hidden_state" if hasattr(output, "last_hidden_state") else "logits"
        output[name] = torch.cat([*(part[name] for part in parts), output[name]], dim=1)
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
        if "flash" in name or "flex" in name:
            raise UnsupportedModelError(
                f"attention {name!r} takes no 4-D mask, which prompts and padded batches need; load the model with "
                'attn_implementation="sdpa"'
            )
        if name == "eager":
            dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
            return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
        return visible

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a layer returns in this step, and the offset by which the last query sees them all."""
        step = self.step
        if step is None:
            return query_length, 0
        if step.slot is None:
            assert step.visible is not None
            keys = step.visible.shape[-1]
        else:
            keys = step.filled
        return keys, self.books.columns - keys

    def rebase(self) -> None:
        """Count positions from the oldest token in the ring; scores stay what they are up to rounding."""
        steps = self.books.rebase()
        for layer in self.layers:
            layer.move(-steps)

    # --- what transformers asks of a cache -----------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included; during a forward, those before it."""
        books = self.books
        return books.columns - self.step.length if self.step is not None else books.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """See :meth:`mask_sizes`."""
        return self.mask_sizes(query_length if isinstance(query_length, int) else len(query_length))

    def reset(self) -> None:
        """Forget everything; buffers stay."""
        if self._books is not None:
            self._books.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in another order, as beam search wants them."""
        self.books.take(beam_idx)
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
        columns = self.books.columns
        keep = columns + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if 0 <= keep < columns:
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
    ) -> None:
        policy = policies["sink_window"](num_sinks=num_sinks, window=window, positions=positions)
        super().__init__(policy, model, chunk=chunk, rebase_at=rebase_at)


# --- the host ----------------------------------------------------------------------------------------------------------------


def _generating_model() -> PreTrainedModel:
    """The model whose generate() is asking; transformers hands a cache everything but its model."""
    frame = sys._getframe(1)
    found: PreTrainedModel | None = None
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "generate" else None
        found = owner if isinstance(owner, PreTrainedModel) else found
        frame = cast(Any, frame.f_back)
    if found is None:
        raise ConfigurationError(
            "this cache does not know its model, which only generate() can tell it; outside of generate() name it: "
            "SinkCache(model, …) or cache.bind(model)"
        )
    return found


def _tokens(arguments: dict[str, Any]) -> Tensor:
    tokens = arguments.get("input_ids")
    return cast(Tensor, arguments.get("inputs_embeds") if tokens is None else tokens)


def _pieces(arguments: dict[str, Any], chunk: int) -> Iterator[dict[str, Any]]:
    """The arguments of a forward for each chunk of its tokens."""
    length, mask = _tokens(arguments).shape[1], arguments.get("attention_mask")
    if length <= chunk:
        yield arguments
        return
    kept = [name for name in ("output_attentions", "output_hidden_states", "labels") if arguments.get(name)]
    if kept:
        raise ConfigurationError(
            f"{kept[0]} cannot be had of {length} tokens at once, which are processed in chunks of {chunk}; give "
            "fewer, or make the cache with a larger chunk"
        )
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        piece = dict(arguments)
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            if piece.get(name) is not None:
                piece[name] = piece[name][..., start:stop] if name != "inputs_embeds" else piece[name][:, start:stop]
        if mask is not None and mask.ndim == 2:
            piece["attention_mask"] = mask[:, : mask.shape[1] - length + stop]
        yield piece


def _require_decoder(model: PreTrainedModel, policy: SlotPolicy) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; its cross-attention cannot be bounded by a policy")
    kinds = set(getattr(config, "layer_types", None) or [])
    strange = sorted(kinds - {"full_attention", "sliding_attention"})
    if strange:
        raise UnsupportedModelError(f"{name} has layers of the kind {', '.join(strange)}; a policy needs full attention")
    sliding = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if sliding and slides and sliding < policy.num_slots:
        raise UnsupportedModelError(
            f"{name} has layers that see {sliding} tokens; the policy holds {policy.num_slots}, and its sinks would be hidden "
            f"from them. Choose sizes that add up to {sliding} or less, the token at hand included"
        )


def _require_positions(policy: SlotPolicy, limit: int | None, name: str) -> None:
    if limit is not None and policy.num_slots >= limit:
        raise UnsupportedModelError(
            f"{name} keeps its frequencies up to position {limit}, and the policy holds {policy.num_slots} tokens; choose fewer"
        )


class _Hooks:
    """The two hooks on a model that let a cache plan its forward; other forwards pass."""

    def __init__(self, module: nn.Module) -> None:
        self.names = list(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = arguments.get("past_key_values")
        return ((), cache.open(module, arguments)) if isinstance(cache, PolicyCache) else None

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        cache = kwargs.get("past_key_values")
        return cache.close(output) if isinstance(cache, PolicyCache) else None


_hooks: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()


def _hook(model: PreTrainedModel) -> None:
    decoder = model.base_model
    if decoder not in _hooks:
        _hooks[decoder] = _Hooks(decoder)
