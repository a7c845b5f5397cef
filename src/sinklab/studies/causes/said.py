"""What heads say in the unedited model, so that a group of several layers can be given what it says on another text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.probe import Watcher
from sinklab.interventions.resample_head import ResampleHead
from sinklab.sinks import Head
from sinklab.studies.causes.head_group import HeadGroup, heads_by_module

__all__ = ["Said"]


class Said(Watcher):
    """Outputs of heads in one run of the unedited model.

    A head of a later layer, in a run in which one of an earlier layer is resampled, says what follows from that; so the other
    text's own run is what it has to be taken from. Groups of one module have nothing edited before them and need no record.

    Args:
        groups: those of several modules are recorded.
    """

    name, needs = "said", frozenset({"head_outputs"})

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        several = [by_module for group in groups if len(by_module := heads_by_module(group)) > 1]
        keys = {key for by_module in several for key in by_module}
        self.wanted = {key: sorted({head for by_module in several for head in by_module.get(key, ())}) for key in keys}
        self._outputs: dict[int | str, list[Tensor]] = {}  # of every call of a module that runs several times

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        key = _key(self.wanted, call.site)
        if key is None:
            return
        assert call.head_outputs is not None  # asked for
        self._outputs.setdefault(key, []).append(call.head_outputs[:, :, self.wanted[key]])

    def in_place(self, interventions: Sequence[HeadIntervention], edited: Head | HeadGroup) -> list[HeadIntervention]:
        """The interventions for one run; a resampled head is given what was recorded, not what the edited run would say."""
        by_module = heads_by_module(edited)
        if len(by_module) < 2:
            return list(interventions)
        return [
            _ResampleSaid(heads=edit.heads, shift=edit.shift, said={key: self._of(key, own) for key, own in by_module.items()})
            if isinstance(edit, ResampleHead)
            else edit
            for edit in interventions
        ]

    def _of(self, key: int | str, heads: Sequence[int]) -> Iterator[Tensor]:
        """What some heads of a module said, call by call; an intervention is shown them in ascending order."""
        chosen = [self.wanted[key].index(head) for head in sorted(heads)]
        return (outputs[:, :, chosen] for outputs in self._outputs[key])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _ResampleSaid(ResampleHead):
    """Resampling from recorded outputs, in one run of the model.

    Args:
        said: by module, of one call after the other ``(batch, q_len, num_heads, value_dim)``.
    """

    said: Mapping[int | str, Iterator[Tensor]]

    def given_by(self, call: AttentionCall) -> Tensor:
        key = _key(self.said, call.site)
        assert key is not None  # only modules whose heads are edited are shown
        return next(self.said[key])


def _key(known: Mapping[int | str, object], site: Site) -> int | str | None:
    """Under which name a module is known: its own, or, of self-attention, its running number."""
    if site.module in known:
        return site.module
    return site.layer if site.kind == "self" and site.layer in known else None
