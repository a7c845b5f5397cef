"""Editing: what the interventions of a session do to one attention call, head by head, and to hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import AttentionCall, LayerOutput, Site
from sinklab.attention.intervention import HeadIntervention, HiddenIntervention, Intervention, names_nothing, overrides
from sinklab.attention.operation import repeat_groups
from sinklab.attention.visibility import Visibility
from sinklab.errors import ConfigurationError, ContractError, SessionError

NO_NULL = -1e30
"""Null score of heads without one where others have one: a mass of exactly 0, and finite for rows that see no key."""


def of_heads(call: AttentionCall, heads: Sequence[int]) -> AttentionCall:
    """The call cut down to some of its heads, each with keys and values of its own; the call itself if these are all."""
    if list(heads) == list(range(call.num_heads)):
        return call
    index = torch.as_tensor(heads, device=call.queries.device)
    groups = index // call.groups

    def pick(tensor: Tensor | None, dim: int = 1) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.index_select(dim, index)

    return dataclasses.replace(
        call, queries=call.queries[:, index], keys=call.keys[:, groups], values=call.values[:, groups],
        visible=OfHeads(call.visible, index), bias=pick(call.bias), sink_scores=pick(call.sink_scores),
        null_value=pick(call.null_value, 0), output_bias=pick(call.output_bias, 0), gain=pick(call.gain),
        head_outputs=pick(call.head_outputs, 2), log_sum_exp=pick(call.log_sum_exp), projection=None,
        heads=tuple(call.head_numbers[head] for head in heads),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class OfHeads(Visibility):
    """A rule for some of the heads that another one is about."""

    rule: Visibility
    index: Tensor

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        return self._chosen(self.rule.block(query_start, query_stop, key_start, key_stop))

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._chosen(self.rule.pairs(queries, keys))

    def _chosen(self, visible: Tensor) -> Tensor:
        return visible if visible.shape[1] == 1 else visible.index_select(1, self.index.to(visible.device))


@dataclasses.dataclass(frozen=True, eq=False)
class ByHead(Visibility):
    """Different rules for different heads."""

    rule: Visibility
    parts: Sequence[tuple[Sequence[int], Visibility]]
    num_heads: int

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        tile = (query_start, query_stop, key_start, key_stop)
        return self._merged(self.rule.block(*tile), [rule.block(*tile) for _, rule in self.parts])

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._merged(self.rule.pairs(queries, keys), [rule.pairs(queries, keys) for _, rule in self.parts])

    def _merged(self, whole: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        batch = max(block.shape[0] for block in (whole, *blocks))
        whole = whole.expand(batch, self.num_heads, -1, -1).clone()
        for (heads, _), block in zip(self.parts, blocks, strict=True):
            whole[:, list(heads)] = block
        return whole


Parts: TypeAlias = Sequence[tuple[list[int], AttentionCall, AttentionCall]]
"""Heads, their call before, and their call after."""


def merged_call(call: AttentionCall, parts: Parts) -> AttentionCall:
    """One call for all heads again: that of the model, with what the first stage changed for some of them.

    Raises:
        ContractError: an intervention changed something that heads of one call cannot differ in.
    """

    def differs(*fields: str) -> bool:
        return any(getattr(after, field) is not getattr(before, field) for _, before, after in parts for field in fields)

    if all(after is before for _, before, after in parts):
        return call
    if len(parts) == 1 and len(parts[0][0]) == call.num_heads:
        return parts[0][2]
    if differs("operation", "output_bias", "scaling", "softcap"):
        raise ContractError(
            f"{call.site.module}: an intervention on some of its heads may not change the operation, its bias, the scaling or "
            "the soft cap"
        )
    changed: dict[str, Any] = {}
    if differs("visible"):
        rules = [(heads, after.visible) for heads, _, after in parts]
        changed["visible"] = ByHead(call.visible, rules, call.num_heads)
    if differs("queries"):
        changed["queries"] = _written(call.queries.clone(), parts, lambda one: one.queries)
    if differs("keys", "values"):  # query heads that shared them may not do so any more
        keys, values = (repeat_groups(tensor, call.groups).clone() for tensor in (call.keys, call.values))
        changed["keys"] = _written(keys, parts, lambda one: repeat_groups(one.keys, one.groups))
        changed["values"] = _written(values, parts, lambda one: repeat_groups(one.values, one.groups))
    if differs("bias"):
        # A copy of the size of the scores; only interventions that add to scores of some heads alone come here.
        shape = (call.queries.shape[0], call.num_heads, call.q_len, call.kv_len)
        whole = call.queries.new_zeros(shape) if call.bias is None else call.bias.expand(shape).clone()
        changed["bias"] = _written(whole, parts, lambda one: one.bias)
    if differs("sink_scores"):
        changed["sink_scores"] = _merged_sink_scores(call, parts)
    if differs("null_value"):
        size = (call.num_heads, call.values.shape[-1])
        whole = call.values.new_zeros(size) if call.null_value is None else call.null_value.expand(size).clone()
        changed["null_value"] = _written(whole[None], parts, lambda one: one.null_value)[0]
    return dataclasses.replace(call, **changed)


def _written(whole: Tensor, parts: Parts, of: Callable[[AttentionCall], Tensor | None], missing: float = 0.0) -> Tensor:
    """What every part has of a field, written over its heads in ``(batch or 1, num_heads, …)``."""
    for heads, _, after in parts:
        value = of(after)
        whole[:, heads] = missing if value is None else value.to(whole.device, whole.dtype)
    return whole


def _merged_sink_scores(call: AttentionCall, parts: Parts) -> Tensor:
    shapes = [one.sink_scores.shape for one in (call, *(after for _, _, after in parts)) if one.sink_scores is not None]
    shape = (max((shape[0] for shape in shapes), default=1), call.num_heads, max((shape[2] for shape in shapes), default=1))
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    if call.sink_scores is None:
        whole = call.queries.new_full(shape, NO_NULL, dtype=dtype)
    else:
        whole = call.sink_scores.expand(shape).to(dtype, copy=True)
    return _written(whole, parts, lambda one: one.sink_scores, NO_NULL)


class Editing:
    """The interventions of one session, sorted by kind and checked against the model.

    Args:
        interventions: those that change nothing are dropped, so that they cannot change a bit.

    Raises:
        ConfigurationError: something that is no intervention, or a layer or module that the model has not.
    """

    def __init__(self, interventions: Sequence[Intervention], anatomy: Anatomy) -> None:
        others = [edit for edit in interventions if not isinstance(edit, (HeadIntervention, HiddenIntervention))]
        if others:
            raise ConfigurationError(
                f"{type(others[0]).__name__} is no intervention; it must be a HeadIntervention or a HiddenIntervention "
                "('sinklab list interventions')"
            )
        for edit in interventions:
            _require_lists(edit)
        active = [edit for edit in interventions if not edit.changes_nothing]
        self._of_heads = [edit for edit in active if isinstance(edit, HeadIntervention)]
        self.of_hidden = [edit for edit in active if isinstance(edit, HiddenIntervention)]
        _require_positions(active)
        _require_layers(self.of_hidden, anatomy)

    def groups(self, site: Site, num_heads: int) -> list[tuple[list[int], list[HeadIntervention]]]:
        """Heads of a module that undergo the same interventions, with these in order; heads that undergo none are left out.

        Raises:
            ConfigurationError: a head that the module has not.
        """
        by_head: dict[int, list[HeadIntervention]] = {}
        for edit in self._of_heads:
            chosen: Iterable[int] = range(num_heads)
            if edit.heads is not None:  # once each, also if a module is named in both ways
                chosen = {*edit.heads.get(site.module, ()), *(edit.heads.get(site.layer, ()) if site.kind == "self" else ())}
            for head in chosen:
                if not 0 <= head < num_heads:
                    raise ConfigurationError(
                        f"intervention {edit.name!r}: {site.module} has no head {head}; expected 0 to {num_heads - 1}"
                    )
                by_head.setdefault(head, []).append(edit)
        groups: dict[tuple[int, ...], tuple[list[int], list[HeadIntervention]]] = {}
        for head in sorted(by_head):
            group = groups.setdefault(tuple(id(edit) for edit in by_head[head]), ([], by_head[head]))
            group[0].append(head)
        return list(groups.values())

    def check_used(self, sites: Sequence[Site], seq_len: int) -> None:
        """Raise :class:`ConfigurationError` if heads were named of a module that has not run, or positions of no text.

        Args:
            seq_len: tokens of the longest document that was seen.
        """
        for edit in (*self._of_heads, *self.of_hidden):
            place = getattr(edit, "place", None)
            if place is None or isinstance(place, str) or names_nothing(place):
                continue
            if int(torch.as_tensor(place).min()) >= seq_len:
                raise ConfigurationError(
                    f"intervention {edit.name!r}: no text has the position {place}, so nothing was edited; the longest had "
                    f"{seq_len} tokens"
                )
        seen = {site.module for site in sites} | {site.layer for site in sites if site.kind == "self"}
        for edit in self._of_heads:
            for module in edit.heads or ():
                if module not in seen:
                    raise ConfigurationError(
                        f"intervention {edit.name!r}: module {module!r} did not run, so nothing of it was edited; these did: "
                        f"{', '.join(f'{site.layer} ({site.module})' for site in sites if site.kind == 'self')}, and by name: "
                        f"{', '.join(site.module for site in sites if site.kind == 'cross') or 'none'}"
                    )

    def edit(
        self, call: AttentionCall, module: nn.Module, dropout: float, want_weights: bool
    ) -> tuple[AttentionCall, Tensor | None] | None:
        """The call with all interventions of its heads, and its weights if they are wanted; ``None`` if it has none.

        It is what probes are shown: edits of weights show in its ``head_outputs`` alone, with which the model goes on.

        Raises:
            SessionError: the model is being trained: what is recomputed here has neither gradient nor dropout.
            UnsupportedModelError: an intervention asks for something that this attention does not have.
        """
        groups = self.groups(call.site, call.num_heads)
        if not groups:
            return None
        if module.training and dropout:
            raise SessionError(f"{call.site.module}: interventions have no attention dropout; call model.eval() first")
        assert call.head_outputs is not None  # a session always has them
        outputs, parts = call.head_outputs.clone(), []
        weights = call.queries.new_zeros(*call.queries.shape[:3], call.kv_len) if want_weights else None
        for heads, interventions in groups:
            own = of_heads(call, heads)
            part, part_outputs, part_weights = edited_outputs(own, interventions, want_weights=want_weights)
            outputs[:, :, heads] = part_outputs.transpose(1, 2).to(outputs.dtype)
            if weights is not None and part_weights is not None:
                weights[:, heads] = part_weights.to(weights.dtype)
            parts.append((heads, own, part))
        edited = dataclasses.replace(merged_call(call, parts), head_outputs=outputs, log_sum_exp=None)
        if weights is not None:
            touched = {head for heads, _, _ in parts for head in heads}
            rest = [head for head in range(call.num_heads) if head not in touched]
            if rest:
                weights[:, rest] = of_heads(call, rest).weights(0, call.q_len).to(weights.dtype)
        return edited, weights

    def edits_layer(self, layer: int) -> bool:
        """Whether some intervention edits what a layer puts out, or, for -1, what enters the first."""
        return any(_is_about(edit, layer) for edit in self.of_hidden)

    def edit_layer(self, output: LayerOutput) -> Tensor:
        """Hidden states after all interventions of this layer."""
        for edit in self.of_hidden:
            if _is_about(edit, output.site.layer):
                output = dataclasses.replace(output, hidden_states=edit.edit_hidden(output))
        return output.hidden_states


def _require_lists(edit: Intervention) -> None:
    """Refuse one number, or pairs, where heads by module or a list is to be given, by the name of the setting."""
    if isinstance(edit, HeadIntervention) and edit.heads is not None:
        given = edit.heads.values() if isinstance(edit.heads, Mapping) else [None]
        if not all(isinstance(heads, Collection) and not isinstance(heads, str) for heads in given):
            raise ConfigurationError(
                f"intervention {edit.name!r}: heads {edit.heads!r} must be lists of heads by module, such as {{5: (0, 1)}} for "
                "heads 5.0 and 5.1"
            )
    if isinstance(edit, HiddenIntervention) and edit.layers is not None and not isinstance(edit.layers, Collection):
        raise ConfigurationError(f"intervention {edit.name!r}: layers must be a list, also of one, got {edit.layers!r}")


def _require_positions(edits: Sequence[Intervention]) -> None:
    """Refuse places that are neither positions nor the null score."""
    for edit in edits:
        place = getattr(edit, "place", None)
        if place is None or (isinstance(place, str) and place == "null"):
            continue
        positions = None if isinstance(place, str) else torch.as_tensor(place)
        # -1 in a tensor fills up the row of a sample that has fewer positions.
        negative = positions is not None and not isinstance(place, Tensor) and bool((positions < 0).any())
        wrong = positions is None or positions.is_floating_point() or positions.dtype == torch.bool
        if negative or (wrong and (positions is None or positions.numel())):
            raise ConfigurationError(
                f"intervention {edit.name!r}: place {place!r} is no position; they count from 0, from the first token of "
                "the document, and nothing is 'null'"
            )


def _require_layers(edits: Sequence[HiddenIntervention], anatomy: Anatomy) -> None:
    """Refuse layers that the model has not."""
    layers = max(len(anatomy.layers), anatomy.depth if anatomy.shares_layers else 0)
    for edit in edits:
        wrong = [layer for layer in edit.layers or () if not -1 <= layer < layers]
        if wrong:
            raise ConfigurationError(
                f"intervention {edit.name!r}: the model has no layer {wrong[0]}; expected -1 (embeddings) to {layers - 1}"
            )


def _is_about(edit: HiddenIntervention, layer: int) -> bool:
    return layer >= 0 if edit.layers is None else layer in edit.layers


def edited_outputs(
    call: AttentionCall, interventions: Sequence[HeadIntervention], *, want_weights: bool = False
) -> tuple[AttentionCall, Tensor, Tensor | None]:
    """The call, which has its head outputs, under interventions that apply to all of its heads; the plain definition, in blocks
    of rows.

    Returns:
        The call after the first stage; head outputs ``(batch, num_heads, q_len, value_dim)``, float32 or wider; weights if
        asked for.
    """
    assert call.head_outputs is not None
    native, outputs = call, call.head_outputs.transpose(1, 2)
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    for edit in interventions:
        call = edit.edit_call(call)
    weighing = [edit for edit in interventions if overrides(edit, "edit_weights")]
    weight_blocks = []
    if call is native and not weighing:
        outputs = outputs.to(dtype)  # exact, and exact back again where nothing is edited
        if want_weights:
            weight_blocks.append(call.weights(0, call.q_len))
    else:
        values = repeat_groups(call.values.to(dtype), call.groups)
        blocks = []
        for start, stop in call.blocks():
            scores = call.scores(start, stop)
            weights, mass = call.signed_weights(start, stop, scores), call.null_mass(start, stop, scores)
            for edit in weighing:
                weights, mass = edit.edit_weights(call, weights, mass, start, stop)
            blocks.append(call.combine(weights, mass, values, start, stop))
            if want_weights:
                weight_blocks.append(weights)
        outputs = torch.cat(blocks, dim=2)
    for edit in interventions:
        outputs = edit.edit_outputs(call, outputs)
    return call, outputs, torch.cat(weight_blocks, dim=2) if weight_blocks else None
