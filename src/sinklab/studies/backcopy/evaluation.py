"""What the heads of a backcopy model do: the three numbers of extreme tokens, who is active where, and what a head is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, LayerOutput, Statistics
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend
from sinklab.models.language_model import SinkLM
from sinklab.results.metric import FRACTION, VALUE_RATIO, Metric, Row
from sinklab.studies.backcopy.model import knocked_out
from sinklab.studies.backcopy.problem import BackcopyProblem

__all__ = ["BY_HEAD", "BY_LAYER", "BackcopyNumbers", "HeadNumbers", "evaluate", "risks"]

EVALUATION_SEED = 1_000_003
"""Seed of the evaluated samples; seeds of training are small numbers."""

_GUO = "Guo et al. 2024 (arXiv 2410.13835)"

BY_HEAD: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("bos_weight", "weight", "Mean weight on BOS of queries that are no triggers.", paper=_GUO),
        Metric(
            "bos_share",
            "fraction",
            "bos_weight as a share of the weight on all keys; for weights that do not sum to one.",
            range=FRACTION,
        ),
        Metric("bos_weight_trigger", "weight", "Mean weight on BOS of queries that are triggers.", paper=_GUO),
        Metric("previous_weight", "weight", "Mean weight on the token before, of queries that are no triggers."),
        Metric("previous_weight_trigger", "weight", "Mean weight on the token before, of triggers.", paper=_GUO),
        Metric("nothing", "weight", "Mean mass on no token of the text: null mass, learned tokens in front; no triggers."),
        VALUE_RATIO,
    )
}
"""Numbers of one head on one sample. Queries count from the second character on: before it, the token before is BOS."""

BY_LAYER: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("residual_ratio", "ratio", "Norm of the residual stream at BOS by its mean norm elsewhere.", paper=_GUO),
        Metric("residual_bos", "norm", "Norm of the residual stream at BOS."),
    )
}
"""Numbers of the output of one layer on one sample; layer -1 is what enters the first one."""

FIRST_COUNTED = 2


class HeadNumbers(Probe):
    """The numbers of one batch, sample by sample; made for one forward with :func:`~sinklab.attention.session.attend`.

    Args:
        is_trigger: boolean ``(batch, length)``.
        front: learned tokens that the model puts in front of BOS.

    Attributes:
        heads: layer to the name of a number to float32 ``(batch, heads)``; nan where a sample has no such query.
        layers: layer to the name of a number to float32 ``(batch,)``.
    """

    name: ClassVar[str] = "backcopy"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden_states"})
    metrics: ClassVar[tuple[Metric, ...]] = (*BY_HEAD.values(), *BY_LAYER.values())

    def __init__(self, is_trigger: Tensor, front: int = 0) -> None:
        self.is_trigger, self.front = is_trigger, front
        self.heads: dict[int, dict[str, Tensor]] = {}
        self.layers: dict[int, dict[str, Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        front = self.front
        weights = call.weights(front, call.q_len)  # (batch, heads, queries, front + keys)
        null = call.null_mass(front, call.q_len) + weights[..., :front].sum(-1)
        weights = weights[..., front:]
        on_bos, total = weights[..., 0], weights.abs().sum(-1)
        on_previous = torch.zeros_like(on_bos)
        on_previous[..., 1:] = weights.diagonal(-1, dim1=-2, dim2=-1)
        counted = torch.ones_like(self.is_trigger)
        counted[:, :FIRST_COUNTED] = False
        triggers, others = (
            chosen[:, None].to(weights.dtype) for chosen in (self.is_trigger & counted, ~self.is_trigger & counted)
        )

        def mean(numbers: Tensor, chosen: Tensor) -> Tensor:
            return (numbers * chosen).sum(-1) / chosen.sum(-1)

        norms = call.values[:, :, front:].float().norm(dim=-1).repeat_interleave(call.groups, dim=1)
        mass = (total * others).sum(-1)
        # The running number of an attention module is not that of its layer where attention was taken out of an earlier one.
        layer = int(call.site.module.split(".")[1])
        self.heads[layer] = {
            "bos_weight": mean(on_bos, others),
            # A head that is silent there has no share to give.
            "bos_share": torch.where(mass > 0, (on_bos.abs() * others).sum(-1) / mass.where(mass > 0, 1.0), 0.0),
            "bos_weight_trigger": mean(on_bos, triggers),
            "previous_weight": mean(on_previous, others),
            "previous_weight_trigger": mean(on_previous, triggers),
            "nothing": mean(null, others),
            "value_ratio": norms[..., 0] / norms[..., 1:].mean(-1),
        }

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "layer":
            norms = output.hidden_states[:, self.front :].float().norm(dim=-1)
            self.layers[output.site.layer] = {
                "residual_ratio": norms[:, 0] / norms[:, 1:].mean(-1),
                "residual_bos": norms[:, 0],
            }

    def merge(self, other: Self) -> None:
        for own, added in ((self.heads, other.heads), (self.layers, other.layers)):
            for layer, numbers in added.items():
                own[layer] = {name: torch.cat((own[layer][name], values)) for name, values in numbers.items()}
        self.is_trigger = torch.cat((self.is_trigger, other.is_trigger))

    def rows(self) -> Iterator[Row]:
        for layer, numbers in self.heads.items():
            for name, values in numbers.items():
                for head, value in enumerate(values.nanmean(0).tolist()):
                    yield {"metric": BY_HEAD[name], "value": value, "count": len(values), "layer": layer, "head": head}
        for layer, numbers in self.layers.items():
            for name, values in numbers.items():
                yield {"metric": BY_LAYER[name], "value": float(values.mean()), "count": len(values), "layer": layer}


@dataclasses.dataclass(frozen=True, eq=False)
class BackcopyNumbers:
    """Numbers of one model on the same fresh sequences, sample by sample.

    Attributes:
        trigger_excess, other_excess: expected loss above the floor at triggers and at all other places, nats, ``(batch,)``.
        heads: layer to name (:data:`BY_HEAD`) to ``(batch, heads)``.
        layers: layer to name (:data:`BY_LAYER`) to ``(batch,)``; -1 is what enters the first.
        knock_outs: layer and head to the two excesses without that head; empty unless asked for.
    """

    trigger_excess: Tensor
    other_excess: Tensor
    heads: dict[int, dict[str, Tensor]]
    layers: dict[int, dict[str, Tensor]]
    knock_outs: dict[tuple[int, int], tuple[Tensor, Tensor]]


def risks(model: SinkLM, problem: BackcopyProblem, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Excess loss at triggers and at other places by sample, nats, float64 ``(batch,)`` each; nan where there are none."""
    excess, triggers = problem.excess(tokens, model(tokens, use_cache=False).logits), problem.is_trigger(tokens)
    at_triggers = (excess * triggers).sum(1) / triggers.sum(1)
    return at_triggers, (excess * ~triggers).sum(1) / (~triggers).sum(1)


@torch.no_grad()
def evaluate(model: SinkLM, problem: BackcopyProblem, samples: int = 128, *, knock_out: bool = False) -> BackcopyNumbers:
    """Evaluate a model on fresh samples.

    Args:
        samples: how many.
        knock_out: measure the excess without each head in turn, too.
    """
    was_training = model.training
    model.eval()
    tokens = problem.draw(samples, torch.Generator().manual_seed(EVALUATION_SEED))[:, :-1]
    probe = HeadNumbers(problem.is_trigger(tokens), model.tokens_in_front)
    # Of a model that diverged there is nothing to verify; its numbers are no numbers, and say so.
    sound = bool(model(tokens, use_cache=False).logits.isfinite().all())
    with attend(model, [probe], verify=sound):
        at_triggers, elsewhere = risks(model, problem, tokens)
    without = {}
    for layer, numbers in probe.heads.items() if knock_out else ():
        for head in range(numbers["bos_weight"].shape[1]):
            with knocked_out(model, layer, head):
                without[layer, head] = risks(model, problem, tokens)
    model.train(was_training)
    return BackcopyNumbers(at_triggers, elsewhere, probe.heads, probe.layers, without)
