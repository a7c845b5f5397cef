"""Small SinkLMs in float64 and what the tests ask of them: logits, decoding in pieces, who sees whom."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from tests.conftest import TINY
from torch import Tensor

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.operations.softmax import Softmax

SIGMOID = {"name": "sigmoid", "bias": -2.5}
TOKENS = torch.randint(2, 40, (2, 12), generator=torch.Generator().manual_seed(0))
EXACT = {"rtol": 0, "atol": 1e-11}
"""float64: some thousand roundings of 1e-16 at logits of about one."""


def make(**fields) -> SinkLM:
    """Two layers with weights large enough for uneven attention, from a fixed seed."""
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**TINY | {"initializer_range": 0.3} | fields)).double().eval()


@torch.no_grad()
def logits_of(model: SinkLM, tokens: Tensor = TOKENS, **arguments) -> Tensor:
    return model(input_ids=tokens, **arguments).logits


@torch.no_grad()
def decoded(model: SinkLM, tokens: Tensor, pieces: list[int], cache=None, **arguments) -> Tensor:
    """Logits of the tokens given piece by piece to a cache."""
    found = []
    for piece in tokens.split(pieces, dim=1):
        step = model(input_ids=piece, past_key_values=cache, use_cache=True, **arguments)
        cache = step.past_key_values
        found.append(step.logits)
    return torch.cat(found, dim=1)


@torch.no_grad()
def visible(model: SinkLM, tokens: Tensor, **arguments) -> list[str]:
    """Rows of the first layer's attention: ``x`` where the weight is not 0."""
    weights = model(input_ids=tokens, output_attentions=True, **arguments).attentions[0]
    return ["".join("x" if weight else "." for weight in row) for row in weights[0, 0].tolist()]


@dataclass(frozen=True, kw_only=True)
class Fronted(Softmax):
    """Softmax behind two learned tokens; registered by the fixture ``fronted``."""

    name: ClassVar[str] = "fronted"

    @property
    def tokens_in_front(self) -> int:
        return 2
