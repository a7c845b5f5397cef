"""compare_policies(): loss, speed and memory of a model under every cache policy, over long texts, and which one to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sinklab.arguments import (
    Bos,
    CorpusSource,
    Device,
    Dtype,
    ModelSource,
    Out,
    Overwrite,
    Progress,
    Revision,
    Seed,
    TrustRemoteCode,
)
from sinklab.results.run import Result, Run

__all__ = ["compare_policies"]


def compare_policies(
    model: ModelSource,
    *,
    corpus: CorpusSource = "python_source",
    policies: Sequence[str] | None = None,
    windows: Sequence[int] | None = None,
    sinks: Sequence[int] = (0, 1, 2, 4, 8),
    tokens: int | None = None,
    documents: int = 8,
    seed: Seed = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Read long texts under every cache policy: what each loses, how fast it decodes, what it holds, and which one to use.

    Policies of bounded memory are compared at equal size: the sinks are part of the window's budget, as in Table 2 of Xiao et
    al. 2024 (arXiv 2309.17453). Of a corpus with documents those held out of training are read, in their order.

    Args:
        policies: registered names; by default all, those that no recommendation rests on at the largest size only.
        windows: tokens held before the query, sinks included; by default a quarter and half of what the model was trained on.
        sinks: numbers of first tokens that ``sink_window`` keeps; 0 is the plain window.
        tokens: tokens of a document, the beginning-of-sequence token included.
        documents: how many texts, at most.

    Raises:
        UnknownNameError: no such policy, corpus or model.
        InputError: a text too short, or of no more tokens than the policies hold.
        ConfigurationError: sizes that do not fit together.
        UnsupportedModelError: a model that predicts no next token.
    """
    from sinklab.auditing.cache_display import display
    from sinklab.auditing.cache_policies import compared
    from sinklab.auditing.long_texts import long_texts
    from sinklab.auditing.policy_plan import checked_budgets, checked_names, default_length
    from sinklab.auditing.probing import opened, uses_bos
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora.base import hash_tokens
    from sinklab.report.policies import write_policy_plot

    with Run("cache", out=out, overwrite=overwrite, settings={"seed": seed, "bos": bos}, progress=progress) as run:
        names = checked_names(policies)
        text = resolve_corpus(corpus)
        loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        budgets = checked_budgets(loaded, windows, sinks)
        length = tokens or default_length(loaded, budgets)
        with_bos = uses_bos(loaded.encoder, bos)
        rows = long_texts(text, loaded.encoder, tokens=length, documents=documents, seed=seed, bos=with_bos)
        summary, table = compared(
            loaded, rows, names=names, budgets=budgets, sinks=sinks, corpus=text.name, bos=with_bos, run_id=run.id, seed=seed,
            briefly=policies is None, progress=run.progress,
        )  # fmt: skip
        return run.finish(
            summary=summary,
            table=table,
            display=display,
            files=lambda folder: write_policy_plot(summary, folder / "loss.png"),
            loaded=loaded,
            config={
                "corpus": text.name, "tokens": length, "documents": len(rows), "windows": budgets, "sinks": sorted(set(sinks)),
                "policies": names, "bos_tokens_per_sample": int(with_bos),
            },
            model={"name": loaded.name, "class": type(loaded.model).__name__, "revision": loaded.revision},
            corpus={"name": text.name, **dataclasses.asdict(text.identity)},
            token_sha256=hash_tokens(rows),
        )  # fmt: skip
