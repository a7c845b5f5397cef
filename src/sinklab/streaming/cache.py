"""Policy cache: a key-value cache for transformers decoders that holds what a policy says, however long the text gets."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.integrations import sdpa_attention

from sinklab.attention.host_arguments import CACHE
from sinklab.attention.modules import input_device
from sinklab.errors import ConfigurationError, UnsupportedModelError, known_arguments
from sinklab.policies.base import Positions, SlotPolicy
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.results.environment import require_whole
from sinklab.sinks import Sinks
from sinklab.streaming.base import Telemetry, describe_slots
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.host import (
    Arguments,
    Planner,
    SinksApart,
    generated_ids,
    generating_model,
    join,
    kept_tensors,
    mask_of,
    require_plain,
    split,
    tokens_of,
)
from sinklab.streaming.layer import RecurrentLayer, SlotLayer
from sinklab.streaming.limits import (
    fit_limits,
    hosted,
    inside,
    narrow_window,
    require_decoder,
    require_integers,
    warn_of_length,
)
from sinklab.streaming.quantized import make_layers, read_kind
from sinklab.streaming.step import StaticStep, Step
from sinklab.streaming.table import RecurrentTable, SlotTable, WindowedTable
from sinklab.streaming.traits import has_states, tokens_in_front

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


_PACKED = 2048
"""Keys from which on a mask pays that hides nothing: behind one transformers packs the query heads that share a key head into
queries of one head, and torch reads its keys once and not once for every query head."""


class PolicyCache(Cache, Planner):
    """The cache of a policy, for one model; pass it as ``cache`` (:attr:`keyword`).

    One forward may hold one token or many, a prompt longer than the cache included: it is processed in chunks, and the
    result does not depend on their size. Rows of a batch may be padded on either side, given a 2-D ``attention_mask``; each is
    one text. Positions are the cache's own. Python warns where the policy holds more than the model was trained to see at once.

    Args:
        policy: what is held, a :class:`SlotPolicy`.
        model: by default the first one that is given the cache.
        chunk: most tokens that are processed at once; more make a prompt faster and take more memory. They are fewer where each
            would take copies of many pinned tokens along.
        rebase_at: positions are counted from the oldest token held as soon as they would reach this. By default 2,048, or
            twice what the policy holds and a chunk, 32,768 for keys of 16 bits and for integers; less where the model's
            frequencies change with the position or come from a table.
        quantized: ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp8b"``, ``"mxfp4"`` or ``"nvfp4"``: how keys and values are kept that
            are neither pinned nor among the newest; see
            :class:`~sinklab.streaming.quantized.QuantizedLayer`.
        rollback: hold so many tokens beyond the policy's window, which no query sees, so that :meth:`crop` can take back as
            many of the newest: at least the candidates of a step of assisted decoding.

    Raises:
        ConfigurationError: sizes that do not fit together; in use, another model or batch size, gradients, packed rows.
        UnsupportedModelError: positions that cannot be moved (:func:`read_rotations`), no layer of attention, an
            encoder-decoder, sliding windows smaller than what the policy holds, attention functions that take no mask.
    """

    keys_in_slots: ClassVar[bool] = True
    layers: list[SlotLayer | RecurrentLayer]

    @known_arguments
    def __init__(
        self,
        policy: SlotPolicy,
        model: PreTrainedModel | None = None,
        *,
        chunk: int = 128,
        rebase_at: int | None = None,
        quantized: str | None = None,
        rollback: int = 0,
    ) -> None:
        if not isinstance(policy, SlotPolicy):
            raise ConfigurationError(
                f"{type(self).__name__} takes a SlotPolicy, and {getattr(policy, 'name', policy)!r} is none; "
                "open_reader(model, policy) takes any policy, or its name"
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
        super().__init__(layers=[])
        self.policy, self.rollback = policy, rollback
        self.chunk, self.rebase_at, self.quantized, self._kind = chunk, rebase_at, quantized, read_kind(quantized)
        self.static = False
        self._table: SlotTable | None = None
        self._static: StaticStep | None = None
        self._apart: SinksApart | None = None
        self._outputs: list[ModelOutput] = []  # of the chunks before the last
        self._kept_logits = 0  # how many of the last tokens get logits; 0 for all
        self._front = 0  # learned tokens that the model puts in front of every text
        self._unfinished = False  # a forward has begun and not ended: some layers hold its tokens and others do not
        if model is not None:
            self.bind(model)

    # --- the model -----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that the cache belongs to."""
        return None if self._table is None else self._table.model

    @property
    def table(self) -> SlotTable:
        """Which token is where; see :class:`~sinklab.streaming.table.SlotTable`."""
        if self._table is None:
            self.bind(generating_model())
        assert self._table is not None
        return self._table

    @property
    def step(self) -> Step | StaticStep | None:
        """What the forward at hand does; ``None`` between forwards."""
        return None if self._table is None else self._table.step

    @property
    def batch_size(self) -> int:
        """Rows of what the layers hold; -1 before the first forward. A layer that holds nothing has none to say."""
        return next((rows for layer in self.layers if (rows := layer.batch_size) >= 0), -1)

    def bind(self, model: PreTrainedModel) -> PolicyCache:
        """Take the model's layers, rotations and limits, and plan the forwards it is given to; errors as the class says."""
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

    def _belongs(self) -> str:
        whose = "a model that is gone" if self.model is None else f"another model, a {type(self.model).__name__}"
        return f"this cache belongs to {whose}; make one for each model"

    def _fit(self, model: PreTrainedModel) -> None:
        """Make layers and the table for a model."""
        self._front = tokens_in_front(model)
        policy = hosted(self.policy, front=self._front, rollback=self.rollback)
        rotations, self.chunk, self.rebase_at = fit_limits(
            model, policy, chunk=self.chunk, rebase_at=self.rebase_at, integers=self._kind is not None
        )
        self._table = table = self._table_of(model, policy)
        if table.in_cache and not isinstance(table, WindowedTable):
            self._apart = SinksApart(model, table, len(rotations.layers))
        self.layers = make_layers(model, table, rotations, self._kind)
        config, names = model.config.get_text_config(decoder=True), ("num_attention_heads", "num_key_value_heads")
        heads, few = (getattr(config, name, None) for name in names)
        self._packs = few not in (None, heads) and table.device.type == "cpu" and hasattr(sdpa_attention, "pack_gqa")

    def _table_of(self, model: PreTrainedModel, policy: SlotPolicy) -> SlotTable:
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

    # --- one forward ---------------------------------------------------------------------------------------------------------

    def open(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """Plan a forward of ``module`` with these keyword arguments; those with which it is to go on.

        Of more tokens than a chunk has, all but the last chunk are processed here and now.
        """
        batch, length = tokens_of(arguments).shape[:2]
        static = self.static  # the chunks before the last are not
        self._require_ready(module, arguments, batch, length)
        outputs: list[ModelOutput] = []
        given = arguments.get("logits_to_keep")
        wanted = given if isinstance(given, int) and given else None
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
        apart = self._apart
        with kept_tensors():
            if table.next_position + length > self.rebase_at:
                self.rebase()
            self._outputs, self._kept_logits = outputs, wanted or 0
            if apart is not None:
                apart.ask(length)
            table.step = table.plan(length, valid)
            table.note(ids, batch)
            if static:
                self._make_static()
        if apart is not None:
            apart.begin()
        return self._planned(module, arguments)

    def _make_static(self) -> None:
        """Replace the step at hand by a static one, in the tensors of the last, where it is a single token that allows it."""
        table, layers = self.table, [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        step = table.step
        if self.quantized or isinstance(table, WindowedTable) or not isinstance(step, Step) or not isinstance(step.slot, int):
            return
        if not all(layer.is_initialized and layer.device == table.device for layer in layers):  # its tensors are on one device
            return
        if self._static is None:
            rotations, first = [layer.rotation for layer in layers], layers[0]
            self._static = StaticStep(table.policy, rotations, first.device, first.masters.dtype)
            for layer in layers:
                layer.static_matrices = None if layer.rotation is None else self._static.matrices[layer.rotation]
        self._static.set(step, step.slot, table.present(table.seen[:, None] - 1)[0], table.columns - 1)
        table.step = self._static

    def _require_ready(self, module: nn.Module, arguments: Arguments, batch: int, length: int) -> None:
        """Refuse what cannot go well, before anything is written; an empty cache is made ready for its rows."""
        if not length:
            raise ConfigurationError(
                f"{type(module).__name__} is given no token to read: the cache has been given {self.get_seq_length()} already, "
                "and generate() reads only what goes beyond those. To go on, hand it all ids so far; reset() the cache before "
                "another text"
            )
        table, model = self.table, self.model  # in this order: the table binds a cache to the model that generates
        if model is None or model.base_model is not module:
            raise ConfigurationError(self._belongs())
        if self._unfinished:
            raise ConfigurationError(
                "a forward with this cache was interrupted: some of its layers hold the tokens of that forward and others do "
                "not; reset() it, or make another"
            )
        require_plain(model, module, arguments)
        attention = str(getattr(module.config, "_attn_implementation", "eager"))
        if "flex" in attention or "flash" in attention:
            raise UnsupportedModelError(
                f"attention {attention!r} takes no 4-D mask, which a bounded cache needs; load the model with "
                'attn_implementation="sdpa"'
            )
        held = self.batch_size
        self._require_same_text()
        if held not in (-1, batch):
            if table.columns:
                raise ConfigurationError(f"the cache holds {held} rows and is given {batch}; reset() it or make another")
            table.ids = None
            for layer in self.layers:
                layer.release()

    def _require_same_text(self) -> None:
        """Refuse another text than the cache holds: generate() passes over as many ids as were read, whichever they are."""
        table = self.table
        if not table.columns or table.rows > 1 or table.ids is None or (whole := generated_ids()) is None:
            return
        there = (table.index[0] >= self._front).nonzero()[:, 0]
        tokens = table.index[0, there] - self._front
        ids = table.ids[:, there.to(table.ids.device)].to(whole.device)
        beyond = bool((tokens >= whole.shape[1]).any())
        if len(ids) == len(whole) and (beyond or bool((whole[:, tokens.to(whole.device)] != ids).any())):
            raise ConfigurationError(
                "generate() is given another text than the cache has read; a cache is of one text: hand it all ids so far, "
                "reset() it, or give every text (every prompt of a pipeline) a cache of its own"
            )

    def _room(self, mask: Tensor | None, batch: int, length: int) -> int:
        """How many of ``length`` new columns can be taken at once."""
        table = self.table
        size, front = min(length, self.chunk), self._new_in_front
        if size == 1:
            return size
        if mask is not None and length > size:
            mask = mask[:, : size - length]
        valid = self._valid(mask, batch, size)
        if front and valid is not None:
            valid = pad(valid, (front, 0), value=True)
        return max(1, table.room(size + front, valid) - front)

    @property
    def _new_in_front(self) -> int:
        """Learned tokens that the forward at hand has besides its own: all of them in the first one, and none later."""
        return 0 if self.table.columns else self._front

    def _planned(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """The arguments with the mask and the positions of the step at hand."""
        step: Any = self.step
        rows, given = tokens_of(arguments).shape[:2]
        mask: object = self._mask(module, step.visible, rows, step.filled)
        if isinstance(self.table, RecurrentTable) and (valid := mask_of(arguments)) is not None:
            mask = self.table.masks(mask, valid[:, -given:])
        if isinstance(self.table, WindowedTable):
            narrow: Any = self.table.narrow.step
            mask = self.table.masks(mask, self._mask(module, narrow.visible, rows, narrow.filled))
        # The model counts its learned tokens in front itself.
        positions = step.position_ids[:, -given:] - self._front if self._front else step.position_ids
        return dict(arguments, attention_mask=mask, position_ids=positions.expand(rows, -1))

    def _mask(self, module: nn.Module, visible: Tensor | None, rows: int, keys: int = 0) -> Tensor | None:
        """What is visible, boolean ``(1 or rows, 1, length, keys)``, as the attention function of ``module`` takes it."""
        attention = getattr(module.config, "_attn_implementation", "eager")
        if visible is None and keys >= _PACKED and self._packs and attention == "sdpa":  # of one token, which sees all
            visible = torch.ones(1, 1, 1, keys, dtype=torch.bool)
        visible = None if visible is None else visible.expand(rows, -1, -1, -1)
        if visible is None or attention != "eager":
            return visible
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return hidden.masked_fill(~visible, torch.finfo(dtype).min)

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
                self.table.spread(batch)
        if self.table.rows > 1:
            return torch.ones(batch, length, dtype=torch.bool) if valid is None else valid
        return valid

    def rebase(self) -> None:
        """Count positions from the oldest token in the ring; scores stay what they are up to rounding."""
        steps = self.table.rebase()
        for layer in self.layers:
            layer.move(-steps)

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

    # --- what it holds -------------------------------------------------------------------------------------------------------

    @property
    def keyword(self) -> dict[str, Self]:
        """The cache as the keyword argument that the installed transformers has for it: ``generate(**inputs, **cache.keyword)``
        is ``cache=cache``, and before transformers 5.24 ``past_key_values=cache``."""
        return {CACHE: self}

    def __repr__(self) -> str:
        of = f"{self.policy.describe()}, of no model yet"
        if self.model is not None:
            of = f"{type(self.model).__name__}; {self.telemetry()}"
        return f"{type(self).__name__}({of})"

    def bytes_held(self) -> int:
        """Bytes of keys and values, and of what is kept beside them, as allocated."""
        return sum(layer.bytes_held() for layer in self.layers)

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone, in figures."""
        table, rows = self.table, max(1, self.batch_size)
        return Telemetry(
            policy=self.policy.describe(),
            seen=tuple(table.seen.expand(rows).tolist()),
            held=tuple(table.held.expand(rows).tolist()),
            capacity=table.policy.num_slots,
            bytes=self.bytes_held(),
            rebases=table.rebases,
            highest_position=table.highest_position,
        )

    def describe(self, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
        """The tokens held, one a line, with slot, position and distance; see :func:`describe_slots`."""
        return describe_slots(self.table, max(1, self.batch_size), tokenizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache of the same model that goes on by itself, as for texts with a common beginning; the model is not copied."""
        shared = {} if self.model is None else {id(module): module for module in self.model.modules()}
        others = {key: memo[key] for key in shared.keys() & memo.keys()}  # the model is being copied by the same call
        memo.update(shared)
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        for key in shared:
            del memo[key]
        memo.update(others)
        if self.model is not None:
            join(self.model, copied)
        return copied

    # --- what transformers asks of a cache -----------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        """False: transformers must not compile a model for its sake (:func:`~sinklab.streaming.host.compile_steps`). Asked for,
        as assisted decoding asks before the first forward, when :meth:`bind` is still in time."""
        if self._table is None:
            self.bind(generating_model())
        return False

    @property
    def is_croppable(self) -> bool:
        """Always: where :meth:`crop` cannot go back, it says itself why not, and what to do."""
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Tokens seen, padding included and learned ones in front left out; during a forward those before it, a tensor if
        compiled."""
        table = self.table
        return table.seq_length if table.step is not None else max(0, table.columns - self._front)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """See :meth:`SlotTable.mask_sizes`."""
        return self.table.mask_sizes(query_length if isinstance(query_length, int) else len(query_length))

    def reset(self) -> None:
        """Forget everything; buffers stay as long as the number of rows does."""
        self._unfinished, self._outputs = False, []
        if self._table is not None:
            with kept_tensors():
                self._table.clear()
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in another order, as beam search wants them."""
        with kept_tensors():
            self.table.take(beam_idx)
            for layer in self.layers:
                layer.take(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch ``repeats`` times."""
        rows = max(self.batch_size, self.table.rows)
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, counted as transformers does: a negative number of them, or the length to keep.

        Raises:
            ConfigurationError: tokens that would be held again have been evicted, a padded batch, padding among what is taken
                back, or more than there is.
        """
        columns, count = max(0, self.table.columns - self._front), int(tokens_to_remove)  # some releases hand in a tensor
        keep = columns + count if count <= 0 else count
        if keep < 0:
            raise ConfigurationError(f"{-count} tokens cannot be taken back: the cache has been given {columns}")
        if keep < columns:
            with kept_tensors():
                self.table.crop(keep + self._front)


class SinkCache(PolicyCache):
    """The sinks and the last ``window`` tokens: the cache of :class:`~sinklab.policies.sink_window.SinkWindow`.

    ``model.generate(**inputs, **SinkCache(num_sinks=4, window=1020).keyword)`` is StreamingLLM (arXiv 2309.17453) with
    4+1020 tokens. Other arguments and errors are those of :class:`PolicyCache`.

    Args:
        num_sinks: first tokens that stay, 4 by default.
        sinks: what :func:`~sinklab.sinks.find_sinks` found, in place of ``num_sinks``: the positions that stay; the policy is
            then :class:`~sinklab.policies.pinned.Pinned`.

    Raises:
        ConfigurationError: ``num_sinks`` and ``sinks``; or sinks without a position (see :meth:`Pinned.of`).
    """

    @known_arguments
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


class ExportableStep(nn.Module):
    """One step of a decoder for ``torch.export``, which goes on where a cache is; what is held is in its buffers.

    It takes what transformers' ``TorchExportableModuleWithStaticCache`` takes, and texts of any length: tokens leave, and
    positions are counted anew, inside. Export it under ``torch.no_grad()``.

    Raises:
        ConfigurationError: a cache that has read nothing, whose keys are quantised or whose rows are padded; of a model with
            sliding windows, states of linear attention or learned tokens in front.
    """

    def __init__(self, model: PreTrainedModel, cache: PolicyCache) -> None:
        super().__init__()
        self.model, self.cache = model, copy.deepcopy(cache.bind(model))
        table = self.cache.table
        plain = type(table) is SlotTable and table.rows == 1 and table.columns and not self.cache._front
        if not plain or self.cache.quantized:
            raise ConfigurationError(
                "a step is exported of a cache that has read a token or more, without padding, in full precision, of a model "
                "without sliding windows, states of linear attention and learned tokens in front"
            )
        table.pinned = table.pinned.to(table.device)
        self._layers = [layer for layer in self.cache.layers if isinstance(layer, SlotLayer)]
        self._held: list[tuple[object, str, str]] = [(table, name, name) for name in ("base", "index", "anchors")]
        self._held += [(one, name, f"{name}_{at}") for at, one in enumerate(self._layers) for name in one.buffers]
        for owner, name, own in self._held:
            self.register_buffer(own, getattr(owner, name).to(table.device), persistent=False)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        """Logits ``(batch, 1, vocab_size)`` behind ids ``(batch, 1)``, token ``cache_position``, int64 ``(1,)``, of a text; 0
        begins another one."""
        table, layers = self.cache.table, self._layers
        for owner, name, own in self._held:
            setattr(owner, name, getattr(self, own))
        table.seen, going_on = cache_position, cache_position > 0
        table.base, table.index = table.base.where(going_on, 0), table.index.where(going_on, -1)
        due = cache_position + 1 - table.base > (self.cache.rebase_at or 0)
        steps = torch.where(due, table.oldest() - table.base, 0)
        table.base = table.base + steps
        rotations = [layer.rotation for layer in layers]

        def move(steps: Tensor, *held: Tensor) -> Tensor:
            for rotation, keys in zip(rotations, held, strict=True):
                if rotation is not None:
                    keys.copy_(rotation.rotated(keys, -steps))
            return steps.clone()

        moving = tuple(layer.keys[:, :, layer.fixed :] for layer in layers)
        torch.cond(due.all(), move, lambda steps, *held: steps.clone(), (steps, *moving))
        tokens, slots = table.write()
        for name in ("base", "index", "anchors"):
            getattr(self, name).copy_(getattr(table, name))
        step = table.step = StaticStep(table.policy, rotations, input_ids.device, layers[0].masters.dtype)
        step.slot.copy_(slots[0])
        step.seen.copy_(cache_position[0])
        for rotation, matrices in step.matrices.items():
            matrices.copy_(rotation.matrices(table.moved(tokens)[0, 0], matrices.dtype))
        for layer in layers:
            layer.static_matrices = None if layer.rotation is None else step.matrices[layer.rotation]
        rows, visible = len(input_ids), table.present(tokens)[:, None, None]
        mask, positions = self.cache._mask(self.model.base_model, visible, rows), (tokens - table.base).expand(rows, 1)
        plain: dict[str, Any] = {CACHE: Cache(layers=self.cache.layers), "use_cache": True}  # which plans nothing
        return cast(Tensor, self.model(input_ids, attention_mask=mask, position_ids=positions, **plain).logits)
