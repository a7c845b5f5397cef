"""find_causes(): what the sink of a model is for, head by head, from what happens when it is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import Bos, CorpusSource, Loading, Output, command
from sinklab.studies.causes.request import Request

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.models.loading import LoadedModel
    from sinklab.sinks import Sinks
    from sinklab.studies.causes.readout import Readout
    from sinklab.studies.causes.samples import Samples


@command("causes")
def find_causes(
    model: str | LoadedModel | PreTrainedModel | nn.Module,
    *,
    request: Request = Request(),
    domains: Annotated[Sequence[CorpusSource], "--corpus", "--domains"] = ("auto",),
    texts: int | None = None,
    seq_len: int | None = None,
    bos: Bos = "auto",
    sinks: Sinks | None = None,
    samples: Samples | None = None,
    readout: Readout | None = None,
    loading: Loading = Loading(),
    output: Output = Output(),
) -> Result:
    """Label what every head does with its sink: text-dependent, constant, dormant, bias, broadcast, unneeded, switch, …

    Edits one head at a time, or several at once, and measures the loss again. A model of many heads is screened first; then
    heads are measured, most informative first. With an output directory, an interrupted run continues where it was.
    docs/explain.md says what each label means, and the rule behind it.

    Args:
        model: embedded:softmax, embedded:sigmoid, a directory, a GGUF file, or a hub id.
        heads: Heads to examine, written layer.head from 0 with commas between, or all; 0.0+3.1 edits two at once, after each
            alone, and layers all of each layer. A list may have pairs of layer and head.
        sink: Where the sink is: auto finds it, a position of the document, null for the null score, or none (heads are then
            zeroed).
        sinks: what find_sinks found on other texts, in place of ``sink``; without a main one, heads are zeroed.
        domains: Names from 'sinklab list corpora' or text files, each a domain; auto: prose for a model that was made to talk,
            else python_source.
        texts: Texts of each domain; more decide more heads. By default 64, and 18 for a model of more than 50 million
            parameters; to show that an edit costs nothing takes 250 or more.
        seq_len: Tokens of a text, BOS included; by default 256, or the trained length if less, and 64 for such a model.
        budget: Time after which no further head is begun, such as 90s, 10m or 1.5h; by default all heads are measured.
        level: Expected share of false labels among those given (Benjamini and Hochberg, over all heads and hypotheses).
        minimal_effect: Change of the loss, in nats, below which it counts as nothing; auto: a twentieth of what a head, of
            more than 64 heads a layer, is worth on average, at most 0.01.
            samples, readout: inputs of your own and what is read off the outputs, instead of ``domains``: for encoders, vision
            models and anything that does not read tokens; ``model`` may then be any module.
        seed: Seed of texts and controls; the same seed gives the same numbers.
        batch_size: Texts in a forward pass.
        out: Directory for report.html, summary.json, table.parquet and run.json, which appear complete or not at all.

    Raises:
        SinklabError: see the errors of loading and corpora. No sink, heads that are not there, an error rate that so few texts
            cannot reach, an intervention that the model's attention cannot express: the message says what to do.

    Examples:
        sinklab causes embedded:softmax
        sinklab causes embedded:softmax --heads 2.0,3.1 --texts 64 --out build/causes
        sinklab causes ORG/MODEL --corpus python_source,notes.txt --budget 10m --out build/causes
        sinklab causes ORG/MODEL --sink null --json
    """
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.attention.anatomy import unwrapped
    from sinklab.models.loading import LoadedModel, require_as_it_is
    from sinklab.report.page import write_blocks_page
    from sinklab.results.sections import to_json
    from sinklab.results.table import make_table
    from sinklab.sinks.value import require_sinks
    from sinklab.studies.causes import SECTION
    from sinklab.studies.causes.domains import Texts, default_texts
    from sinklab.studies.causes.measurement import examine, facts_of
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
            require_as_it_is(next(module.parameters(), torch.zeros(0)), **vars(loading))
            module.eval()  # as a model of transformers is put: dropout would be taken for an effect
        assert isinstance(module, nn.Module)
        with_bos: int | None = None
        if samples is not None and readout is not None:
            inputs = Texts(samples, readout, [{"domain": name} for name in samples.domain_names])
        else:
            assert loaded is not None
            with_bos = int(uses_bos(loaded.encoder, bos))
            inputs = default_texts(loaded, domains, texts=texts, seq_len=seq_len, seed=request.seed, bos=bool(with_bos))
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
