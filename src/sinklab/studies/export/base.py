"""What is exported: the policy of a comparison, what an engine makes of each part of it, and the file for one of them."""

from __future__ import annotations

import abc
import functools
import importlib
import json
import pkgutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from sinklab.errors import ConfigurationError, InputError
from sinklab.policies.base import Policy
from sinklab.registry import policies
from sinklab.results.blocks import Block, Facts, Heading, counted, interval
from sinklab.results.sections import from_json
from sinklab.results.table import read_run
from sinklab.streaming.limits import require_integers
from sinklab.studies.arguments import ENGINES
from sinklab.studies.cache.found import Comparison, PolicyEntry, recommended

if TYPE_CHECKING:
    from sinklab.policies.base import Policy

PAST_TRAINING = "past the trained length that can cost more than they gain (measure the policy with positions=original)"
"""What to know where keys keep the positions of the text although the policy has them in the cache."""


@dataclass(frozen=True)
class Answer:
    """What an engine makes of one part of a policy: how well, and by what, or why it cannot and what happens instead."""

    how: Literal["expressed", "approximated", "not expressible"]
    says: str


@dataclass(frozen=True)
class ExportPlan:
    """A bounded policy to be written for engines, and in ``found`` what was measured of it, for the head of a file.

    ``bos`` says whether the texts of the comparison began with BOS; ``quantized`` is ``int8`` or ``int4`` for a cache of
    integers.
    """

    model: str
    bos: bool
    policy: Policy
    quantized: str | None
    found: tuple[str, ...]
    model_class: str = ""  # in transformers

    @property
    def label(self) -> str:
        """Name and sizes of the policy."""
        described = self.policy.describe()
        name = described if described.startswith(self.policy.name) else f"{self.policy.name} {described}"
        return name if self.quantized is None else f"{name}, {self.quantized}"

    @property
    def pinned(self) -> tuple[int, ...]:
        """Positions that are never evicted, ascending."""
        pinned: tuple[int, ...] = getattr(self.policy, "pinned", ())
        return pinned

    @property
    def num_first(self) -> int | None:
        """How many tokens stay, if they are the first ones; else ``None``."""
        return len(self.pinned) if self.pinned == tuple(range(len(self.pinned))) else None

    @property
    def held(self) -> int:
        """Tokens held, the one being processed included."""
        return self.policy.max_held(2**31)

    @property
    def recent(self) -> int | None:
        """Tokens right before the query that are all held; ``None`` where the policy names no such number."""
        return getattr(self.policy, "window", None)

    def wanted(self) -> Iterator[tuple[str, str, str]]:
        """What an engine must do: the method of :class:`Engine` that answers, the name of the part, and what it is."""
        by_rule = self.policy.name not in ("window", "sink_window", "pinned")
        if by_rule:
            yield "rule", "rule", policies.summary(self.policy.name).rstrip(".")
        if self.pinned:
            first = self.num_first
            word = "the first token" if first == 1 else f"the first {first} tokens"
            yield "stay", "tokens that stay", word if first else f"positions {', '.join(map(str, self.pinned))}"
        if self.recent is not None:
            yield "window", "recent tokens", f"the last {self.recent} before the query"
        if self.pinned or by_rule:  # a window moves along, and no distance changes in it
            kind = "rank in the cache" if self.policy.positions == "in_cache" else "index in the text"
            yield "positions", "positions", kind
        if self.quantized is not None:
            whole = "the tokens that stay and the newest" if self.pinned else "the newest"
            yield "integers", "integers", f"{self.quantized}, in full precision {whole}"


class Engine(abc.ABC):
    """One engine, with no state; a method for each part of a policy says what the engine makes of it.

    A part that the engine has no setting for needs no method. ``checked`` says which version of its documentation or source the
    answers were checked against, and when.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    checked: ClassVar[str]

    def unserved(self, plan: ExportPlan) -> str | None:
        """Why the engine can bound the cache of no such model, whatever the policy; ``None`` where it can."""
        return None

    def stay(self, plan: ExportPlan) -> Answer:
        """The tokens of :attr:`ExportPlan.pinned` are never evicted; an engine that cannot do that is given nothing."""
        return Answer("not expressible", "it has no such setting")

    def window(self, plan: ExportPlan) -> Answer:
        """The last :attr:`ExportPlan.recent` tokens before the query are held."""
        return Answer("not expressible", "it has no such setting")

    def rule(self, plan: ExportPlan) -> Answer:
        """What else a policy does; an engine that cannot do that is given nothing."""
        return Answer("not expressible", "it has no such rule")

    def positions(self, plan: ExportPlan) -> Answer:
        """Positions of keys are ranks in the cache, or indices in the text."""
        return Answer("not expressible", "it has no such setting")

    def integers(self, plan: ExportPlan) -> Answer:
        """Keys and values are kept as integers, those of pinned and newest tokens are not."""
        return Answer("not expressible", "it has no such setting")

    @abc.abstractmethod
    def text(self, plan: ExportPlan) -> str:
        """The file without its head."""

    @abc.abstractmethod
    def command(self, plan: ExportPlan) -> str:
        """The line by which the file is used."""


@functools.cache
def engines() -> Mapping[str, Engine]:
    """All engines by name, sorted."""
    from sinklab.studies.export import engines as package

    found: list[Engine] = [
        importlib.import_module(f"{package.__name__}.{one.name}").ENGINE for one in pkgutil.iter_modules(package.__path__)
    ]
    return {engine.name: engine for engine in sorted(found, key=lambda engine: engine.name)}


@dataclass(frozen=True)
class ExportPart:
    """One part of a policy, and what an engine makes of it by which setting, or why it cannot."""

    part: str
    wanted: str
    how: str
    says: str


@dataclass(frozen=True)
class ExportEntry:
    """A policy for one engine: its file, the line that uses it, and what of the policy is in it."""

    engine: str
    policy: str
    checked: str
    parts: list[ExportPart]
    file: str
    command: str
    text: str


def exported(engine: Engine, plan: ExportPlan) -> ExportEntry:
    """What an engine makes of a plan, and its file."""
    if (why := engine.unserved(plan)) is not None:
        raise ConfigurationError(f"{engine.name} cannot bound the cache of {plan.model}: {why}; leave it out of `to`")
    parts: list[ExportPart] = []
    for method, name, wanted in plan.wanted():
        answer: Answer = getattr(engine, method)(plan)
        if answer.how == "not expressible" and method in ("rule", "stay", "window"):
            raise ConfigurationError(f"{engine.name} cannot do {plan.label}: {answer.says}; leave it out of `to`")
        parts.append(ExportPart(name, wanted, answer.how, answer.says))
    text = f"{_head(engine, plan, parts)}\n{engine.text(plan)}"
    text = f"#!/bin/sh\n{text}" if engine.file.endswith(".sh") else text
    return ExportEntry(engine.name, plan.label, engine.checked, parts, engine.file, engine.command(plan), text)


def _head(engine: Engine, plan: ExportPlan, parts: Sequence[ExportPart]) -> str:
    """Comment lines that say what the file is, what was measured, and what the engine makes of each part."""
    # What a name of a model holds must not end the comment.
    lines = [f"{plan.label} for {json.dumps(plan.model)[1:-1]}, written by sinklab for {engine.name}.", *plan.found, ""]
    lines += [f"{part.part} ({part.wanted}): {part.how}: {part.says}." for part in parts]
    lines += ["", f"Checked against {engine.checked}."]
    wrapped = (
        piece for line in lines for piece in textwrap.wrap(line, 118, subsequent_indent="  ", break_on_hyphens=False) or [""]
    )
    return "\n".join(f"# {piece}".rstrip() for piece in wrapped)


def show_exports(entries: Sequence[ExportEntry], folder: Path) -> Iterator[Block]:
    """Each engine with its file and command, and what it makes of each part."""
    for entry in entries:
        yield Heading(f"{entry.engine}: {entry.policy}", 3)
        parts = [(part.part, f"{part.wanted}: {part.how}: {part.says}") for part in entry.parts]
        yield Facts([("file", str(folder / entry.file)), ("command", entry.command), *parts])


def comparison_of(folder: Path) -> Comparison:
    """``summary.json`` of ``sinklab cache``, or the entry ``cache`` of that of an audit."""
    kind = read_run(folder).get("kind")
    summary = read_run(folder, "summary.json") if kind in ("cache", "audit") else {}
    comparison = summary.get("cache") if kind == "audit" else summary
    if not isinstance(comparison, dict) or "policies" not in comparison:
        what = f"a run of {kind}" if kind != "audit" else "an audit that compared no policies"
        raise InputError(f"{folder} is {what}; a run of 'sinklab cache' is needed")
    return from_json(Comparison, comparison, folder / "summary.json")


def plan_of(found: Comparison, policy: str | None = None, quantized: str | None = None, model_class: str = "") -> ExportPlan:
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
    return ExportPlan(found.model, bool(found.bos), made, quantized, tuple(sentences), model_class)


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
    for name in names:
        ENGINES.require("to", name)
    return [engines()[name] for name in dict.fromkeys(names)]
