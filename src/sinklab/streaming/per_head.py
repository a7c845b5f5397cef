"""Per head: the cache of heads with budgets of their own; heads of one layer with equal budgets are a group of slots.

A model hands its attention function keys and values that are as long for all heads. Here a layer has one
:class:`~sinklab.streaming.layer.SlotLayer` for each budget that its heads have, and the model's attention function is called
once for each, with the query heads that belong to it: no head stores more than its budget, and none is padded.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, ClassVar, Unpack

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.forward_arguments import cache_argument
from sinklab.attention.operation import state_of
from sinklab.attention.placement import input_device
from sinklab.errors import ConfigurationError, SinklabError, UnsupportedModelError
from sinklab.policies.base import BoundedPolicy
from sinklab.policies.per_head import PerHead
from sinklab.results.naming import counted
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.host import Arguments, tokens_of
from sinklab.streaming.layer import HeldLayer, SlotLayer
from sinklab.streaming.rotation import KeyRotations, Rotation, read_rotations, without_autocast
from sinklab.streaming.slot_table import SlotTable
from sinklab.streaming.table import Step, Table
from sinklab.streaming.traits import fingerprint, has_ordered_bias, hybrid_layers, keyless_layers
from sinklab.streaming.verify import TOKENS, require_close, some_tokens

__all__ = [
    "AttendingCache",
    "AwaitingTable",
    "PerHeadCache",
    "PerHeadLayer",
    "PerHeadStep",
    "PerHeadTable",
    "require_fit",
    "require_unordered",
    "verify_groups",
]

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


def require_unordered(policy: BoundedPolicy, model: PreTrainedModel) -> None:
    """Refuse a model whose bias counts the keys in between.

    Raises:
        UnsupportedModelError: heads that keep different tokens would need a bias each.
    """
    if has_ordered_bias(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} adds a bias that counts the keys between key and query, which is another for every head "
            f"once heads keep different tokens; policy {policy.name!r} needs rotary positions or none"
        )


class AwaitingTable(Table):
    """A table that knows whose attention comes next.

    Attributes:
        waiting: the layer that has written keys, and whose attention has not been seen.
        without: what the policy lacks without it, for the error.
    """

    without: ClassVar[str]
    waiting: object | None = None

    def wait_for(self, layer: object) -> None:
        """The next attention call is of this layer."""
        self.require_seen()
        self.waiting = layer

    def require_seen(self) -> None:
        """Refuse to go on without the attention of a layer.

        Raises:
            UnsupportedModelError: a layer waits still.
        """
        if self.waiting is not None:
            raise UnsupportedModelError(
                f"a layer of {type(self.model).__name__} wrote keys and its attention was not seen, so policy "
                f"{self.policy.name!r} {self.without}"
            )


class AttendingCache(PolicyCache, seam.Observer, abc.ABC):
    """A cache that is an observer of its model's attention while the model is in its forward, and at no other time."""

    table: AwaitingTable
    keys_in_slots: ClassVar[bool] = False  # a session gets nothing to see of it, and is refused for that

    def __init__(
        self, policy: BoundedPolicy, model: PreTrainedModel | None = None, *, chunk: int = 128, rebase_at: int | None = None
    ) -> None:
        self._anatomy: Anatomy | None = None
        self._looking = contextlib.ExitStack()
        super().__init__(policy, model, chunk=chunk, rebase_at=rebase_at)

    def _fit_positions(self, model: PreTrainedModel, policy: BoundedPolicy | None = None) -> KeyRotations:
        """As every cache does, of a model whose heads have keys and values of their own in every layer.

        Raises:
            UnsupportedModelError: latent attention, of which all heads share what is cached, or layers that write no keys.
        """
        rotations = super()._fit_positions(model, policy or self.policy)
        lacks = {
            "caches a latent that all heads share": rotations.latent,
            "has layers that write no keys": keyless_layers(model),
            "has layers that keep states beside their keys": hybrid_layers(model),
        }
        for lack in (words for words, layers in lacks.items() if layers):
            raise UnsupportedModelError(
                f"{type(model).__name__} {lack}, and under policy {self.policy.name!r} every head of every layer holds keys "
                "of its own. One with the same tokens for all heads works, such as sink_window"
            )
        return rotations

    def close(self, output: ModelOutput | None) -> ModelOutput | None:
        if output is not None:
            self.table.require_seen()
        self._stop_looking()
        return super().close(output)

    def reset(self) -> None:
        self._stop_looking()
        super().reset()

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is one of this model's attention modules."""
        return self._anatomy is not None and id(module) in self._anatomy.names

    @property
    def running(self) -> bool:
        """Whether the model is inside its forward."""
        return self.step is not None

    def _look(self) -> None:
        self._looking.enter_context(seam.shadow(self))

    def _stop_looking(self) -> None:
        self._looking.close()
        if self._table is not None:
            self.table.waiting = None


if TYPE_CHECKING:
    pass


def require_fit(policy: PerHead, model: PreTrainedModel, kv_heads: tuple[int, ...]) -> None:
    """Refuse budgets that were made for another model.

    Args:
        kv_heads: key-value heads of every layer of ``model``.

    Raises:
        ConfigurationError: another number of layers or heads, or another fingerprint.
    """
    name = type(model).__name__
    given = tuple(len(layer) for layer in policy.budgets)
    if given != kv_heads:
        raise ConfigurationError(
            f"the head map is for {_shape(given)}, and this {name} has {_shape(kv_heads)}; choose budgets for this model"
        )
    if policy.fingerprint is not None and policy.fingerprint != (mine := fingerprint(model, rounded=True)):
        raise ConfigurationError(
            f"the head map is for a model with the fingerprint {policy.fingerprint}, and this {name} has {mine}: its weights "
            "or its config are others; choose budgets for this model"
        )


def _shape(heads: tuple[int, ...]) -> str:
    """Layers and key-value heads in words."""
    each = str(heads[0]) if len(set(heads)) == 1 else f"{', '.join(map(str, heads))}"
    return f"{counted(len(heads), 'layer')} of {each} key-value head{'' if each == '1' else 's'}"


class PerHeadCache(AttendingCache):
    """The cache of a :class:`~sinklab.policies.per_head.PerHead`, for one model; pass it as ``past_key_values``.

    The model's own attention function computes every group of heads, and has to be reached through the attention interface of
    transformers. Arguments and errors are those of :class:`PolicyCache`.

    Raises:
        ConfigurationError: also budgets for another model.
        UnsupportedModelError: also a model whose bias depends on the order of its keys, one whose attention cannot be seen, and
            one with learned sink logits or other parameters of heads within its attention function.
    """

    takes: ClassVar[type] = PerHead
    policy: PerHead
    table: PerHeadTable
    layers: list[PerHeadLayer]

    def _fit(self, model: PreTrainedModel) -> None:
        require_unordered(self.policy, model)
        rotations = self._fit_positions(model)
        require_fit(self.policy, model, rotations.kv_heads)
        self._anatomy = Anatomy(model)
        if not self._anatomy.attention:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention in its own code, for all heads together; policy "
                f"{self.policy.name!r} needs it on the attention interface of transformers"
            )
        self._table = table = PerHeadTable(self.policy, input_device(model), model)
        self.layers = [PerHeadLayer(table, rotation, index) for index, rotation in enumerate(rotations.layers.values())]

    # --- one forward ---------------------------------------------------------------------------------------------------------

    def open(self, module: nn.Module, arguments: Arguments) -> Arguments:
        if arguments.get("output_attentions"):
            raise ConfigurationError(
                "output_attentions cannot be had under policy 'per_head': heads hold different tokens, so their weights make "
                "no matrix"
            )
        self._stop_looking()
        self._require_unseen()
        arguments = super().open(module, arguments)
        step, rows = self.table.step, len(tokens_of(arguments))
        assert step is not None
        step.masks = [self._mask(module, part.visible, rows) for part in step.parts]
        self._look()
        return arguments

    def _require_unseen(self) -> None:
        """Refuse to be called behind somebody else, who would see the new keys alone."""
        mine = self._anatomy.attention.values() if self._anatomy is not None else ()
        if any(observer.owns(module) for observer in seam.active_observers() for module in mine):
            raise UnsupportedModelError(
                f"policy {self.policy.name!r} computes attention by groups of heads, and an attend() on this model is open, "
                "which would see none of them; close it, or use sink_window"
            )

    def on_attention(
        self,
        native: seam.Native,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:
        """The model's own function, once for each group of heads: head outputs ``(batch, q_len, num_heads, value_dim)``."""
        layer, self.table.waiting = self.table.waiting, None
        step = self.table.step
        if layer is None or step is None:  # an attention that keeps nothing
            return native(module, query, key, value, mask, **kwargs)
        self._require_groups(native, module, kwargs)
        return layer.attended(step, native, module, query, kwargs), None

    def _require_groups(self, native: seam.Native, module: nn.Module, kwargs: host_arguments.Keywords) -> None:
        """Refuse an attention function that has more of each head than queries, keys and values."""
        why = None
        if host_arguments.read_sink_scores(kwargs) is not None:
            why = "has learned sink logits"
        elif kwargs.get("position_bias") is not None:
            why = "adds a bias to the scores of each head"
        elif state_of(module, seam.operation_of(module, native), kwargs.get("layer_input")):
            why = "has an operation with parameters of each head"
        if why is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} {why}, and policy {self.policy.name!r} computes some heads at a time; use sink_window"
            )

    # --- what it holds -------------------------------------------------------------------------------------------------------

    def describe(self, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
        """What each key-value head holds, one a line.

        Returns:
            ``layer``, ``head``, ``num_sinks``, ``window``, ``held`` (tokens of the row that has most) and ``bytes`` (of all
            rows, as allocated).
        """
        lines = []
        for index, layer in enumerate(self.layers):
            for part in layer.parts:
                rule, held = part.slots.table.policy, int(part.slots.table.held.max())
                each = part.slots.bytes_held() // len(part.heads)
                sizes = (len(rule.pinned), rule.num_slots - len(rule.pinned) - 1)
                lines += [(index, head, *sizes, held, each) for head in part.heads]
        columns = ["layer", "head", "num_sinks", "window", "held", "bytes"]
        return pd.DataFrame(lines, columns=columns).sort_values(["layer", "head"], ignore_index=True)


@dataclasses.dataclass(eq=False)
class PerHeadStep:
    """One forward.

    Attributes:
        parts: what it does to the slots of each budget.
        masks: of each group, as the attention function of the model takes it; ``None`` where all keys are visible.
    """

    parts: list[Step]
    masks: list[Tensor | None] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """Columns of the forward, padding included."""
        return self.parts[0].length

    @property
    def filled(self) -> int:
        """Keys that a head of the smallest budget returns."""
        return self.parts[0].filled

    @property
    def visible(self) -> Tensor | None:
        """What queries see under the smallest budget: the mask that the model is given, and its attention is given others."""
        return self.parts[0].visible

    @property
    def position_ids(self) -> Tensor:
        """For the model, int64 ``(rows, length)``; the same for all budgets."""
        return self.parts[0].position_ids


class PerHeadTable(AwaitingTable):
    """The tables of the budgets that heads have, in step with each other.

    Attributes:
        parts: one for each distinct budget, from the one that holds least to the one that holds most.
    """

    without: ClassVar[str] = "could not compute it by groups of heads: it computes attention in its own code"
    policy: PerHead
    step: PerHeadStep | None
    waiting: PerHeadLayer | None = None

    def __init__(self, policy: PerHead, device: torch.device, model: PreTrainedModel | None = None) -> None:
        self.parts = tuple(SlotTable(rule, device, model) for rule in policy.distinct)
        super().__init__(policy, device, model)

    def clear(self) -> None:
        super().clear()
        for part in self.parts:
            part.clear()
        self._follow()

    def _follow(self) -> None:
        """Take over what all parts agree on."""
        first = self.parts[0]
        self.seen, self.base, self.columns = first.seen, first.base, first.columns
        self.rebases, self.highest = first.rebases, first.highest

    @property
    def held(self) -> Tensor:
        """Tokens of every row that the head which holds most has now, int64 ``(rows,)``."""
        return self.parts[-1].held

    def spread(self, batch: int) -> None:
        for part in self.parts:
            part.spread(batch)
        self._follow()

    def take(self, rows: Tensor) -> None:
        for part in self.parts:
            part.take(rows)
        self._follow()

    def room(self, length: int, valid: Tensor | None) -> int:
        return min(part.room(length, valid) for part in self.parts)

    def plan(self, length: int, valid: Tensor | None) -> PerHeadStep:
        steps = [part.plan(length, valid) for part in self.parts]
        for part, step in zip(self.parts, steps, strict=True):
            part.step = step
        self._follow()
        return PerHeadStep(steps)

    def note(self, ids: Tensor | None, batch: int) -> None:
        for part in self.parts:
            part.note(ids, batch)

    def rebase(self) -> Tensor:
        """Count positions from the oldest token in any ring of each row."""
        oldest = torch.stack([part.oldest() for part in self.parts]).amin(dim=0)
        steps = [part._count_from(oldest.clone()) for part in self.parts]  # each its own, as a file has it
        self._follow()
        return steps[0]

    def crop(self, keep: int) -> None:
        for part in self.parts:  # what the one that holds least can go back to, the others can
            part.crop(keep)
        self._follow()

    def state(self) -> dict[str, Tensor]:
        return {f"{number}.{name}": tensor for number, part in enumerate(self.parts) for name, tensor in part.state().items()}

    def counts(self) -> dict[str, bool | int]:
        return {f"{number}.{name}": count for number, part in enumerate(self.parts) for name, count in part.counts().items()}

    def restore(self, state: dict[str, Tensor], counts: dict[str, bool | int]) -> None:
        for number, part in enumerate(self.parts):
            mine = f"{number}."
            part.restore(
                {name.removeprefix(mine): tensor for name, tensor in state.items() if name.startswith(mine)},
                {name.removeprefix(mine): count for name, count in counts.items() if name.startswith(mine)},
            )
        self._follow()


@dataclasses.dataclass(eq=False)
class _Part:
    """Heads of one layer that have the same budget.

    Attributes:
        number: of their table among those of the cache.
        heads: key-value heads, ascending.
        slots: what they hold.
    """

    number: int
    heads: list[int]
    slots: SlotLayer

    def of(self, states: Tensor, each: int = 1) -> Tensor:
        """Those of ``states``, ``(batch, heads, …)``, that belong to these heads, ``each`` for one key-value head."""
        first, last = self.heads[0], self.heads[-1]
        if last - first + 1 == len(self.heads):
            return states[:, first * each : (last + 1) * each]
        return states[:, torch.tensor(_each(self.heads, each), device=states.device)]


def _each(heads: list[int], each: int) -> list[int]:
    """Query heads of key-value heads, ``each`` for one."""
    return [head * each + member for head in heads for member in range(each)]


class PerHeadLayer(HeldLayer):
    """One layer of a :class:`PerHeadCache`: a :class:`SlotLayer` for each group of heads with the same budget."""

    table: PerHeadTable

    def __init__(self, table: PerHeadTable, rotation: Rotation | None, index: int) -> None:
        super().__init__(table, rotation)
        rules = table.policy.rules[index]
        self.parts = [
            _Part(number, heads, SlotLayer(of_budget, rotation))
            for number, of_budget in enumerate(table.parts)
            if (heads := [head for head, rule in enumerate(rules) if rule == of_budget.policy])
        ]
        self._order: Tensor | None = None
        self._ready: list[tuple[Tensor, Tensor]] = []

    @property
    def batch_size(self) -> int:
        return self.parts[0].slots.batch_size

    def bytes_held(self) -> int:
        return sum(part.slots.bytes_held() for part in self.parts)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values, ``(batch, num_kv_heads, length, head_dim)``, which are given back.

        What is held is attended to group by group when the attention of this layer is called.
        """
        if self.table.step is None:
            raise ConfigurationError(self.table.misuse(key_states.shape[2]))
        self._ready = [part.slots.update(part.of(key_states), part.of(value_states)) for part in self.parts]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.table.wait_for(self)
        return key_states, value_states

    def attended(
        self, step: PerHeadStep, native: seam.Native, module: nn.Module, query: Tensor, kwargs: host_arguments.Keywords
    ) -> Tensor:
        """Outputs ``(batch, q_len, num_heads, value_dim)`` of all heads, in their order."""
        ready, self._ready = self._ready, []
        each = query.shape[1] // sum(len(part.heads) for part in self.parts)
        outputs = []
        for part, (keys, values) in zip(self.parts, ready, strict=True):
            mask = step.masks[part.number]
            mask = mask if mask is None else mask.to(query.device)
            output, _ = native(module, part.of(query, each), keys, values, mask, **kwargs)
            outputs.append(output)
        if len(outputs) == 1:
            return outputs[0]
        whole = torch.cat(outputs, dim=2)
        if self._order is None or self._order.device != whole.device:
            order = [head for part in self.parts for head in _each(part.heads, each)]
            self._order = torch.tensor(order, device=whole.device).argsort()
        return whole.index_select(2, self._order)

    def move(self, steps: Tensor) -> None:
        for part in self.parts:
            part.slots.move(steps)

    def release(self) -> None:
        self.is_initialized, self._ready = False, []
        for part in self.parts:
            part.slots.release()

    def take(self, rows: Tensor) -> None:
        for part in self.parts:
            part.slots.take(rows)

    def state(self) -> dict[str, Tensor]:
        return {f"{part.number}.{name}": tensor for part in self.parts for name, tensor in part.slots.state().items()}

    def restore(self, buffers: dict[str, Tensor]) -> None:
        for part in self.parts:
            mine = f"{part.number}."
            part.slots.restore({name.removeprefix(mine): held for name, held in buffers.items() if name.startswith(mine)})
        first = self.parts[0].slots
        self.dtype, self.device, self.is_initialized = first.dtype, first.device, True


_verified: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.no_grad()
def verify_groups(model: PreTrainedModel) -> None:
    """Read a few tokens with heads in two groups that both hold all of them: logits must be those of a dense forward.

    Once for a model. One whose attention function does more than attend head by head gives others, without an error.

    Raises:
        UnsupportedModelError: they are not, or its attention function does not compute some heads alone.
    """
    if model in _verified:
        return
    heads = read_rotations(model).kv_heads
    # Windows differ and neither evicts: the last head of every layer is a group of its own, where there are two.
    budgets = tuple(tuple((0, TOKENS + (head == count - 1)) for head in range(count)) for count in heads)
    tokens = some_tokens(model)
    training = model.training
    model.eval()
    try:
        cache = PerHeadCache(PerHead(budgets=budgets, positions="original"), model)
        with without_autocast(model):
            grouped = model(input_ids=tokens, **cache_argument(model, cache), use_cache=True).logits[0]
            dense = model(input_ids=tokens, use_cache=False).logits[0]
    except (RuntimeError, IndexError, TypeError) as error:
        if isinstance(error, SinklabError):
            raise
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} does not compute some of its heads alone: {error}; policy 'per_head' "
            "needs that"
        ) from error
    finally:
        model.train(training)
    require_close(model, grouped, dense, "computed by groups of heads and all together")
    _verified.add(model)
