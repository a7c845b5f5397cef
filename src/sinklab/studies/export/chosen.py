"""The policy of a finished comparison that is to be written for engines, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from sinklab.errors import InputError, UnknownNameError
from sinklab.policies.base import Policy, Positions, SlotPolicy
from sinklab.registry import policies
from sinklab.results.blocks import counted, interval
from sinklab.results.sections import from_json
from sinklab.results.table import read_run
from sinklab.streaming.limits import require_integers
from sinklab.studies.cache.found import INTEGER_MARGIN, Comparison, PolicyEntry, QuantizedEntry
from sinklab.studies.export.base import Engine, ExportPlan, IntegerChoice, engines


def comparison_of(folder: Path) -> Comparison:
    """``summary.json`` of ``sinklab cache``, or the entry ``cache`` of that of an audit.

    Raises:
        InputError: no finished run is there, or one that compares no policies.
    """
    kind = read_run(folder).get("kind")
    summary = read_run(folder, "summary.json") if kind in ("cache", "audit") else {}
    comparison = summary.get("cache") if kind == "audit" else summary
    if not isinstance(comparison, dict) or "policies" not in comparison:
        what = f"a run of {kind}" if kind != "audit" else "an audit that compared no policies"
        raise InputError(f"{folder} is {what}; a run of 'sinklab cache' is needed")
    return from_json(Comparison, comparison, folder / "summary.json")


def plan_of(found: Comparison, policy: str | None = None, quantized: IntegerChoice = "auto") -> ExportPlan:
    """A policy of a comparison, by default the recommended one.

    Args:
        policy: a row of the table by its label or its name, or ``name:setting=value`` for one that need not have been measured.
        quantized: ``auto`` takes the fewest bits that change the loss by :data:`INTEGER_MARGIN` at most where that is
            measured, with no token in full precision that the policy does not keep, or none.

    Raises:
        InputError: nothing was recommended; a name that stands for several rows, or for none; a policy that keeps everything.
        UnknownNameError, ConfigurationError: no such policy; integers that it cannot have.
    """
    made, entry = _recommended(found) if policy is None else _chosen(found, policy)
    if not made.bounded:
        raise InputError(f"policy {made.name!r} keeps everything, as every engine does by itself; name another with `policy`")
    sentences = [_loss(found, entry)]
    if policy is None:
        sentences.append(found.recommendation)
    ring = made if isinstance(made, SlotPolicy) and made.is_one_ring else None
    measured = [
        one
        for one in found.quantized
        # A token that was whole there and leaves here is another cache: it is kept whole because rounding it costs most.
        if ring is not None and one.window is not None and set(one.positions) <= set(ring.pinned)
    ]
    kind: str | None = None if quantized == "none" else quantized
    if kind == "auto":
        kind = _cheapest(measured)
    elif kind is not None:
        require_integers(made)
    all_rounded, all_missed = "", False
    if kind is not None:
        sentences.append(_integers(measured, kind))
        unkept = [one for one in found.quantized if one.quantized == kind and not one.positions]
        if unkept:
            worst = max(unkept, key=lambda one: one.gap.most)
            all_rounded = f", which on the grids of sinklab costs {interval(worst.gap, 4, '')} nats per token"
            all_missed = quantized == "auto" and worst.gap.most > INTEGER_MARGIN
    about = found.model, found.revision, bool(found.bos)
    return ExportPlan(*about, made, kind, tuple(sentences), all_rounded, all_missed)


def _recommended(found: Comparison) -> tuple[Policy, PolicyEntry | None]:
    advised = found.recommended
    if advised is None:
        raise InputError(f"this comparison recommends no policy, name one with `policy`: {found.recommendation}")
    window = advised.window
    if advised.pinned is not None:
        sizes = [{"name": "pinned", "pinned": tuple(advised.pinned), "window": window}]
    else:
        sizes = [{"name": "sink_window", "num_sinks": advised.num_sinks, "window": window}]
        if not advised.num_sinks:  # one rule under two names; the plain one is usual
            sizes.insert(0, {"name": "window", "window": window})
    made: list[Policy] = [policies.make({**size, "positions": kind}) for kind in get_args(Positions) for size in sizes]
    # Of one size with both kinds of positions, the recommendation is about the first kind.
    entries = ((policy, entry) for policy in made if (entry := _measured(found, policy)) is not None)
    return next(entries, (made[0], None))


def _chosen(found: Comparison, text: str) -> tuple[Policy, PolicyEntry | None]:
    rows = found.policies
    matches = [row for row in rows if text == row.label] or [row for row in rows if text == row.policy]
    labels = ", ".join(repr(row.label) for row in matches or rows)
    if len(matches) > 1:
        raise InputError(f"`policy` {text!r} stands for {len(matches)} rows of this comparison; name one: {labels}")
    if matches:
        return policies.make(dict(matches[0].settings)), matches[0]
    if ":" not in text:
        raise InputError(
            f"`policy` {text!r} is no row of this comparison; it has {labels}. With its settings, name:setting=value, a policy "
            "need not have been measured"
        )
    policy: Policy = policies.make(text)
    return policy, _measured(found, policy)


def _measured(found: Comparison, policy: Policy) -> PolicyEntry | None:
    """The row of a policy, ``None`` where it was not measured."""
    settings = policies.settings(policy)
    same = (row for row in found.policies if policies.settings(policies.make(dict(row.settings))) == settings)
    return next(same, None)


def _loss(found: Comparison, entry: PolicyEntry | None) -> str:
    if entry is None:
        return "Not measured: this comparison has no row of it."
    loss = interval({"mean": entry.loss, "low": entry.loss_low, "high": entry.loss_high}, 3, "")
    texts = f"{counted(found.documents, 'text')} of {found.tokens:,} tokens of {found.corpus}"
    return f"Measured: {loss} nats per token, {texts} {'with' if found.bos else 'without'} BOS."


def _cheapest(entries: list[QuantizedEntry]) -> str | None:
    """The fewest bits that change the loss by no more than the margin in a bounded cache, up or down."""
    for kind in ("int4", "int8"):
        of_kind = [entry.gap.most for entry in entries if entry.quantized == kind]
        if of_kind and max(of_kind) <= INTEGER_MARGIN:
            return kind
    return None


def _integers(entries: list[QuantizedEntry], kind: str) -> str:
    entry = next((entry for entry in entries if entry.quantized == kind), None)
    if entry is None:
        return f"What {kind} costs was not measured."
    return (
        f"{kind} costs {interval(entry.gap, 4, '')} nats per token in a cache of {entry.window:,} tokens, in full precision: "
        f"{entry.whole}."
    )


def checked_engines(names: Sequence[str]) -> list[Engine]:
    """Engines by their names, each once, in the order in which they were named.

    Raises:
        UnknownNameError: there is none of a name.
    """
    known = engines()
    for name in names:
        if name not in known:
            raise UnknownNameError(f"no engine is called {name!r}. Known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
