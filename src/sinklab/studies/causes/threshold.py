"""The minimal effect: below which change of the loss a head's effect counts as nothing, in a model of so many heads."""

from __future__ import annotations

import math

import numpy as np

from sinklab.results.intervals import Interval, means_over_items
from sinklab.results.summaries.causes import MinimalEffect
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.finding import bounds
from sinklab.studies.causes.head_group import HeadGroup
from sinklab.studies.causes.labels import MINIMAL_EFFECT

__all__ = ["LEAST_WORTH", "SHARE", "SILENCED", "given", "minimal_effect_of"]

SHARE = 1 / 20
"""Of what one head would be worth if all were worth the same."""

LEAST_WORTH = 0.1
"""Nats that all attention must be worth for a smaller minimal effect: what luck gives heads with random weights is less."""

SILENCED = ("zero", "resample")
"""How the worth of attention is taken: every output is 0; every output is that of another text."""


def given(value: float, heads: int, unit: str) -> MinimalEffect:
    """The minimal effect that somebody asked for.

    Args:
        heads: of the model.
    """
    text = f"Minimal effect {value:g} {unit}, as asked for."
    return {"value": value, "by": "given", "heads": heads, "domain": None, "worth": {}, "text": text}


def minimal_effect_of(effects: Effects[HeadGroup]) -> MinimalEffect:
    """The minimal effect for a model, from what all of its attention together is worth.

    A twentieth of a head's fair share of that, rounded to one digit: so small a part that heads which do far less than others
    are seen, and the same for nearly all draws of texts. In nats it is :data:`~sinklab.studies.causes.labels.MINIMAL_EFFECT`
    at most. Worth is the lesser of two costs (:data:`SILENCED`), since with random weights an output of 0 changes the loss by a
    definite amount, and half of the time to the worse; what such heads say of another text costs nothing on average. Of several
    domains the one counts on which attention is worth most.

    Both intervals must lie above 0, and in nats the worth must be :data:`LEAST_WORTH`; or the minimal effect is
    :data:`~sinklab.studies.causes.labels.MINIMAL_EFFECT`.

    Args:
        effects: of :data:`SILENCED` on one group, that of all heads.
    """
    (everything,) = effects.heads
    heads, unit = len(everything.members), effects.unit
    worth: dict[str, dict[str, Interval]] = {}
    for number, domain in enumerate(effects.domain_names):
        costs = np.stack([effects.of(variant)[0, :, number] for variant in SILENCED])
        costs = costs[:, np.isfinite(costs).all(0)]
        if costs.shape[1] > 1:
            worth[domain] = dict(zip(SILENCED, means_over_items(costs), strict=True))
    least = LEAST_WORTH if unit == "nats" else 0.0
    lesser = {
        domain: min(costs.values(), key=lambda cost: cost.mean)
        for domain, costs in worth.items()
        if min(cost.low for cost in costs.values()) > 0 and min(cost.mean for cost in costs.values()) >= least
    }
    best = max(lesser, key=lambda name: lesser[name].mean, default=None)
    if best is None:
        value = MINIMAL_EFFECT
        shown = f"worth {least:g} {unit} or more" if least else "of use"
        why = f"no smaller one, since all attention together is not shown to be {shown}: {_seen(worth)}"
    else:
        own = SHARE * lesser[best].mean / heads
        value = float(f"{own:.0e}")
        where = f" on {best}" if len(effects.domain_names) > 1 else ""
        why = (
            f"all attention together is worth {_words(lesser[best])}{where}, and a twentieth of the share of one of {heads} "
            f"heads is {_rounded(own)}"
        )
        if unit == "nats" and value > MINIMAL_EFFECT:
            value, why = MINIMAL_EFFECT, f"{why}; {MINIMAL_EFFECT:g} is the most"
    return {
        "value": value,
        "by": "auto",
        "heads": heads,
        "domain": best,
        "worth": {name: {how: bounds(cost) for how, cost in costs.items()} for name, costs in worth.items()},
        "text": f"Minimal effect {value:g} {unit}: {why}.",
    }


def _seen(worth: dict[str, dict[str, Interval]]) -> str:
    costs_by_domain = {
        domain: f"an output of 0 costs {_words(costs['zero'])}, that of another text {_words(costs['resample'])}"
        for domain, costs in worth.items()
    }
    return "; ".join(f"on {domain} {words}" if len(costs_by_domain) > 1 else words for domain, words in costs_by_domain.items())


def _words(cost: Interval) -> str:
    return f"{cost.mean:z.2f} [{cost.low:z.2f}, {cost.high:z.2f}]"


def _rounded(value: float) -> str:
    """Two digits, without an exponent."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"
