"""What an export is: its plan, its parts as found, the engines, and the shell script that carries a command."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import json
import pkgutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from sinklab.registry import policies
from sinklab.results.blocks import Block, Facts, Heading, Say

if TYPE_CHECKING:
    from sinklab.policies.base import Policy

HowExported = Literal["expressed", "approximated", "not expressible"]
IntegerChoice = Literal["auto", "none", "int8", "int4"]
"""Integers of a cache, as they are asked for: those that were measured to cost little, or none, or these."""

INTEGER_MARGIN = 0.02
"""Nats per token by which integers may change the loss at most (the whole interval) before they are taken; as of sinks."""


@dataclass(frozen=True)
class ExportPart:
    """One part of a policy, and what an engine makes of it by which setting, or why it cannot."""

    part: str
    wanted: str
    how: HowExported
    says: str


@dataclass(frozen=True)
class ExportEntry:
    """A policy for one engine: its file and the line that uses it, empty where ``refused`` says why there is none."""

    engine: str
    policy: str
    checked: str
    parts: list[ExportPart] = field(default_factory=list)
    refused: str = ""
    file: str = ""
    command: str = ""
    text: str = ""


def show_exports(entries: Sequence[ExportEntry], folder: Path | None = None) -> Iterator[Block]:
    """Each engine with its command, and what it makes of each part.

    Args:
        folder: where the files lie.
    """
    for entry in entries:
        if entry.refused:
            yield Say(f"{entry.engine}: {entry.policy or 'no policy'} not written: {entry.refused}")
            continue
        yield Heading(f"{entry.engine}: {entry.policy}", 3)
        file = [("file", str(folder / entry.file))] if folder is not None else []
        parts = [(part.part, f"{part.wanted}: {part.how}: {part.says}") for part in entry.parts]
        yield Facts([*file, ("command", entry.command), *parts])


PAST_TRAINING = "past the trained length that can cost more than they gain (measure the policy with positions=original)"
"""What to know where keys keep the positions of the text although the policy has them in the cache."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What an engine makes of one part of a policy: how well, and by what."""

    how: HowExported
    says: str


def expressed(says: str) -> Answer:
    """The engine does just that."""
    return Answer("expressed", says)


def approximated(says: str) -> Answer:
    """It does something near to it; ``says`` is what the difference is."""
    return Answer("approximated", says)


def not_expressible(says: str = "it has no such setting") -> Answer:
    """It cannot; ``says`` is why, and what happens instead."""
    return Answer("not expressible", says)


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """A policy to be written for engines, and what was measured of it.

    Attributes:
        model: name of the model, as the comparison had it.
        revision: of a hub repository.
        bos: whether the texts of the comparison began with BOS.
        policy: the policy itself.
        quantized: ``int8`` or ``int4`` for a cache of integers, else ``None``.
        found: sentences on what was measured, for the head of a file.
        without: what a plain window of the same size lost more, in nats per token; ``None`` where that was not measured.
        without_ends: its 95 % interval; ``None`` where there is none.
        all_rounded: what the integers cost where no token stays whole, in words; empty where that was not measured.
        all_missed: whether that is more than the limit by which they were chosen; engines that round all are given none.
    """

    model: str
    revision: str | None
    bos: bool
    policy: Policy
    quantized: str | None
    found: tuple[str, ...]
    without: float | None
    all_rounded: str = ""
    all_missed: bool = False
    without_ends: tuple[float, float] | None = None

    @property
    def label(self) -> str:
        """Name and sizes of the policy."""
        described = self.policy.describe()
        name = described if described.startswith(self.policy.name) else f"{self.policy.name} {described}"
        return name if self.quantized is None else f"{name}, {self.quantized}"

    @property
    def settings(self) -> dict[str, object]:
        """The policy as ``policies.make`` takes it."""
        return policies.settings(self.policy)

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
        """Tokens held, the one being processed included; of a policy that holds all, 0."""
        return self.policy.max_held(2**31) if self.policy.bounded else 0

    @property
    def recent(self) -> int | None:
        """Tokens right before the query that are all held; ``None`` where the policy names no such number."""
        names = ("window", "recent", "dense")
        return next((getattr(self.policy, name) for name in names if hasattr(self.policy, name)), None)

    @property
    def by_rule(self) -> bool:
        """Whether there is more to it than tokens that stay and a window."""
        return self.policy.name not in ("full", "window", "sink_window", "pinned")

    def wanted(self) -> Iterator[tuple[str, str, str]]:
        """What an engine must do: the method of :class:`Engine` that answers, the name of the part, and what it is."""
        if not self.policy.bounded:
            yield "everything", "all tokens stay", "nothing is evicted"
        if self.by_rule:
            yield "rule", "rule", policies.summary(self.policy.name).rstrip(".")
        if self.pinned:
            places = ", ".join(map(str, self.pinned))
            first = self.num_first
            word = f"positions {places}" if first is None else "the first token" if first == 1 else f"the first {first} tokens"
            yield "stay", "tokens that stay", word
        if self.recent is not None:
            yield "window", "recent tokens", f"the last {self.recent} before the query"
        # A window moves along, and no distance changes in it; what is read anew has positions of its own each time.
        if (self.pinned or self.by_rule) and self.policy.name != "recompute":
            kind = "rank in the cache" if self.policy.positions == "in_cache" else "index in the text"
            yield "positions", "positions", kind
        if self.quantized is not None:
            whole = "the tokens that stay and the newest" if self.pinned else "the newest"
            yield "integers", "integers", f"{self.quantized}, in full precision {whole}"


class Engine(abc.ABC):
    """One engine, with no state; a method for each part of a policy says what the engine makes of it.

    A part that the engine has no setting for needs no method: that is the answer of this class.

    Attributes:
        name: how a user calls it.
        file: name of the file that is written for it.
        checked: which version of its documentation or source the answers were checked against, and when.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    checked: ClassVar[str]

    def everything(self, plan: ExportPlan) -> Answer:
        """Nothing is evicted."""
        return expressed("what it does by itself")

    def stay(self, plan: ExportPlan) -> Answer:
        """The tokens of :attr:`ExportPlan.pinned` are never evicted."""
        return not_expressible()

    def window(self, plan: ExportPlan) -> Answer:
        """The last :attr:`ExportPlan.recent` tokens before the query are held."""
        return not_expressible()

    def evicts(self, plan: ExportPlan) -> bool:
        """Whether its file has a window; where the tokens that stay cannot be had, a window alone would be another policy."""
        return plan.policy.bounded and (not plan.pinned or self.stay(plan).how != "not expressible")

    def rule(self, plan: ExportPlan) -> Answer:
        """What else a policy does; an engine that cannot do that is given nothing at all."""
        return not_expressible("it has no such rule")

    def positions(self, plan: ExportPlan) -> Answer:
        """Positions of keys are ranks in the cache, or indices in the text."""
        return not_expressible()

    def integers(self, plan: ExportPlan) -> Answer:
        """Keys and values are kept as integers, those of pinned and newest tokens are not."""
        return not_expressible()

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


def exported(engine: Engine, plan: ExportPlan) -> ExportEntry:
    """What an engine makes of a plan, and its file; ``refused`` says why where it can do nothing of it."""
    parts: list[ExportPart] = []
    refused, written = "", plan
    for method, name, wanted in plan.wanted():
        answer: Answer = getattr(engine, method)(plan)
        if method == "window" and not engine.evicts(plan):
            cost = "" if plan.without is None else f", which lost {_more(plan.without, plan.without_ends)} here"
            answer = not_expressible(f"left out: without the tokens that stay it is a plain window{cost}; all tokens are kept")
        if method == "positions" and plan.pinned and not engine.evicts(plan):
            answer = not_expressible("left out with the window")
        if method == "integers" and answer.how == "approximated" and plan.all_missed:
            written = dataclasses.replace(plan, quantized=None)
            answer = not_expressible(f"left out: it rounds all tokens{plan.all_rounded}, more than the limit")
        parts.append(ExportPart(name, wanted, answer.how, answer.says))
        if method == "rule" and answer.how == "not expressible":
            refused = answer.says
    if not refused and all(part.how == "not expressible" for part in parts):
        refused = parts[0].says
    if refused:
        return ExportEntry(engine.name, plan.label, engine.checked, parts, refused)
    plan = written
    first = "#!/bin/sh\n" if engine.file.endswith(".sh") else ""
    text = f"{first}{_head(engine, plan, parts)}\n{engine.text(plan)}"
    return ExportEntry(engine.name, plan.label, engine.checked, parts, "", engine.file, engine.command(plan), text)


def _more(nats: float, ends: tuple[float, float] | None) -> str:
    """By how much a loss is higher than another, in words, with the interval of that; it may be lower."""
    sign = -1.0 if nats < 0 else 1.0
    interval = "" if ends is None else " [{:.3f}, {:.3f}]".format(*sorted(sign * end for end in ends))
    return f"{abs(nats):.3f}{interval} nats per token {'less' if nats < 0 else 'more'}"


def _head(engine: Engine, plan: ExportPlan, parts: list[ExportPart]) -> str:
    """Comment lines that say what the file is, what was measured, and what the engine makes of each part."""
    # What a name of a model holds must not end the comment.
    lines = [f"{plan.label} for {json.dumps(plan.model)[1:-1]}, written by sinklab for {engine.name}.", *plan.found, ""]
    lines += [f"{part.part} ({part.wanted}): {part.how}: {part.says}." for part in parts]
    lines += ["", f"Checked against {engine.checked}."]
    wrapped = (
        piece for line in lines for piece in textwrap.wrap(line, 118, subsequent_indent="  ", break_on_hyphens=False) or [""]
    )
    return "\n".join(f"# {piece}".rstrip() for piece in wrapped)
