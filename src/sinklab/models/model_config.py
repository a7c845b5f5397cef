"""SinkLMConfig: the architecture of a SinkLM as a config of transformers, saved with every checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Self

from transformers import AutoConfig, PreTrainedConfig

from sinklab.attention.forward_arguments import CACHE
from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture

__all__ = ["SinkLMConfig"]

FOREIGN_FIELDS = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig)) | {
    # What transformers takes besides its declared fields, or writes into config.json.
    *("model_type", "name_or_path", "attn_implementation", "experts_implementation", "output_attentions", "torch_dtype"),
    *("num_labels", "use_cache", "auto_map", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
}

SAVED_AS = {"prefix": "prefix_length"}
"""Fields of the architecture that are called otherwise in a config. Pipelines of transformers take the ``prefix`` of a config
for a text, and put it in front of every prompt."""


class SinkLMConfig(PreTrainedConfig):
    """Config of a :class:`SinkLM`: the fields of :class:`~sinklab.models.architecture.Architecture`, flat.

    Its ``prefix`` is ``prefix_length`` here, and taken under either name. ``head_dim`` and ``num_key_value_heads`` are
    resolved. The operation and the position scheme are saved with the checkpoint, because transformers does not save the name
    of an attention implementation.

    Args:
        fields: those of the architecture, and those that every config of transformers takes.

    Raises:
        ConfigurationError: an unknown field (did you mean …?), a value that a field does not take, or fields that cannot go
            together.
        UnknownNameError: no operation or position scheme of that name.
    """

    model_type = "sinklm"
    keys_to_ignore_at_inference = [CACHE]

    def __init__(self, **fields: object) -> None:
        fields |= {name: fields.pop(saved) for name, saved in SAVED_AS.items() if saved in fields}
        known = set(Architecture.model_fields)
        unknown = sorted(name for name in fields if name not in known | FOREIGN_FIELDS and not name.startswith("_"))
        if unknown:
            near = difflib.get_close_matches(unknown[0], known | FOREIGN_FIELDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"SinkLMConfig has no field {unknown[0]!r}.{hint} Fields of the architecture: "
                f"{', '.join(Architecture.model_fields)}"
            )
        architecture = Architecture(**{name: fields.pop(name) for name in known if name in fields})
        for name, value in architecture.model_dump().items():
            setattr(self, SAVED_AS.get(name, name), value)
        self.head_dim = architecture.head_size
        self.num_key_value_heads = architecture.kv_heads
        super().__init__(**fields)

    @classmethod
    def from_architecture(cls, architecture: Architecture, **fields: object) -> Self:
        """The config of an architecture; ``fields`` are those of transformers, such as ``bos_token_id``."""
        return cls(**architecture.model_dump(), **fields)

    @property
    def architecture(self) -> Architecture:
        """The architecture, validated anew: attributes of a config can be set to anything."""
        return Architecture(**{name: getattr(self, SAVED_AS.get(name, name)) for name in Architecture.model_fields})


AutoConfig.register("sinklm", SinkLMConfig)
