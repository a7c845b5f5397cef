"""Chen et al. 2026, gradient sinks: gradients gather on the sink as attention does, and in proportion to it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sinklab.attention.anatomy import Anatomy
from sinklab.claims._architecture import has_sink
from sinklab.claims._snapshots import ALONG, along_the_way
from sinklab.errors import DoesNotApply
from sinklab.models.losses import cross_entropies
from sinklab.probes.attention_received import AttentionReceived
from sinklab.read_outs._attention import look
from sinklab.registry import claims, read_outs
from sinklab.results.metric import Metric
from sinklab.results.table import unpacked
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint, MeasuredModel, TrainedModel

__all__ = ["METRICS", "gradient_numbers", "gradient_sinks", "gradients", "of_checkpoint"]

TIMES = 2.0
"""Times the mean of the others: what the first token gets beyond it is called gathered. Published is 40."""

TEXTS, SEQ_LEN = 32, 64

LESS = 1.25
"""Least ratio that is called more than even."""

_WHEN = {
    "start": "of the first model that the training kept",
    "before": "of the last model kept before the weight on the first token was half of what it is in the end",
    "end": "of the trained model",
}

METRICS = tuple(
    metric
    for when, whose in _WHEN.items()
    for metric in (
        Metric(
            f"token_gradient_{when}",
            "ratio",
            "Norm of the gradient of the loss with respect to the hidden state of the first token, over the mean norm of those "
            f"of later tokens; mean over the inputs of the layers but the first, {whose}.",
            paper="Chen et al. 2026 (arXiv 2603.17771)",
        ),
        Metric(
            f"key_gradient_{when}",
            "ratio",
            "Norm of the gradient of the loss with respect to the first key over the mean norm of those of later keys; of "
            f"sums over the key-value heads, {whose}.",
        ),
        Metric(
            f"key_gradient_per_mass_{when}",
            "ratio",
            "key_gradient with each norm divided by the attention that the key receives from all queries together; of norms "
            f"and attention summed over the key-value heads, {whose}.",
        ),
    )
)


@contextlib.contextmanager
def _caught(modules: dict[str, nn.Module], outputs: dict[str, Tensor]) -> Iterator[None]:
    """What modules put out in the block, with the graph behind it."""

    def keep(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[name] = output[0] if isinstance(output, tuple) else output

    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _key_maps(anatomy: Anatomy) -> dict[str, nn.Module]:
    """The map to the keys of every attention module.

    Raises:
        DoesNotApply: keys come from one map with queries and values.
    """
    maps = {}
    for name, module in anatomy.attention.items():
        found = [child for called, child in module.named_children() if called in ("k_proj", "key", "k")]
        if not found:
            raise DoesNotApply(f"{name} has no map for keys alone, so that their gradients are not seen apart")
        maps[name] = found[0]
    return maps


def gradient_numbers(model: nn.Module, rows: Tensor, front: int) -> dict[str, float]:
    """Ratios of gradients of the mean next-token loss, the first token to later ones; keys as their map gives them.

    Args:
        model: in evaluation mode.
        rows: int64 ``(rows, seq_len)``, on the model's device.
        front: learned tokens in front of every row, which are neither.
    """
    anatomy = Anatomy(model)
    keys, layers = _key_maps(anatomy), dict(list(anatomy.layers.items())[:-1])
    outputs: dict[str, Tensor] = {}
    with torch.enable_grad(), _caught(keys | layers, outputs):
        logits = model(input_ids=rows, use_cache=False).logits[:, -rows.shape[1] :]
        loss = cross_entropies(logits, rows.roll(-1, dims=1))[:, :-1].mean()
    found = dict(zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True))
    received = AttentionReceived()
    look(model, rows, (received,))
    mass: dict[str, Tensor] = {}
    for row in unpacked(received.rows()):
        of_module = mass.setdefault(row["module"], torch.zeros(rows.shape[1] + front, dtype=torch.float64))
        of_module[row["key_position"]] += row["value"] * row["count"]
    norms, masses = (torch.zeros(rows.shape[1] + front, dtype=torch.float64) for _ in range(2))
    for name in keys:
        module = anatomy.attention[name]
        head_dim = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", 0)
        norms += found[name].double().unflatten(-1, (-1, head_dim)).norm(dim=-1).mean(0).sum(1).cpu()
        masses += mass[name]
    tokens = [found[name].double().norm(dim=-1).mean(0) for name in layers]
    numbers = {
        "key_gradient": norms[front] / norms[front + 1 :].mean(),
        "key_gradient_per_mass": norms[front] / masses[front] * masses[front + 1 :].sum() / norms[front + 1 :].sum(),
    }
    if tokens:
        numbers["token_gradient"] = torch.stack([norm[front] / norm[front + 1 :].mean() for norm in tokens]).mean()
    return {name: float(number) for name, number in numbers.items()}


def _of(model: MeasuredModel, when: str) -> dict[str, float]:
    numbers = gradient_numbers(model.loaded.model, model.rows(TEXTS, SEQ_LEN), model.front)
    return {f"{name}_{when}": number for name, number in numbers.items()}


def gradients(trained: TrainedModel) -> dict[str, float]:
    """Of the first model that a training kept, the last before its sink, and the trained one. :data:`METRICS`."""
    kept = list(along_the_way(trained))
    numbers = _of(trained, "end")
    if kept:
        half = read_outs["sinks"](trained)["first_attention"] / 2
        before = list(itertools.takewhile(lambda model: read_outs["sinks"](model)["first_attention"] < half, kept))
        numbers |= _of(kept[0], "start") | (_of(before[-1], "before") if before else {})
    return numbers


def of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """Sinks and gradients of a model as it is."""
    return {BASELINE: read_outs["sinks"](checkpoint) | _of(checkpoint, "end")}


def _gathered(label: str) -> tuple[Part, ...]:
    return (
        Part("gradients gather on the first token", Value("token_gradient_end", label), more_than=TIMES),
        Part("gradients gather on its keys", Value("key_gradient_end", label), more_than=TIMES),
        Part(
            "for the attention that it receives, its key gets less than others",
            Value("key_gradient_per_mass_end", label),
            less_than=1 / LESS,
        ),
    )


@claims.register("gradient_sinks")
def gradient_sinks() -> Claim:
    """A causal mask alone gives early keys more queries, so the model is compared with itself before it had a sink."""
    label = ALONG.label
    return Claim(
        statement="Gradients gather on the sink as attention goes to it: before, its key gets more of them than others for the "
        "attention that it receives, and then less.",
        source="chen2026",
        reference="Chen et al. 2026 (arXiv 2603.17771)",
        published="The norm of the gradient at the first token over the mean of the others: a median of 40.3, and 5.6 where "
        "the gradients of the value path are scaled down; nothing is said of keys.",
        variants=(ALONG,),
        bases=("no-bos", "bos"),
        read_outs=("sinks", gradients),
        presupposes=(has_sink(label),),
        parts=(
            *_gathered(label),
            Part(
                "they gather on the first token as the sink comes",
                Ratio("token_gradient_end", label, label, other="token_gradient_start"),
                more_than=LESS,
            ),
            Part(
                "before there is a sink, its key gets more than others for the attention that it receives",
                Value("key_gradient_per_mass_before", label),
                more_than=LESS,
            ),
        ),
        checkpoint=OnCheckpoint(
            measure=of_checkpoint,
            parts=_gathered(BASELINE),
            presupposes=(has_sink(),),
            remark="How gradients came to gather takes a training; on a checkpoint it is asked whether they do.",
        ),
    )
