"""compare_policies(): loss, speed and memory of a model under every cache policy, over long texts, and which one to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from sinklab.results.run import Result, Run
from sinklab.studies.arguments import FLOATS, Bos, CorpusSource, Known, Loading, ModelSource, Output, Seed, command


@command("cache")
def compare_policies(
    model: ModelSource,
    *,
    corpus: Annotated[CorpusSource, "--corpus", "--text"] = "python_source",
    policies: Annotated[Sequence[str] | None, Known("policies")] = None,
    windows: Annotated[Sequence[int] | None, "--window", "--windows"] = None,
    sinks: Sequence[int] = (0, 1, 2, 4, 8),
    tokens: int | None = None,
    documents: int | None = None,
    quantized: Annotated[Sequence[str], Known(others=f"int8|int4|{FLOATS}")] = (),
    seed: Seed = 0,
    bos: Bos = "auto",
    loading: Loading = Loading(),
    output: Output = Output(),
) -> Result:
    """Compare cache policies on long texts: loss, speed and memory of each, and which one to use.

    Compares dense attention, a window, sinks and a window, the window recomputed for every token, and every other policy at
    the same size. The sinks are part of the window's budget, as in Table 2 of Xiao et al. 2023 (arXiv 2309.17453). From a
    corpus with documents, those held out of training are read, in order. What to use stands first.

    embedded:softmax takes about a minute of one core.

    Args:
        corpus: A UTF-8 text, or a name from 'sinklab list corpora'.
        policies: Names from 'sinklab list policies', optionally with fixed settings: sink_window:num_sinks=2. By default all;
            those that no recommendation rests on at the largest size only.
        windows: Tokens held before the query, sinks included; by default a quarter and half of the trained length, and 256
            where that is above 1024.
        sinks: Numbers of first tokens that sink_window keeps; 0 is the plain window.
        tokens: Tokens of a text, BOS included; by default 4 windows, and 4 times the trained length where that is at most 1024.
        documents: Largest number of texts to average over; by default 8, and down to 2 of a model of many parameters.
        quantized: Also measure a quantised cache (int8, int4, fp8, fp8b, mxfp4, nvfp4): what it costs, by the tokens that stay
            in full precision.
        seed: Seed of corpora that are sampled.
        out: Directory for report.html, summary.json, table.parquet, run.json; none by default.

    Raises:
        UnknownNameError: no such policy, corpus, model or engine.
        InputError: a text too short, or of no more tokens than the policies hold.
        ConfigurationError: sizes that do not fit together.
        UnsupportedModelError: a model that predicts no next token.

    Examples:
        sinklab cache embedded:softmax
        sinklab cache ./my-checkpoint --corpus book.txt --window 256,1024 --sinks 0,1,4
        sinklab cache org/model --policies window,sink_window,full --tokens 4096 --documents 4 --out build/cache
        sinklab cache embedded:softmax --policies sink_window,full --quantized int8,int4
        sinklab cache embedded:sigmoid --json > policies.json
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record
    from sinklab.corpora.base import hash_tokens
    from sinklab.report.page import write_blocks_page
    from sinklab.results.sections import to_json
    from sinklab.results.table import make_table
    from sinklab.streaming.limits import length_known
    from sinklab.streaming.quantized import read_kind
    from sinklab.studies.cache import SECTION
    from sinklab.studies.cache.comparison import compared, require_next_token
    from sinklab.studies.cache.found import quantized_rows
    from sinklab.studies.cache.plan import TEXTS, affordable, checked_budgets, checked_names, default_length, long_texts
    from sinklab.studies.cache.rounding import quantized_caches, require_quantized
    from sinklab.studies.measure.probing import uses_bos

    settings = {"seed": seed, "bos": bos}
    with Run("cache", **vars(output), settings=settings) as run, length_known():  # it is said
        names = checked_names(policies)
        for kind in quantized:
            read_kind(kind)
        text = resolve_corpus(corpus)
        loaded = loading.open(model)
        require_next_token(loaded)
        if quantized:
            require_quantized(loaded.model, quantized)
        budgets = checked_budgets(loaded, windows, sinks)
        length = tokens or default_length(loaded, budgets)
        with_bos = uses_bos(loaded.encoder, bos)
        number = max(2, min(TEXTS, affordable(loaded.model, length))) if documents is None else documents
        texts = long_texts(text, loaded.encoder, tokens=length, documents=number, seed=seed, bos=with_bos)
        found, rows = compared(
            loaded, texts, names=names, budgets=budgets, sinks=sinks, corpus=text.label, bos=with_bos, briefly=policies is None,
            progress=run.progress,
        )  # fmt: skip
        if quantized:
            integers = quantized_caches(loaded, texts, quantized, max(budgets), progress=run.progress)
            found = dataclasses.replace(found, quantized=integers)
            rows += quantized_rows(integers, len(texts))
        return run.finish(
            summary=to_json(found),
            table=make_table(
                rows, run_id=run.id, model=loaded.name, revision=loaded.revision, operation=loaded.operation,
                corpus=text.label, bos=int(with_bos), seed=seed,
            ),
            show=SECTION.blocks,
            page=lambda folder: write_blocks_page(folder, SECTION.title, SECTION.lead, SECTION.blocks),
            loaded=loaded,
            config={
                "corpus": text.label, "tokens": length, "documents": len(texts), "windows": budgets,
                "sinks": sorted(set(sinks)), "policies": policies and names, "quantized": list(quantized),
                "bos_tokens_per_sample": int(with_bos),
            },
            model={"name": loaded.name, "class": type(loaded.model).__name__, "revision": loaded.revision},
            corpus=corpus_record(text),
            token_sha256=hash_tokens(texts),
        )  # fmt: skip
