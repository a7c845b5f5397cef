"""What a claim is: a published statement with its citation, what is run for it, and what it says about the numbers.

A claim has parts; a part is an :class:`~sinklab_claims.contract.effect.Effect` and the region in which it is said to lie. A
scale is how large the models are that are trained for it, a base what their rows begin with.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from sinklab.errors import ConfigurationError
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.recipes.emergence import emergence
from sinklab.recipes.emergence_medium import emergence_medium
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.effect import Effect, Numbers


def _without_bos(base: PretrainingConfig) -> PretrainingConfig:
    """Learned positions and a random token at the first of them in training: the position says all and the token nothing."""
    return base.model_copy(
        update={
            "name": f"{base.name}_no_bos",
            "data": base.data.model_copy(update={"bos": "none", "random_positions": (0, 1)}),
            "model": base.model.model_copy(update={"position": {"name": "learned"}}),
        }
    )


CONFIGS: Mapping[Scale, Mapping[Base, Callable[[], PretrainingConfig]]] = {
    "tiny": {"bos": backcopy_tiny, "no-bos": lambda: _without_bos(backcopy_tiny())},
    "small": {"bos": emergence, "no-bos": lambda: _without_bos(emergence())},
    "medium": {"bos": emergence_medium, "no-bos": lambda: _without_bos(emergence_medium())},
}

SECONDS_OF_A_TRAINING: Mapping[Scale, float] = {"tiny": 17.0, "small": 560.0, "medium": 29_000.0}
"""Of one core, in round numbers. Nobody trained ``medium`` on one: a token of it takes 26 times as long as one of
``small`` (one core, float32), and there are twice as many."""

SECONDS_ON_A_GPU: Mapping[Scale, float] = {"medium": 60.0}
"""Of one data-centre GPU, in round numbers, where a scale is meant for one."""


def base_config(scale: Scale, base: Base | None = None) -> PretrainingConfig:
    """The configuration in which a variant changes something, anew; by default with BOS."""
    config = CONFIGS[scale][base or "bos"]()
    return config.model_copy(update={"training": config.training.model_copy(update={"snapshots": ()})})


def base_called(name: str) -> PretrainingConfig:
    """The base whose configuration has a name, which every variant of it keeps.

    Raises:
        ConfigurationError: no base has.
    """
    known = {config.name: config for bases in CONFIGS.values() for config in (make() for make in bases.values())}
    if name not in known:
        raise ConfigurationError(f"no base of a scale is called {name!r}; bases: {', '.join(known)}")
    return known[name]


Scale = Literal["tiny", "small", "medium"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "medium")

CHECKPOINT = "checkpoint"
"""In the place of a scale: nothing is trained, and claims are measured on models as they are."""

RECORDED = (*SCALES, CHECKPOINT)
"""What a record may have for its scale."""

Base = Literal["bos", "no-bos"]
BASES: tuple[Base, ...] = ("bos", "no-bos")
"""What the rows of a scale's models begin with: BOS, which is a place to rest in every row, or a random token, with learned
positions (Gu's *x1 random*).

With BOS, a bias that could take the sink is not needed; so what a paper found without BOS is tested without.
"""

ROWS: Mapping[str, str] = {"bos": "with BOS", "no-bos": "x1 random, learned positions"}
"""Bases in words. Without BOS it is a variant of Gu et al. 2024: the first token (x1) of training rows is random."""


def folder_name(scale: str, base: str | None, own: str | None) -> str:
    """The folder in which the result of a claim lies: the scale, with the base where that is not the claim's own."""
    return scale if base == own else f"{scale}-{base}"


def folder_names(scale: str) -> tuple[str, ...]:
    """Every folder in which results of a scale, or of :data:`CHECKPOINT`, may lie."""
    return (scale,) if scale == CHECKPOINT else (scale, *(f"{scale}-{base}" for base in BASES))


Cost = Literal["seconds", "minutes", "hours", "gpu"]
COSTS: tuple[Cost, ...] = ("seconds", "minutes", "hours", "gpu")

TRAINED_COSTS: Mapping[Scale, Cost] = {"tiny": "minutes", "small": "hours", "medium": "gpu"}
"""Cost of a claim about pre-training, at every scale."""


def is_natural(scale: str) -> bool:
    """Whether the models of a scale read text that people wrote; those of the smallest read a synthetic language."""
    return scale != "tiny"


if TYPE_CHECKING:
    from sinklab.training.config import PretrainingConfig
    from sinklab_claims.contract.trained import Checkpoint, Reads, TrainedModel


BASELINE = "baseline"
"""Label of the variant in which nothing is changed."""


@dataclasses.dataclass(frozen=True)
class Times:
    """A value of the scale's own configuration times a factor; what makes "half the learning rate" one word at every scale."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Part:
    """One sentence of a claim: an effect and the region in which it is said to lie.

    Args:
        says: the sentence, such as "the sink leaves the first token".
        more_than, less_than: bounds of the region, themselves outside. The bound of a direction is the least effect that is
            worth calling one, not 0, so that "reproduced" is about more than a sign.
        proved: whether it follows from definitions alone, so that one exception is an error of the proof or of the
            implementation: it holds if every seed shows it, and is no evidence about trainings.
        of_some: whether what is claimed is that there are such models: over models one that shows it decides, and those that
            do not refute nothing. With several models the interval of each is at the level with which all hold together.
        beside: the same by a secondary number, such as a rate where a mean weight decides: judged and shown, never counted.

    Raises:
        ConfigurationError: no bound, or bounds with nothing between.
    """

    says: str
    effect: Effect
    more_than: float = -math.inf
    less_than: float = math.inf
    proved: bool = False
    of_some: bool = False
    beside: Part | None = None

    def __post_init__(self) -> None:
        if math.isinf(self.more_than) and math.isinf(self.less_than):
            raise ConfigurationError(f"the part {self.says!r} has no bound; give more_than or less_than")
        if not self.more_than < self.less_than:
            raise ConfigurationError(f"the part {self.says!r}: nothing lies between {self.more_than:g} and {self.less_than:g}")

    @property
    def region(self) -> str:
        """The region in words."""
        bounds = {"more than": self.more_than, "less than": self.less_than}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))

    def holds(self, value: float) -> bool:
        """Whether a value lies in the region."""
        return self.more_than < value < self.less_than

    def misses(self, low: float, high: float) -> bool:
        """Whether an interval outside of the region shows less of what is claimed, and not something else.

        That is so on the side of no effect (0; of a ratio 1), up to the mirrored bound: an effect as large the other way round
        is another one, and so is one where none is claimed.
        """
        ratio = self.effect.unit == "ratio"
        if high <= self.more_than:
            if ratio:
                return self.more_than <= 1 or high > 1 / self.more_than
            return self.more_than >= 0 and not (self.more_than and high <= -self.more_than)
        if ratio:
            return self.less_than <= 1 and low < 1 / self.less_than
        return self.less_than < 0 and low < -self.less_than


Changes = Mapping[str, object]
"""Dotted field to its value or to :class:`Times`; a dictionary (``model.operation``, ``model.position``) replaces the whole."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A setting under which a model is pre-trained at every seed.

    Args:
        label: what tables call it: ``baseline`` where nothing is changed, otherwise what is.
        changes: to the configuration of the scale; or a function of that configuration that returns them.
        after: label of the variant from whose trained weights this one starts, at the same seed (fine-tuning).
    """

    label: str
    changes: Changes | Callable[[PretrainingConfig], Changes] = dataclasses.field(default_factory=dict)
    after: str | None = None


ReadOut: TypeAlias = "Callable[[TrainedModel], Mapping[str, float]]"
"""Numbers of one trained model; registered in ``sinklab/read_outs`` or a function in the file of a claim."""

Measure: TypeAlias = Callable[[int, Scale], Numbers]
"""Numbers of one seed from something else than pre-training, by variant; it must be deterministic under the seed."""

OfCheckpoint: TypeAlias = "Callable[[Checkpoint], Numbers]"
"""Numbers of a checkpoint on the texts of one draw, by label; it must be deterministic under the seed of the draw.

It raises DoesNotApply or UnsupportedModelError, with the reason, where it is not about such a model or cannot be measured.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnCheckpoint:
    """How a claim is measured on any checkpoint, without training.

    Args:
        measure: numbers by label, in the place of the read-outs of the claim, whose numbers are those of :data:`BASELINE`.
        parts: what is said of them, if the claim says more than one model can answer.
        about: ``decoder``, models that predict the next token; ``text``, encoders too.
        reads: the longest texts that it takes.
        not_about: why it says nothing about a checkpoint of that kind, such as one with other positions; empty where it does.
        remark: how what is measured differs from what the claim says of trained models, in a sentence.
    """

    measure: OfCheckpoint | None = None
    parts: tuple[Part, ...] = ()
    about: Literal["decoder", "text"] = "decoder"
    reads: Reads = "samples"
    not_about: Callable[[Checkpoint], str] | None = None
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published statement that can be run.

    The numbers that ``parts`` speak of come from pre-trained models (``variants`` and ``read_outs``), from ``measure``, or
    from both, in which case labels must not clash. Every pre-trained variant has the numbers ``diverged`` (0 or 1),
    ``held_out_loss`` in nats and ``steps`` without any read-out.

    Args:
        statement: what is claimed, in one sentence.
        source: short name of the paper: ``gu2024``.
        reference: where it says so: ``Gu et al. 2024 (arXiv 2410.10781), table 4``.
        published: the published numbers, in a sentence.
        parts: what the claim says about the numbers; all must hold.
        presupposes: what must be so for the claim to be about anything, such as a baseline that has a sink.
        variants: what is pre-trained.
        read_outs: what is read from every trained model: names from ``sinklab/read_outs``, or functions.
        measure: numbers from elsewhere.
        costs: scale to cost class. At scales that are not named the claim cannot be run; by default those of pre-training.
        bases: on which bases it is run, where a scale has several: first the one that is as in the source, which gives the
            verdict, then others to compare with.
        evidence: scale to a remark about the result there that other numbers support; never a guess.
        checkpoint: how it is measured on a model as it is; ``None`` where it takes training.

    Raises:
        ConfigurationError: fields that cannot go together; the message says which.
    """

    statement: str
    source: str
    reference: str
    published: str
    parts: tuple[Part, ...]
    presupposes: tuple[Part, ...] = ()
    variants: tuple[Variant, ...] = ()
    read_outs: tuple[str | ReadOut, ...] = ()
    measure: Measure | None = None
    costs: Mapping[Scale, Cost] = dataclasses.field(default_factory=lambda: dict(TRAINED_COSTS))
    bases: tuple[Base, ...] = ("bos",)
    evidence: Mapping[Scale, str] = dataclasses.field(default_factory=dict)
    checkpoint: OnCheckpoint | None = None

    def __post_init__(self) -> None:
        labels, known = [variant.label for variant in self.variants], BASES
        after = [variant.after for variant in self.variants if variant.after not in (None, *labels)]
        bases = ", ".join(self.bases) or "none"
        bases_known = bool(self.bases) and len(set(self.bases)) == len(self.bases) and set(self.bases) <= set(known)
        problems = {
            "has no parts; a claim says something about a number": not self.parts,
            f"reference {self.reference!r} names no 'arXiv NNNN.NNNNN'": not re.search(r"arXiv \d{4}\.\d{5}", self.reference),
            "has no variants, no measure and no checkpoint, so nothing can be run": not self.variants
            and self.measure is None
            and self.checkpoint is None,
            f"two variants have one label: {', '.join(labels)}": len(set(labels)) < len(labels),
            f"a variant starts after {after}, which is no variant of it": bool(after),
            "has no costs, so no scale to run at": not self.costs and self.checkpoint is None,
            f"bases are {bases}; expected one or more of {', '.join(known)}, each once": not bases_known,
            "measures by itself, which no base decides, and names several bases": len(self.bases) > 1
            and self.measure is not None,
        }
        for problem, found in problems.items():
            if found:
                raise ConfigurationError(f"claim {self.statement!r}: {problem}")
