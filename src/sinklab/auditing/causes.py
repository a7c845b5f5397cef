"""find_causes(): what the sink of a model is for, head by head, from what happens when it is taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from sinklab.arguments import (
    Bos,
    CorpusSource,
    Device,
    Dtype,
    Out,
    Overwrite,
    Progress,
    Revision,
    Seed,
    Threshold,
    TrustRemoteCode,
)
from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.causes.readout import Readout
    from sinklab.causes.samples import Samples
    from sinklab.models.loading import LoadedModel

__all__ = ["find_causes"]


def find_causes(
    model: str | LoadedModel | PreTrainedModel | nn.Module,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    sink: int | Literal["auto", "null", "none"] = "auto",
    domains: Sequence[CorpusSource] = ("python_source",),
    texts: int | None = None,
    seq_len: int | None = None,
    budget: Literal["fast", "full"] = "fast",
    level: float = 0.05,
    minimal_effect: float = 0.01,
    threshold: Threshold = 0.3,
    samples: Samples | None = None,
    readout: Readout | None = None,
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: int = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> Result:
    """Label every head by what interventions on it do to the loss: semantic, dormant, switch, broadcast or undecided.

    Args:
        model: a name for :func:`sinklab.load_model`, or a model in memory; with ``samples`` any module.
        heads: pairs of layer and head, both from 0; all heads by default.
        sink: where the mass is parked: ``auto`` finds it, a position of the document, ``null`` for the null score (a sink
            logit, a key bias), ``none`` for a model without a sink, whose heads are judged by zeroing alone.
        domains: corpora, each a domain of its own: a registered name, the path of a text file, or a corpus.
        texts: of each domain; 16 in a fast run, 64 in a full one.
        seq_len: tokens of a text; 256, or what the model was trained on if that is less.
        budget: ``fast``, or ``full`` for more texts, more controls, replacement by means and by other texts, and all
            experiments.
        level: false discovery rate over all heads and hypotheses (Benjamini and Hochberg).
        minimal_effect: change of the loss, in its unit, below which a head is said to cost nothing.
        threshold: mean weight of a head on a key from which on the key counts as its sink.
        samples, readout: inputs of your own and what is read off the outputs, instead of ``domains``: for encoders, vision
            models and anything that does not read tokens.
        batch_size: samples a forward pass.
        out: directory for ``report.html``, ``summary.json``, ``table.parquet`` and ``run.json``; written whole or not at all.
            What a killed run had measured is kept beside it and taken up by the next run with the same settings.
        overwrite: replace an earlier result in ``out``.
        say: told in a sentence how long it will take.
        progress: told about every step.

    Raises:
        SinklabError: see the errors of loading and corpora. No sink, heads that are not there, an error rate that so few texts
            cannot reach, an intervention that the model's attention cannot express: the message says what to do.
    """
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from sinklab.auditing.causes_display import display
    from sinklab.auditing.causes_measure import Asked, examine, facts_of, texts_of_budget
    from sinklab.auditing.causes_samples import Texts
    from sinklab.auditing.probing import opened, uses_bos
    from sinklab.models.loading import LoadedModel
    from sinklab.report.html import write_report
    from sinklab.results.table import make_table

    asked = Asked(
        heads=None if heads is None else tuple(heads), sink=sink, budget=budget, level=level, minimal_effect=minimal_effect,
        threshold=threshold, seed=seed, batch_size=batch_size,
    )  # fmt: skip
    asked.check()
    if (samples is None) != (readout is None):
        raise ConfigurationError(
            "samples and readout go together: inputs of your own, and what is read off the outputs for them"
        )
    with Run("causes", out=out, overwrite=overwrite, settings={**asked.to_dict(), "bos": bos}, progress=progress) as run:
        loaded: LoadedModel | None = None
        if isinstance(model, (str, LoadedModel, PreTrainedModel)):
            loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        elif samples is None:
            raise ConfigurationError(
                f"{type(model).__name__} is no model of transformers, so it is not known what to feed it; give samples and "
                "readout"
            )
        else:
            model.eval()  # as a model of transformers is put: dropout would be taken for an effect
        with_bos: int | None = None
        if samples is not None and readout is not None:
            given = Texts(samples, readout, [{"domain": name} for name in samples.domain_names])
        else:
            assert loaded is not None
            with_bos = int(uses_bos(loaded.encoder, bos))
            given = texts_of_budget(loaded, domains, budget, texts=texts, seq_len=seq_len, seed=seed, bos=bool(with_bos))
        module = loaded.model if loaded is not None else model
        assert isinstance(module, nn.Module)
        facts = facts_of(module, loaded)
        found = examine(module, given, asked, identity=facts, store=run.store, say=say, progress=run.progress)
        return run.finish(
            summary={**facts, **found.summary},
            table=make_table(found.rows, run_id=run.id, seed=seed, bos=with_bos, **facts),
            display=display,
            page=write_report,
            loaded=loaded or next(module.parameters(), torch.zeros(0)),
            config={"texts": len(given.samples), "positions": given.samples.domains.shape[1]},
            model={**facts, "class": type(module).__name__},
            domains=given.record,
            measured=found.record,
        )
