"""Verdicts: what a gap, a module and a cure are called, by rules that look at intervals and not at means alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from sinklab.report.words import number
from sinklab.results.intervals import CHANCE, Interval, fewest, rare_cost, shortfall
from sinklab.results.summaries.quantize import CureEntry, QuantizeSummary, SiteEntry

__all__ = ["Verdict", "best_cure", "carrier", "judged", "sample_noun", "texts_needed", "verdict_text"]

Verdict = Literal["gap", "none", "not measurable"]

NORMAL = statistics.NormalDist().inv_cdf(0.975)
"""Half a 95 % interval in standard errors."""

SEARCHED = 2**20
"""Texts up to which is looked for a number that decides."""


def judged(gap: Interval, minimal_effect: float) -> Verdict:
    """``none`` if the whole interval is at most ``minimal_effect``, ``gap`` if it is above 0, otherwise ``not measurable``."""
    if gap.high <= minimal_effect:
        return "none"
    return "gap" if gap.low > 0 else "not measurable"


def texts_needed(gap: Interval, texts: int, minimal_effect: float) -> int | None:
    """How many texts decide a gap that so many did not, with a chance of :data:`~sinklab.results.intervals.CHANCE`.

    The interval shrinks with the root of their number and its mean moves by what their scatter allows, until it leaves out 0 or
    lies below ``minimal_effect``, whichever takes fewer texts. ``None`` if neither can be foretold.

    Args:
        gap: its mean with the 95 % interval, from two texts or more.
    """
    half = (gap.high - gap.low) / 2
    scatter = half * math.sqrt(texts) / NORMAL
    room = max(gap.mean, minimal_effect - gap.mean)

    def decided(count: int) -> bool:
        return half * math.sqrt(texts / count) + shortfall(texts, count) * scatter <= room

    return fewest(decided, texts + 1, SEARCHED)


def carrier(sites: Sequence[SiteEntry]) -> SiteEntry | None:
    """The site that costs most by itself, if its gap is above 0 with its whole interval."""
    measurable = [site for site in sites if site["low"] > 0]
    return max(measurable, key=lambda site: site["gap"], default=None)


def best_cure(cures: Sequence[CureEntry], minimal_effect: float) -> CureEntry | None:
    """The cheapest cure that leaves no gap, else the one nearest to the loss as it is; of those with a measurable gain."""
    helping = _helping(cures)
    curing = [cure for cure in helping if cure["left"]["high"] <= minimal_effect]
    if curing:
        return min(curing, key=_cost)
    return min(helping, key=lambda cure: (_off(cure), *_cost(cure)), default=None)


def _helping(cures: Sequence[CureEntry]) -> list[CureEntry]:
    """Those that gain anything measurable."""
    return [cure for cure in cures if cure["gain"]["low"] > 0]


def _off(cure: CureEntry) -> float:
    """How far off the loss is in the mean.

    A loss below that of the model as it is counts as off too: the model was changed, and other texts may show the other side.
    """
    return abs(cure["left"]["mean"])


def _cost(cure: CureEntry) -> tuple[float, ...]:
    """Whole products first, since they take time and a second kernel; then bytes, activations, and how far off the loss is."""
    return cure["share_whole"], cure["extra_bytes"], cure["activations_whole"], _off(cure)


def sample_noun(summary: QuantizeSummary) -> str:
    """What one of the samples is: a text, a pair, a picture, a recording."""
    return {"pairs": "pair", "image": "picture", "audio": "recording"}.get(summary.get("kind", "text"), "text")


def verdict_text(summary: QuantizeSummary) -> str:
    """What the numbers say, in a few sentences."""
    entry = next(scheme for scheme in summary["schemes"] if scheme["scheme"] == summary["examined"] and not scheme["per_token"])
    unit, least, label = summary["unit"], summary["minimal_effect"], summary["examined"].upper()
    texts, noun = summary["texts"], sample_noun(summary)
    if summary["residual"]:
        label += " with the residual stream"
    gap = _interval(entry["gap"], entry["low"], entry["high"])
    opening = f"{label} costs {gap} {unit} on top of {summary['clean_loss']['mean']:.3f}"
    if entry["verdict"] == "none":
        falls = entry["high"] < 0
        change = " A loss that falls is a change, too: these samples do not show what rounding may harm." if falls else ""
        return f"{opening}, not more than {least:g}: no cure needed. {rare_cost(texts, noun)}{change}"
    if entry["verdict"] == "not measurable":
        needed = entry["texts_needed"]
        how_many = (
            f"how many {noun}s would decide it cannot be estimated"
            if needed is None
            else f"{needed:,} {noun}s would decide it with a chance of {100 * CHANCE:.0f} %"
        )
        return f"{opening}: not measurable at this sample size; {how_many} ({texts} were measured)."
    return " ".join([f"{opening}.", _carried(summary), _cured(summary)])


def _carried(summary: QuantizeSummary) -> str:
    site = carrier(summary["sites"])
    if site is None:
        return f"Of the {len(summary['sites'])} sites none costs anything measurable when it alone is quantised."
    words = f"Alone, {site['site']} costs most, {_interval(site['gap'], site['low'], site['high'])}"
    larger = max(summary["sites"], key=lambda entry: entry["gap"])
    if larger["gap"] > site["gap"]:
        words = (
            f"Alone, {larger['site']} may cost most, {_interval(larger['gap'], larger['low'], larger['high'])}, which is not "
            f"measurable at this sample size; of those that are, {site['site']} costs most, "
            f"{_interval(site['gap'], site['low'], site['high'])}"
        )
    if summary["activation_bits"] == 16:
        return f"{words}."
    words += f"; the range of its channel {site['channel']} is {number(site['range_ratio'])} times that of the median channel"
    if not site["spike"]:
        return f"{words}, which is no spike."
    if site["everywhere"]:
        return f"{words}, at many positions."
    if not site["positions"]:
        return f"{words}, at no fixed position."
    where = ", ".join(site["tokens"][:4]) + (", …" if len(site["tokens"]) > 4 else "")
    return f"{words}, at {where}: {_role(site, summary['sinks'])}."


def _role(site: SiteEntry, sinks: Sequence[int] | None) -> str:
    """Whether the tokens with the spike are sinks: all, none, or some of them."""
    if sinks is None:
        return "where the sinks are is not known"
    named = [token for token, position in zip(site["tokens"], site["positions"], strict=True) if position in sinks]
    if not named:
        return "no sink by the rate"
    if site["at_sink"]:
        return "a sink" if len(named) == 1 else "sinks"
    listed = ", ".join(named[:4]) + (", …" if len(named) > 4 else "")
    return f"of these {listed} {'is a sink' if len(named) == 1 else 'are sinks'}, and others none by the rate"


def _cured(summary: QuantizeSummary) -> str:
    unit, cure = summary["unit"], best_cure(summary["cures"], summary["minimal_effect"])
    if cure is None:
        return "No cure that was tried gains anything measurable."
    left = cure["left"]
    words = f"leaves {_interval(left['mean'], left['low'], left['high'])} {unit} ({_price(cure)})"
    if left["high"] <= summary["minimal_effect"]:
        opening = "Cure"
    elif all(one["left"]["low"] > 0 for one in _helping(summary["cures"])):
        opening = "No cure takes all of it away; best"
    else:  # one may leave nothing, which these texts do not show
        least = f"{summary['minimal_effect']:g} or less"
        opening = f"No cure is shown to leave {least} at this sample size; nearest to the loss as it was comes this one"
    return f"{opening}: {cure['label']} {words}."


def _price(cure: CureEntry) -> str:
    share, activations, held = cure["share_whole"], cure["activations_whole"], cure["extra_bytes"]
    if not share and not held and not activations:
        return "nothing kept whole, no more bytes"
    return f"{100 * share:.3g} % of the products and {100 * activations:.3g} % of the activations whole, {held:,} bytes more"


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:z.3f} [{low:z.3f}, {high:z.3f}]"
