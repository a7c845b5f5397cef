"""Gates in a trained model: a softmax model that gets gates, which start at 1, and is trained on keeps its sink."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.claims._gates import ELEMENT_WISE
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Times, Variant
from sinklab_claims.contract.effect import Difference, Ratio

__all__ = ["gates_in_a_trained_model"]

SAME = 0.02
"""Nats below which losses are no different, as for pathways."""

HALF = 0.5
"""Of the weight on the first token: less is called most of it, as in the claim on gates that are there from the start."""

GOING_ON: dict[str, object] = {"training.steps": Times(0.5), "schedule.warmup_steps": Times(0.5)}
"""Half as many steps as there have been, at the rate of the first training: as free to change as it was there."""


def _going_on(label: str, **gates: object) -> Variant:
    """The trained model, trained on; with gates where these have settings."""
    operation = {"model.operation": {"name": "gated", "double": True, **gates}} if gates else {}
    return Variant(label, {**GOING_ON, **operation}, after=BASELINE)


SOFTMAX = _going_on("trained on")
GATES = (
    _going_on("trained on, gate, element-wise", element_wise=True),
    _going_on("trained on, gate, head-wise", element_wise=False),
)


@claims.register("gates_in_a_trained_model")
def gates_in_a_trained_model() -> Claim:
    """The authors' answer to a user who asks about a model that is trained; the control is as much training without gates.

    What a head writes of the first token is its weight times the gate: a gate may leave the weight and shut.
    """
    return Claim(
        statement="Gates that start at 1 in a trained softmax model hardly change anything when it is trained on: most of the "
        "weight on the first token stays, and the loss is no lower than without them.",
        source="qiu2025",
        reference="Qiu et al. 2025 (arXiv 2505.06708), answered in issue 10 of their repository, December 2025",
        published="In words: gates that start at 1 barely changed in continued pre-training, with no noticeable improvement.",
        bases=("bos", "no-bos"),
        presupposes=(
            has_sink(),
            has_sink(SOFTMAX.label),
            Part(
                "gates that are there from the start leave less than half of the weight times the gate",
                Ratio("effective_first", ELEMENT_WISE.label, BASELINE),
                less_than=HALF,
            ),
        ),
        parts=tuple(
            part
            for gate in GATES
            for part in (
                Part(
                    f"{gate.label}: more than half of the weight on the first token is left",
                    Ratio("first_attention", gate.label, SOFTMAX.label),
                    more_than=HALF,
                ),
                Part(
                    f"{gate.label}: more than half of the weight times the gate is left",
                    Ratio("effective_first", gate.label, SOFTMAX.label),
                    more_than=HALF,
                ),
                Part(
                    f"{gate.label}: the loss is no lower",
                    Difference("held_out_loss", gate.label, SOFTMAX.label),
                    more_than=-SAME,
                ),
            )
        ),
        variants=(UNCHANGED, ELEMENT_WISE, SOFTMAX, *GATES),
        read_outs=("sinks", "effective", "window", "norms"),
    )
