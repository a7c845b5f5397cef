"""show(): the heads, the tokens and the sinks of any model on one text or picture, in one line of a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from sinklab.models.loading import LoadedModel
    from sinklab.models.tokenizer import GivenTokenizer, Processor
    from sinklab.report.heads import HeadView
    from sinklab.studies.show.content import Content


def show(
    model: str | Path | LoadedModel | PreTrainedModel,
    content: Content,
    *,
    target: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    processor: Processor | None = None,
    threshold: float = 0.3,
    seq_len: int = 4096,
    **loading: Any,
) -> HeadView:
    """Show every head of a model on one text or picture: coloured by its attention to the sinks, each with its map.

    The last expression of a cell draws itself; elsewhere ``show(…).save("heads.html")`` writes the page. Tokens are coloured by
    the attention that they receive, and sinks are named. One text says what heads do on this text; how often they do it is
    what :func:`sinklab.audit` measures.

    Args:
        model: ``embedded:softmax``, a directory, a hub id, or a loaded model.
        content: what the model reads: a text, with the tokens that its tokenizer puts round it; for a model of pictures one of
            PIL, or the path of its file, which one of texts and pictures reads in front of a prompt; or what a processor
            or tokenizer makes, tensors by name.
        target: of an encoder–decoder, what it writes; without it, source and target are the halves of the text.
        tokenizer, processor: in place of the model's own; of one from ``from_pretrained`` it is found by its name.
        threshold: mean weight, over the queries that see the key, from which a position is named a sink; where rows do not sum
            to one, of its share of the row too.
        seq_len: the most tokens that are read; a longer text is cut, and the page says so.
        loading: as of :func:`sinklab.load_model`; of a model in memory what it is.

    Raises:
        SinklabError: see the errors of loading and of sessions; a model of sound, for which audits are.
    """
    from sinklab.attention.maps import AttentionMaps
    from sinklab.models.drawing import reading_part
    from sinklab.models.loading import opened
    from sinklab.models.positions import length_warnings, require_positions
    from sinklab.report.heads import Shown
    from sinklab.results.intervals import require_threshold
    from sinklab.studies.measure.probing import run_probes
    from sinklab.studies.show.content import longest, samples_of

    require_threshold(threshold, "`threshold`")
    if seq_len < 2:
        raise ConfigurationError(f"`seq_len` must be at least 2 tokens, got {seq_len}")
    loaded = reading_part(opened(model, tokenizer=tokenizer, processor=processor, **loading))
    samples, notes = samples_of(loaded, content, target, seq_len)
    length = samples.positions or 0
    if samples.tokens is not None:
        require_positions(loaded.model, length)
        notes += length_warnings(loaded.model, samples, threshold)
    session = run_probes(loaded.model, samples, [AttentionMaps(length=longest(samples))], stage="heads").session
    pictures = None if samples.pictures is None else samples.pictures.numpy()
    about = Shown(
        model=loaded.name, kind=samples.kind, notes=notes, names=samples.names, groups=samples.together, pictures=pictures,
        grid=samples.grid, sources=samples.sources,
    )  # fmt: skip
    return session.show(loaded.tokenizer, threshold=threshold, about=about)
