"""Qiu et al. 2025: gates on the output of heads, from the start and in a model that is trained already."""

from __future__ import annotations

from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Part, Times, Variant
from sinklab_claims.contract.effect import Difference, Ratio
from sinklab_claims.variants import ELEMENT_WISE, HEAD_WISE, UNCHANGED, WEIGHT, Fields, has_sink, of_paper, operation

qiu = of_paper("qiu2025", "Qiu et al. 2025 (arXiv 2505.06708)")

HALF = 0.5
"""Of the weight on the first token: less is called most of it taken away."""

SAME = 0.02
"""Nats below which losses are no different."""


@claims.register("gate_positions")
@qiu
def gate_positions() -> Fields:
    """A gate on head outputs that depends on the query takes most of the sink away, element-wise or head-wise; one that heads
    share, that does not depend on the input, or that cannot close leaves more of it.

    By the weight times the gate. The kinds of gates on head outputs; gates on queries, keys, values or behind the output map
    sinklab has not.
    """
    shared = operation("gate, shared by heads", "gated", shared=True)
    independent = operation("gate, input-independent", "gated", input_dependent=False)
    squeezed = operation("gate, at least a half", "gated", floor=0.5)

    # What a head takes is its weight times the gate; the weight by itself, which the paper reports, stands beside it.
    def little_left(gate: Variant, metric: str, beside: Part | None = None) -> Part:
        less = Ratio(metric, gate.label, BASELINE)
        return Part(f"{gate.label}: less than half is left", less, less_than=HALF, beside=beside)

    def more_left(gate: Variant, metric: str, beside: Part | None = None) -> Part:
        more = Difference(metric, gate.label, ELEMENT_WISE.label)
        return Part(f"{gate.label}: more is left than element-wise", more, more_than=WEIGHT, beside=beside)

    return dict(
        where="Table 4",
        published="Mean weight on the first token: none 0.467, element-wise 0.048, head-wise 0.073, shared by heads 0.301, "
        "input-independent 0.364, squeezed to [0.5, 1] 0.451. Also, not tested: on values 0.297.",
        presupposes=(has_sink(),),
        parts=tuple(
            part(gate, "effective_first", part(gate, "first_attention"))
            for part, gates in ((little_left, (ELEMENT_WISE, HEAD_WISE)), (more_left, (shared, independent, squeezed)))
            for gate in gates
        ),
        variants=(UNCHANGED, ELEMENT_WISE, HEAD_WISE, shared, independent, squeezed),
        read_outs=("sinks", "effective"),
    )


def _trained_on(label: str, **gates: object) -> Variant:
    """The trained model, trained on; with gates where these have settings."""
    going_on: dict[str, object] = {"training.steps": Times(0.5), "schedule.warmup_steps": Times(0.5)}
    gated = {"model.operation": {"name": "gated", "double": True, **gates}} if gates else {}
    return Variant(label, {**going_on, **gated}, after=BASELINE)


@claims.register("gates_in_a_trained_model")
@qiu
def gates_in_a_trained_model() -> Fields:
    """Gates that start at 1 in a trained softmax model hardly change anything when it is trained on: most of the weight on the
    first token stays, and the loss is no lower than without them.

    The authors' answer to a user who asks about a model that is trained; the control is as much training without gates. What a
    head writes of the first token is its weight times the gate: a gate may leave the weight and shut.
    """
    softmax = _trained_on("trained on")
    gates = (
        _trained_on("trained on, gate, element-wise", element_wise=True),
        _trained_on("trained on, gate, head-wise", element_wise=False),
    )
    from_the_start = "gates that are there from the start leave less than half of the weight times the gate"

    def keeps(gate: str, what: str, metric: str) -> Part:
        return Part(f"{gate}: more than half of {what} is left", Ratio(metric, gate, softmax.label), more_than=HALF)

    def no_lower(gate: str) -> Part:
        return Part(f"{gate}: the loss is no lower", Difference("held_out_loss", gate, softmax.label), more_than=-SAME)

    return dict(
        where="answered in issue 10 of their repository, December 2025",
        published="In words: gates that start at 1 barely changed in continued pre-training, with no noticeable improvement.",
        bases=("bos", "no-bos"),
        presupposes=(
            has_sink(),
            has_sink(softmax.label),
            Part(from_the_start, Ratio("effective_first", ELEMENT_WISE.label, BASELINE), less_than=HALF),
        ),
        parts=tuple(
            part
            for gate in gates
            for part in (
                keeps(gate.label, "the weight on the first token", "first_attention"),
                keeps(gate.label, "the weight times the gate", "effective_first"),
                no_lower(gate.label),
            )
        ),
        variants=(UNCHANGED, ELEMENT_WISE, softmax, *gates),
        read_outs=("sinks", "effective", "window", "norms"),
    )
