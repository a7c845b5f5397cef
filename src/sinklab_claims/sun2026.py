"""Sun et al. 2026 (arXiv 2603.05498): sinks and outliers are two things; each can be taken away without the other."""

from __future__ import annotations

import torch

from sinklab.attention.call import LayerOutput
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.intervention import NEAR, Intervention
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.interventions.clamp_activation import ClampActivation
from sinklab.interventions.hide_key import HideKey
from sinklab.probes.massive_activation import MassiveActivation
from sinklab.registry import claims, read_outs
from sinklab.results.table import unpacked
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part
from sinklab_claims.contract.effect import Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.numbers.attention import FirstToken, batches, first_rows
from sinklab_claims.variants import Fields, has_sink, of_paper

sun = of_paper("sun2026", "Sun et al. 2026 (arXiv 2603.05498); Kaul et al. 2024 (arXiv 2410.17174)")

OUTLIER = 50.0
"""Largest activation over the median of its hidden state from which there is anything to take away; 1000 is massive."""

CLAMPED, HIDDEN = "outliers clamped", "sink hidden"

LIMIT = 20.0
"""Times the median of a layer to which its hidden state is clamped; with outliers of 50 and more that is less than half."""


class _Medians(Watcher):
    """Median absolute value of the hidden states of every layer, over the batches that were seen."""

    name, needs = "medians", frozenset({"hidden_states"})

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "layer":
            self.seen.setdefault(output.site.layer, []).append(output.hidden_states.float().abs().median().item())


@torch.no_grad()
def edited(checkpoint: Checkpoint) -> Numbers:
    """Sink and outliers of a checkpoint as it is, with its outliers clamped in every layer, and with its sink hidden."""
    model, rows, medians = checkpoint.loaded.model, first_rows(checkpoint), _Medians()

    def seen(*edits: Intervention, watch: Watcher | None = None) -> dict[str, float]:
        first, massive = FirstToken(checkpoint.front), MassiveActivation()
        with attend(model, (first, massive, *([] if watch is None else [watch])), edits):
            for part in batches(rows):
                model(**lean_arguments(model, {"input_ids": part}))
        ratios = [row["value"] for row in unpacked(massive.rows()) if row["metric"] == "max_to_median" and row["layer"] >= 0]
        return {"first_attention": first.whole(), "massive_ratio": max(ratios)}

    plain = seen(watch=medians)
    clamps = [
        ClampActivation(layers=(layer,), limit=LIMIT * sum(values) / len(values))
        for layer, values in medians.seen.items()
        if layer >= 0
    ]
    return {
        BASELINE: {**plain, "sink_rate": read_outs["sinks"](checkpoint)["sink_rate"]},
        CLAMPED: seen(*clamps),
        HIDDEN: seen(HideKey(place=checkpoint.front, spare=NEAR)),
    }


@claims.register("sinks_and_outliers_part")
@sun
def sinks_and_outliers_part() -> Fields:
    """Sinks and outliers part: each can be taken away without the other.

    The papers train two models, with sandwich norm and with softmax plus one. Here the hidden states of a model as it is are
    clamped, and its first key is hidden: of a causal model the first token, which sees itself alone, keeps its outliers then.
    """
    return dict(
        published="Sandwich norm: largest activation 3818 to 520, sink ratio 46.0 to 44.7 %. Softmax plus one: share of "
        "first-token maxima 0.333 to 0.022, kurtosis still 245.",
        costs={},
        checkpoint=OnCheckpoint(
            measure=edited,
            remark="On a checkpoint the hidden states are clamped to 20 times their median, and the first key is hidden from "
            "all heads at queries from 8 on, in the place of the two trainings; of a causal model the first token, which sees "
            "itself alone, keeps its outliers then.",
        ),
        presupposes=(has_sink(), Part("the baseline has outliers", Value("massive_ratio", BASELINE), more_than=OUTLIER)),
        parts=(
            Part("clamping halves outliers", Ratio("massive_ratio", CLAMPED, BASELINE), less_than=0.5),
            Part("it leaves half of the sink", Ratio("first_attention", CLAMPED, BASELINE), more_than=0.5),
            Part("hidden, half of the sink is gone", Ratio("first_attention", HIDDEN, BASELINE), less_than=0.5),
            Part("hiding it leaves half of the outliers", Ratio("massive_ratio", HIDDEN, BASELINE), more_than=0.5),
        ),
    )
