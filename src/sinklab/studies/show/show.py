"""show(): the heads, the tokens and the sinks of any model on one text or picture, in one line of a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinklab.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sinklab.corpora.samples import Samples
    from sinklab.models.loading import LoadedModel
    from sinklab.report.heads import HeadView

__all__ = ["show"]


def show(
    model: str | LoadedModel | PreTrainedModel,
    text: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    threshold: float = 0.3,
    seq_len: int = 4096,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> HeadView:
    """Show every head of a model on one text: coloured by its attention to the sinks, each with its map, and the tokens.

    The last expression of a cell draws itself; elsewhere ``show(…).save("heads.html")`` writes the page. One text says what
    heads do on this text; how often they do it is what :func:`sinklab.audit` measures.

    Args:
        model: ``embedded:softmax``, a directory, a hub id, or a loaded model.
        text: what the model reads, with the tokens that its tokenizer puts round it.
        tokenizer: of a transformers model that is handed over; other models bring theirs.
        threshold: mean weight, over the queries that see the key, from which a position is named a sink.
        seq_len: the most tokens that are read; a longer text is cut, and the page says so.
        device, dtype, revision, trust_remote_code: as of :func:`sinklab.load_model`.

    Raises:
        SinklabError: see the errors of loading and of sessions.
    """
    from sinklab.attention.maps import AttentionMaps
    from sinklab.models.lengths import length_warning, require_positions
    from sinklab.models.loading import LoadedModel, wrap_model
    from sinklab.studies.measure.probing import opened, run_probes

    if not 0.0 <= threshold < 1.0:
        raise ConfigurationError(f"`threshold` {threshold} must be in [0, 1): a mean weight is compared with it; usual is 0.3")
    if seq_len < 2:
        raise ConfigurationError(f"`seq_len` must be at least 2 tokens, got {seq_len}")
    if isinstance(model, str | LoadedModel):
        loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    else:
        loaded = wrap_model(model, tokenizer, name=getattr(model.config, "name_or_path", "") or type(model).__name__)
    samples, notes = _samples(loaded, text, seq_len)
    require_positions(loaded.model, samples.positions or 0)
    maps = AttentionMaps()
    session = run_probes(loaded.model, samples, [maps], stage="heads").session
    return session.show(
        loaded.tokenizer, threshold=threshold, model=loaded.name,
        notes=[*notes, *filter(None, [length_warning(loaded.model, samples.positions or 0)])],
    )  # fmt: skip


def _samples(loaded: LoadedModel, text: str, seq_len: int) -> tuple[Samples, list[str]]:
    """The text as the model reads it, and a sentence where it was cut."""
    import torch

    from sinklab.corpora.samples import Samples

    front, back = loaded.encoder.frame(loaded.encoder.adds_bos)
    ids = loaded.encoder.encode(text)
    if not ids:
        raise InputError(f"the tokenizer of {loaded.name} makes no token of {text[:40]!r}; give a longer text")
    kept = ids[: max(1, seq_len - len(front) - len(back))]
    notes = [f"Only the first {len(kept):,} of the {len(ids):,} tokens of the text were read."] if len(kept) < len(ids) else []
    return Samples.of_tokens(torch.tensor([[*front, *kept, *back]])), notes
