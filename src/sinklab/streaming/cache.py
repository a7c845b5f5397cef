"""Policy cache: a key-value cache for transformers decoders that holds what a policy says, however long the text gets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import EncoderDecoderCache, PreTrainedModel

from sinklab.attention.cache_argument import given_cache
from sinklab.attention.placement import input_device
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.policies.base import BoundedPolicy, Policy, Positions, SlotPolicy
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.results.requirements import require_whole
from sinklab.sinks import Sinks
from sinklab.streaming.apart import SinksApart
from sinklab.streaming.bounded import BoundedCache
from sinklab.streaming.differences import require_differences
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.host import (
    Arguments,
    decoder_of,
    join,
    kept_logits,
    kept_tensors,
    mask_of,
    media_of,
    require_one_text,
    split,
    tokens_of,
)
from sinklab.streaming.hosted import hosted
from sinklab.streaming.hybrid import HybridLayer, QuantizedHybridLayer
from sinklab.streaming.in_front import columns_of, tokens_in_front, tokens_of_prefix
from sinklab.streaming.latent import LatentLayer, QuantizedLatentLayer
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.limits import fit_limits, warn_of_length
from sinklab.streaming.ordered import OrderedLayer, OrderedStep, OrderedTable, has_ordered_bias, require_ordered
from sinklab.streaming.quantized import QuantizedLayer, Workspace, read_bits
from sinklab.streaming.recurrent import RecurrentLayer, has_states, hybrid_layers, keyless_layers
from sinklab.streaming.recurrent_table import RecurrentTable
from sinklab.streaming.refusals import inside, narrow_window, require_decoder, require_integers, slides
from sinklab.streaming.rotation import KeyRotations
from sinklab.streaming.slot_table import SlotTable
from sinklab.streaming.step import StaticStep, Step
from sinklab.streaming.table import IndexedTable, Table
from sinklab.streaming.windowed_table import WindowedTable

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

__all__ = ["PolicyCache", "SinkCache"]

_RECOMPUTES = (
    "is_activation_checkpointing"
    if hasattr(PreTrainedModel, "is_activation_checkpointing")
    else "is_gradient_checkpointing"  # before transformers 5.23
)


class PolicyCache(BoundedCache):
    """The cache of a policy, for one model; pass it as ``past_key_values``.

    One forward may hold one token or many, a prompt longer than the cache included: it is processed in chunks, and the
    result does not depend on their size. Rows of a batch may be padded on either side, given a 2-D ``attention_mask``.
    Positions are the cache's own: whatever ``position_ids`` a caller gives are replaced. A row is one text: several documents
    packed into it are refused. Python warns where the policy holds more than the model was trained to see at once.

    Args:
        policy: what is held, a :class:`SlotPolicy`.
        model: the model; if it is left out, the first one that is given the cache.
        chunk: most tokens that are processed at once; more make a prompt faster and take more memory. They are fewer where each
            would take copies of many pinned tokens along.
        rebase_at: positions are counted from the oldest token held as soon as they would reach this. By default 2,048, or
            twice what the policy holds and a chunk, 32,768 for keys of 16 bits and for integers; less where the model's
            frequencies change with the position or come from a table.
        quantized: ``"int8"`` or ``"int4"``: keep keys and values that are neither pinned nor among the newest as integers; see
            :class:`~sinklab.streaming.quantized.QuantizedLayer`.
        rollback: hold so many tokens beyond the policy's window, which no query sees, so that :meth:`crop` can take back as
            many of the newest: at least the candidates of a step of assisted decoding.

    Raises:
        ConfigurationError: sizes that do not fit together, a cache used with another model or batch size, gradients, rows of
            several documents.
        UnsupportedModelError: see :func:`read_rotations` and :func:`require_differences`; also models without a layer of
            attention, encoder-decoders, sliding windows smaller than what the policy holds, a rollback where keys are in the
            order of the text, and what needs a mask where the attention function takes none.

    Attributes:
        static: whether the forward at hand is compiled; its steps are then a :class:`~sinklab.streaming.step.StaticStep`.
    """

    takes: ClassVar[type] = SlotPolicy

    def __init__(
        self,
        policy: BoundedPolicy,
        model: PreTrainedModel | None = None,
        *,
        chunk: int = 128,
        rebase_at: int | None = None,
        quantized: str | None = None,
        rollback: int = 0,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ConfigurationError(
                f"`policy` is of {type(policy).__name__}, which is no policy; make one with "
                "sinklab.registry.policies.make('sink_window'), or let open_reader(model, policy) take its name"
            )
        if not isinstance(policy, self.takes):
            raise ConfigurationError(
                f"{type(self).__name__} takes a {self.takes.__name__}, and policy {policy.name!r} is none; "
                "open_reader(model, policy) picks what a policy needs"
            )
        require_whole("chunk", chunk, 1)
        require_whole("`rollback`", rollback, 0, ": so many tokens can be taken back at once")
        if rollback and quantized is not None:
            raise ConfigurationError(
                f"`rollback` takes tokens back, and what `quantized` {quantized!r} has rounded with them stays rounded; leave "
                "one of them out"
            )
        if quantized is not None:
            require_integers(policy)
        super().__init__(policy)
        self.rollback = rollback
        self.chunk, self.rebase_at, self.quantized, self._bits = chunk, rebase_at, quantized, read_bits(quantized)
        self._kept_logits = 0
        self.static = False
        self._static: StaticStep | None = None
        self._apart: SinksApart | None = None
        if model is not None:
            self.bind(model)

    # --- the model -----------------------------------------------------------------------------------------------------------

    def bind(self, model: PreTrainedModel) -> PolicyCache:
        """Take the model's layers, rotations and limits; from now on this cache plans the forwards that it is given to.

        Raises:
            ConfigurationError: it is bound to another model, or ``rebase_at`` leaves no room.
            UnsupportedModelError: as the class says.
        """
        model = inside(model)
        if self.model is model:
            return self
        if self._table is not None:
            raise ConfigurationError(self._belongs())
        require_decoder(model, self.policy)
        self._fit(model)
        warn_of_length(model, self.policy)
        join(model, self)
        return self

    def _fit(self, model: PreTrainedModel) -> None:
        """Make layers and the table for a model."""
        assert isinstance(self.policy, SlotPolicy)
        self._front, self._prefix = tokens_in_front(model), tokens_of_prefix(model)
        policy = hosted(self.policy, front=self._front, prefix=self._prefix, rollback=self.rollback)
        if has_ordered_bias(model):
            self._fit_ordered(model, policy)
            return
        rotations = self._fit_positions(model, policy)
        self._table = slots = self._slots(model, policy)
        if slots.in_cache and not isinstance(slots, WindowedTable):
            self._apart = SinksApart(model, slots, len(rotations.layers))
        layers: dict[int, HeldLayer | RecurrentLayer] = {
            index: RecurrentLayer(states) for index, states in keyless_layers(model).items()
        }
        hybrid, workspace = hybrid_layers(model), Workspace()
        for index, rotation in rotations.layers.items():
            table = slots.narrow if isinstance(slots, WindowedTable) and slides(model, index) else slots
            settings: tuple[Any, ...] = (table, rotation)
            kinds: tuple[Any, ...] = (SlotLayer, LatentLayer, HybridLayer)
            if self._bits is not None:
                settings = (table, rotation, self._bits, workspace)
                kinds = (QuantizedLayer, QuantizedLatentLayer, QuantizedHybridLayer)
            plain, of_latents, with_states = kinds
            if index in hybrid:
                layers[index] = with_states(*settings, states=hybrid[index])
            else:
                layers[index] = (of_latents if index in rotations.latent else plain)(*settings)
        self.layers = [layers[index] for index in sorted(layers)]

    def _fit_ordered(self, model: PreTrainedModel, policy: SlotPolicy) -> None:
        """Make layers and the table for a model whose bias counts keys."""
        require_ordered(policy, model)
        if self.quantized or self.rollback:
            setting = "quantized" if self.quantized else "rollback"
            raise ConfigurationError(
                f"`{setting}` is for keys in slots; {type(model).__name__} needs them in the order of the text"
            )
        ordered = OrderedTable(policy, input_device(decoder_of(model)), model)
        self.layers = [OrderedLayer(ordered) for _ in range(_num_layers(model))]
        self._table, self.rebase_at = ordered, sys.maxsize

    def _slots(self, model: PreTrainedModel, policy: SlotPolicy) -> SlotTable:
        """The table of a model's layers of attention, of the kind that its other layers and its windows ask for."""
        device = input_device(model)
        if (narrow := narrow_window(model, self.policy)) is not None:
            return WindowedTable(policy, hosted(narrow, rollback=self.rollback), device, model)
        if not has_states(model):
            return SlotTable(policy, device, model)
        if self.rollback:
            raise ConfigurationError(
                f"`rollback` takes tokens back, and layers of linear attention of {type(model).__name__} have taken them into "
                "their state"
            )
        return RecurrentTable(policy, device, model)

    def _fit_positions(self, model: PreTrainedModel, policy: BoundedPolicy | None = None) -> KeyRotations:
        """Rotations of the keys of all layers; from now on positions stay below what the model can tell apart."""
        limits = fit_limits(
            model, policy or self.policy, chunk=self.chunk, rebase_at=self.rebase_at, integers=self._bits is not None
        )
        self.chunk, self.rebase_at = limits.chunk, limits.rebase_at
        if not self._places_are_ranks:
            require_differences(model, limits.rotations)
        return limits.rotations

    @property
    def _places_are_ranks(self) -> bool:
        """Whether the query, too, is given its rank among what is held as its position, at which its keys are rotated anew."""
        return False

    def _belongs(self) -> str:
        whose = "a model that is gone" if self.model is None else f"another model, a {type(self.model).__name__}"
        return f"this cache belongs to {whose}; make one for each model"

    # --- one forward ---------------------------------------------------------------------------------------------------------

    def open(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """Plan a forward of ``module`` with these keyword arguments; those with which it is to go on.

        Of more tokens than a chunk has, all but the last chunk are processed here and now.
        """
        if arguments.get("use_cache") is False:
            raise ConfigurationError(
                f"{type(module).__name__} is given a cache and use_cache=False, with which generate() feeds the whole text "
                "again at every step; pass use_cache=True"
            )
        batch, length = tokens_of(arguments).shape[:2]
        if not length:
            raise ConfigurationError(
                f"{type(module).__name__} is given no token to read: the cache has been given {self.get_seq_length()} already, "
                "and generate() reads only what goes beyond those. To go on, hand it all ids so far; reset() the cache before "
                "another text"
            )
        static = self.static  # the chunks before the last are not
        self._require_ready(module, arguments, batch)
        self._require_no_gaps(length)
        outputs: list[ModelOutput] = []
        wanted = kept_logits(arguments)
        while (size := self._room(mask_of(arguments), batch, length)) < length:
            chunk, arguments = split(arguments, size, module.config, chunk=self.chunk)
            length -= size
            if wanted is not None:
                chunk["logits_to_keep"] = 0 if wanted > length else 1
            output = module(**chunk)
            if wanted is None or wanted > length:
                outputs.append(output)
        if wanted is not None and outputs:
            arguments = dict(arguments, logits_to_keep=0)
        valid, table = self._valid(mask_of(arguments), batch, length), self.table
        ids = arguments.get("input_ids")
        ids = ids if isinstance(ids, Tensor) else None
        if front := self._new_in_front:
            length += front
            valid = None if valid is None else pad(valid, (front, 0), value=True)
            ids = None if ids is None else pad(ids, (front, 0), value=-1)
        if valid is not None and isinstance(table, RecurrentTable):
            with kept_tensors():
                table.require_unbroken(valid)
        assert self.rebase_at is not None
        self._unfinished = True
        with kept_tensors():
            if table.next_position + length > self.rebase_at:
                self.rebase()
            self._outputs, self._kept_logits = outputs, wanted or 0
            apart = self._apart
            if apart is not None:
                apart.ask(length)
            table.step = table.plan(length, valid)
            masked = isinstance(table.step, Step) and table.step.visible is not None
            assert not (masked and isinstance(table, SlotTable) and table.maskless), "refused before anything was planned"
            table.note(ids, batch)
            if static:
                self._make_static()
        if apart is not None:
            apart.begin()
        return self._planned(module, arguments)

    def _make_static(self) -> None:
        """Replace the step at hand by a static one, in the tensors of the last, where it is a single token that allows it."""
        table, layers = self.table, [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        if self.quantized or not isinstance(table, SlotTable) or isinstance(table, WindowedTable):
            return
        if not layers[-1].is_initialized:
            return
        if any(layer.device != table.device for layer in layers):  # the tensors of a static step are on one device
            return
        step = table.step
        if not isinstance(step, Step) or not isinstance(step.slot, int):
            return
        if self._static is None:
            rotations, first = [layer.rotation for layer in layers], layers[0]
            self._static = StaticStep(table.policy, rotations, first.device, first.masters.dtype)
            for layer in layers:
                layer.static_matrices = self._static.matrices_of(layer.rotation)
        present = table.index[0] >= 0
        if table.policy.holds_more:
            present &= table.policy.visible(table.seen - 1, table.index[0])
        self._static.set(step, step.slot, present, table.columns - 1)
        table.step = self._static

    def _require_ready(self, module: nn.Module, arguments: Arguments, batch: int) -> None:
        """Refuse what cannot go well, before anything is written."""
        table, model = self.table, self.model  # in this order: the table binds a cache to the model that generates
        if model is None or decoder_of(model) is not module:
            raise ConfigurationError(self._belongs())
        if model.config.is_encoder_decoder and not isinstance(given_cache(arguments), EncoderDecoderCache):
            raise ConfigurationError(
                f"{type(model).__name__} has cross-attention too, whose keys need a cache of their own: pass "
                "past_key_values=EncoderDecoderCache(SinkCache(…), DynamicCache())"
            )
        if self._unfinished:
            raise ConfigurationError(
                "a forward with this cache was interrupted: some of its layers hold the tokens of that forward and others do "
                "not; reset() it, or make another"
            )
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError("a bounded cache is written in place and has no gradient; run under torch.no_grad()")
        if module.training and getattr(model, _RECOMPUTES):
            raise ConfigurationError(
                f"{type(model).__name__} is in training mode with gradient checkpointing, in which transformers withholds the "
                "cache from its layers; call model.eval() before"
            )
        self._require_maskable(table, str(getattr(module.config, "_attn_implementation", "eager")))
        own = [kind for kind in ("token_type_ids", "mm_token_type_ids") if arguments.get(kind) is not None]
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        if (own or "mrope_section" in rope) and (media := media_of(arguments)):
            raise UnsupportedModelError(
                f"{type(model).__name__} is given {media[0]} and has positions or a mask of its own for them, where a bounded "
                "cache has those of a text; give it text alone"
            )
        require_one_text(arguments)
        self._require_rows(table, batch)

    def _require_maskable(self, table: Table, name: str) -> None:
        """Refuse attention functions that take no mask, where one is needed; tell the slot table whether there may be none."""
        if "flex" in name and not table.in_order:
            raise UnsupportedModelError(_no_mask(name, "a bounded cache needs"))
        if isinstance(table, SlotTable):
            table.maskless = "flash" in name
            if "flash" in name and isinstance(table, WindowedTable):
                raise UnsupportedModelError(_no_mask(name, "a sliding window narrower than what the policy holds needs"))
            if "flash" in name and self._prefix:
                raise UnsupportedModelError(_no_mask(name, "a prefix needs"))
            if "flash" in name and table.policy.holds_more:
                what = "`rollback`" if self.rollback else f"policy {self.policy.name!r}"
                raise UnsupportedModelError(_no_mask(name, f"{what} needs"))
        elif "flash" in name and not table.in_order:
            raise UnsupportedModelError(_no_mask(name, f"policy {self.policy.name!r} needs"))

    def _require_rows(self, table: Table, batch: int) -> None:
        """Refuse another number of rows than the cache holds; an empty one is made ready for it."""
        held = self.batch_size
        if held in (-1, batch):
            return
        if table.columns:
            raise ConfigurationError(f"the cache holds {held} rows and is given {batch}; reset() it or make another")
        if isinstance(table, IndexedTable):
            table.ids = None
        for layer in self.layers:
            layer.release()

    def _require_no_gaps(self, length: int) -> None:
        """Refuse tokens that leave slots empty in front of others, where the attention function has no mask to hide these."""
        table = self.table
        if isinstance(table, SlotTable) and table.maskless and table.leaves_gaps(length + self._new_in_front):
            raise UnsupportedModelError(
                _no_mask("flash", f"policy {self.policy.describe()} needs while it holds no token in some slots")
            )

    def _room(self, mask: Tensor | None, batch: int, length: int) -> int:
        """How many of ``length`` new columns can be taken at once."""
        size, least = min(length, self.chunk), 1
        if self._prefix and not self.table.columns:
            valid = self._valid(mask, batch, length)
            least = columns_of(torch.ones(1, length) if valid is None else valid, self._prefix)
            size = max(size, least)
        if isinstance(self.table, SlotTable) and self.table.maskless:
            if self._valid(mask, batch, length) is not None:
                raise UnsupportedModelError(_no_mask("flash", "a padded batch needs"))
            return max(1, self.table.unmasked(size + self._new_in_front) - self._new_in_front)
        if size == 1 or not self.table.counts_room:
            return size
        if mask is not None and length > size:
            mask = mask[:, : size - length]
        valid, front = self._valid(mask, batch, size), self._new_in_front
        if front and valid is not None:
            valid = pad(valid, (front, 0), value=True)
        return max(least, self.table.room(size + front, valid) - front)

    @property
    def _new_in_front(self) -> int:
        """Learned tokens that the forward at hand has besides its own: all of them in the first one, and none later."""
        return 0 if self.table.columns else self._front

    def _planned(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """The arguments with the mask and the positions of the step at hand."""
        step: Any = self.step
        rows, given = tokens_of(arguments).shape[:2]
        if isinstance(step, OrderedStep):  # these models count positions along the columns of a 2-D mask
            others = {name: value for name, value in arguments.items() if name != "position_ids"}
            columns = step.attention_mask
            return dict(others, attention_mask=None if columns is None else columns[:, self._front :].expand(rows, -1))
        mask: object = self._mask(module, step.visible, rows)
        if isinstance(self.table, RecurrentTable) and (valid := mask_of(arguments)) is not None:
            mask = self.table.masks(mask, valid[:, -given:])
        if isinstance(self.table, WindowedTable):
            narrow: Any = self.table.narrow.step
            mask = self.table.masks(mask, self._mask(module, narrow.visible, rows))
        # The model counts its learned tokens in front itself.
        positions = step.position_ids[:, -given:] - self._front if self._front else step.position_ids
        return dict(arguments, attention_mask=mask, position_ids=positions.expand(rows, -1))

    def _mask(self, module: nn.Module, visible: Tensor | None, rows: int) -> Tensor | None:
        """What is visible, boolean ``(1 or rows, 1, length, keys)``, as the attention function of ``module`` takes it."""
        visible = None if visible is None else visible.expand(rows, -1, -1, -1)
        if visible is None or getattr(module.config, "_attn_implementation", "eager") != "eager":
            return visible
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return hidden.masked_fill(~visible, torch.finfo(dtype).min)

    def close(self, output: ModelOutput | None) -> ModelOutput | None:
        """The forward is over; its output with those of the chunks before it in front."""
        if self._table is not None:
            self._table.finish()
        if self._apart is not None:
            self._apart.end(failed=output is None)
        outputs, self._outputs = self._outputs, []
        if output is None:  # an exception is on its way up
            return None
        self._unfinished = False
        if not outputs:
            return output
        name = "last_hidden_state" if hasattr(output, "last_hidden_state") else "logits"
        output[name] = torch.cat([*(chunk[name] for chunk in outputs), output[name]], dim=1)[:, -self._kept_logits :]
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
            if valid is not None and self._front and self.table.in_order:
                raise ConfigurationError(
                    f"{type(self.model).__name__} has learned tokens in front and a bias that counts keys: padding behind them "
                    "would be counted too. Give one text at a time, or texts of one length"
                )
        if valid is not None:
            with kept_tensors():
                self.table.spread(batch)
        if self.table.rows > 1:
            return torch.ones(batch, length, dtype=torch.bool) if valid is None else valid
        return valid


def _no_mask(attention: str, who: str) -> str:
    return f'attention {attention!r} takes no 4-D mask, which {who}; load the model with attn_implementation="sdpa"'


def _num_layers(model: PreTrainedModel) -> int:
    """Layers that write keys; an encoder-decoder has a config for each of its halves."""
    config = decoder_of(model).config if model.config.is_encoder_decoder else model.config.get_text_config()
    return int(config.num_hidden_layers)


class SinkCache(PolicyCache):
    """The sinks and the last ``window`` tokens: the cache of :class:`~sinklab.policies.sink_window.SinkWindow`.

    ``model.generate(**inputs, past_key_values=SinkCache(num_sinks=4, window=1020))`` is StreamingLLM (arXiv 2309.17453) with
    4+1020 tokens. Other arguments and errors are those of :class:`PolicyCache`.

    Args:
        num_sinks: first tokens that stay, 4 by default.
        sinks: what :func:`~sinklab.sinks.find_sinks` found, in place of ``num_sinks``: the positions that stay; the policy is
            then :class:`~sinklab.policies.pinned.Pinned`.

    Raises:
        ConfigurationError: ``num_sinks`` and ``sinks``; or sinks without a position (see :meth:`Pinned.of`).
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        *,
        num_sinks: int | None = None,
        window: int = 1020,
        sinks: Sinks | None = None,
        positions: Positions = "in_cache",
        chunk: int = 128,
        rebase_at: int | None = None,
        quantized: str | None = None,
        rollback: int = 0,
    ) -> None:
        if sinks is not None and num_sinks is not None:
            raise ConfigurationError("`num_sinks` and `sinks` both say which tokens stay; give one of them")
        number = 4 if num_sinks is None else num_sinks
        policy = (
            SinkWindow(num_sinks=number, window=window, positions=positions)
            if sinks is None
            else Pinned.of(sinks, window=window, positions=positions)
        )
        super().__init__(policy, model, chunk=chunk, rebase_at=rebase_at, quantized=quantized, rollback=rollback)
