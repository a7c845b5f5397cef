"""Conditions: what a score is measured under, and the plan of a grid: BOS in front, the sink's visibility, policy, bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError
from sinklab.policies.base import Policy
from sinklab.policies.blocks import Blocks
from sinklab.policies.full import Full
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.streaming.limits import require_integers
from sinklab.streaming.quantized import BITS
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.evicted import SinkEvicted
from sinklab.studies.depend.words import bos_name

__all__ = [
    "Cell",
    "Condition",
    "ConditionPlan",
    "Sight",
    "counts_of",
    "make_plan",
    "pairs",
    "read_bits",
    "read_bos",
    "read_sights",
]

Sight = Literal["visible", "hidden"]

BOS_COUNTS = {"none": 0, "one": 1, "two": 2}


@dataclasses.dataclass(frozen=True)
class Condition:
    """What one reading of the texts is like.

    Attributes:
        bos: beginning-of-sequence tokens in front.
        quantized: ``"int8"``, ``"int4"``, or ``None`` for a cache in the dtype of the model.
    """

    bos: int
    policy: Policy
    quantized: str | None = None

    @property
    def label(self) -> str:
        """Policy and, of a cache of integers, their kind: the column ``policy`` of the table."""
        return self.policy.describe() + (f", {self.quantized}" if self.quantized else "")

    @property
    def kind(self) -> str:
        """What takes its own time for a token: the name of the policy, and the kind of integers."""
        return self.policy.name + (f", {self.quantized}" if self.quantized else "")

    def label_beside(self, bos: int) -> str:
        """The same, and what stands in front where it is not so many tokens."""
        return self.label if self.bos == bos else f"{self.label}, {bos_name(self.bos)}"

    def fitted(self, length: int) -> Policy:
        """The policy, for texts of ``length`` tokens at most."""
        if isinstance(self.policy, SinkEvicted):
            least = self.policy.at + self.policy.num_sinks
            return dataclasses.replace(self.policy, length=max(length, least))
        return self.policy


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the grid.

    Attributes:
        bos: beginning-of-sequence tokens in front.
        policy: the policy as it is with the sink visible; the name of its pair.
        sink: whether the first tokens stay visible.
        bits: of a number of the cache.
        condition: what is read; ``None`` if there is no such thing.
        reason: why there is none.
    """

    bos: int
    policy: str
    sink: Sight
    bits: int
    condition: Condition | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ConditionPlan:
    """Everything that is read, each once.

    Attributes:
        contenders: the policies that are compared at the reference.
        bos: numbers of tokens in front, the reference first.
        bits: of the cache at the reference: those of the model's dtype.
        cells: of the grid, those of the reference first: visible, hidden.
        grid: whether there is more than the reference.
    """

    contenders: Contenders
    bos: tuple[int, ...]
    bits: int
    cells: tuple[Cell, ...]
    grid: bool

    @property
    def reference(self) -> int:
        """Tokens in front at the reference."""
        return self.bos[0]

    def of_policy(self, name: str) -> Condition:
        """The condition of a contender at the reference."""
        return Condition(self.reference, self.contenders.policies[name])

    @property
    def conditions(self) -> list[Condition]:
        """All of them: contenders at the reference, then the others of the grid."""
        compared = (self.of_policy(name) for name in self.contenders.policies)
        return list(dict.fromkeys((*compared, *(cell.condition for cell in self.cells if cell.condition is not None))))

    @property
    def needed(self) -> set[Condition]:
        """Those without which there is no verdict."""
        contenders = self.contenders
        return {self.of_policy(name) for name in (contenders.with_sinks, contenders.without, contenders.floor)}


def make_plan(
    contenders: Contenders, bos: Sequence[int], sights: Sequence[Sight], bits: Sequence[int], model_bits: int, *, cross: bool
) -> ConditionPlan:
    """The plan of a grid.

    Args:
        bos: tokens in front, the reference first.
        sights: which of visible and hidden are measured away from the reference, where both always are.
        bits: of the cache, those of the model left out or not.
        cross: every combination; by default one factor at a time differs from the reference.
    """
    others = [name for name in contenders.policies if name not in (contenders.with_sinks, contenders.without, contenders.floor)]
    precisions = tuple(dict.fromkeys((model_bits, *bits)))
    grid = len(bos) > 1 or len(precisions) > 1 or cross
    families = (contenders.with_sinks, *(others if grid else ()))
    triples = [(bos[0], contenders.with_sinks, model_bits)]
    if cross:
        triples += [(count, family, size) for count in bos for family in families for size in precisions]
    else:
        triples += [(count, contenders.with_sinks, model_bits) for count in bos]
        triples += [(bos[0], family, model_bits) for family in families]
        triples += [(bos[0], contenders.with_sinks, size) for size in precisions]
    cells = (
        _cell(contenders, count, family, sight, size, model_bits)
        for number, (count, family, size) in enumerate(dict.fromkeys(triples))
        for sight in get_args(Sight)
        if number == 0 or sight in sights
    )
    return ConditionPlan(contenders, tuple(bos), model_bits, tuple(cells), grid)


def _cell(contenders: Contenders, bos: int, family: str, sight: Sight, bits: int, model_bits: int) -> Cell:
    policy: Policy | None = contenders.policies[family]
    if sight == "hidden":
        assert policy is not None
        policy = _hidden(policy, contenders)
        if policy is None:
            return Cell(
                bos, family, sight, bits, None, f"what {family} keeps is its own rule, so no sink can be hidden from it"
            )
    quantized = None if bits == model_bits else next(name for name, size in BITS.items() if size == bits)
    if quantized is not None and isinstance(policy, (Full, SinkEvicted)):
        return Cell(
            bos, family, sight, bits, None, "a full cache of integers is not there: integers are for sinks and a window"
        )
    assert policy is not None
    if quantized is not None:
        try:
            require_integers(policy)
        except ConfigurationError:
            return Cell(bos, family, sight, bits, None, f"what {family} holds cannot be kept as integers")
    return Cell(bos, family, sight, bits, Condition(bos, policy, quantized))


def _hidden(policy: Policy, contenders: Contenders) -> Policy | None:
    """The same without the sink, holding as many tokens; ``None`` where the policy decides by itself what stays.

    Blocks are of one size: where that does not add up, they hold a few tokens more, fewer than there are blocks.
    """
    if isinstance(policy, Full):
        at = contenders.budget + 1
        return SinkEvicted(num_sinks=contenders.num_sinks, at=at, length=at + contenders.num_sinks)
    if isinstance(policy, SinkWindow) and policy.num_sinks:
        return Window(window=policy.num_sinks + policy.window)
    if isinstance(policy, Blocks) and policy.num_sinks:
        return dataclasses.replace(policy, num_sinks=0, block=math.ceil(policy.num_slots / policy.blocks))
    if isinstance(policy, Pinned) and policy.pinned:
        return Window(window=len(policy.pinned) + policy.window)
    return None


def read_bos(bos: Sequence[str]) -> list[str]:
    """The words for what stands in front, checked.

    Raises:
        ConfigurationError: another word, or none.
    """
    words = [bos] if isinstance(bos, str) else list(bos)
    known = ("auto", "always", *BOS_COUNTS)
    for word in words or [""]:
        if word not in known:
            raise ConfigurationError(f"`bos` {word!r} is none of {', '.join(known)}")
    return words


def counts_of(bos: Sequence[str], encoder: Encoder) -> list[int]:
    """Tokens in front, each number once; what the tokenizer does by itself comes first if it is among them.

    Raises:
        ConfigurationError: a model without such a token.
    """
    for word in bos:
        if encoder.bos_token_id is None and word not in ("auto", "none"):
            raise ConfigurationError(f"`bos` {word}: this model has no beginning-of-sequence token; use `bos` none")
    usual = int(encoder.adds_bos)
    counts = dict.fromkeys({"auto": usual, "always": 1, **BOS_COUNTS}[word] for word in bos)
    return sorted(counts, key=lambda count: count != usual)


def read_sights(visibility: Sequence[str]) -> list[Sight]:
    """``visible`` and ``hidden``, checked.

    Raises:
        ConfigurationError: another word, or none.
    """
    words = [visibility] if isinstance(visibility, str) else list(visibility)
    known = get_args(Sight)
    for word in words or [""]:
        if word not in known:
            raise ConfigurationError(f"`visibility` {word!r} is none of {', '.join(known)}")
    return [sight for sight in known if sight in words]


def read_bits(bits: Sequence[int], model_bits: int) -> list[int]:
    """Bits of a number of the cache, checked.

    Args:
        model_bits: of the dtype that the model computes in, which is the full precision of its cache.

    Raises:
        ConfigurationError: bits that there are not.
    """
    known = (model_bits, *BITS.values())
    for size in bits:
        if size not in known:
            raise ConfigurationError(
                f"`cache_bits` {size} is none of {', '.join(map(str, known))}: the model computes in {model_bits} bits, and "
                f"integers have {' or '.join(map(str, BITS.values()))}"
            )
    return list(bits)


def pairs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell | None]]:
    """Cells with the sink visible, each with its twin in which it is hidden, if there is one."""
    hidden = {(cell.bos, cell.policy, cell.bits): cell for cell in cells if cell.sink == "hidden"}
    for cell in cells:
        if cell.sink == "visible":
            yield cell, hidden.get((cell.bos, cell.policy, cell.bits))
