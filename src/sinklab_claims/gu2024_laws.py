"""Gu et al. 2024, propositions 1 to 4: on one token repeated, attention is a function of distance alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import DoesNotApply
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.studies.theory.laws import alibi_weights, relative_weights, rotary_bounds, uniform_weights
from sinklab_claims.contract.claim import OnCheckpoint, Part, Scale
from sinklab_claims.contract.effect import Numbers, Value
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.variants import Fields, of_paper, only_about

gu = of_paper("gu2024", "Gu et al. 2024 (arXiv 2410.10781)")

METRICS = (
    Metric("law_error", "weight", "Largest difference, over layers, heads, queries and keys, of a weight and its closed form."),
    Metric(
        "over_bound", "ratio", "Largest weight over its upper bound, over layers, heads and queries that see more than one key."
    ),
    Metric("under_bound", "ratio", "Largest lower bound over the weight."),
    Metric("bound_violation", "ratio", "By how much over_bound or under_bound exceeds 1; 0 where neither does."),
)

EXACT = 1e-9
"""Weights are computed in float64: sums of 64 terms of at most 1, in scores below 10, err by less than 64 · 10 · 2**-53."""

ROTARY = "rotary positions"
"""Label of what is about models that have them."""

LENGTH, HEADS, HEAD_DIM = 64, 4, 16
STD = 0.05
"""Of random weights: scores of about one, with which the bounds of rotary positions say something and no law is trivial."""

ROUNDING = 1e-3
"""Of weights in float32: a score is a sum of at most 256 products that together are at most 50 or so, and errs by less than
256 · 2**-24 · 50 = 8e-4; so does its exponential, relatively."""

DRAWN = 8
"""Tokens of a draw, each of which is repeated in a row of its own."""

LEAST = torch.finfo(torch.float32).smallest_normal
"""A weight in float32 that is smaller has lost its digits, or is 0 where its score is a hundred below the largest."""


class _Bounds(Watcher):
    """Largest weight over its upper bound, and largest lower bound over its weight, of rows of one token repeated."""

    name, needs = "bounds", frozenset[str]()

    def __init__(self) -> None:
        self.over = self.under = 0.0
        self.reason = ""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        self.reason = self.reason or self._assumed(call)
        if not self.reason:
            self._compare(call)

    @staticmethod
    def _assumed(call: AttentionCall) -> str:
        """Which assumption of the laws does not hold of a call; empty where all do."""
        visible = call.visible.block(0, call.q_len, 0, call.kv_len)
        if not bool((visible == torch.ones_like(visible).tril()).all()):
            return (
                f"not every query of {call.site.module} sees all tokens before it and none behind it, and the bounds are about "
                f"rows of {LENGTH} tokens that do"
            )
        softmax = torch.softmax(call.scores(0, call.q_len).masked_fill(~visible, float("-inf")), dim=-1)
        if call.bias is not None or bool(((call.weights(0, call.q_len) - softmax).abs() > ROUNDING).any()):
            return (
                f"weights of {call.site.module} are not the softmax of products of queries and keys over the tokens, and the "
                "bounds are about such weights"
            )
        return ""

    def _compare(self, call: AttentionCall) -> None:
        # Rotations keep norms, so those of all positions are the same but for rounding.
        queries, keys = (tensor.double().norm(dim=-1).amax(dim=-1) for tensor in (call.queries, call.keys))
        norms = queries * keys.repeat_interleave(call.groups, dim=1) * abs(call.scaling)
        lower, upper = (bound[..., None] for bound in rotary_bounds(norms, call.q_len))
        weights = call.weights(0, call.q_len).double()
        visible = torch.ones(call.q_len, call.kv_len, dtype=torch.bool, device=weights.device).tril()
        self.over = max(self.over, (weights / upper)[..., 1:, :].max().item())
        self.under = max(self.under, (lower / weights.where(visible, 1.0).clamp(min=LEAST))[..., 1:, :].max().item())


def of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """How near weights of a checkpoint come to the bounds, on rows of one token of its text, repeated 64 times.

    Raises:
        DoesNotApply: a window shorter than the rows, tokens that see later ones, or weights that are no softmax over
            the tokens.
    """
    model, generator = checkpoint.loaded.model, torch.Generator().manual_seed(checkpoint.draw)
    ids = checkpoint.text_ids
    tokens = ids[torch.randint(len(ids), (DRAWN, 1), generator=generator)].repeat(1, LENGTH)
    found = _Bounds()
    with torch.no_grad(), attend(model, (found,)):
        model(input_ids=tokens.to(checkpoint.loaded.device), use_cache=False)
    if found.reason:
        raise DoesNotApply(found.reason)
    # How far weights stay inside says nothing for or against a bound; how far one lies outside does.
    violation = max(0.0, found.over - 1, found.under - 1)
    return {ROTARY: {"over_bound": found.over, "under_bound": found.under, "bound_violation": violation}}


@claims.register("repeated_token_laws")
@gu
def repeated_token_laws() -> Fields:
    """Copies of one token get equal weights without positions, weights of the distance alone with relative positions and ALiBi,
    and weights that vanish with the length with rotary ones; with learned positions they do not.

    Models of two layers with random weights; a seed is their weights and the token that is repeated 64 times.
    """
    exact, inside = "all weights are those of the law", Value("bound_violation", ROTARY)
    return dict(
        where="propositions 1 to 4",
        published="Proved: 1/t; exp g(t-i) over its sum; the same with g(d) = -m d; at most e^(2ξ) / (e^(2ξ) + t - 1).",
        measure=measure,
        checkpoint=OnCheckpoint(
            measure=of_checkpoint,
            parts=(Part("no weight is outside of its bounds", inside, less_than=ROUNDING, proved=True),),
            not_about=only_about("rotary"),
            remark="Of a checkpoint with rotary positions the two bounds are tested, in the precision that it computes in.",
        ),
        costs={"tiny": "seconds"},
        parts=(
            *(
                Part(f"{exact}, {label}", Value("law_error", label), less_than=EXACT, proved=True)
                for label in ("no positions", "relative positions", "ALiBi")
            ),
            Part("no weight exceeds the upper bound", Value("over_bound", ROTARY), less_than=1 + EXACT, proved=True),
            Part("none is below the lower bound", Value("under_bound", ROTARY), less_than=1 + EXACT, proved=True),
            # One counterexample is a proof, so the bound is rounding alone.
            Part("learned positions break it", Value("law_error", "learned positions"), more_than=EXACT, proved=True),
        ),
    )


def measure(seed: int, scale: Scale) -> Numbers:
    """Differences from the laws, at random weights of this seed; the same at every scale."""
    numbers: dict[str, dict[str, float]] = {}
    for label, scheme in (("no positions", "no_position"), ("learned positions", "learned")):
        _, weights, _ = _run(seed, scheme)
        numbers[label] = {"law_error": _largest(weights - uniform_weights(LENGTH))}
    model, weights, _ = _run(seed, "relative")
    positions = torch.arange(LENGTH)[None]
    bias = model.position.score_bias(positions, positions)
    assert bias is not None
    numbers["relative positions"] = {"law_error": _largest(weights - relative_weights(bias[0, :, -1].flip(-1)))}
    _, weights, _ = _run(seed, "alibi")
    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64))
    numbers["ALiBi"] = {"law_error": _largest(weights - alibi_weights(slopes, LENGTH))}
    _, weights, norms = _run(seed, "rotary")
    lower, upper = (bound[..., None] for bound in rotary_bounds(norms, LENGTH))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    numbers[ROTARY] = {
        "over_bound": (weights / upper)[..., 1:, :].max().item(),
        "under_bound": (lower / weights.where(visible, 1.0))[..., 1:, :].max().item(),
    }
    return numbers


@torch.no_grad()
def _run(seed: int, scheme: str) -> tuple[SinkLM, Tensor, Tensor]:
    """A model, its weights on a repeated token, and ``|q| |k| · scaling``: ``(layers, heads, …)``, float64."""
    torch.manual_seed(seed)
    config = SinkLMConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        position={"name": scheme},
        initialization="normal",
        initializer_range=STD,
    )
    model = SinkLM(config).double().eval()
    model.set_attn_implementation("eager")
    lengths: list[Tensor] = []

    def look(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        lengths.append(output[0].unflatten(-1, (HEADS, HEAD_DIM)).norm(dim=-1).amax(dim=0))

    for layer in model.layers:  # every token has the same, so the largest is that of all; rotations keep it
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(look)
    token = int(torch.randint(config.vocab_size, ()))
    weights = model(torch.full((1, LENGTH), token), output_attentions=True).attentions
    norms = torch.stack([query * key for query, key in zip(lengths[::2], lengths[1::2], strict=True)])
    return model, torch.stack([layer[0] for layer in weights]), norms * HEAD_DIM**-0.5


def _largest(differences: Tensor) -> float:
    return differences.abs().max().item()
