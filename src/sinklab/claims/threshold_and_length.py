"""Gu et al. 2024, the metric itself: models that differ keep their order under other thresholds and lengths of the rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from sinklab.claims._architecture import UNCHANGED, position
from sinklab.claims.fixed_token import FIXED
from sinklab.claims.learning_rate import QUARTER
from sinklab.probes.sink_rate import SinkRate
from sinklab.read_outs._attention import SAMPLES, look
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, PERCENTAGE, Metric
from sinklab.results.table import unpacked
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part
from sinklab_claims.contract.effect import Effect, Extreme, Numbers, Value
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "SameOrder", "rates", "threshold_and_length"]

THRESHOLDS = (20, 30, 40)
"""Percent of a row. At 50, the fourth threshold of the paper's figure, models as small as ours are all near 0."""

LENGTHS = (32, 48, 64)
"""Tokens. In rows of 16 a head that attends evenly gives the first token 0.21, above the lowest threshold."""

APART = 5.0
"""Points of the rate at 0.3 and 64 tokens by which two models differ; nearer ones have no order to keep."""

CHANGE = 10.0
"""Points, about half of the rate of 18.18 that the paper's model of 60 million parameters has."""

MODELS = (QUARTER, position("ALiBi", "alibi"), UNCHANGED, FIXED[0])


def _name(threshold: int, length: int) -> str:
    return f"sink_rate_{threshold}_of_{length}"


USUAL = _name(30, 64)
OTHERS = tuple(_name(*setting) for setting in itertools.product(THRESHOLDS, LENGTHS) if setting != (30, 64))

METRICS = (
    *(
        Metric(
            f"sink_rate_{threshold}_of_{length}",
            "percent",
            f"Sink rate (gu2024) of the first token at a threshold of {threshold} % of a row, over rows of {length} tokens.",
            paper="Gu et al. 2024 (arXiv 2410.10781)",
            range=PERCENTAGE,
        )
        for threshold in THRESHOLDS
        for length in LENGTHS
    ),
    Metric(
        "change_with_length",
        "percent",
        "Largest of the sink rates at a threshold of 0.3 over rows of 32, 48 and 64 tokens, less the smallest.",
        range=PERCENTAGE,
    ),
)


@dataclasses.dataclass(frozen=True)
class SameOrder(Effect):
    """Share of the pairs of models, far enough apart by one metric, that another metric puts in the same order; the least of
    several others. Missing where no two models are apart."""

    metric: str
    others: tuple[str, ...]
    over: tuple[str, ...]
    apart: float = APART

    @property
    def unit(self) -> str:
        return "fraction"

    @property
    def range(self) -> tuple[float, float]:
        return FRACTION

    def __call__(self, numbers: Numbers) -> float | None:
        if any(metric not in numbers.get(label, {}) for label, metric in self.needs()):
            return None
        usual = {label: numbers[label][self.metric] for label in self.over}
        pairs = [(low, high) for low, high in itertools.permutations(self.over, 2) if usual[high] - usual[low] >= self.apart]
        if not pairs:
            return None
        return min(sum(numbers[high][other] > numbers[low][other] for low, high in pairs) / len(pairs) for other in self.others)

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset(itertools.product(self.over, (self.metric, *self.others)))

    @property
    def words(self) -> str:
        return (
            f"share of pairs of {', '.join(self.over)} that differ by {self.apart:g} or more in {self.metric} and are in the "
            f"same order by each of {len(self.others)} others"
        )


def rates(trained: MeasuredModel) -> Mapping[str, float]:
    """Rates of the first token at every threshold and length; shorter rows are the beginnings of the longer ones."""
    numbers: dict[str, float] = {}
    for length in LENGTHS:
        probes = {threshold: SinkRate(threshold / 100) for threshold in THRESHOLDS}
        look(trained.loaded.model, trained.rows(SAMPLES, max(LENGTHS))[:, :length], tuple(probes.values()))
        for threshold, probe in probes.items():
            numbers[_name(threshold, length)] = next(
                row["value"]
                for row in unpacked(probe.rows())
                if row["metric"] == "gu2024" and "layer" not in row and row["key_position"] == trained.front
            )
    at_usual = [numbers[_name(30, length)] for length in LENGTHS]
    return {**numbers, "change_with_length": max(at_usual) - min(at_usual)}


@claims.register("threshold_and_length")
def threshold_and_length() -> Claim:
    """Four models that other claims train too, whose rates lie far apart; which one has more of a sink is not at issue."""
    labels = tuple(variant.label for variant in MODELS)
    sink = Part("there is a sink with baseline", Value(USUAL, BASELINE), more_than=APART)
    return Claim(
        statement="Which of two models has the higher sink rate does not depend on the threshold (0.2, 0.3 or 0.4) or on the "
        "length of the rows (32 to 64 tokens), and at 0.3 the rate changes little with the length.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 3.2",
        published="Curves of three large models at thresholds of 0.2 to 0.5 over lengths, no numbers: the rate falls with the "
        "length, faster at larger thresholds; 0.3 is chosen as strict and not very sensitive to the length.",
        variants=MODELS,
        bases=("no-bos",),
        read_outs=(rates,),
        presupposes=(sink,),
        parts=(
            Part("models that differ keep their order", SameOrder(USUAL, OTHERS, labels), more_than=0.9),
            Part(
                "the rate of no model changes much with the length",
                Extreme("change_with_length", labels),
                less_than=CHANGE,
            ),
        ),
        checkpoint=OnCheckpoint(
            parts=(Part("the rate changes little with the length", Value("change_with_length", BASELINE), less_than=CHANGE),),
            remark="One checkpoint has no order; of it the rate at 0.3 over rows of 32 to 64 tokens is compared.",
        ),
    )
