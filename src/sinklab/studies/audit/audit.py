"""audit(): every probe on natural text, the sink rate under other conditions, the studies that were asked for, and a page."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

from typing_extensions import Doc

from sinklab.results.run import Result, Run
from sinklab.results.sections import sections
from sinklab.studies import arguments

Included: Any = dataclasses.make_dataclass(
    "Included",
    [(section.name, Annotated[bool, Doc(section.help)], section.default) for section in sections().values()],
    bases=(arguments.Options,),
    frozen=True,
    kw_only=True,
)
"""Name of a section (:mod:`sinklab.results.sections`) to whether an audit has it."""

BY_DEFAULT: arguments.Options = Included()
ON_BY_DEFAULT = [name for name, wanted in vars(BY_DEFAULT).items() if wanted]

QUICK_SAMPLES, QUICK_OTHERS = 20, 5


@arguments.command
def audit(
    model: arguments.ModelSource,
    *,
    corpus: arguments.CorpusOfModel = "auto",
    seq_len: arguments.SeqLen = arguments.SEQ_LEN,
    samples: arguments.Samples = 100,
    threshold: arguments.Threshold = 0.3,
    seed: arguments.Seed = 0,
    bos: arguments.Bos = "auto",
    batch_size: arguments.BatchSize = None,
    quick: Annotated[bool, Doc("At most 20 samples, and none of the studies besides, unless they are asked for.")] = False,
    include: arguments.Options = BY_DEFAULT,
    loading: arguments.Loading = arguments.Loading(),
    output: Annotated[arguments.Output, arguments.WrittenTo("sinklab-audit/{model}")] = arguments.Output(),
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Find the sinks of a model: at which positions and tokens, in which layers and heads, under which conditions.

    Writes report.html, summary.json, table.parquet, maps.safetensors and run.json into the output directory. The defaults are
    those of Gu et al. 2024 (arXiv 2410.10781): 100 samples of 64 tokens, threshold 0.3. All registered probes run on the
    corpus. On a quarter as many samples, the sink rate and the loss are also measured on random tokens, on one repeated token,
    and with or without the beginning-of-sequence token; for pictures and sound, on noise and on one grey or one tone.

    The sink is said as soon as it is known. Ctrl-C, from the end of the main condition on, reports what there is.

    In Python:
        Without ``out`` nothing is written; the page is in the result. ``say`` gets the sink, from the first samples.

    Raises:
        SinklabError: see the errors of loading, corpora and sessions.

    Examples:
        sinklab audit embedded:softmax
        sinklab audit org/model --quick
        sinklab audit ./my-checkpoint --corpus notes.txt --seq-len 256
        sinklab audit org/model --bos none --json > summary.json
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.models.drawing import AUTO, default_corpus, reading_part
    from sinklab.studies.audit.found import show
    from sinklab.studies.audit.measurement import measure_audit, write_maps
    from sinklab.studies.audit.page import frame_report, write_report

    included = dict(vars(include))
    fewer: dict[str, Any] = {}
    if quick:
        samples, included = min(samples, QUICK_SAMPLES), included | dict.fromkeys(ON_BY_DEFAULT, False)
        fewer = {"least_others": QUICK_OTHERS}
    settings: dict[str, Any] = {"seq_len": seq_len, "samples": samples, "threshold": threshold, "seed": seed, "bos": bos}
    with Run("audit", **vars(output), settings=settings) as run:
        named_corpus = None if corpus == AUTO else resolve_corpus(corpus)
        loaded = reading_part(loading.open(model))
        text = named_corpus or default_corpus(loaded)
        audit = measure_audit(
            loaded,
            text,
            **settings,
            **fewer,
            batch_size=batch_size,
            include=included,
            run_id=run.id,
            progress=run.progress,
            say=say,
        )
        return run.finish(
            summary=audit.summary,
            table=audit.table,
            show=show,
            files=functools.partial(write_maps, audit.maps),
            page=write_report,
            frame=frame_report,
            loaded=loaded,
            config={
                "corpus": text.label,
                "seq_len": audit.summary["seq_len"],
                "min_queries": max(1, audit.summary["seq_len"] // 2),
                "bos_tokens_per_sample": audit.summary["bos"],
            },
            **audit.record,
        )
