"""Chen et al. 2026: the course of a training: gradients gather on the sink as attention does, and activations follow it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from sinklab.attention.anatomy import Anatomy
from sinklab.errors import DoesNotApply
from sinklab.models.loading import LoadedModel, load_model
from sinklab.models.losses import cross_entropies
from sinklab.probes.attention_received import AttentionReceived
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.results.table import unpacked
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint, TrainedModel, gives
from sinklab_claims.numbers.attention import look, sinks
from sinklab_claims.numbers.losses import window
from sinklab_claims.numbers.norms import norms
from sinklab_claims.variants import Fields, has_sink, of_paper

chen = of_paper("chen2026", "Chen et al. 2026 (arXiv 2603.17771)")

# --- gradients ----------------------------------------------------------------------------------------------------------------

TIMES = 2.0
"""Times the mean of the others: what the first token gets beyond it is called gathered. Published is 40."""

TEXTS, SEQ_LEN = 32, 64

LESS = 1.25
"""Least ratio that is called more than even."""

GRADIENTS = (
    Metric(
        "token_gradient",
        "ratio",
        "Norm of the gradient of the loss with respect to the hidden state of the first token, over the mean norm of those of "
        "later tokens; mean over the inputs of the layers but the first.",
        paper="Chen et al. 2026 (arXiv 2603.17771)",
    ),
    Metric(
        "key_gradient",
        "ratio",
        "Norm of the gradient of the loss with respect to the first key over the mean norm of those of later keys; of sums "
        "over the key-value heads.",
    ),
    Metric(
        "key_gradient_per_mass",
        "ratio",
        "key_gradient with each norm divided by the attention that the key receives from all queries together; of norms and "
        "attention summed over the key-value heads.",
    ),
)


def _outputs(modules: dict[str, nn.Module], forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What a forward gives and, by name, what modules put out in it, with the graph behind it."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[name] = output[0] if isinstance(output, tuple) else output

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(lambda _m, _a, output, name=name: keep(name, output)).remove)
        return forward(), outputs


def _key_maps(anatomy: Anatomy) -> dict[str, nn.Module]:
    """The map to the keys of every attention module."""
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
    with torch.enable_grad():
        logits, outputs = _outputs(keys | layers, lambda: model(input_ids=rows, use_cache=False).logits[:, -rows.shape[1] :])
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


def of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """Sinks and gradients of a model as it is. :data:`GRADIENTS`."""
    rows = checkpoint.rows(TEXTS, SEQ_LEN)
    return {BASELINE: sinks(checkpoint) | gradient_numbers(checkpoint.loaded.model, rows, checkpoint.front)}


@claims.register("gradient_sinks")
@chen
def gradient_sinks() -> Fields:
    """Gradients gather on the sink as attention goes to it, and its key gets less of them than others for the attention that it
    receives.

    A causal mask alone gives early keys more queries, so what a key gets is compared with what it receives. How gradients came
    to gather takes a training, of which ``results/tiny.json`` and ``results/small-bos.json`` have some.
    """
    per_mass = Value("key_gradient_per_mass", BASELINE)
    return dict(
        published="The norm of the gradient at the first token over the mean of the others: a median of 40.3, and 5.6 where "
        "the gradients of the value path are scaled down; nothing is said of keys.",
        costs={},
        bases=("no-bos",),
        presupposes=(has_sink(),),
        parts=(
            Part("gradients gather on the first token", Value("token_gradient", BASELINE), more_than=TIMES),
            Part("gradients gather on its keys", Value("key_gradient", BASELINE), more_than=TIMES),
            Part("for the attention that it receives, its key gets less than others", per_mass, less_than=1 / LESS),
        ),
        checkpoint=OnCheckpoint(measure=of_checkpoint),
    )


# --- the order of onset -------------------------------------------------------------------------------------------------------

KEPT = 16
"""Models of one training: a sink comes within tens of steps, and each is read in a second."""


def steps_kept(config: PretrainingConfig) -> tuple[int, ...]:
    """Steps at equal ratios, from a fifth of the warm-up (or a hundredth of the steps) to the last one."""
    steps = config.training.steps
    first = max(1, config.schedule.warmup_steps // 5 or steps // 100)
    return tuple(sorted({round(first * (steps / first) ** (index / (KEPT - 1))) for index in range(KEPT)}))


ALONG = Variant("kept along the way", lambda base: {"training.snapshots": steps_kept(base)})
"""The baseline, of which nothing is changed but that models are kept."""


class AtStep(TrainedModel):
    """The model of a training after some step, and the text of that training.

    Args:
        step: one of ``training.snapshots``.
    """

    def __init__(self, trained: TrainedModel, step: int) -> None:
        super().__init__(trained.folder, trained.cache)
        self.step = step

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        return load_model(str(self.folder / "snapshots" / f"step-{self.step}"))


def along_the_way(trained: TrainedModel) -> Iterator[AtStep]:
    """The models that a training has kept, first to last; none of a training that kept none."""
    for step in sorted(trained.config.training.snapshots):
        yield AtStep(trained, step)


LATER = 1.1
"""Ratio of two steps above which one is later; models are kept at steps that lie 1.25 apart, and lines are drawn between."""

LEAST = {"weight": 0.05, "massive": 1.0, "worth": 0.05}
"""Change from the first model to the last below which a curve has no onset: of a share, a ratio, and nats."""

CURVES = {
    "weight": "the mean share of a row on the first token, of all heads",
    "massive": "the largest activation of a row over the median one (massive_ratio)",
    "worth": "what first tokens are worth beyond a window (sink_worth)",
}

ONSETS = tuple(
    Metric(
        f"onset_{name}",
        "steps",
        f"Steps after which {what} has gone half of its way from the first model that is kept to the last, and stays beyond; "
        "absent where the way is short.",
        version=2,
    )
    for name, what in CURVES.items()
)


def half_way(curve: Mapping[int, float], least: float) -> float | None:
    """Step from which a curve is beyond half of its way from its first value to its last, on straight lines between.

    It counts when the curve comes to stay there: in warm-up activations jump past it and come back.

    Args:
        curve: step to value, of two steps or more.
        least: change from first to last below which there is no way to go.
    """
    steps = sorted(curve)
    start, end = curve[steps[0]], curve[steps[-1]]
    if abs(end - start) < least:
        return None
    gone = {step: (curve[step] - start) / (end - start) for step in steps}
    before = max(step for step in steps if gone[step] < 0.5)
    after = steps[steps.index(before) + 1]
    return before + (0.5 - gone[before]) / (gone[after] - gone[before]) * (after - before)


@gives(*ONSETS)
def onsets(trained: TrainedModel) -> dict[str, float]:
    """When each curve of a training gets under way. :data:`ONSETS`; nothing of a training that kept no models."""
    curves: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    for model in along_the_way(trained):
        curves["weight"][model.step] = sinks(model)["first_attention"]
        curves["massive"][model.step] = norms(model)["massive_ratio"]
        curves["worth"][model.step] = window(model)["sink_worth"]
    begun = {name: half_way(curve, LEAST[name]) for name, curve in curves.items() if len(curve) > 1}
    return {f"onset_{name}": step for name, step in begun.items() if step is not None}


def _after(name: str, says: str) -> Part:
    label = ALONG.label
    return Part(says, Ratio(f"onset_{name}", label, label, other="onset_weight"), more_than=LATER)


@claims.register("order_of_onset")
@chen
def order_of_onset() -> Fields:
    """In training attention goes to the sink first; that activations become massive and that predictions come to need the sink
    follows.

    Three curves of one training, each at half of its way. A curve that does not move has no onset, and a training without one
    says nothing of the order.
    """
    return dict(
        published="No steps: massive activations are read as an answer to the gradients that attention to the sink gathers "
        "there, and so come after it.",
        variants=(ALONG,),
        bases=("no-bos", "bos"),
        read_outs=("sinks", onsets),
        presupposes=(has_sink(ALONG.label),),
        parts=(
            _after("massive", "activations become massive later than attention goes to the sink"),
            _after("worth", "predictions come to need the sink later than attention goes to it"),
        ),
    )
