"""find_causes(): what the sink of a model is for, head by head, from what happens when it is taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
    Bos,
    CorpusSource,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    OffloadFolder,
    Out,
    Overwrite,
    Progress,
    Revision,
    Seed,
    Threshold,
    TrustRemoteCode,
    command,
)
from sinklab.studies.causes.request import Request, parse_heads, parse_sink

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.models.loading import LoadedModel
    from sinklab.sinks import Sinks
    from sinklab.studies.causes.readout import Readout
    from sinklab.studies.causes.samples import Samples

__all__ = ["find_causes"]


@command("causes")
def find_causes(
    model: str | LoadedModel | PreTrainedModel | nn.Module,
    *,
    heads: str | Sequence[tuple[int, int] | Sequence[tuple[int, int]]] | None = "all",
    together: bool = False,
    sink: int | str = "auto",
    sinks: Sinks | None = None,
    domains: Annotated[Sequence[CorpusSource], "--corpus", "--domains"] = ("python_source",),
    texts: int | None = None,
    seq_len: int | None = None,
    budget: Literal["fast", "full"] = "fast",
    level: float = 0.05,
    minimal_effect: float | Literal["auto"] = "auto",
    threshold: Threshold = 0.3,
    experiments: bool = True,
    samples: Samples | None = None,
    readout: Readout | None = None,
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: int = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Label what every head does with its sink: semantic, constant, dormant, broadcast, unneeded, switch, or undecided.

    Edits one head at a time, or several at once, and measures the loss again. The duration is shown before it starts;
    embedded:softmax takes 80 seconds of one core with --no-experiments. With an output directory, an interrupted run continues
    where it was.

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
        say: called with a sentence: how long it will take. Without it the duration is not estimated.

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

    from sinklab.models.loading import LoadedModel, opened, require_as_it_is
    from sinklab.models.wrappers import unwrapped
    from sinklab.results.table import make_table
    from sinklab.sinks.value import require_sinks
    from sinklab.studies.audit.page import write_report
    from sinklab.studies.causes.display import display
    from sinklab.studies.causes.measurement import examine, facts_of, texts_of_budget
    from sinklab.studies.causes.texts import Texts
    from sinklab.studies.measure.probing import uses_bos

    request = Request(
        heads=parse_heads(heads), together=together, sink=parse_sink(sink), budget=budget, level=level,
        minimal_effect=minimal_effect, threshold=threshold, seed=seed, batch_size=batch_size, experiments=experiments,
    )  # fmt: skip
    request.check()
    if (samples is None) != (readout is None):
        raise ConfigurationError(
            "samples and readout go together: inputs of your own, and what is read off the outputs for them"
        )
    require_sinks(sinks)
    if sinks is not None and sink != "auto":
        raise ConfigurationError(f"`sink` {sink} and `sinks` both say where the sink is; give one of them")
    settings = {**request.to_dict(), "bos": bos} | ({} if sinks is None else {"sinks": sinks.to_dict()})
    with Run("causes", out=out, overwrite=overwrite, settings=settings, progress=progress) as run:
        loaded: LoadedModel | None = None
        loading: dict[str, Any] = {
            "device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code,
            "device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder,
        }  # fmt: skip
        inside = unwrapped(model) if samples is None else model
        if isinstance(inside, (str, LoadedModel, PreTrainedModel)):
            loaded = opened(model, **loading)
        elif samples is None:
            raise ConfigurationError(
                f"{type(inside).__name__} is no model of transformers, so it is not known what to feed it; give samples and "
                "readout"
            )
        else:
            require_as_it_is(next(inside.parameters(), torch.zeros(0)), **loading)
            inside.eval()  # as a model of transformers is put: dropout would be taken for an effect
        with_bos: int | None = None
        if samples is not None and readout is not None:
            domain_texts = Texts(samples, readout, [{"domain": name} for name in samples.domain_names])
        else:
            assert loaded is not None
            with_bos = int(uses_bos(loaded.encoder, bos))
            domain_texts = texts_of_budget(loaded, domains, budget, texts=texts, seq_len=seq_len, seed=seed, bos=bool(with_bos))
        module = loaded.model if loaded is not None else inside
        assert isinstance(module, nn.Module)
        facts = facts_of(module, loaded)
        examined = examine(
            module, domain_texts, request, identity=facts, sinks=sinks, store=run.store, say=say, progress=run.progress
        )
        return run.finish(
            summary={**facts, **examined.summary},
            table=make_table(examined.rows, run_id=run.id, seed=seed, bos=with_bos, **facts),
            display=display,
            page=write_report,
            loaded=loaded or next(module.parameters(), torch.zeros(0)),
            config={"texts": domain_texts.of_each, "positions": domain_texts.samples.domains.shape[1]},
            model={**facts, "class": type(module).__name__},
            domains=domain_texts.record,
            measured=examined.record,
        )
