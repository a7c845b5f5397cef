"""Zhai et al. 2023: a bound on the entropy of attention, and its collapse under learning rates that are too large."""

from __future__ import annotations

import contextlib
import math

import torch

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.studies.theory.laws import entropy_bound as least_entropy
from sinklab.studies.theory.laws import head_entropy_bound, least_entropy_scores, row_entropy
from sinklab_claims.contract.claim import BASELINE, Part, Scale, Times, Variant
from sinklab_claims.contract.effect import Difference, Numbers, Value
from sinklab_claims.contract.trained import TrainedModel, gives
from sinklab_claims.numbers.losses import curve_of
from sinklab_claims.variants import UNCHANGED, Fields, of_paper

zhai = of_paper("zhai2023", "Zhai et al. 2023 (arXiv 2303.06296)")

# --- the bound ----------------------------------------------------------------------------------------------------------------

MARGIN = Metric("least_margin", "nats", "Least entropy of a row less its lower bound, over heads and rows of two keys or more.")
VIOLATION = Metric("largest_violation", "nats", "By how much least_margin is below 0.")
GAP = Metric(
    "largest_gap_of_worst_row", "nats", "Largest distance of the entropy of the worst row from the bound, which it attains."
)

LENGTHS, NORMS, ROWS = (2, 8, 64), (0.1, 1.0, 3.0, 10.0, 30.0), 2000
EXACT = 1e-9
"""Entropies of float64 rows of 64 weights: 64 · 64 · 1.1e-16 · ln 64 = 2e-12, and room."""
ROUNDING = 1e-5
"""Float32 weights have relative errors of about 1e-6, which move an entropy of at most ln 64 by no more than 1e-5."""


def of_rows_of_scores(seed: int, scale: Scale) -> Numbers:
    """Rows of scores of given norms in random directions, and in the direction that is said to be the worst."""
    generator = torch.Generator().manual_seed(seed)
    margins, gaps = [], []
    for length in LENGTHS:
        directions = torch.randn(ROWS, length, generator=generator, dtype=torch.float64)
        directions /= directions.norm(dim=-1, keepdim=True)
        for norm in NORMS:
            bound = least_entropy(norm, length)
            margins.append(float((row_entropy(norm * directions) - bound).min()))
            gaps.append(float((row_entropy(least_entropy_scores(norm, length)) - bound).abs()))
    return {"rows of scores": {**_margin(min(margins)), "largest_gap_of_worst_row": max(gaps)}}


@gives(MARGIN, VIOLATION)
def trained_rows(trained: TrainedModel) -> dict[str, float]:
    """``least_margin`` and ``largest_violation`` of a trained model, with the bound from weights and inputs."""
    model, scheme = trained.loaded.model, trained.config.model.position.get("name", "rotary")
    probe, entered = _Entropies(), {}
    with torch.no_grad(), attend(model, [probe]), contextlib.ExitStack() as stack:
        for index, layer in enumerate(model.layers):
            hook = layer.input_layernorm.register_forward_hook(lambda _m, _i, out, index=index: entered.update({index: out}))
            stack.callback(hook.remove)
        model(trained.rows(samples=16, seq_len=64), use_cache=False)
    margins = []
    for index, layer in enumerate(model.layers):
        attention, size = layer.self_attn, trained.config.model.head_size
        for head in range(trained.config.model.num_attention_heads):
            rows = slice(head * size, (head + 1) * size)
            queries, keys = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
            bound = head_entropy_bound(
                queries, keys, entered[index], scaling=attention.scaling, positions="rotary" if scheme == "rotary" else "none"
            )
            margins.append(float((probe.entropies[index][:, head] - bound)[:, 1:].min()))
    return _margin(min(margins))


def _margin(least: float) -> dict[str, float]:
    """How far rows stay above the bound says nothing for or against it; how far one lies below does."""
    return {"least_margin": least, "largest_violation": max(0.0, -least)}


class _Entropies(Watcher):
    """Entropy of every row, ``(batch, heads, queries)``, by layer."""

    name, needs = "entropies", frozenset[str]()

    def __init__(self) -> None:
        self.entropies: dict[int, torch.Tensor] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        weights = call.weights(0, call.q_len)
        self.entropies[call.site.layer] = torch.special.entr(weights.double()).sum(-1)


@claims.register("entropy_bound")
@zhai
def entropy_bound() -> Fields:
    """No row of attention has less entropy than the bound that the norm of its scores gives, and some row attains it."""
    rows = "rows of scores"
    return dict(
        where="Theorem 3.1",
        published="Ent ≥ log(1 + (T-1)β) + σ √(T(T-1)) β / (1 + (T-1)β), with β = exp(-σ √(T/(T-1))); tight.",
        parts=(
            Part("no row of scores is below", Value("largest_violation", rows), less_than=EXACT, proved=True),
            Part("the worst row attains it", Value("largest_gap_of_worst_row", rows), less_than=EXACT, proved=True),
            Part("no row of a trained model is below", Value("largest_violation", BASELINE), less_than=ROUNDING, proved=True),
        ),
        variants=(UNCHANGED,),
        read_outs=(trained_rows,),
        measure=of_rows_of_scores,
    )


# --- the collapse -------------------------------------------------------------------------------------------------------------

COURSE = (
    Metric("least_loss", "nats", "Least training loss on record."),
    Metric("least_entropy", "nats", "Least mean entropy of attention on the probe rows of the training."),
)

COLLAPSED = 0.5
"""Nats of mean entropy below which it has collapsed: as much as even weights on 1.6 keys have."""

HARM = 0.1
"""Nats by which the loss must be worse for training to be called harmed."""


@gives(*COURSE, of_diverged=True)
def course(trained: TrainedModel) -> dict[str, float]:
    """How a training went, of those that diverged too: :data:`COURSE`."""
    curves = {"least_loss": curve_of(trained.table, "train_loss"), "least_entropy": curve_of(trained.table, "entropy")}
    known = {name: [value for value in curve.values() if math.isfinite(value)] for name, curve in curves.items()}
    return {name: min(values) for name, values in known.items() if values}


@claims.register("entropy_collapse")
@zhai
def entropy_collapse() -> Fields:
    """A learning rate that is too large to train well makes the entropy of attention collapse on the way.

    The least mean entropy over training. A sink lowers it too, so that stable training is set beside it.
    """
    too_large = Variant("rate x16", {"optimizer.learning_rate": Times(16)})
    harmed = Difference("least_loss", too_large.label, BASELINE)
    return dict(
        where="section 3",
        published="Pathologically low entropy goes with oscillating or diverging losses in vision, translation, speech and "
        "language models.",
        presupposes=(Part("the rate is too large for softmax", harmed, more_than=HARM),),
        parts=(
            Part("the entropy collapses", Value("least_entropy", too_large.label), less_than=COLLAPSED),
            Part("it falls far", Difference("least_entropy", too_large.label, BASELINE), less_than=-0.5),
        ),
        variants=(UNCHANGED, too_large),
        read_outs=(course,),
    )
