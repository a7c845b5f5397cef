"""denoise(): where the sinks of a masked language model are while it fills in a text, and what they are worth there."""

from __future__ import annotations

from typing import Literal

from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
    BatchSize,
    CorpusOfModel,
    Device,
    Dtype,
    ModelSource,
    Out,
    Overwrite,
    Progress,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Threshold,
    TrustRemoteCode,
    command,
)

__all__ = ["denoise"]


@command
def denoise(
    model: ModelSource,
    *,
    corpus: CorpusOfModel = "auto",
    seq_len: SeqLen = 64,
    samples: Samples = 32,
    steps: int = 16,
    prompt: int = 0,
    order: Literal["confidence", "random", "left"] = "confidence",
    fill: Literal["text", "model"] = "text",
    mask_token: int | None = None,
    threshold: Threshold = 0.3,
    seed: Seed = 0,
    batch_size: BatchSize = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Follow the sinks of a masked language model from a masked text to a complete one.

    Every step fills in some of the masked tokens, as masked diffusion language models do. In every state, each head's sink keys
    are found: special tokens, masked tokens or text. From one state to the next sinks stay, move to another position or vanish.
    Hiding the strongest from every head, compared with hiding random keys of equal mass, measures what it is worth. For BERT,
    ALBERT, ModernBERT and others that fill gaps; docs/denoising.md has the definitions.

    Args:
        steps: Denoising steps, from all tokens masked to none.
        prompt: Tokens at the start of a text that are never masked, besides special ones.
        order: Which masked tokens are filled in first: the most confident, random ones, or from left to right.
        fill: text puts in the text's own tokens, which gives a loss; model puts in the model's most likely ones.
        mask_token: Id of the mask token, for a model whose tokenizer names none.
        out: Directory for denoising.png, summary.json, table.parquet and run.json; none by default.

    Raises:
        SinklabError: see the errors of loading and corpora; a model that fills no gaps, or settings that leave nothing to fill.

    Examples:
        sinklab denoise ORG/MASKED_MODEL --corpus notes.txt --out build/denoise
        sinklab denoise ./my-bert --steps 32 --order random --samples 64
        sinklab denoise ./my-bert --prompt 16 --fill model --json
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record
    from sinklab.models.drawing import AUTO, default_corpus, draw_samples
    from sinklab.results.table import make_table
    from sinklab.studies.denoise.display import display
    from sinklab.studies.denoise.figure import Figure
    from sinklab.studies.denoise.gaps import gaps_of, mask_token_of, require_settings
    from sinklab.studies.denoise.measurement import follow
    from sinklab.studies.denoise.words import notes_on, sentences
    from sinklab.studies.measure.probing import model_facts, opened

    settings = {
        "seq_len": seq_len, "samples": samples, "steps": steps, "prompt": prompt, "order": order, "fill": fill,
        "threshold": threshold, "seed": seed,
    }  # fmt: skip
    require_settings(samples=samples, steps=steps, prompt=prompt, threshold=threshold, batch_size=batch_size)
    with Run("denoise", out=out, overwrite=overwrite, settings=settings, progress=progress) as run:
        named_corpus = None if corpus == AUTO else resolve_corpus(corpus)
        loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        mask = mask_token_of(loaded, mask_token)
        text = named_corpus or default_corpus(loaded)
        drawn = draw_samples(loaded, text, seq_len=seq_len, samples=samples, seed=seed, bos=loaded.encoder.adds_bos)
        tokens = drawn.tokens
        assert tokens is not None  # the model reads text
        free = gaps_of(loaded, tokens, prompt=prompt, steps=steps)
        followed = follow(
            loaded.model, tokens, free, mask, steps=steps, order=order, fill=fill, threshold=threshold, seed=seed,
            batch_size=batch_size, progress=run.progress,
        )  # fmt: skip
        summary = followed.summary
        facts = {"model": loaded.name, "revision": loaded.revision, "operation": loaded.operation}
        constants = {"corpus": text.label, "bos": int(loaded.encoder.adds_bos)}
        return run.finish(
            summary={
                **facts, **constants, **settings, "mask_token": mask, **summary,
                "notes": notes_on(loaded.model, summary, threshold), "text": sentences(summary, threshold),
            },
            table=make_table(followed.rows, run_id=run.id, seed=seed, probe="denoise", **constants, **facts),
            display=display,
            files=Figure(followed, title=f"{loaded.name} on {text.label}", threshold=threshold),
            loaded=loaded,
            config={"corpus": text.label, "mask_token": mask},
            model=model_facts(loaded, followed.session),
            corpus=corpus_record(text),
            token_sha256=drawn.sha256,
        )  # fmt: skip
