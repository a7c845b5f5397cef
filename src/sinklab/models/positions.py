"""What the positions of a model are: class tokens, registers, patches and frames, and how long a text it can read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.maps import patch_names
from sinklab.attention.modules import core_module, named_modules
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError
from sinklab.models.losses import is_causal_lm
from sinklab.results.intervals import LEAST_SHARE
from sinklab.sinks.short_rows import short_rows_warning


@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions of self-attention.

    Attributes:
        names: of each; ``None`` where modules differ in how many they have, or the configuration does not account for them.
        grid: rows and columns of the patches, which come last; ``None`` where there are none, or windows of them.
    """

    names: tuple[str, ...] | None = None
    grid: tuple[int, int] | None = None


class _Lengths(Watcher):
    """How many rows a call has, and how many positions, for the self-attention of one sample."""

    name, needs = "lengths", frozenset({"mass"})

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind == "self":
            self.seen.add((len(call.queries), call.q_len, call.kv_len))


@torch.no_grad()
def positions_of(model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Positions:
    """The positions that a model gives its input, from its configuration, checked against what one sample shows.

    Args:
        arguments: of the forward, one sample.
    """
    lengths = _Lengths()
    with attend(model, [lengths]):
        model(**arguments)
    sizes = {(length, keys) for _, length, keys in lengths.seen}
    if len(sizes) != 1:
        return Positions()
    ((length, keys),) = sizes
    if length != keys:
        return Positions()
    if any(
        rows > 1 for rows, _, _ in lengths.seen
    ):  # the windows of a picture stand in the batch: a position is one inside its window
        edge = round(length**0.5)
        square = edge * edge == length
        inside = [f"({row}, {column})" for row in range(edge) for column in range(edge)] if square else range(length)
        return Positions(tuple(f"place {place} of a window" for place in inside))
    grid = grid_of(model, arguments)
    if grid is None:
        return Positions(tuple(f"frame {frame}" for frame in range(length)) if "pixel_values" not in arguments else None)
    front = _front(model, length - grid[0] * grid[1])
    return Positions() if front is None else Positions((*front, *patch_names(*grid)), grid)


def grid_of(model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Rows and columns of patches; of spectrograms, frequencies and times."""
    config = model.config
    size = getattr(config, "patch_size", None)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return None
    if "pixel_values" in arguments:
        height, width = arguments["pixel_values"].shape[-2:]
        return height // size[0], width // size[1]
    steps = getattr(config, "frequency_stride", None), getattr(config, "time_stride", None)
    values = arguments.get("input_values")
    if values is None or values.ndim != 3 or steps[0] is None or steps[1] is None:
        return None
    times, frequencies = values.shape[1:]
    return (frequencies - size[0]) // steps[0] + 1, (times - size[1]) // steps[1] + 1


def _front(model: PreTrainedModel, number: int) -> tuple[str, ...] | None:
    """Names of the tokens before the patches; ``None`` where the configuration does not account for their number."""
    registers = int(getattr(model.config, "num_register_tokens", 0) or 0)
    own = {0: (), 1: ("[CLS]",), 2: ("[CLS]", "[DIST]")}.get(number - registers)
    return None if own is None else (*own, *(f"register {register}" for register in range(registers)))


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

    Learned tokens in front are left out, and tables of towers that read pictures or sound.
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
    """Refuse a text that is longer than a table of positions, where torch reports an index and a GPU is lost to the process."""
    table = learned_positions(model)
    if table is not None and length > table:
        raise ConfigurationError(
            f"{type(model).__name__} has embeddings for {table:,} positions and a text has {length:,} tokens; choose a shorter "
            "`seq_len`, or a policy that re-computes its window"
        )


def require_lengths(model: PreTrainedModel, samples: Samples) -> None:
    """:func:`require_positions` of samples that somebody gives: of texts and of both sides of pairs."""
    for name in ("input_ids", "decoder_input_ids"):
        if (tokens := samples.arguments.get(name)) is not None:
            require_positions(model, tokens.shape[1])


def length_warnings(model: PreTrainedModel, samples: Samples, threshold: float | None) -> list[str]:
    """The sentences of the two below that apply to samples; none of pictures and sound. ``threshold`` is ``None`` where no head
    is said to sink."""
    if samples.tokens is None:
        return []
    said = [length_warning(model, samples.tokens.shape[1])]
    if threshold is not None:
        said.append(short_text_warning(model, samples, threshold))
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


def short_text_warning(model: PreTrainedModel, samples: Samples, threshold: float) -> str:
    """A sentence where a decoder's head that looks at all keys alike passes for one that sinks; empty otherwise.

    Of pairs the decoder reads the targets, which have lengths of their own; as many must be short as must see a sink.
    """
    targets, mask = (samples.arguments.get(f"decoder_{name}") for name in ("input_ids", "attention_mask"))
    if targets is not None:
        lengths = sorted([targets.shape[1]] * len(targets) if mask is None else mask.sum(1).tolist())
        return short_rows_warning(lengths[int(LEAST_SHARE * len(lengths))], threshold)
    return short_rows_warning(samples.tokens.shape[1], threshold) if samples.tokens is not None and is_causal_lm(model) else ""
