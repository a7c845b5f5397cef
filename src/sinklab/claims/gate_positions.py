"""Qiu et al. 2025: a gate on head outputs takes the sink away if it may close and sees the query; other gates leave it."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, WEIGHT, has_sink
from sinklab.claims._gates import ELEMENT_WISE, HEAD_WISE, INDEPENDENT, SHARED, SQUEEZED
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, Part
from sinklab_claims.contract.effect import Difference, Ratio

__all__ = ["gate_positions"]


@claims.register("gate_positions")
def gate_positions() -> Claim:
    """The kinds of gates on head outputs; gates on queries, keys, values or behind the output map sinklab has not."""
    return Claim(
        statement="A gate on head outputs that depends on the query takes most of the sink away, element-wise or head-wise; "
        "one that heads share, that does not depend on the input, or that cannot close leaves more of it.",
        source="qiu2025",
        reference="Qiu et al. 2025 (arXiv 2505.06708), Table 4",
        published="Mean weight on the first token: none 0.467, element-wise 0.048, head-wise 0.073, shared by heads 0.301, "
        "input-independent 0.364, squeezed to [0.5, 1] 0.451. Also, not tested: on values 0.297.",
        presupposes=(has_sink(),),
        parts=(
            *(
                Part(
                    f"{gate.label}: less than half is left",
                    Ratio("first_attention", gate.label, BASELINE),
                    less_than=0.5,
                )
                for gate in (ELEMENT_WISE, HEAD_WISE)
            ),
            *(
                Part(
                    f"{gate.label}: more is left than element-wise",
                    Difference("first_attention", gate.label, ELEMENT_WISE.label),
                    more_than=WEIGHT,
                )
                for gate in (SHARED, INDEPENDENT, SQUEEZED)
            ),
        ),
        variants=(UNCHANGED, ELEMENT_WISE, HEAD_WISE, SHARED, INDEPENDENT, SQUEEZED),
        read_outs=("sinks",),
    )
