"""In front: learned tokens that a model puts before a text, and the first of the text, which may see each other both ways."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError

__all__ = ["columns_of", "tokens_in_front", "tokens_of_prefix"]


def tokens_in_front(model: PreTrainedModel) -> int:
    """Learned tokens that a model puts in front of every text, which its cache counts and its arguments do not."""
    return int(getattr(model, "tokens_in_front", 0))  # SinkLM


def tokens_of_prefix(model: PreTrainedModel) -> int:
    """How many of the first tokens of a text see each other both ways."""
    return int(getattr(model.config.get_text_config(), "prefix_length", 0) or 0)  # SinkLM


def columns_of(valid: Tensor, count: int) -> int:
    """Columns from the first one on in which every row of a boolean ``(rows, length)`` has ``count`` tokens.

    Raises:
        ConfigurationError: a row has fewer.
    """
    totals = valid.long().cumsum(dim=1)
    if (fewest := int(totals[:, -1].min())) < count:
        raise ConfigurationError(
            f"the first {count} tokens of a text see each other both ways, and the cache is given {fewest} to begin with; give "
            f"{count} or more at once"
        )
    return int((totals < count).sum(dim=1).max()) + 1
