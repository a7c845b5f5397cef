"""The policy of a finished comparison that is to be written for engines, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sinklab.errors import InputError, UnknownNameError
from sinklab.policies.base import Policy
from sinklab.registry import policies
from sinklab.results.blocks import counted, interval
from sinklab.results.sections import from_json
from sinklab.results.table import read_run
from sinklab.streaming.limits import require_integers
from sinklab.studies.cache.found import Comparison, PolicyEntry, recommended
from sinklab.studies.export.base import Engine, ExportPlan, engines


def comparison_of(folder: Path) -> Comparison:
    """``summary.json`` of ``sinklab cache``, or the entry ``cache`` of that of an audit."""
    kind = read_run(folder).get("kind")
    summary = read_run(folder, "summary.json") if kind in ("cache", "audit") else {}
    comparison = summary.get("cache") if kind == "audit" else summary
    if not isinstance(comparison, dict) or "policies" not in comparison:
        what = f"a run of {kind}" if kind != "audit" else "an audit that compared no policies"
        raise InputError(f"{folder} is {what}; a run of 'sinklab cache' is needed")
    return from_json(Comparison, comparison, folder / "summary.json")


def plan_of(found: Comparison, policy: str | None = None, quantized: str | None = None) -> ExportPlan:
    """A policy of a comparison, by default the recommended one."""
    entry = recommended(found) if policy is None else _named(found, policy)
    if entry is None:
        raise InputError(f"this comparison recommends no policy, name one with `policy`: {found.recommendation}")
    made: Policy = policies.make(dict(entry.settings))
    if not made.bounded:
        raise InputError(f"policy {made.name!r} keeps everything, as every engine does by itself; name another with `policy`")
    sentences = [_loss(found, entry)]
    if policy is None:
        sentences.append(found.recommendation)
    if quantized is not None:
        require_integers(made)
        sentences.append(_integers(found, made, quantized))
    return ExportPlan(found.model, bool(found.bos), made, quantized, tuple(sentences))


def _named(found: Comparison, text: str) -> PolicyEntry:
    rows = found.policies
    matches = [row for row in rows if text == row.label] or [row for row in rows if text == row.policy]
    if len(matches) == 1:
        return matches[0]
    labels = ", ".join(repr(row.label) for row in matches or rows)
    if matches:
        raise InputError(f"`policy` {text!r} stands for {len(matches)} rows of this comparison; name one: {labels}")
    raise InputError(f"`policy` {text!r} is no row of this comparison; it has {labels}")


def _loss(found: Comparison, entry: PolicyEntry) -> str:
    loss = interval({"mean": entry.loss, "low": entry.loss_low, "high": entry.loss_high}, 3, "")
    texts = f"{counted(found.documents, 'text')} of {found.tokens:,} tokens of {found.corpus}"
    return f"Measured: {loss} nats per token, {texts} {'with' if found.bos else 'without'} BOS."


def _integers(found: Comparison, policy: Policy, kind: str) -> str:
    """What integers cost with as few tokens whole; one that leaves the policy is kept whole because rounding it costs most."""
    pinned = set(getattr(policy, "pinned", ()))
    measured = [one for one in found.quantized if one.quantized == kind and one.window and set(one.positions) <= pinned]
    if not measured:
        return f"What {kind} costs was not measured."
    entry = measured[0]
    return (
        f"{kind} costs {interval(entry.gap, 4, '')} nats per token in a cache of {entry.window:,} tokens, in full precision: "
        f"{entry.whole}."
    )


def checked_engines(names: Sequence[str]) -> list[Engine]:
    """Engines by their names, each once, in the order in which they were named."""
    known = engines()
    for name in names:
        if name not in known:
            raise UnknownNameError(f"no engine is called {name!r}. Known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
