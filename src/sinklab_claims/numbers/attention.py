"""Where the attention of a trained model goes: to the first token, on text and on made-up inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, scores_of_keys, weights_of_keys
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.operation import SHARE_OF_ROW, Operation, row_share
from sinklab.attention.probe import Means, Probe, Watcher, by_head, filled
from sinklab.attention.session import attend
from sinklab.probes.null_mass import NullMass
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import read_outs
from sinklab.results.intervals import just_above
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab.results.table import unpacked
from sinklab.training.callback import TOKENS_PER_FORWARD
from sinklab_claims.contract.trained import MeasuredModel, gives, once

FIRST_POSITIONS = 4
"""Positions whose sink rates have names of their own."""

SAMPLES, SEQ_LEN, THRESHOLD = 100, 64, 0.3
"""Rows, tokens of a row and epsilon of Gu et al. 2024 (arXiv 2410.10781)."""

FIRST_ATTENTION = Metric(
    "first_attention",
    "fraction",
    "Mean over rows, layers, heads and queries of the weight on the first token; 0 for queries that cannot see it; "
    f"{SHARE_OF_ROW}. Without learned tokens in front it is the probes' qiu2025_first_attention.",
    paper="Qiu et al. 2025 (arXiv 2505.06708)",
    range=FRACTION,
)
ATTENTION = (
    Metric(
        "sink_rate",
        "percent",
        "Sink rate of the first token: share of (row, layer, head) in which the mean weight on it, over the queries that see "
        f"it, exceeds {THRESHOLD}; {SHARE_OF_ROW}.",
        paper="Gu et al. 2024 (arXiv 2410.10781)",
        range=PERCENTAGE,
    ),
    *(
        Metric(
            f"sink_rate_{position}",
            "percent",
            f"sink_rate of the token at position {position}, counted from 0.",
            range=PERCENTAGE,
        )
        for position in range(1, FIRST_POSITIONS)
    ),
    Metric(
        "sink_rate_max",
        "percent",
        "Largest sink rate over the tokens of the first half of the rows; late tokens are seen by too few queries to compare.",
        range=PERCENTAGE,
    ),
    Metric(
        "sink_rate_star",
        "percent",
        "Sink_* of Gu et al.: the rule of sink_rate for the mean mass on the null score (sink logit, key bias, plus one) or, "
        "where the model puts learned tokens in front, for the most attended of them; 0 where there is neither.",
        range=PERCENTAGE,
    ),
    FIRST_ATTENTION,
)
"""Metrics of :func:`attention_numbers`. A learned token in front is a key, but no token and no query."""


class FirstToken(Watcher):
    """Share of the rows of tokens that is on the first one, by head.

    The probes of the audit count a learned token in front like any other: they would take it for the first.

    Args:
        front: learned tokens in front of every row.
    """

    name = "first_token"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.front = front
        self.means = Means("head")

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        (mass,) = filled(statistics, "row_mass")
        weight = weights_of_keys(call, keys_of_document(call, self.front), statistics.log_sum_exp)[..., 0]
        counted = (call.query_positions >= self.front)[:, None]
        self.means.add(FIRST_ATTENTION, call.site, *by_head(row_share(weight, mass, call.operation), counted))

    def by_head(self) -> dict[int, Tensor]:
        """Layer to the mean of each head, float64 ``(num_heads,)``."""
        return {site.layer: sums / counts for site, sums, counts in self.means.cells(FIRST_ATTENTION)}

    def whole(self) -> float:
        """Mean over all heads and queries."""
        cells = list(self.means.cells(FIRST_ATTENTION))
        return float(sum(sums.sum() for _, sums, _ in cells) / sum(counts.sum() for _, _, counts in cells))


def look(model: nn.Module, rows: Tensor, probes: Sequence[Probe]) -> None:
    """Show the attention of the model over the rows to the probes.

    Args:
        model: in evaluation mode.
        rows: int64 ``(rows, seq_len)``, on the model's device.
    """
    with torch.no_grad(), attend(model, probes):
        for part in batches(rows):
            model(**lean_arguments(model, {"input_ids": part}))


def attention_numbers(model: nn.Module, rows: Tensor, front: int = 0) -> dict[str, float]:
    """The numbers of :data:`ATTENTION` of one model on one set of rows.

    Args:
        model: in evaluation mode.
        rows: int64 ``(rows, seq_len)``, on the model's device.
        front: learned tokens that the model puts in front of every row (``Architecture.tokens_in_front``).
    """
    rates, nothing, first = SinkRate(THRESHOLD), NullMass(), FirstToken(front)
    look(model, rows, (rates, nothing, first))
    whole = [row for probe in (rates, nothing) for row in unpacked(probe.rows()) if "layer" not in row]
    profile = {row["key_position"] - front: row["value"] for row in whole if row["metric"] == "gu2024"}
    of_nothing = {row["metric"]: row["value"] for row in whole if "key_position" not in row}
    numbers = {"sink_rate": profile[0]}
    numbers |= {f"sink_rate_{at}": profile[at] for at in range(1, FIRST_POSITIONS) if at in profile}
    numbers["sink_rate_max"] = max(profile[at] for at in range(max(1, rows.shape[1] // 2)) if at in profile)
    numbers["sink_rate_star"] = max([of_nothing.get("gu2024_null", 0.0), *(profile[at] for at in range(-front, 0))])
    return numbers | {FIRST_ATTENTION.name: first.whole()}


def first_rows(model: MeasuredModel) -> Tensor:
    """The rows of Gu et al.: 100 of 64 tokens, or as many as there are, on the model's device; raises as ``model.rows``."""
    return model.rows(SAMPLES, SEQ_LEN)


def batches(rows: Tensor) -> Iterator[Tensor]:
    """The rows in parts whose logits fit any machine."""
    yield from rows.split(max(1, TOKENS_PER_FORWARD // rows.shape[1]))


@read_outs.register("sinks")
@gives(*ATTENTION)
@once
def sinks(trained: MeasuredModel) -> dict[str, float]:
    """Where the attention of a trained model goes on held-out text, by Gu et al.'s rate and by the mean weight.

    Numbers of :data:`ATTENTION` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training.
    """
    return attention_numbers(trained.loaded.model, first_rows(trained), trained.front)


_WEIGHT = (
    "the absolute weight as it is, not divided by the sum of its row, times the gate on the output of the head at the query, "
    "of a gate with many coordinates the mean magnitude"
)

EFFECTIVE = (
    Metric(
        "effective_first",
        "weight",
        f"Mean effective weight of the first token over rows, layers, heads and the queries that see it: {_WEIGHT}.",
    ),
)
"""Without a gate, where rows sum to one, it is ``first_attention`` of the read-out ``sinks``."""


def _gate_of(call: AttentionCall) -> Tensor | None:
    """The gain of outputs where it is learned; one that is a setting of the operation is part of the output map."""
    learned = call.operation.needs_layer_input or type(call.operation).parameters is not Operation.parameters
    return call.gain if learned else None


class EffectiveWeight(Watcher):
    """The mean effective weight of the first token over the queries that see it, by row, layer and head.

    Args:
        front: learned tokens in front of every row, which are not the first token.
    """

    name = "effective_weight"
    needs: ClassVar[frozenset[str]] = frozenset({"log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.front = front
        self.means: list[Tensor] = []
        """A tensor ``(rows, num_heads)`` of each call, float64."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        first = keys_of_document(call, self.front)
        weight = weights_of_keys(call, first, statistics.log_sum_exp)[..., 0].double()
        sees = scores_of_keys(call, first)[1][..., 0] & call.counted[:, None]
        if (gate := _gate_of(call)) is not None:
            weight = weight * gate.double().abs().mean(-1)
        self.means.append((weight * sees).sum(2) / sees.sum(2))


@read_outs.register("effective")
@gives(*EFFECTIVE)
def effective(trained: MeasuredModel) -> dict[str, float]:
    """What a head takes from the first token: the weight that is really there, times the gate on what comes out.

    Number of :data:`EFFECTIVE` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training.
    """
    watched = EffectiveWeight(trained.front)
    look(trained.loaded.model, first_rows(trained), (watched,))
    return {"effective_first": torch.cat([part.flatten() for part in watched.means]).mean().item()}


CARRYING = 5
"""First tokens of which one may be the sink: as many as the prefix has."""

CARRIED = (
    Metric(
        "carried_rate",
        "percent",
        "Share of (row, layer, head) in which one of the first five tokens has, over the queries that see it, a mean share of "
        "more than 0.3 of its rows and a mean weight of more than 0.3 too: the weight itself, not divided by the sum of its "
        "row, times the gate on the output of the head if it is learned.",
        range=PERCENTAGE,
    ),
)


class CarriedRate(Watcher):
    """Share of the heads of single rows that carry more than the threshold from one of the first tokens to their outputs.

    Args:
        front: learned tokens in front of every row.
    """

    name = "carried_rate"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.keys = tuple(range(front, front + CARRYING))
        self.hits: list[Tensor] = []
        """Of each call, ``(rows, heads)``, 0 or 1."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        first = keys_of_document(call, *self.keys)
        weights = weights_of_keys(call, first, statistics.log_sum_exp)
        (mass,) = filled(statistics, "row_mass")
        shares = row_share(weights, mass[..., None], call.operation)
        if (gate := _gate_of(call)) is not None:
            weights = weights * gate.mean(-1, keepdim=True)
        seen = (scores_of_keys(call, first)[1] & call.counted[:, None, :, None]).sum(2)
        both = torch.minimum(weights.sum(2), shares.sum(2)) / seen.clamp_min(1)
        self.hits.append((both.amax(-1) > just_above(THRESHOLD)).double().cpu())

    def rate(self) -> float:
        """Percent of all rows and heads."""
        return 100 * float(torch.cat([hits.flatten() for hits in self.hits]).mean())


@read_outs.register("carried")
@gives(*CARRIED)
def carried(trained: MeasuredModel) -> dict[str, float]:
    """How many heads carry the sink to their outputs, by share of the row and by weight at once.

    Number of :data:`CARRIED` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training.
    """
    watcher = CarriedRate(trained.front)
    look(trained.loaded.model, first_rows(trained), (watcher,))
    return {"carried_rate": watcher.rate()}


_TEXTS = {
    "random": "rows of tokens drawn uniformly from those that occur in the held-out text",
    "repeated": "rows of one such token repeated",
}
_FRONTS = {"": "as in training, with its token in front if it has one", "_no_bos": "without a token in front"}

INPUTS = tuple(
    Metric(f"{metric}_{text}{front}", unit, f"{metric} on {of_text}, {of_front}.", range=extent)
    for metric, unit, extent in (("sink_rate", "percent", PERCENTAGE), ("first_attention", "fraction", FRACTION))
    for text, of_text in _TEXTS.items()
    for front, of_front in _FRONTS.items()
)
"""Metrics (Gu et al. 2024, arXiv 2410.10781, table 1); ``sink_rate`` as in the read-out ``sinks``.

The first token is the one at position 0: the token in front where there is one."""


@read_outs.register("inputs")
@gives(*INPUTS)
def inputs(trained: MeasuredModel) -> dict[str, float]:
    """Whether the sink of a trained model needs language: its rate on random tokens and on one token repeated.

    Numbers of :data:`INPUTS` on 100 rows of 64 tokens that are drawn once for all models of a vocabulary.

    A fixed token of the training (``data.fixed_position``) stands where it stood. Special tokens are not drawn.
    """
    model, front, bos = trained.loaded.model, trained.front, trained.bos
    length = min(SEQ_LEN, trained.context)
    numbers: dict[str, float] = {}
    for text, rows in _drawn(trained, length).items():
        if trained.fixed is not None and trained.fixed[0] < length:
            rows[:, trained.fixed[0]] = trained.fixed[1]
        by_condition = {"_no_bos": attention_numbers(model, rows, front)}
        by_condition[""] = by_condition["_no_bos"]
        if bos is not None:
            rows[:, 0] = bos
            by_condition[""] = attention_numbers(model, rows, front)
        for suffix, of_rows in by_condition.items():
            numbers |= {f"{metric}_{text}{suffix}": of_rows[metric] for metric in ("sink_rate", "first_attention")}
    return numbers


def _drawn(trained: MeasuredModel, length: int) -> dict[str, Tensor]:
    """Rows of random tokens and of one token repeated, int64 ``(SAMPLES, length)`` each, on the model's device."""
    ids, generator = trained.text_ids, torch.Generator().manual_seed(trained.draw)
    random = ids[torch.randint(len(ids), (SAMPLES, length), generator=generator)]
    repeated = ids[torch.randint(len(ids), (SAMPLES, 1), generator=generator)].repeat(1, length)
    device = trained.loaded.device
    return {"random": random.to(device), "repeated": repeated.to(device)}
