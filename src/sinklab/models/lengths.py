"""How long a text a model can read: the end of its table of positions, and the length that it was trained on."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from sinklab.attention.names import core_module, named_modules
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError
from sinklab.models.losses import is_causal_lm
from sinklab.results.intervals import LEAST_SHARE
from sinklab.results.naming import counted
from sinklab.sinks.short_rows import even_share, from_tokens_on, short_rows_warning

__all__ = [
    "learned_positions",
    "length_warning",
    "length_warnings",
    "require_lengths",
    "require_positions",
    "short_target_warning",
    "short_text_warning",
    "trained_length",
]


LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""What configurations call the length of a text; the last that of a decoder whose encoder reads sound (Whisper)."""


def trained_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model was made for at once, as its configuration says; ``None`` if it does not."""
    config = model.config.get_text_config()
    lengths = (getattr(config, name, None) for name in LENGTHS)
    length = next(filter(None, lengths), None)
    return int(length) if isinstance(length, int) and length > 0 else None


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many tokens of a text a model has embeddings of positions for; ``None`` if it computes them.

    Those of learned tokens that the model puts in front of a text are left out, and tables of towers that read pictures or
    sound: they are as long as what those see.
    """
    scheme = getattr(model, "position", None)  # SinkLM
    if scheme is not None:
        table = getattr(scheme, "table", None)
        return None if table is None else len(table) - int(getattr(model, "tokens_in_front", 0))
    tables = _tables_of_text(model)
    limit = trained_length(model)
    if not tables or limit is None:
        return None
    # RoBERTa counts its positions from behind the index of padding.
    return min(limit, *(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables))


def _tables_of_text(model: PreTrainedModel) -> list[nn.Embedding]:
    """The embeddings of positions, but for those in a part whose input is no text."""
    reads: dict[str, str] = {}
    tables = []
    for name, module in named_modules(model):  # what holds a module comes before it
        above = reads.get(name.rpartition(".")[0], "input_ids")
        reads[name] = module.main_input_name if isinstance(module, PreTrainedModel) else above
        table = core_module(module)
        if isinstance(table, nn.Embedding) and ("position" in name or name.endswith("wpe")) and above == "input_ids":
            tables.append(table)
    return tables


def require_positions(model: PreTrainedModel, length: int) -> None:
    """Refuse a text that is longer than a table of positions, where torch reports an index and a GPU is lost to the process.

    Raises:
        ConfigurationError: it is.
    """
    table = learned_positions(model)
    if table is not None and length > table:
        raise ConfigurationError(
            f"{type(model).__name__} has embeddings for {table:,} positions and a text has {length:,} tokens; choose a shorter "
            "`seq_len`, or a policy that re-computes its window"
        )


def require_lengths(model: PreTrainedModel, samples: Samples) -> None:
    """:func:`require_positions` of samples that somebody gives: of texts and of both sides of pairs.

    Raises:
        ConfigurationError: one is longer than the table.
    """
    for name in ("input_ids", "decoder_input_ids"):
        if (tokens := samples.arguments.get(name)) is not None:
            require_positions(model, tokens.shape[1])


def length_warnings(model: PreTrainedModel, samples: Samples, threshold: float | None) -> list[str]:
    """The sentences of the three below that apply to samples; none of pictures and sound.

    Args:
        threshold: ``None`` where no head is said to sink.
    """
    if samples.tokens is None:
        return []
    length = samples.tokens.shape[1]
    said = [length_warning(model, length)]
    if threshold is not None:
        said += [short_text_warning(model, length, threshold), short_target_warning(samples, threshold)]
    return [sentence for sentence in said if sentence]


def length_warning(model: PreTrainedModel, length: int) -> str:
    """A sentence where a text is longer than those that the model was trained on; empty otherwise."""
    trained = trained_length(model)
    if trained is None or length <= trained:
        return ""
    return (
        f"The samples have {length:,} tokens and the model was made for {trained:,}: past that length losses and sinks are "
        "those of positions it has never seen."
    )


def short_text_warning(model: PreTrainedModel, length: int, threshold: float) -> str:
    """A sentence where a decoder's head that looks at all keys alike passes for one that sinks; empty otherwise.

    Args:
        length: tokens of a sample.
        threshold: mean weight above which a head is said to sink.
    """
    return short_rows_warning(length, threshold) if is_causal_lm(model) else ""


def short_target_warning(samples: Samples, threshold: float) -> str:
    """The same of the targets of pairs, which the decoder reads: they have lengths of their own, one each.

    Args:
        threshold: mean weight above which a head is said to sink. It does so in so many samples that as many short targets
            would be enough: more than :data:`~sinklab.results.intervals.LEAST_SHARE`.
    """
    targets = samples.arguments.get("decoder_input_ids")
    if targets is None:
        return ""
    mask = samples.arguments.get("decoder_attention_mask")
    lengths = [targets.shape[1]] * len(targets) if mask is None else mask.sum(1).tolist()
    short = [length for length in lengths if even_share(length) > threshold]
    if len(short) <= LEAST_SHARE * len(lengths):
        return ""
    tokens = f"{min(short):,} to {max(short):,} tokens" if min(short) < max(short) else counted(max(short), "token")
    verb = "has" if len(short) == 1 else "have"
    which = f"{len(short):,} of {len(lengths):,} targets {verb}" if len(lengths) > 1 else "The target has"
    return (
        f"{which} {tokens}, where a head of the decoder that looks at all keys alike gives the first position more than "
        f"{threshold:g} of its attention: that many heads do so says nothing of a sink{from_tokens_on(threshold)}."
    )
