"""find_causes(): what the sink of a model is for, head by head, from what happens when it is taken away."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import Bos, CorpusSource, Loading, Options, Output, Seed, Threshold, command

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.models.loading import LoadedModel
    from sinklab.sinks import Sinks
    from sinklab.studies.causes.readout import Readout
    from sinklab.studies.causes.samples import Samples

__all__ = ["ChosenHeads", "Pair", "Request", "find_causes"]

Pair: TypeAlias = tuple[int, int]
"""Layer and head, from 0."""


@dataclasses.dataclass(frozen=True)
class ChosenHeads:
    """Which heads are to be examined, and which of them together too.

    Attributes:
        heads: by themselves, with those of the groups; ``None`` for all.
        groups: the heads of each.
        layers: whether every layer is a group besides.
    """

    heads: tuple[Pair, ...] | None = None
    groups: tuple[tuple[Pair, ...], ...] = ()
    layers: bool = False

    @property
    def alone(self) -> tuple[Pair, ...] | None:
        """Heads that are examined by themselves, each once: a group says something beside its members alone."""
        if self.heads is None:
            return None
        return tuple(dict.fromkeys([*self.heads, *(pair for group in self.groups for pair in group)]))

    def words(self) -> str | list[str]:
        """As a command line writes them."""
        named = ["layers" if self.layers else "all"] if self.heads is None else [_written([pair]) for pair in self.heads]
        named += [_written(group) for group in self.groups]
        return named[0] if named in (["all"], ["layers"]) else named


def _written(pairs: Sequence[Pair]) -> str:
    return "+".join(f"{layer}.{head}" for layer, head in pairs)


def parse_heads(heads: str | Sequence[Pair | Sequence[Pair]]) -> ChosenHeads:
    """Heads and groups from ``0.1,3.0+3.1``, ``all`` or ``layers``; from Python also pairs, and lists of pairs for groups.

    Raises:
        ConfigurationError: anything else, no head at all, or one that a group has twice.
    """
    entries = [entry.strip() for entry in heads.split(",") if entry.strip()] if isinstance(heads, str) else list(heads)
    if not entries:
        raise ConfigurationError("`heads` names no head; leave it out for all of them")
    whole = [entry for entry in entries if isinstance(entry, str) and entry in ("all", "layers")]
    alone, groups = list[Pair](), list[tuple[Pair, ...]]()
    for entry in entries:
        if entry in whole:
            continue
        try:
            if isinstance(entry, str):
                pairs = [tuple(map(int, member.split("."))) for member in entry.split("+")]
                single = len(pairs) == 1
            else:
                members: list[Any] = list(entry)
                single = not isinstance(members[0], Iterable)
                pairs = [tuple(map(operator.index, member)) for member in ([members] if single else members)]
            own = tuple((layer, head) for layer, head in pairs)
        except (TypeError, ValueError, IndexError):
            raise ConfigurationError(
                f"`heads` {entry!r} must be all, or heads written layer.head with commas between, such as 0.1,3.0; + joins "
                "those that are edited at once, 0.1+3.0, and layers is each layer's; from Python pairs (layer, head) too, and "
                "lists of pairs for groups"
            ) from None
        if len(set(own)) < len(own):
            raise ConfigurationError(f"`heads` {_written(own)}: a head stands in the group more than once; name it once")
        alone += own if single else ()
        groups += () if single else (own,)
    return ChosenHeads(None if whole else tuple(alone), tuple(groups), "layers" in whole)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Options):
    """What is asked of find_causes(), as it documents it.

    Raises:
        ConfigurationError: what no model could be asked.
    """

    heads: str | Sequence[tuple[int, int] | Sequence[tuple[int, int]]] | None = "all"
    together: bool = False
    sink: int | str = "auto"
    budget: Literal["fast", "full"] = "fast"
    level: float = 0.05
    minimal_effect: float | Literal["auto"] = "auto"
    threshold: Threshold = 0.3
    experiments: bool = True
    seed: Seed = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "sink", int(self.sink) if str(self.sink).isdecimal() else self.sink)
        if not (isinstance(self.sink, int) and self.sink >= 0) and self.sink not in ("auto", "null", "none"):
            raise ConfigurationError(f"`sink` {self.sink} must be auto, a position from 0, null or none")
        if self.budget not in ("fast", "full"):
            raise ConfigurationError(f"`budget` {self.budget!r} must be fast or full")
        if not 0 < self.level < 1:
            raise ConfigurationError(f"`level` {self.level:g} must lie between 0 and 1: the share of labels that may be false")
        if self.minimal_effect != "auto" and not (isinstance(self.minimal_effect, (int, float)) and self.minimal_effect > 0):
            raise ConfigurationError(
                f"`minimal_effect` {self.minimal_effect} must be auto or above 0: no effect can be shown to be none"
            )
        if not 0 < self.threshold < 1:
            raise ConfigurationError(f"`threshold` {self.threshold:g} must lie between 0 and 1")
        if self.batch_size < 2:
            raise ConfigurationError(
                f"`batch_size` must be at least 2, got {self.batch_size}: a head is given its output of another text of the "
                "batch"
            )
        _ = self.chosen

    @functools.cached_property
    def chosen(self) -> ChosenHeads:
        """The heads that are asked for."""
        return parse_heads("all" if self.heads is None else self.heads)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**dataclasses.asdict(self), "heads": self.chosen.words()}


@command("causes")
def find_causes(
    model: str | LoadedModel | PreTrainedModel | nn.Module,
    *,
    request: Request = Request(),
    domains: Annotated[Sequence[CorpusSource], "--corpus", "--domains"] = ("python_source",),
    texts: int | None = None,
    seq_len: int | None = None,
    bos: Bos = "auto",
    sinks: Sinks | None = None,
    samples: Samples | None = None,
    readout: Readout | None = None,
    loading: Loading = Loading(),
    output: Output = Output(),
) -> Result:
    """Label what every head does with its sink: semantic, constant, dormant, broadcast, unneeded, switch, or undecided.

    Edits one head at a time, or several at once, and measures the loss again; embedded:softmax takes 80 seconds of one core
    with --no-experiments. With an output directory, an interrupted run continues where it was.

    - semantic: silencing the head costs loss, and so does replacing its output by that on another text.
    - constant: silencing it costs loss, replacing its output by that on another text does not.
    - dormant: sending all of its attention to the sink costs nothing, hiding the sink costs loss.
    - broadcast: sending all of its attention to the sink costs nothing, zeroing the sink's value costs loss.
    - unneeded: none of these costs loss.
    - switch: semantic on some domains, or at some positions, and dormant on the others.
    - undecided: anything else at the error rate asked for; the reason is shown.

    Beside the label stands whether the head needs its sink. docs/causes.md has the rules.

    Args:
        model: embedded:softmax, embedded:sigmoid, a directory, or a hub id.
        heads: Heads to examine, written layer.head from 0 with commas between, or all; 0.0+3.1 edits two at once, after each
            alone, and layers all of each layer.
        together: Also edit all heads of a label at once, except semantic: heads that can replace each other.
        sink: Where the sink is: auto finds it, a position of the document, null for the null score, or none (heads are then
            zeroed).
        sinks: what find_sinks found on other texts, in place of ``sink``; without a main one, heads are zeroed.
        domains: Names from 'sinklab list corpora' or text files; each is a domain.
        texts: Texts of each domain; more decide more heads. By default 64, or 384 in full; to show that an edit costs nothing
            takes 250 or more.
        seq_len: Tokens of a text, BOS included; by default 256, or the trained length if less.
        budget: full: more texts, so that dormant heads can be found, more controls, all experiments.
        level: Expected share of false labels among those given (Benjamini and Hochberg, over all heads and hypotheses).
        minimal_effect: Change of the loss, in nats, below which it counts as nothing; auto: a twentieth of what a head is worth
            on average (the worth of all attention over the number of heads), at most 0.01.
        experiments: Also examine the sink itself: its location, its value, massive activations.
        samples, readout: inputs of your own and what is read off the outputs, instead of ``domains``: for encoders, vision
            models and anything that does not read tokens.
        seed: Seed of texts and controls; the same seed gives the same numbers.
        batch_size: Texts in a forward pass.
        out: Directory for report.html, summary.json, table.parquet and run.json, which appear complete or not at all.

    In Python:
        ``model`` may be one in memory, and with ``samples`` any module; ``heads`` may be pairs of layer and head, and lists of
        pairs for groups.

    Raises:
        SinklabError: see the errors of loading and corpora. No sink, heads that are not there, an error rate that so few texts
            cannot reach, an intervention that the model's attention cannot express: the message says what to do.

    Examples:
        sinklab causes embedded:softmax
        sinklab causes embedded:softmax --heads 2.0,3.1 --texts 64 --out build/causes
        sinklab causes embedded:softmax --heads 0.0+0.1,layers --together
        sinklab causes ORG/MODEL --corpus python_source,notes.txt --budget full --out build/causes
        sinklab causes ORG/MODEL --sink null --json
    """
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.models.loading import LoadedModel, require_as_it_is
    from sinklab.models.wrappers import unwrapped
    from sinklab.report.page import write_blocks_page
    from sinklab.results.record import to_json
    from sinklab.results.table import make_table
    from sinklab.sinks.value import require_sinks
    from sinklab.studies.causes.measurement import examine, facts_of
    from sinklab.studies.causes.show import SECTION
    from sinklab.studies.causes.texts import Texts, texts_of_budget
    from sinklab.studies.measure.probing import uses_bos

    if (samples is None) != (readout is None):
        raise ConfigurationError(
            "samples and readout go together: inputs of your own, and what is read off the outputs for them"
        )
    require_sinks(sinks)
    if sinks is not None and request.sink != "auto":
        raise ConfigurationError(f"`sink` {request.sink} and `sinks` both say where the sink is; give one of them")
    settings = {**request.to_dict(), "bos": bos} | ({} if sinks is None else {"sinks": sinks.to_dict()})
    with Run("causes", out=output.out, overwrite=output.overwrite, settings=settings, progress=output.progress) as run:
        loaded: LoadedModel | None = None
        module = unwrapped(model) if samples is None else model
        if isinstance(module, (str, LoadedModel, PreTrainedModel)):
            loaded = loading.open(model)
            module = loaded.model
        elif samples is None:
            raise ConfigurationError(
                f"{type(module).__name__} is no model of transformers, so it is not known what to feed it; give samples and "
                "readout"
            )
        else:
            require_as_it_is(next(module.parameters(), torch.zeros(0)), **dataclasses.asdict(loading))
            module.eval()  # as a model of transformers is put: dropout would be taken for an effect
        assert isinstance(module, nn.Module)
        with_bos: int | None = None
        if samples is not None and readout is not None:
            inputs = Texts(samples, readout, [{"domain": name} for name in samples.domain_names])
        else:
            assert loaded is not None
            with_bos = int(uses_bos(loaded.encoder, bos))
            inputs = texts_of_budget(
                loaded, domains, request.budget, texts=texts, seq_len=seq_len, seed=request.seed, bos=bool(with_bos)
            )
        facts = facts_of(module, loaded)
        examined = examine(module, inputs, request, identity=facts, sinks=sinks, store=run.store, progress=run.progress)
        return run.finish(
            summary={**facts, **to_json(examined.found)},
            table=make_table(examined.rows, run_id=run.id, seed=request.seed, bos=with_bos, **facts),
            show=SECTION.blocks,
            page=lambda folder: write_blocks_page(folder, SECTION.title, SECTION.lead, SECTION.blocks),
            loaded=loaded or next(module.parameters(), torch.zeros(0)),
            config={"texts": inputs.of_each, "positions": inputs.samples.domains.shape[1]},
            model={**facts, "class": type(module).__name__},
            domains=inputs.record,
            measured=examined.record,
        )
