"""Calibration of a fold: for every head the score of its sinks, linear in the query before rotation, and their value.

Sums of a layer are float64: normal equations in float32 lose the digits that the fit is made of.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import on_seam_modules
from sinklab.attention.operation import HeadShape, Source, repeat_groups
from sinklab.corpora.samples import Samples
from sinklab.operations._bias import NO_SCORE
from sinklab.results.progress import Progress
from sinklab.studies.measure.probing import forward_arguments

LEAST_EIGENVALUE = 1e-10
"""Of the normal equations, as a share of the largest: directions of the query that the texts do not have are left out."""


@dataclasses.dataclass
class Fit:
    """What stands for the sinks in one attention module; of query heads unless said, float64.

    Attributes:
        key: ``(num_heads, head_dim)``; a score is ``query · key + constant``.
        constant: ``(num_heads,)``.
        mean_score: ``(num_heads,)``: the constant score that is nearest to those of the sinks.
        value: ``(num_kv_heads, value_dim)``, the mean over texts and queries, by the weight that these give.
        value_spread: ``(num_kv_heads,)``: root mean square distance of the values of single texts from it, over its norm.
        weight: ``(num_heads,)``: mean weight on the sinks, of the queries that see them and stand on none.
        sink_key: ``(num_kv_heads, head_dim)``: mean key of the first sink as it is cached, rotated at its position.
    """

    key: Tensor
    constant: Tensor
    mean_score: Tensor
    value: Tensor
    value_spread: Tensor
    weight: Tensor
    sink_key: Tensor


@dataclasses.dataclass
class Residuals:
    """How well a fit does on texts that it was not made from; of query heads, float64.

    ``explained`` is the share of the variance of the sinks' scores, at most 1 (R²), ``weight`` the mean weight on the
    sinks, and ``error`` the mean distance of the weight on nothing from it.
    """

    explained: Tensor
    error: Tensor
    weight: Tensor


class _Scores(seam.Observer):
    """Hands on, of every attention module, queries before rotation, the scores of the sinks, and the rest of their rows."""

    running = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shapes: Mapping[str, HeadShape],
        positions: Sequence[int],
        take: Callable[..., None],
    ) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.shapes, self.positions, self.take = shapes, list(positions), take
        self.unrotated: dict[str, Tensor] = {}

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self.names

    def keep(self, name: str, source: Source, module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
        shape = self.shapes[name]
        self.unrotated[name] = source.read(output, shape.num_heads, shape.head_dim)

    def on_attention(
        self, native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:  # fmt: skip
        name = self.names[id(module)]
        length, device = query.shape[2], query.device
        implementation = getattr(native, "__name__", "")
        rule, bias = host_arguments.read_mask(mask, kwargs, module, implementation, length, length, device)
        scaling = kwargs.get("scaling")
        keys = repeat_groups(key, query.shape[1] // key.shape[1])
        scores = torch.matmul(query, keys.transpose(2, 3)).float() * (query.shape[3] ** -0.5 if scaling is None else scaling)
        if (cap := kwargs.get("softcap")) is not None:
            scores = torch.tanh(scores / cap) * cap
        if bias is not None:
            scores = scores + bias
        seen = rule.block(0, length, 0, length)
        scores = scores.masked_fill(~seen, float("-inf"))
        rows = seen[0, 0, :, self.positions].all(-1)
        rows[self.positions] = False
        at = torch.zeros(length, dtype=torch.bool, device=device)
        at[self.positions] = True
        sinks = scores[..., rows, :][..., at]
        rest = scores[..., rows, :][..., ~at].logsumexp(-1).double()
        unrotated = self.unrotated.pop(name, query)[:, :, rows].double()
        self.take(name, unrotated, sinks.double(), rest, value[:, :, at].double(), key[:, :, self.positions[0]].double())
        return native(module, query, key, value, mask, **kwargs)


def _run(
    model: PreTrainedModel,
    samples: Samples,
    shapes: Mapping[str, HeadShape],
    positions: Sequence[int],
    take: Callable[..., None],
    batch_size: int,
    progress: Callable[[int], None],
) -> None:
    modules = on_seam_modules(model)
    observer = _Scores(modules, shapes, positions, take)
    handles = [
        modules[name].get_submodule(source.module).register_forward_hook(functools.partial(observer.keep, name, source))
        for name, shape in shapes.items()
        if shape.queries_from and (source := Source.of(shape.queries_from))
    ]
    try:
        with torch.no_grad(), seam.shadow(observer):
            for start in range(0, len(samples), batch_size):
                some = samples.take(slice(start, start + batch_size))
                model(**forward_arguments(model, some, full_logits=False))
                progress(start + len(some))
    finally:
        for handle in handles:
            handle.remove()


class _Sums:
    """Sums of one module over texts and queries."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []

    def add(self, queries: Tensor, sinks: Tensor, rest: Tensor, values: Tensor, keys: Tensor) -> None:
        scores = sinks.logsumexp(-1)
        ones = queries.new_ones(*queries.shape[:3], 1)
        inputs = torch.cat((queries, ones), -1).transpose(0, 1).flatten(1, 2)  # (heads, rows, size + 1)
        targets = scores.transpose(0, 1).flatten(1)
        weight = torch.sigmoid(scores - rest)
        shares = torch.softmax(sinks, -1) * weight[..., None]  # (batch, heads, rows, sinks)
        groups = queries.shape[1] // values.shape[1]
        by_value = shares.sum(2).unflatten(1, (-1, groups)).sum(2)  # (batch, kv heads, sinks)
        self.parts.append(
            {
                "gram": torch.matmul(inputs.transpose(1, 2), inputs),
                "moment": torch.matmul(inputs.transpose(1, 2), targets[..., None])[..., 0],
                "score": targets.sum(1),
                "count": torch.full((), float(targets.shape[1]), dtype=torch.float64),
                "weight": weight.sum(dim=(0, 2)),
                "value": (by_value[..., None] * values).sum(dim=(0, 2)),
                "share": by_value.sum(dim=(0, 2)),
                "squared": (by_value * values.square().sum(-1)).sum(dim=(0, 2)),
                "key": keys.sum(0),
                "texts": torch.full((), float(len(keys)), dtype=torch.float64),
            }
        )
        if len(self.parts) == 2:
            first, second = self.parts
            self.parts = [{name: first[name] + second[name] for name in first}]

    def fit(self) -> Fit:
        (sums,) = self.parts
        sizes = sums["gram"].diagonal(dim1=1, dim2=2)
        scale = torch.where(sizes > 0, sizes.clamp_min(1e-300).rsqrt(), 0.0)  # a norm may set coordinates of queries to zero
        gram = sums["gram"] * scale[:, :, None] * scale[:, None, :]
        values, vectors = torch.linalg.eigh(gram)
        inverse = torch.where(values > LEAST_EIGENVALUE * values[:, -1:], 1 / values, 0.0)
        projected = torch.matmul(vectors.transpose(1, 2), (scale * sums["moment"])[..., None])
        solution = torch.matmul(vectors, inverse[..., None] * projected)[..., 0] * scale
        value = sums["value"] / sums["share"][:, None].clamp_min(1e-300)
        norm = value.square().sum(-1)
        spread = (sums["squared"] / sums["share"].clamp_min(1e-300) - norm).clamp_min(0).sqrt() / norm.sqrt().clamp_min(1e-300)
        count = sums["count"]
        key = sums["key"] / sums["texts"]
        return Fit(solution[:, :-1], solution[:, -1], sums["score"] / count, value, spread, sums["weight"] / count, key)


def calibrate(
    model: PreTrainedModel,
    samples: Samples,
    shapes: Mapping[str, HeadShape],
    positions: Sequence[int],
    *,
    batch_size: int,
    progress: Progress,
) -> dict[str, Fit]:
    """The fit of every attention module, by least squares over all queries that see all sinks and stand on none."""
    sums = {name: _Sums() for name in shapes}

    def take(name: str, *parts: Tensor) -> None:
        sums[name].add(*parts)

    _run(model, samples, shapes, positions, take, batch_size, lambda done: progress("calibrating", done, len(samples)))
    return {name: own.fit() for name, own in sums.items()}


def check_fits(
    model: PreTrainedModel,
    samples: Samples,
    shapes: Mapping[str, HeadShape],
    positions: Sequence[int],
    fits: Mapping[str, Fit],
    *,
    batch_size: int,
    progress: Progress,
) -> dict[str, Residuals]:
    """How well fits do on other samples; arguments as of :func:`calibrate`."""
    sums: dict[str, Tensor] = {}

    def take(name: str, queries: Tensor, sinks: Tensor, rest: Tensor, *_: Tensor) -> None:
        scores, own = sinks.logsumexp(-1), fits[name]
        fitted = torch.matmul(queries, own.key[..., None])[..., 0] + own.constant[:, None]
        weight = torch.sigmoid(scores - rest)
        parts = (
            torch.ones_like(scores), scores, scores.square(), (scores - fitted).square(), weight,
            (torch.sigmoid(fitted - rest) - weight).abs(),
        )  # fmt: skip
        found = torch.stack([part.sum(dim=(0, 2)) for part in parts])
        sums[name] = sums[name] + found if name in sums else found

    _run(model, samples, shapes, positions, take, batch_size, lambda done: progress("checking the fits", done, len(samples)))
    residuals = {}
    for name, (count, score, squared, missed, weight, error) in sums.items():
        variance = (squared - score.square() / count).clamp_min(1e-300)
        residuals[name] = Residuals(1 - missed / variance, error / count, weight / count)
    return residuals


def parameters_of(fit: Fit, folded: Sequence[int], score: str = "linear", value: str = "mean") -> dict[str, Tensor]:
    """Parameters of :class:`~sinklab.operations.folded_sink.FoldedSink`, of the key–value heads that are folded.

    Args:
        score: ``linear`` in the query, or ``constant``.
        value: ``mean``, or ``0`` as that of a learned sink logit (gpt-oss).
    """
    heads = torch.zeros(len(fit.value), dtype=torch.bool)
    heads[list(folded)] = True
    rows = heads.repeat_interleave(len(fit.key) // len(fit.value))
    linear = score == "linear"
    return {
        "key": torch.where(rows[:, None], fit.key if linear else 0.0, 0.0),
        "constant": torch.where(rows, fit.constant if linear else fit.mean_score, NO_SCORE),
        "value": torch.where(heads[:, None], fit.value if value == "mean" else 0.0, 0.0),
    }
