"""fold_sinks(): the sinks of a trained model made explicit: a score and a value for nothing, in closed form."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from typing_extensions import Doc

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run
from sinklab.studies import arguments

if TYPE_CHECKING:
    from pathlib import Path

    from sinklab.models.loading import LoadedModel


LENGTH = 256
"""Tokens of a text; pictures and recordings have their own."""


@dataclasses.dataclass(frozen=True, eq=False)
class FoldResult(Result):
    """A result with the model that was made.

    Attributes:
        loaded: the folded model with its tokenizer.
    """

    loaded: LoadedModel | None = None


@arguments.command("fold")
def fold_sinks(
    model: arguments.ModelSource,
    *,
    corpus: arguments.CorpusOfModel = "auto",
    held_out: Annotated[arguments.CorpusOfModel, Doc("Texts to judge by; by default others of the same corpus.")] = "auto",
    seq_len: arguments.SeqLen = LENGTH,
    samples: arguments.Samples = 16,
    margin: float = 0.01,
    silence: bool = False,
    threshold: arguments.Threshold = 0.3,
    seed: arguments.Seed = 0,
    bos: arguments.Bos = "auto",
    loading: arguments.Loading = arguments.Loading(),
    output: arguments.Output = arguments.Output(),
) -> FoldResult:
    """Make the sinks of a trained model explicit: constants in the place of the tokens on which its heads rest.

    Every head that rests on a token at a fixed position is given a score for nothing, linear in its query before rotation, and
    a value; both are fitted without training, and the real key is hidden. The loss stays; the mass that was parked is null
    mass, and streaming needs no sink token. docs/fold.md has what it is good for, with numbers, and when it is exact.

    Takes some 80 seconds of two cores for a model of 135 million parameters.

    Args:
        samples: Texts for the constants, and as many others to judge them by.
        margin: Nats by which the loss may change; layers that cost more are left as they are.
        silence: Also set the neurons to zero that make the token stand out, where that costs no more than the margin.
        out: Directory for the folded model, which sinklab.load_model reads, with constants.safetensors, prefix.safetensors,
            report.html, summary.json, table.parquet and run.json; none by default.

    In Python:
        ``result.loaded`` is the folded model; a model of transformers that was given is changed in place.

    Raises:
        SinklabError: see the errors of loading and corpora; a model that is folded already, or whose attention is not softmax.

    Examples:
        sinklab fold embedded:softmax --out build/folded
        sinklab fold ORG/MODEL --corpus notes.txt --held-out letters.txt --silence --out build/folded
        sinklab fold ./my-checkpoint --seq-len 512 --samples 32 --json
    """
    if samples < 2:
        raise ConfigurationError(f"`samples` {samples}: an interval over texts needs two or more")
    if not margin > 0:
        raise ConfigurationError(f"`margin` {margin} must be above 0 nats")
    from safetensors.torch import save_file

    from sinklab.attention.maps import token_text
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record
    from sinklab.corpora.samples import Samples as Shown
    from sinklab.models.attach import save_model
    from sinklab.models.drawing import AUTO, default_corpus, draw_samples, reading_part
    from sinklab.report.page import write_blocks_page
    from sinklab.results.sections import to_json
    from sinklab.results.table import make_table
    from sinklab.sinks import find_sinks
    from sinklab.studies.fold.found import LEAD, TITLE, fold_rows, show
    from sinklab.studies.fold.measurement import constants_of, fold, require_foldable
    from sinklab.studies.measure.probing import require_length, require_one_place, uses_bos
    from sinklab.studies.origin.measurement import birth_neurons

    settings = {
        "held_out": None if held_out == AUTO else str(held_out), "seq_len": seq_len, "samples": samples, "margin": margin,
        "silence": silence, "threshold": threshold, "seed": seed, "bos": bos,
    }  # fmt: skip
    with Run("fold", **vars(output), settings=settings) as run:
        named = {
            name: None if given == AUTO else resolve_corpus(given) for name, given in (("own", corpus), ("other", held_out))
        }
        loaded = loading.open(model)
        require_one_place(loaded.model, "fold")
        loaded = reading_part(loaded)
        require_foldable(loaded.model, loaded.operation)
        text = named["own"] or default_corpus(loaded)
        other = named["other"]
        with_bos = uses_bos(loaded.encoder, bos)
        count = samples if other is not None else 2 * samples
        drawn = draw_samples(loaded, text, seq_len=seq_len, samples=count, seed=seed, bos=with_bos)
        require_length(loaded, drawn, seq_len, LENGTH)
        calibration, judged = drawn.take(slice(0, samples)), drawn.take(slice(samples, None))
        if other is not None:
            judged = draw_samples(loaded, other, seq_len=seq_len, samples=samples, seed=seed, bos=with_bos)
        run.progress("looking for sinks", 0, 1)
        tokenizer = loaded.tokenizer
        starts = calibration
        if calibration.kind == "text":  # where sinks are, and where they are born, shows in the first tokens
            starts = Shown({name: tensor[:, : arguments.SEQ_LEN] for name, tensor in calibration.arguments.items()})
        sinks = find_sinks(
            loaded.model, starts.on(loaded.device, loaded.dtype), threshold=threshold, names=calibration.names,
            together=calibration.together, corpus=text.label, bos=int(with_bos),
            decode=None if tokenizer is None else lambda token: token_text(tokenizer, token),
        )  # fmt: skip
        run.progress("looking for sinks", 1, 1)
        neurons = birth_neurons(loaded.model, starts.take(slice(0, 4)), sinks) if silence else []
        folded, found, prefix = fold(
            loaded.model, calibration, judged, sinks, margin=margin, neurons=neurons, progress=run.progress
        )
        made = dataclasses.replace(loaded, model=folded, operation="folded_sink" if found.positions else loaded.operation)
        facts = {"model": loaded.name, "revision": loaded.revision, "operation": made.operation}
        constants = {"corpus": (other or text).label, "bos": int(with_bos)}

        def files(folder: Path) -> None:
            if found.positions:
                save_model(folded, folder, tokenizer)
                save_file(constants_of(folded), folder / "constants.safetensors")
            if prefix:
                save_file(prefix, folder / "prefix.safetensors")

        result = run.finish(
            summary={**facts, **constants, "sinks": sinks.to_dict(), **to_json(found)},
            table=make_table(fold_rows(found, len(judged)), run_id=run.id, seed=seed, **facts, **constants),
            show=show,
            page=lambda folder: write_blocks_page(folder, TITLE, LEAD, show),
            files=files,
            loaded=made,
            config={"corpus": text.label},
            model={"name": loaded.name, "class": type(folded).__name__, "revision": loaded.revision},
            corpus=corpus_record(text),
            token_sha256=drawn.sha256,
        )
        return FoldResult(**{field.name: getattr(result, field.name) for field in dataclasses.fields(Result)}, loaded=made)
