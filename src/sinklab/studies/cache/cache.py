"""compare_policies(): loss, speed and memory of a model under every cache policy, over long texts, and which one to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
    Bos,
    CorpusSource,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    ModelSource,
    OffloadFolder,
    Out,
    Overwrite,
    Progress,
    Revision,
    Seed,
    TrustRemoteCode,
    command,
)

__all__ = ["compare_policies"]


@command("cache")
def compare_policies(
    model: ModelSource,
    *,
    corpus: Annotated[CorpusSource, "--corpus", "--text"] = "python_source",
    policies: Sequence[str] | None = None,
    windows: Annotated[Sequence[int] | None, "--window", "--windows"] = None,
    sinks: Sequence[int] = (0, 1, 2, 4, 8),
    tokens: int | None = None,
    documents: int = 8,
    quantized: Sequence[str] = (),
    export: Sequence[str] = (),
    per_head: Sequence[str] = (),
    seed: Seed = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Compare cache policies on long texts: loss, speed and memory of each, and which one to use.

    Compares dense attention, a window, sinks and a window, the window recomputed for every token, and every other policy at
    the same size. The sinks are part of the window's budget, as in Table 2 of Xiao et al. 2023 (arXiv 2309.17453). From a
    corpus with documents, those held out of training are read, in order. The sentence below the table is the recommendation.

    embedded:softmax takes about a minute of one core.

    Args:
        corpus: A UTF-8 text, or a name from 'sinklab list corpora'.
        policies: Names from 'sinklab list policies', optionally with fixed settings: sink_window:num_sinks=2. By default all;
            those that no recommendation rests on at the largest size only.
        windows: Tokens held before the query, sinks included; by default a quarter and half of the trained length, at most
            1024.
        sinks: Numbers of first tokens that sink_window keeps; 0 is the plain window.
        tokens: Tokens of a text, BOS included; by default 4 times the trained length, at most 8192, at least 4 windows.
        documents: Largest number of texts to average over.
        quantized: Also measure a quantised cache, int8 or int4: what it costs, by the tokens that stay in full precision.
        export: Engines to write the recommended policy for: kvpress, llama.cpp, mlx-lm, transformers, vllm; see
            'sinklab export'.
        per_head: Also distribute the same bytes over key-value heads. Which heads hold less is chosen by 'measured' (the loss
            with one head at a time cut short), 'curves' (the same with six windows for each), 'attention' (what a short window
            hides), 'random' (a control), or a run folder of 'sinklab causes' (its labels). Each gives a head map, heads-….json,
            for the policy per_head.
        seed: Seed of corpora that are sampled.
        out: Directory for summary.json, table.parquet, run.json, loss.png and export; none by default.

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
        sinklab cache org/model --export llama.cpp,transformers --out build/cache
        sinklab cache embedded:softmax --policies window,sink_window --per-head measured,random --out build/heads
        sinklab cache embedded:softmax --policies sink_window,per_head:heads=build/heads/heads-measured-64.json
        sinklab cache embedded:sigmoid --json > policies.json
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record
    from sinklab.corpora.base import hash_tokens
    from sinklab.report.policies import write_policy_plot
    from sinklab.results.table import append
    from sinklab.streaming.limits import length_known
    from sinklab.streaming.quantized import read_bits
    from sinklab.studies.cache.cache_policies import compared, require_next_token
    from sinklab.studies.cache.display import display
    from sinklab.studies.cache.head_budgets import (
        head_budgets,
        per_head_table,
        require_head_maps,
        require_room,
        selection_texts,
        sinks_with_room,
        write_head_maps,
    )
    from sinklab.studies.cache.head_orders import checked_sources
    from sinklab.studies.cache.long_texts import long_texts
    from sinklab.studies.cache.policy_plan import checked_budgets, checked_names, default_length
    from sinklab.studies.cache.rounding import quantized_caches, quantized_table, require_quantized
    from sinklab.studies.export.chosen import require_advice
    from sinklab.studies.export.writing import FOLDER, advised_exports, checked_engines, write_exports
    from sinklab.studies.measure.probing import opened, uses_bos, writes

    with (
        Run(
            "cache", out=out, overwrite=overwrite, settings={"seed": seed, "bos": bos}, progress=progress, writes=writes(model)
        ) as run,
        length_known(),
    ):  # the recommendation says it
        names = checked_names(policies)
        for kind in quantized:
            read_bits(kind)
        engines = checked_engines(export)
        if engines:
            require_advice(names, sinks)
        sources = checked_sources(per_head)
        text = resolve_corpus(corpus)
        loaded = opened(
            model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code,
            device_map=device_map, max_memory=max_memory, offload_folder=offload_folder,
        )  # fmt: skip
        require_next_token(loaded)
        require_head_maps(loaded, names, sources)
        if quantized:
            require_quantized(loaded.model, quantized)
        budgets = checked_budgets(loaded, windows, sinks)
        length = tokens or default_length(loaded, budgets)
        with_bos = uses_bos(loaded.encoder, bos)
        rows = long_texts(text, loaded.encoder, tokens=length, documents=documents, seed=seed, bos=with_bos)
        require_room(loaded, rows, sources=sources, budgets=budgets, sinks=sinks)
        selection = selection_texts(text, rows, loaded, seed=seed, bos=with_bos) if sources else rows[:0]
        summary, table = compared(
            loaded, rows, names=names, budgets=budgets, sinks=sinks, corpus=text.label, bos=with_bos, run_id=run.id, seed=seed,
            briefly=policies is None, progress=run.progress,
        )  # fmt: skip
        if quantized:
            summary["quantized"] = quantized_caches(loaded, rows, quantized, max(budgets), progress=run.progress)
            integers = quantized_table(
                summary["quantized"], loaded, documents=len(rows), corpus=text.label, bos=with_bos, run_id=run.id, seed=seed
            )  # fmt: skip
            table = append([table, integers])
        if sources:
            advised = summary["recommended"]
            # Heads keep first tokens, whatever else is advised.
            advised_sinks = max(sinks) if advised is None or "pinned" in advised else advised["num_sinks"]
            num_sinks = sinks_with_room(loaded, rows, sources=sources, budgets=budgets, sinks=sinks, advised=advised_sinks)
            summary["per_head"] = head_budgets(
                loaded, rows, selection, sources=sources, budgets=budgets, num_sinks=num_sinks, seed=seed, progress=run.progress
            )
            shared = per_head_table(summary["per_head"], loaded, corpus=text.label, bos=with_bos, run_id=run.id, seed=seed)
            table = append([table, shared])
        if engines:
            summary["exports"] = advised_exports(summary, engines)

        def write(folder: Path) -> None:
            write_policy_plot(summary, folder / "loss.png")
            write_exports(summary.get("exports", []), folder / FOLDER)
            write_head_maps(summary.get("per_head", []), loaded, folder)

        return run.finish(
            summary=summary,
            table=table,
            display=display,
            files=write,
            loaded=loaded,
            config={
                "corpus": text.label, "tokens": length, "documents": len(rows), "windows": budgets, "sinks": sorted(set(sinks)),
                "policies": policies and names, "quantized": list(quantized), "per_head": sources, "export": list(export),
                "bos_tokens_per_sample": int(with_bos),
            },
            model={"name": loaded.name, "class": type(loaded.model).__name__, "revision": loaded.revision},
            corpus=corpus_record(text),
            token_sha256=hash_tokens(rows),
        )  # fmt: skip
