"""Variants and parts that claims share, worded once so that equal settings are one training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from sinklab.models.positions import learned_positions
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Variant
from sinklab_claims.contract.effect import Value
from sinklab_claims.contract.trained import Checkpoint

Fields = dict[str, Any]
"""Those of a claim but for its statement, source and reference, and ``where`` in the paper it is said."""


def of_paper(source: str, paper: str, **usual: Any) -> Callable[[Callable[[], Fields]], Callable[[], Claim]]:
    """A decorator of functions that give the fields of claims of one paper, and in their first paragraph the statement.

    Args:
        source: short name of the paper.
        paper: its authors, year and number.
        usual: fields that most of its claims share; a claim that has others gives them.
    """

    def state(fields: Callable[[], Fields]) -> Callable[[], Claim]:
        @functools.wraps(fields)
        def claim() -> Claim:
            given = {**usual, **fields()}
            where = given.pop("where", "")
            statement = " ".join((fields.__doc__ or "").split("\n\n")[0].split())
            return Claim(statement=statement, source=source, reference=f"{paper}, {where}" if where else paper, **given)

        return claim

    return state


SINK = 5.0
"""Percent of Gu et al.'s metric above which a model is said to have a sink, and below which it is said to have none.

Between what they report with a sink (9 and more, at their learning rate) and without (below 1).
"""

MASSIVE = 2.0
"""Norm of the first token's hidden state over the mean of the others above which it is called massive.

The model of a billion parameters of Gu et al. reaches 23 with softmax and stays at 1.0 to 1.5 with sigmoid attention.
"""

WEIGHT = 0.03
"""Difference of the mean weight on the first token that is called one; over rows of 64 tokens even weights give it 0.07.

A mean weight takes fewer trainings to compare than a rate, which counts the heads on one side of a threshold.
"""

EVEN = sum(1 / seen for seen in range(1, 65)) / 64
"""Mean weight on the first token of 64 where weights are even, 0.074; :data:`WEIGHT` above it there is a sink."""

PLACES = {
    "sink_rate": " on the first token",
    "sink_rate_1": " on the second token",
    "sink_rate_2": " on the third token",
    "sink_rate_star": " on the learned place",
    "carried_rate": " on one of the first tokens, by share and by weight,",
    "first_text_sink_rate": " on text of the first training",
    "sink_rate_repeated_no_bos": " on one token repeated, with nothing in front,",
    "sink_rate_without": " on the first token, BOS taken away,",
}
"""Where and on what a rate looks for the sink, in words: one that is missing here would read as the rate on plain text."""


def operation(label: str, name: str, **settings: object) -> Variant:
    """The variant that changes the attention operation alone."""
    return Variant(label, {"model.operation": {"name": name, **settings}})


def position(label: str, name: str) -> Variant:
    """The variant that changes the position scheme alone; nothing, where it is that of the scale."""
    return Variant(label, {"model.position": {"name": name}})


UNCHANGED = Variant(BASELINE)
SIGMOID = operation("sigmoid", "sigmoid")
PLUS_ONE = operation("softmax plus one", "softmax_plus_one")
ALIBI = position("ALiBi", "alibi")
ROTARY = position("rotary positions", "rotary")
NO_POSITIONS = position("no positions", "no_position")
LEARNED_POSITIONS = position("learned positions", "learned")
RELATIVE_POSITIONS = position("relative positions", "relative")

# Gates on the output of heads, as Qiu et al. 2025 compare them.
ELEMENT_WISE = operation("gate, element-wise", "gated")
HEAD_WISE = operation("gate, head-wise", "gated", element_wise=False)

TOKEN = 200
"""Id of a byte that the texts do not contain, or hardly, in the vocabularies of all scales; no special token."""


FIXED = tuple(
    Variant(
        f"fixed_{ordinal}",
        {"data.bos": "none", "data.fixed_position": place, "data.fixed_token": TOKEN, "data.random_positions": None},
    )
    for place, ordinal in enumerate(("first", "second", "third"))
)
"""The same token at the first, second and third place; held-out rows hold it where training rows do."""

RATE_AT = ("sink_rate", "sink_rate_1", "sink_rate_2")
"""Sink rate of each of the three places."""


def has_sink(label: str = BASELINE, metric: str = "sink_rate") -> Part:
    """There is a sink with a variant, by the mean weight on the first token or, at another place, by the rate."""
    return _sink(f"there is a sink{PLACES[metric]} with {label}", metric, label, 1)


def has_no_sink(label: str, metric: str = "sink_rate") -> Part:
    """There is none, likewise."""
    return _sink(f"there is no sink{PLACES[metric]} with {label}", metric, label, -1)


def _sink(says: str, metric: str, label: str, side: int) -> Part:
    def beyond(bound: float) -> tuple[float, float]:
        return (bound, math.inf) if side > 0 else (-math.inf, bound)

    rate = Part(says, Value(metric, label), *beyond(SINK))
    if metric != "sink_rate":
        return rate
    return Part(says, Value("first_attention", label), *beyond(EVEN + WEIGHT), beside=rate)


def has_massive(label: str = BASELINE) -> Part:
    """The first token's hidden state is massive."""
    return Part(f"there are massive activations with {label}", Value("hidden_ratio", label), more_than=MASSIVE)


def without_bos_in_front(checkpoint: Checkpoint) -> str:
    """Why nothing can be taken away or moved; empty where a token stands in front of every text."""
    return "" if checkpoint.bos is not None else "its tokenizer puts no token in front of a text"


def only_about(wanted: str) -> Callable[[Checkpoint], str]:
    """Why a claim about ``rotary`` or ``learned`` positions says nothing about a checkpoint; empty where they are its own."""

    def not_about(checkpoint: Checkpoint) -> str:
        scheme = _scheme_of(checkpoint)
        has = "positions of another kind" if scheme == "other" else f"{scheme.replace('_', ' ')} positions"
        return "" if scheme == wanted else f"it has {has}, and what is measured is about {wanted} ones"

    return not_about


def _scheme_of(checkpoint: Checkpoint) -> str:
    model = checkpoint.loaded.model
    named = getattr(model.config, "position", None)
    if isinstance(named, dict):  # SinkLM
        return str(named.get("name", "rotary"))
    if learned_positions(model) is not None:
        return "learned"
    return "rotary" if any("inv_freq" in name for name, _ in model.named_buffers()) else "other"
