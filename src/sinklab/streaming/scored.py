"""Scored: the cache of policies that look at what was computed; every head keeps tokens of its own.

One token is processed after the other, also of a prompt: who leaves depends on the scores of all tokens before. That is exact
and slow; a policy of positions alone reads in chunks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, ClassVar, Unpack

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.placement import input_device
from sinklab.attention.state import state_of
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.policies.base import ScoredPolicy
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.host import Arguments
from sinklab.streaming.ordered import has_ordered_bias
from sinklab.streaming.table import Table

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

__all__ = ["ScoredCache", "ScoredLayer", "ScoredStep", "ScoredTable"]


class ScoredCache(PolicyCache, seam.Observer):
    """The cache of a :class:`~sinklab.policies.base.ScoredPolicy`, for one model; pass it as ``past_key_values``.

    Attention weights, where a policy needs them, are computed from what the model's own attention
    function is given, which therefore has to be reached through the attention interface of transformers.

    Arguments and errors are those of :class:`PolicyCache`; there is no ``chunk``.

    Raises:
        UnsupportedModelError: also a model whose bias depends on the order of its keys, and one whose weights are needed and
            cannot be seen.
    """

    takes: ClassVar[type] = ScoredPolicy
    policy: ScoredPolicy
    table: ScoredTable

    def __init__(self, policy: ScoredPolicy, model: PreTrainedModel | None = None, *, rebase_at: int | None = None) -> None:
        self._anatomy: Anatomy | None = None
        self._looking = contextlib.ExitStack()
        super().__init__(policy, model, chunk=1, rebase_at=rebase_at)

    def _fit(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        if has_ordered_bias(model):
            raise UnsupportedModelError(
                f"{name} adds a bias that counts the keys between key and query, which is another for every head once heads "
                f"keep different tokens; policy {self.policy.name!r} needs rotary positions or none"
            )
        rotations = self._fit_positions(model)
        if self.policy.needs_weights:
            self._anatomy = Anatomy(model)
            if not self._anatomy.attention:
                raise UnsupportedModelError(
                    f"{name} computes attention in its own code, where its weights cannot be seen; policy {self.policy.name!r} "
                    "needs them"
                )
        self._table = table = ScoredTable(self.policy, input_device(model), model)
        self.layers = [ScoredLayer(table, rotation) for rotation in rotations.layers.values()]

    def open(self, module: nn.Module, arguments: Arguments) -> Arguments:
        arguments = super().open(module, arguments)
        self._stop_looking()
        if self.policy.needs_weights:
            self._looking.enter_context(seam.shadow(self))
        return arguments

    def close(self, output: ModelOutput | None) -> ModelOutput | None:
        if output is not None and self.table.waiting is not None:
            self.table.miss()
        self._stop_looking()
        return super().close(output)

    def _stop_looking(self) -> None:
        self._looking.close()
        if self._table is not None:
            self.table.waiting = None

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is one of this model's attention modules."""
        return self._anatomy is not None and id(module) in self._anatomy.names

    @property
    def running(self) -> bool:
        """Whether the model is inside its forward."""
        return self.step is not None

    def on_attention(
        self,
        native: seam.Native,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        **kwargs: Unpack[seam.Keywords],
    ) -> seam.Attended:
        """Run the model's own function, and hand the weights of the one query to the layer."""
        result = native(module, query, key, value, mask, **kwargs)
        layer, self.table.waiting = self.table.waiting, None
        if layer is not None:
            unknown = seam.unknown_keywords(kwargs)
            if unknown:
                raise UnsupportedModelError(
                    f"{type(module).__name__} was given the keyword {', '.join(unknown)}, which may change its attention "
                    f"weights in a way that sinklab does not know; policy {self.policy.name!r} needs them"
                )
            with torch.autocast(query.device.type, enabled=False):
                layer.rescore(_weights(native, module, query, key, value, mask, kwargs))
        return result

    # --- what it holds -------------------------------------------------------------------------------------------------------

    def describe(self, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
        """The tokens held, one a line: ``layer``, ``row``, ``head`` (of keys and values), ``slot``, ``token``, ``score``."""
        lines = []
        for index, layer in enumerate(self.layers):
            if layer.batch_size < 0:
                continue
            for row, head, slot in (layer.tokens >= 0).nonzero().tolist():
                token, score = int(layer.tokens[row, head, slot]), float(layer.scores[row, head, slot])
                lines.append((index, row, head, slot, token, score))
        return pd.DataFrame(lines, columns=["layer", "row", "head", "slot", "token", "score"])

    def reset(self) -> None:
        self._stop_looking()
        super().reset()


def _weights(
    native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, kwargs: seam.Keywords
) -> Tensor:
    """Weights of the last query, summed over the query heads of a group, ``(batch, num_kv_heads, kv_len)``."""
    name = getattr(native, "__name__", "")
    seam.require_readable(mask, name, module)
    q_len, kv_len = query.shape[2], key.shape[2]
    visible, bias = seam.read_mask(mask, kwargs, module, name, q_len, kv_len, query.device)
    operation = seam.operation_of(module, native)
    state = state_of(module, operation, kwargs.get("layer_input"))
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key = operation.features(query, key, state)
    sinks = seam.read_sink_scores(kwargs)
    nowhere = query.new_zeros(len(query), kv_len, dtype=torch.long)
    call = AttentionCall(
        site=Site("", 0),
        queries=query,
        keys=key,
        values=value,
        scaling=scaling,
        visible=visible,
        operation=operation,
        query_positions=nowhere[:, :q_len],
        key_positions=nowhere,
        query_documents=nowhere[:, :q_len],
        key_documents=nowhere,
        softcap=kwargs.get("softcap"),
        bias=bias,
        sink_scores=operation.null_scores(query, scaling, state) if sinks is None else sinks,
    )
    weights = call.weights(q_len - 1, q_len)[:, :, 0]
    return weights.unflatten(1, (key.shape[1], -1)).sum(dim=2)


@dataclasses.dataclass(eq=False)
class ScoredStep:
    """One forward of one token a row.

    Attributes:
        length: 1.
        token: index of the new token, int64 ``(rows,)``; of padding any.
        valid: boolean ``(rows,)``, or ``None`` if no row has padding.
        free: first slot of each row that has never held a token, int64 ``(rows,)``; ``num_slots`` where the row is full.
        filled: slots that hold a token of some row behind the step, from the first one on.
        visible: boolean ``(rows, 1, 1, filled)``; ``None`` when all are visible.
        position_ids: int64 ``(rows, 1)``.
    """

    length: int
    token: Tensor
    valid: Tensor | None
    free: Tensor
    filled: int
    visible: Tensor | None
    position_ids: Tensor


class ScoredTable(Table):
    """How many tokens each row has seen, and where positions are counted from; which are held is each layer's to say.

    Attributes:
        waiting: the layer that has written keys, and whose attention comes next.
    """

    policy: ScoredPolicy
    step: ScoredStep | None
    waiting: ScoredLayer | None = None

    def plan(self, length: int, valid: Tensor | None) -> ScoredStep:
        assert length == 1
        token, free = self.seen, self.held
        self.seen = token + (1 if valid is None else valid[:, 0].long())
        self.columns += 1
        held = self.held
        filled = max(1, int(held.max()))
        visible = None
        if bool((held < filled).any()):
            # Padding before the first token of a row sees a slot of zeros: a row that sees nothing may not be a number.
            visible = (torch.arange(filled) < held.clamp(min=1)[:, None])[:, None, None].to(self.device)
        positions = (token - self.base)[:, None].to(self.device)
        valid = None if valid is None else valid[:, 0].to(self.device)
        return ScoredStep(1, token.to(self.device), valid, free.to(self.device), filled, visible, positions)

    def rebase(self) -> Tensor:
        """Count positions from the next token."""
        return self._count_from(self.seen.min().expand(self.rows))

    def crop(self, keep: int) -> None:
        raise ConfigurationError(
            f"cannot go back to {keep} tokens: scores of policy {self.policy.name!r} have the tokens since then in them. Save "
            "the state before, and load it"
        )

    def wait_for(self, layer: ScoredLayer) -> None:
        """The next attention call is of this layer."""
        if self.waiting is not None:
            self.miss()
        self.waiting = layer

    def miss(self) -> None:
        """Refuse to go on without the weights of a layer."""
        raise UnsupportedModelError(
            f"a layer of {type(self.model).__name__} wrote keys and its attention was not seen, so policy {self.policy.name!r} "
            "has no weights to go by: it computes attention in its own code, or an attend() on this model is open and sees it "
            "first"
        )


class ScoredLayer(HeldLayer):
    """One layer of a :class:`ScoredCache`.

    Attributes:
        keys, values: ``(batch, num_kv_heads, slots, head_dim)``; allocated at the first call.
        scores: float32 ``(batch, num_kv_heads, slots)``.
        tokens: index of the token in each slot, int64, likewise; -1 where there is none.
    """

    buffers: ClassVar[tuple[str, ...]] = ("keys", "values", "scores", "tokens")
    table: ScoredTable
    scores: Tensor
    tokens: Tensor

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super().allocate(key_states, value_states)
        self.scores = torch.zeros(self.keys.shape[:3], device=self.device)
        self.tokens = torch.full(self.keys.shape[:3], -1, device=self.device)
        self.pinned = torch.tensor(self.table.policy.pinned, dtype=torch.long, device=self.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new token of every row, ``(batch, num_kv_heads, 1, head_dim)``; keys and values that are held."""
        self.require(key_states, value_states)
        step, keys, values = self.table.step, self.keys, self.values
        assert step is not None
        rows = torch.arange(len(keys), device=self.device)
        if step.valid is not None:
            rows = rows[step.valid.expand(len(keys))]
        slot = self._slots(step)[rows]
        at = rows[:, None], torch.arange(keys.shape[1], device=self.device), slot
        keys[at], values[at] = key_states[rows, :, 0], value_states[rows, :, 0]
        self.scores[at] = 0.0
        self.tokens[at] = step.token.expand(len(keys))[rows, None]
        if self.table.policy.needs_weights:
            self.table.wait_for(self)
        else:
            self.rescore(None)
        return self._rotated(step.filled), values[:, :, : step.filled]

    def _rotated(self, filled: int) -> Tensor:
        """The keys that are held, at their positions as the policy has them, ``(batch, num_kv_heads, filled, head_dim)``.

        For in-cache positions a key moves by the tokens that its head has lost between it and the newest, each time from its
        first form.
        """
        keys, tokens = self.keys[:, :, :filled], self.tokens[:, :, :filled]
        if self.table.policy.positions == "original" or self.rotation is None:
            return keys
        rank = tokens.argsort(dim=2).argsort(dim=2)  # slots without a token come first
        lost = tokens.amax(dim=2, keepdim=True) - tokens - (filled - 1 - rank)
        lost = lost.masked_fill(tokens < 0, 0)
        return self.rotation.rotated(keys, lost) if bool(lost.any()) else keys

    def _slots(self, step: ScoredStep) -> Tensor:
        """Slot of the new token, ``(batch, num_kv_heads)``: a free one, or that of the least score, the oldest of equals."""
        scores, tokens = self.scores, self.tokens
        free = step.free[:, None].expand(len(tokens), tokens.shape[1])
        if int(step.free.min()) == int(step.free.max()) < tokens.shape[2]:
            return free
        recent = tokens > (step.token - self.table.policy.protected)[:, None, None]
        stays = recent | torch.isin(tokens, self.pinned) | (tokens < 0)
        ranked = scores.masked_fill(stays, torch.inf)
        least = (ranked == ranked.amin(dim=2, keepdim=True)) & ~stays
        oldest = tokens.masked_fill(~least, torch.iinfo(torch.long).max).argmin(dim=2)
        return torch.where(free < tokens.shape[2], free, oldest)

    def rescore(self, weights: Tensor | None) -> None:
        """Take in what was computed for the newest token; ``weights`` are ``(batch, num_kv_heads, filled)``, if needed."""
        step = self.table.step
        assert step is not None
        buffers = (self.keys, self.values, self.scores, self.tokens)
        keys, values, scores, tokens = (buffer[:, :, : step.filled] for buffer in buffers)
        new = self.table.policy.score(scores, keys, values, weights).to(torch.float32)
        counts = tokens >= 0 if step.valid is None else (tokens >= 0) & step.valid[:, None, None]
        scores.copy_(torch.where(counts, new, scores))

    def reset(self) -> None:
        """Nothing is held any more."""
        if self.is_initialized:
            self.tokens.fill_(-1)
