"""A stand-in for the models of PEFT, which the tests do without."""

from __future__ import annotations

from torch import nn


class Adapted(nn.Module):
    """As PEFT holds a model: of adapters that are in its layers, or with a prompt that is not."""

    __module__ = "peft.peft_model"

    def __init__(self, model, *, prompt):
        super().__init__()
        self.base_model, self.config = model, model.config
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompt})

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)
