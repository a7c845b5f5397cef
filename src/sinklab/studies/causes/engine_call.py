"""One head under many variants: what they have in common is computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.editing import edited_outputs
from sinklab.attention.intervention import HeadIntervention, overrides

__all__ = ["SharedCall", "SharedHead"]

OF_SCORES = ("queries", "keys", "scaling", "softcap", "bias")
OF_WEIGHTS = (*OF_SCORES, "visible", "operation", "sink_scores")


class SharedHead:
    """The outputs of one head.

    Args:
        call: cut down to that head, with its outputs.
    """

    def __init__(self, call: AttentionCall) -> None:
        self._call = SharedCall.of(call)
        self._memo: dict[tuple[object, ...], tuple[AttentionCall, Tensor]] = {}

    def outputs(self, interventions: Sequence[HeadIntervention], known_as: tuple[object, ...] = ()) -> Tensor:
        """What :func:`~sinklab.attention.editing.edited_outputs` gives, ``(batch, q_len, value_dim)``.

        Args:
            known_as: a key for each intervention, the same for interventions that do the same.
        """
        if not interventions:
            assert self._call.head_outputs is not None
            return self._call.head_outputs[:, :, 0]
        return self._edited(interventions, known_as)[1][:, 0]

    def _edited(self, interventions: Sequence[HeadIntervention], known_as: tuple[object, ...]) -> tuple[AttentionCall, Tensor]:
        if known_as in self._memo:
            return self._memo[known_as]
        last = interventions[-1]
        # Outputs are the last stage, so one that edits them alone goes on from what those before it give.
        follows = not overrides(last, "edit_call") and not overrides(last, "edit_weights")
        if len(interventions) == 1 or not follows or len(known_as) != len(interventions):
            return edited_outputs(self._call, interventions)[:2]
        call, before = self._edited(interventions[:-1], known_as[:-1])
        version = before._version
        outputs = last.edit_outputs(call, before)
        if before._version == version:  # not written to meanwhile
            self._memo[known_as[:-1]] = call, before
        else:
            self._memo.pop(known_as[:-1], None)
        return call, outputs


@dataclasses.dataclass
class SharedCall(AttentionCall):
    """Gives what :class:`AttentionCall` gives; scores and weights once for all interventions that leave them alone.

    Attributes:
        native: the call before any intervention; copies made by :func:`dataclasses.replace` keep it, and are compared with it.
        memo: what has been computed of it.
    """

    native: AttentionCall | None = None
    memo: dict[tuple[str, int, int], tuple[Tensor, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, call: AttentionCall) -> Self:
        """The call with an empty memo."""
        return cls(**{field.name: getattr(call, field.name) for field in dataclasses.fields(AttentionCall)}, native=call)

    def scores(self, query_start: int, query_stop: int) -> Tensor:
        return self._once(
            "scores", OF_SCORES, query_start, query_stop, lambda: super(SharedCall, self).scores(query_start, query_stop)
        )

    def signed_weights(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        def compute() -> Tensor:
            return super(SharedCall, self).signed_weights(query_start, query_stop, scores)

        return self._once("weights", OF_WEIGHTS, query_start, query_stop, compute)

    def null_mass(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        def compute() -> Tensor:
            return super(SharedCall, self).null_mass(query_start, query_stop, scores)

        return self._once("null mass", OF_WEIGHTS, query_start, query_stop, compute)

    def _once(self, what: str, fields: tuple[str, ...], start: int, stop: int, compute: Callable[[], Tensor]) -> Tensor:
        if any(getattr(self, name) is not getattr(self.native, name) for name in fields):
            return compute()
        value, version = self.memo.get((what, start, stop), (None, None))
        if value is None or value._version != version:  # written to meanwhile
            value = compute()
            self.memo[what, start, stop] = value, value._version
        return value
