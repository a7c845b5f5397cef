"""quantize(): what quantisation costs a model, which module, channel and token carry it, and what cures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run
from sinklab.studies import arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from sinklab.corpora.samples import Samples as InputSamples


@arguments.command
def quantize(
    model: arguments.ModelSource,
    *,
    schemes: Annotated[Sequence[str], arguments.SCHEMES] = ("w8a8", "w8a16", "w4a16"),
    corpus: arguments.CorpusOfModel = "auto",
    seq_len: arguments.SeqLen = arguments.SEQ_LEN,
    samples: arguments.Samples = 64,
    calibration: int = 16,
    inputs: InputSamples | Tensor | Mapping[str, Tensor] | None = None,
    minimal_effect: float = 0.01,
    threshold: arguments.Threshold = 0.3,
    products: Literal["integer", "simulated"] = "integer",
    seed: arguments.Seed = 0,
    bos: arguments.Bos = "auto",
    loading: arguments.Loading = arguments.Loading(),
    output: arguments.Output = arguments.Output(),
) -> Result:
    """Measure what quantisation costs in loss, which modules cause it and what cures it.

    Every scheme is measured against the unquantised model, on samples not used for calibration. If the first scheme has a gap,
    the linear maps inside the blocks are quantised one at a time, and cures are tried: a scale for each token, and sinks, spike
    tokens or spike channels kept whole. docs/quantisation.md has the definitions.

    embedded:softmax takes a minute and a half of one core.

    Args:
        schemes: Bits of weights and activations, 2 to 8, or 16 for no quantisation, or fp8, fp8b, mxfp4, nvfp4; the first one
            is examined.
        samples: Samples for the losses.
        calibration: Other samples, for the ranges of activations.
        inputs: samples of your own instead of ``corpus``, the first ``calibration`` of them for ranges: token ids (samples,
            seq_len), what a tokenizer returns, or Samples.
        minimal_effect: Nats up to which a gap counts as none.
        products: integer multiplies int8 codes and checks the products against the simulated ones; simulated multiplies what
            the codes stand for.
        out: Directory for summary.json, table.parquet, run.json and report.html; none by default. An interrupted run continues
            from what is there.

    Raises:
        ConfigurationError: a scheme that does not exist, a model that is quantised already, a device without products of int8.
        UnsupportedModelError: a model without linear maps or without a loss.
        InputError: a corpus without enough samples that have nothing in common.

    Examples:
        sinklab quantize embedded:softmax
        sinklab quantize ./my-checkpoint --schemes w8a8,w4a8 --out build/quantize
        sinklab quantize org/model --corpus notes.txt --samples 200 --seq-len 256 --json
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record
    from sinklab.models.drawing import AUTO, default_corpus, draw_samples
    from sinklab.models.loading import hash_weights
    from sinklab.models.positions import require_lengths
    from sinklab.report.page import write_blocks_page
    from sinklab.results.sections import to_json
    from sinklab.results.table import make_table
    from sinklab.studies.measure.probing import as_samples, require_length, require_one_place, uses_bos
    from sinklab.studies.quantize.found import TITLE, show
    from sinklab.studies.quantize.measurement import Request, examine, require_loss
    from sinklab.studies.quantize.texts import divided, require_counts, two_sets
    from sinklab.studies.quantize.twin import parse_schemes

    if products not in ("integer", "simulated"):
        raise ConfigurationError(f"`products` {products!r} must be integer or simulated")
    request = Request(
        schemes=parse_schemes(schemes), integer=products == "integer", minimal_effect=minimal_effect, threshold=threshold
    )
    settings = {
        "schemes": [scheme.name for scheme in request.schemes], "calibration": calibration,
        "minimal_effect": minimal_effect, "threshold": threshold, "products": products, "seed": seed, "bos": bos,
    }  # fmt: skip
    with Run("quantize", **vars(output), settings=settings) as run:
        if inputs is None:
            require_counts(calibration, samples)
        named_corpus = None if corpus == AUTO else resolve_corpus(corpus)
        if isinstance(model, str) and loading.dtype == "auto":  # of a model in memory its own
            loading = dataclasses.replace(loading, dtype="float32")
        loaded = loading.open(model)
        require_one_place(loaded.model, "quantize")
        require_loss(loaded.model, drawn=inputs is None)
        with_bos = uses_bos(loaded.encoder, bos)
        if inputs is not None:
            own = as_samples(inputs)
            require_lengths(loaded.model, own)
            ranges, measured = divided(own, calibration)
            label, about = "own inputs", None
        else:
            text = named_corpus or default_corpus(loaded)

            def draw(count: int) -> InputSamples:
                drawn = draw_samples(loaded, text, seq_len=seq_len, samples=count, seed=seed, bos=with_bos)
                require_length(loaded, drawn, seq_len)
                return drawn.scored or drawn  # of masked encoders, the texts with gaps

            ranges, measured = two_sets(draw, calibration, samples)
            label, about = text.label, corpus_record(text)
        identity = {"model": loaded.name, "samples": measured.sha256, "calibration": ranges.sha256}
        if run.out is not None:
            identity["weights"] = hash_weights(loaded.model)
        found, rows = examine(
            loaded, ranges, measured, request, corpus=label, bos=int(with_bos), progress=run.progress, store=run.store,
            identity=identity,
        )  # fmt: skip
        return run.finish(
            summary=to_json(found),
            table=make_table(
                rows, run_id=run.id, model=loaded.name, revision=loaded.revision, operation=loaded.operation,
                corpus=label, bos=int(with_bos), seed=seed,
            ),
            show=show,
            page=lambda folder: write_blocks_page(folder, *TITLE, show),
            loaded=loaded,
            config={"corpus": label, "samples": len(measured), "seq_len": measured.positions},
            model={"name": loaded.name, "class": type(loaded.model).__name__, "revision": loaded.revision},
            corpus=about,
            token_sha256=measured.sha256,
            calibration_sha256=ranges.sha256,
        )  # fmt: skip
