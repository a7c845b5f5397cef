"""What heads say in the unedited model, so that a group of several layers can be given what it says on another text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.intervention import HeadIntervention
from sinklab.attention.probe import Watcher
from sinklab.errors import MeasurementError
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
        self.wanted = {key: sorted({head for one in several for head in one.get(key, ())}) for key in keys}
        self._outputs: dict[int | str, Tensor] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        key = _key(self.wanted, call.site)
        if key is None:
            return
        if key in self._outputs:
            raise MeasurementError(
                f"{call.site.module} calls its attention several times in one run of the model, so that its heads cannot be "
                "given what they say on another text together with heads of other modules; take groups of one layer"
            )
        assert call.head_outputs is not None  # asked for
        self._outputs[key] = call.head_outputs[:, :, self.wanted[key]]

    def in_place(self, interventions: Sequence[HeadIntervention], edited: Head | HeadGroup) -> list[HeadIntervention]:
        """The interventions, with what was recorded in place of what the edited run itself would give to a resampled head."""
        by_module = heads_by_module(edited)
        if len(by_module) < 2:
            return list(interventions)
        own = {  # an intervention is shown the heads of a module in ascending order
            key: self._outputs[key][:, :, [self.wanted[key].index(head) for head in sorted(chosen)]]
            for key, chosen in by_module.items()
        }
        return [
            _ResampleSaid(heads=edit.heads, shift=edit.shift, said=own) if isinstance(edit, ResampleHead) else edit
            for edit in interventions
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _ResampleSaid(ResampleHead):
    """Resampling from recorded outputs.

    Args:
        said: by module, ``(batch, q_len, num_heads, value_dim)``.
    """

    said: Mapping[int | str, Tensor]

    def given_by(self, call: AttentionCall) -> Tensor:
        key = _key(self.said, call.site)
        assert key is not None  # only modules whose heads are edited are shown
        return self.said[key]


def _key(known: Mapping[int | str, object], site: Site) -> int | str | None:
    """Under which name a module is known: its own, or, of self-attention, its running number."""
    if site.module in known:
        return site.module
    return site.layer if site.kind == "self" and site.layer in known else None
