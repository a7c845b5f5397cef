"""The policy of a finished comparison that is to be written for engines, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

from sinklab.errors import ConfigurationError, InputError
from sinklab.policies.base import Policy, Positions, SlotPolicy
from sinklab.registry import policies
from sinklab.results.naming import counted
from sinklab.results.summaries.cache import Comparison, IntegerChoice, PolicyEntry, QuantizedEntry
from sinklab.results.summaries.shared import Difference
from sinklab.streaming.limits import require_integers
from sinklab.studies.export.base import ExportPlan

__all__ = ["INTEGER_MARGIN", "plan_of", "require_advice"]

INTEGER_MARGIN = 0.02
"""Nats per token by which integers may change the loss at most (the whole interval) before they are taken; as of sinks."""


def plan_of(summary: Comparison, policy: str | None = None, quantized: IntegerChoice = "auto") -> ExportPlan:
    """A policy of a comparison, by default the recommended one.

    Args:
        policy: a row of the table by its label or its name, or ``name:setting=value`` for one that need not have been measured.
        quantized: ``auto`` takes the fewest bits that change the loss by :data:`INTEGER_MARGIN` at most where that is
            measured, with no token in full precision that the policy does not keep, or none.

    Raises:
        InputError: nothing was recommended; a name that stands for several rows, or for none.
        UnknownNameError, ConfigurationError: no such policy; integers that it cannot have.
    """
    made, entry = _recommended(summary) if policy is None else _named(summary, policy)
    kind: str | None = None if quantized == "none" else quantized
    sentences = [_loss(summary, entry)]
    if policy is None:
        sentences.append(summary["recommendation"])
    ring = made if isinstance(made, SlotPolicy) and made.is_one_ring else None
    measured = [
        one
        for one in summary.get("quantized", [])
        # A token that was whole there and leaves here is another cache: it is kept whole because rounding it costs most.
        if ring is not None and one["window"] is not None and set(one["positions"]) <= set(ring.pinned)
    ]
    if kind == "auto":
        kind = _cheapest(measured)
    elif kind is not None and made.bounded:
        require_integers(made)
    if kind is not None:
        sentences.append(_integers(measured, kind))
    without = _without(made, entry)
    return ExportPlan(
        model=summary["model"], revision=summary["revision"], bos=bool(summary["bos"]), policy=made,
        quantized=cast(Literal["int8", "int4"] | None, kind), found=tuple(sentences),
        without=None if without is None else without["mean"], all_rounded="" if kind is None else _all_rounded(summary, kind),
        without_ends=_ends(without),
    )  # fmt: skip


def require_advice(names: Sequence[str], sinks: Sequence[int]) -> None:
    """Refuse a comparison in which nothing can be recommended, before it is made.

    Raises:
        ConfigurationError: it lacks a window without sinks, or one with some.
    """
    measured = {policies.read(name)["name"] for name in names}
    without = "window" in measured or ("sink_window" in measured and 0 in sinks)
    if not without or "sink_window" not in measured or not any(sinks):
        raise ConfigurationError(
            "`export` writes the recommended policy, which takes a window without sinks and one with some; `policies` must "
            "have window and sink_window, and `sinks` a number above 0"
        )


def _recommended(summary: Comparison) -> tuple[Policy, PolicyEntry | None]:
    advised = summary["recommended"]
    if advised is None:
        raise InputError(f"this comparison recommends no policy, name one with `policy`: {summary['recommendation']}")
    num_sinks, window = advised["num_sinks"], advised["window"]
    if "pinned" in advised:
        sizes = [{"name": "pinned", "pinned": tuple(advised["pinned"]), "window": window}]
    else:
        sizes = [{"name": "sink_window", "num_sinks": num_sinks, "window": window}]
        if not num_sinks:  # one rule under two names; the plain one is usual
            sizes.insert(0, {"name": "window", "window": window})
    made: list[Policy] = [policies.make({**size, "positions": kind}) for kind in get_args(Positions) for size in sizes]
    # Of one size with both kinds of positions, the recommendation is about the first kind.
    entries = ((policy, entry) for policy in made if (entry := _measured(summary, policy)) is not None)
    return next(entries, (made[0], None))


def _named(summary: Comparison, text: str) -> tuple[Policy, PolicyEntry | None]:
    rows = summary["policies"]
    matches = [row for row in rows if text == row["label"]] or [row for row in rows if text == row["policy"]]
    if len(matches) > 1:
        labels = ", ".join(repr(row["label"]) for row in matches)
        raise InputError(f"`policy` {text!r} stands for {len(matches)} rows of this comparison; name one: {labels}")
    if matches:
        return policies.make(dict(matches[0]["settings"])), matches[0]
    known = [row["label"] for row in rows]
    if ":" not in text and text not in policies and not text.isidentifier():
        raise InputError(f"`policy` {text!r} is no row of this comparison; it has {', '.join(map(repr, known))}")
    if ":" not in text and text in policies:
        raise InputError(
            f"policy {text!r} was not measured in this comparison, which has {', '.join(map(repr, known))}; give its settings "
            f"to have it all the same: {text}:setting=value"
        )
    policy: Policy = policies.make(text)
    return policy, _measured(summary, policy)


def _measured(summary: Comparison, policy: Policy) -> PolicyEntry | None:
    """The row of a policy, ``None`` where it was not measured."""
    settings = policies.settings(policy)
    return next(
        (row for row in summary["policies"] if policies.settings(policies.make(dict(row["settings"]))) == settings), None
    )


def _loss(summary: Comparison, entry: PolicyEntry | None) -> str:
    if entry is None:
        return "Not measured: this comparison has no row of it."
    interval = "" if entry["loss_low"] is None else f" [{entry['loss_low']:.3f}, {entry['loss_high']:.3f}]"
    texts = f"{counted(summary['documents'], 'text')} of {summary['tokens']:,} tokens of {summary['corpus']}"
    return f"Measured: {entry['loss']:.3f}{interval} nats per token, {texts} {'with' if summary['bos'] else 'without'} BOS."


def _cheapest(entries: list[QuantizedEntry]) -> str | None:
    """The fewest bits that change the loss by no more than the margin in a bounded cache, up or down."""
    for kind in ("int4", "int8"):
        ends = [entry["gap"][end] for entry in entries if entry["quantized"] == kind for end in ("low", "high")]
        if ends and all(end is not None and abs(end) <= INTEGER_MARGIN for end in ends):
            return kind
    return None


def _integers(entries: list[QuantizedEntry], kind: str) -> str:
    entry = next((entry for entry in entries if entry["quantized"] == kind), None)
    if entry is None:
        return f"What {kind} costs was not measured."
    gap = entry["gap"]
    ends = "" if gap["low"] is None else f" [{gap['low']:.4f}, {gap['high']:.4f}]"
    return (
        f"{kind} costs {gap['mean']:.4f}{ends} nats per token in a cache of {entry['window']:,} tokens, in full precision: "
        f"{entry['whole']}."
    )


def _all_rounded(summary: Comparison, kind: str) -> str:
    """What integers cost with all tokens held and none of them whole."""
    entries = (entry for entry in summary.get("quantized", []) if entry["quantized"] == kind and not entry["positions"])
    gap = next((entry["gap"] for entry in entries), None)
    if gap is None:
        return ""
    ends = "" if gap["low"] is None else f" [{gap['low']:.4f}, {gap['high']:.4f}]"
    return f", which on the grids of sinklab costs {gap['mean']:.4f}{ends} nats per token"


def _ends(difference: Difference | None) -> tuple[float, float] | None:
    """Of an interval, where there is one."""
    if difference is None or difference["low"] is None or difference["high"] is None:
        return None
    return difference["low"], difference["high"]


def _without(policy: Policy, entry: PolicyEntry | None) -> Difference | None:
    """What a window of the same size without the tokens that stay lost more."""
    difference = None if entry is None else entry["against_window"]
    if difference is None or policy.name == "window":
        return None
    low, high = difference["low"], difference["high"]
    return {"mean": -difference["mean"], "low": None if high is None else -high, "high": None if low is None else -low}
