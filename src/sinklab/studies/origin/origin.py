"""find_origin(): where a sink is born, once or again: block and sublayer, channels, the neurons or heads that write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
    SEQ_LEN,
    BatchSize,
    Bos,
    CorpusOfModel,
    Loading,
    ModelSource,
    Output,
    Samples,
    Seed,
    SeqLen,
    Threshold,
    command,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from sinklab.corpora.samples import Samples as Shown
    from sinklab.sinks import Sinks


@command("origin")
def find_origin(
    model: ModelSource,
    *,
    corpus: CorpusOfModel = "auto",
    seq_len: SeqLen = SEQ_LEN,
    samples: Samples = 16,
    threshold: Threshold = 0.3,
    controls: int = 5,
    inputs: Shown | Tensor | Mapping[str, Tensor] | None = None,
    sinks: Sinks | None = None,
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: BatchSize = None,
    loading: Loading = Loading(),
    output: Output = Output(),
) -> Result:
    """Find where each sink is born, what writes it, and what disappears without it: attention, spike, loss.

    Covers every sink, and every position whose norm stands out although no head has a sink there. Reports each block and
    sublayer in which its norm jumps, what writes it away again, the channels that carry it, the neurons or heads that write
    them and how much of it, and which heads look at it. The units are then silenced, set to the mean of other positions,
    compared with as many random units of the same layer. docs/explain.md#where-a-sink-is-born has the definitions and their
    limits.

    Args:
        controls: Number of random draws of as many units of the same layer.
        inputs: samples of your own instead of a corpus: token ids (samples, seq_len), what a tokenizer returns, or Samples of
            any kind that the model reads.
        sinks: what find_sinks found on samples like these; they are searched for otherwise.
        out: Directory for report.html, summary.json, table.parquet and run.json; none by default.

    Raises:
        SinklabError: see the errors of loading and corpora; fewer than two samples, or blocks that cannot be followed.

    Examples:
        sinklab origin embedded:softmax
        sinklab origin ORG/MODEL --corpus notes.txt --samples 64 --out build/origin
        sinklab origin ./my-checkpoint --controls 10 --json
    """
    from sinklab.attention.maps import token_text
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record
    from sinklab.models.drawing import AUTO, default_corpus, draw_samples, reading_part
    from sinklab.models.positions import require_lengths
    from sinklab.report.page import write_blocks_page
    from sinklab.results.sections import to_json
    from sinklab.results.table import make_table
    from sinklab.sinks import find_sinks
    from sinklab.sinks.value import require_sinks
    from sinklab.studies.measure.probing import as_samples, require_length, require_one_place, uses_bos
    from sinklab.studies.origin import SECTION
    from sinklab.studies.origin.measurement import ROWS_AT_ONCE, locate_origins, require_settings

    settings = {
        "seq_len": seq_len, "samples": samples, "threshold": threshold, "seed": seed, "bos": bos, "controls": controls,
    }  # fmt: skip
    require_sinks(sinks)
    inputs = None if inputs is None else as_samples(inputs)
    require_settings(samples if inputs is None else len(inputs), controls, batch_size)
    with Run("origin", **vars(output), settings=settings) as run:
        named_corpus = None if corpus == AUTO or inputs is not None else resolve_corpus(corpus)
        loaded = loading.open(model)
        require_one_place(loaded.model, "origin")
        label, with_bos, about = "inputs", None, None
        if inputs is None:
            loaded = reading_part(loaded)
            text = named_corpus or default_corpus(loaded)
            with_bos = uses_bos(loaded.encoder, bos)
            label, about = text.label, corpus_record(text)
            inputs = draw_samples(loaded, text, seq_len=seq_len, samples=samples, seed=seed, bos=with_bos)
            require_length(loaded, inputs, seq_len)
        else:
            require_lengths(loaded.model, inputs)
        constants = {"corpus": label, "bos": None if with_bos is None else int(with_bos)}
        if sinks is None:
            run.progress("looking for sinks", 0, 1)
            tokenizer = loaded.tokenizer
            sinks = find_sinks(
                loaded.model, inputs.on(loaded.device, loaded.dtype), threshold=threshold, names=inputs.names,
                together=inputs.together, corpus=label, bos=None if with_bos is None else int(with_bos),
                decode=None if tokenizer is None else lambda token: token_text(tokenizer, token),
            )  # fmt: skip
        found, rows = locate_origins(
            loaded.model, inputs, sinks, controls=controls, batch_size=batch_size or ROWS_AT_ONCE,
            seed=seed, progress=run.progress,
        )  # fmt: skip
        facts = {"model": loaded.name, "revision": loaded.revision, "operation": loaded.operation, **constants}
        return run.finish(
            summary={**facts, "sinks": sinks.to_dict(), **to_json(found)},
            table=make_table(rows, run_id=run.id, seed=seed, **facts),
            show=SECTION.blocks,
            page=lambda folder: write_blocks_page(folder, SECTION.title, SECTION.lead, SECTION.blocks),
            loaded=loaded,
            config={"corpus": label, "samples": len(inputs)},
            model={"name": loaded.name, "class": type(loaded.model).__name__, "revision": loaded.revision},
            corpus=about,
            token_sha256=inputs.sha256,
        )
