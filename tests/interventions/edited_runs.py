"""What tests of interventions share: logits, head outputs and attention calls of a model that is being edited."""

from __future__ import annotations

import dataclasses

import torch

from sinklab import attend
from sinklab.attention.intervention import HeadIntervention, keys_at
from sinklab.attention.probe import Watcher

ROUNDING = 1e-12
"""Of float64 models of two layers: logits of size 1 to 10, some hundred products each."""


def logits(model, tokens, *interventions, probes=()):
    with torch.no_grad(), attend(model, probes, interventions):
        return model(input_ids=tokens).logits


def head_outputs(model, tokens, *interventions):
    """Inputs of the output projections of all layers, ``(layers, batch, seq_len, heads, head_dim)``."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        for name, module in model.named_modules()
        if name.endswith(("o_proj", "attn.c_proj"))
    ]
    try:
        logits(model, tokens, *interventions)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen).unflatten(-1, (4, 8))


def first_call(model, *interventions, **inputs):
    """The attention call of the first layer, edited."""
    spy = Spy()
    with torch.no_grad(), attend(model, [spy], interventions):
        model(**inputs)
    return spy.calls[0]


class Spy(Watcher):
    """Keeps every call that it is shown."""

    name, needs = "spy", frozenset()

    def __init__(self):
        self.calls = []

    def update(self, call, statistics):
        self.calls.append(call)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scaled(HeadIntervention):
    """Head outputs times a number."""

    name = "scaled"
    factor: float

    def edit_outputs(self, call, outputs):
        return outputs * self.factor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Added(HeadIntervention):
    """A number more on the scores of a key."""

    name = "added"
    place: int = 0
    amount: float = 2.0

    def edit_call(self, call):
        added = keys_at(call, self.place)[:, None, None].double() * self.amount
        bias = added.expand(-1, -1, call.q_len, -1) if call.bias is None else call.bias + added
        return dataclasses.replace(call, bias=bias)
