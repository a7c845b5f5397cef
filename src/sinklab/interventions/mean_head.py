"""Mean of a head: replace its output at every query by its mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import HeadIntervention, Heads
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.registry import interventions


@interventions.register("mean_head")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MeanHead(HeadIntervention):
    """Mean ablation: what a head adds on average stays, what depends on the query goes (Wang et al. 2022, arXiv 2211.00593).

    Without ``means`` the mean is taken over the queries of the same text, later ones included, after whatever was edited
    before; of documents packed in a row each has its own. Padding is neither counted nor changed. Under any operation, gated
    or not.

    Args:
        means: mean output of every head, ``(num_heads, value_dim)`` by module; ``MeanHead.over`` takes them from
            texts of one's own.

    Raises:
        ConfigurationError: a module without means; or no means and keys in a cache, whose queries are not there any more.
    """

    neutral: ClassVar[dict[str, object]] = {"heads": {}}

    means: Mapping[str, Tensor] | None = None

    @property
    def causal(self) -> bool:
        return self.means is not None

    @classmethod
    def over(cls, model: nn.Module, batches: Iterable[Mapping[str, object]], *, heads: Heads | None = None) -> Self:
        """With the mean output of every head over all tokens of some texts.

        Args:
            batches: keyword arguments of the model, one set a forward.
            heads: those that are to be edited.
        """
        probe = _Means()
        with torch.no_grad(), attend(model, [probe]):
            for batch in batches:
                model(**lean_arguments(model, batch))
        return cls(heads=heads, means={module: total / probe.counts[module] for module, total in probe.sums.items()})

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        counted = call.counted[:, None, :, None]
        if self.means is not None:
            if call.site.module not in self.means:
                raise ConfigurationError(
                    f"mean_head: no means for {call.site.module}; there are some for {', '.join(self.means) or 'no module'}"
                )
            mean = self.means[call.site.module].to(outputs)[list(call.head_numbers)][None, :, None]
        else:
            if call.cached_keys and call.site.kind == "self":
                raise ConfigurationError(
                    f"mean_head: {call.site.module} has {call.cached_keys} keys in a cache, and a mean over the text needs "
                    "their queries; run the text at once, or take means elsewhere (MeanHead.over)"
                )
            mean = _mean_of_documents(call, outputs)
        return torch.where(counted, mean, outputs)


def _mean_of_documents(call: AttentionCall, outputs: Tensor) -> Tensor:
    """Mean output over the counted queries of the document of each query, in the shape of ``outputs``; 0 for padding."""
    counted, documents = call.counted, call.query_documents.clamp(min=0)
    size = int(documents.max()) + 1 if documents.numel() else 1
    if size == 1:  # a plain sum, whose order of addition does not depend on the device
        total = outputs.masked_fill(~counted[:, None, :, None], 0.0).sum(2, keepdim=True)
        return (total / counted.sum(1).clamp_min(1)[:, None, None, None]).expand_as(outputs)
    number = counted.new_zeros(len(counted), size, dtype=torch.int64).scatter_add(1, documents, counted.long())
    index = documents[:, None, :, None].expand_as(outputs)
    sums = outputs.new_zeros(*outputs.shape[:2], size, outputs.shape[3])
    sums = sums.scatter_add(2, index, outputs.masked_fill(~counted[:, None, :, None], 0.0))
    return (sums / number.clamp_min(1)[:, None, :, None]).gather(2, index)


class _Means(Watcher):
    """Sums of head outputs over counted queries."""

    name, needs = "head_means", frozenset()

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        assert call.head_outputs is not None
        outputs = call.head_outputs[call.counted].double().sum(0)
        self.sums[call.site.module] = self.sums.get(call.site.module, torch.zeros_like(outputs)) + outputs
        self.counts[call.site.module] = self.counts.get(call.site.module, 0) + int(call.counted.sum())

    def merge(self, other: _Means) -> None:
        for module, total in other.sums.items():
            self.sums[module] = self.sums.get(module, torch.zeros_like(total)) + total
            self.counts[module] = self.counts.get(module, 0) + other.counts[module]
