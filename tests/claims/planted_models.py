"""Models of one layer that are planted with a sink of a known place or token, and what read-outs ask of a trained model."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sinklab.models.language_model import SinkLM, SinkLMConfig

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(2, 40)


def model_like(**fields) -> SinkLM:
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**{**SHAPE, "max_position_embeddings": 64, **fields})).eval()


def read_like(model: SinkLM, rows: torch.Tensor, **fields) -> SimpleNamespace:
    """What read-outs ask of a trained model."""
    return SimpleNamespace(
        loaded=SimpleNamespace(model=model, device=torch.device("cpu")),
        config=SimpleNamespace(model=model.config.architecture, data=SimpleNamespace(held_out_rows=len(rows))),
        rows=lambda samples=100, seq_len=None: rows[:samples, :seq_len],
        **{
            "front": 0,
            "bos": 0,
            "draw": 0,
            "text_ids": IDS,
            "context": 64,
            "every_row_has_bos": False,
            "large": False,
            **fields,
        },
    )


def drawn_rows(samples: int = 32) -> torch.Tensor:
    return IDS[torch.randint(len(IDS), (samples, 64), generator=torch.Generator().manual_seed(1))]


def by_position(strength: float, token: int | None = None, **fields) -> SinkLM:
    """Learned positions alone, or one token alone, make the score of a key; no other query or key has any.

    The embedding has one coordinate for position 0 (or the token) and one that every token has.
    """
    model = model_like(position={"name": "learned"}, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.embed_tokens.weight[:, 1] = 1.0
        if token is None:
            next(p for name, p in model.named_parameters() if "position" in name)[0, 0] = 1.0
        else:
            model.embed_tokens.weight[token, 0] = 1.0
        attention = model.layers[0].self_attn
        attention.q_proj.weight[[0, 8], 1] = 1.0
        attention.k_proj.weight[[0, 8], 0] = strength
    return model
