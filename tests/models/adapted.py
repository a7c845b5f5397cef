"""A stand-in for the models of PEFT, which the tests do without."""

import copy

import torch
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


class Mixed(nn.Module):
    """As PEFT holds a model with adapters of several kinds, or by a tuner alone (``LoraModel``): nothing of it is a prompt."""

    __module__ = "peft.mixed_model"

    def __init__(self, model):
        super().__init__()
        self.base_model, self.config = Tuner(model), model.config

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


class Tuner(nn.Module):
    """As PEFT's tuners hold a model."""

    __module__ = "peft.tuners.tuners_utils"

    def __init__(self, model):
        super().__init__()
        self.model = model

    def inject_adapter(self):
        raise NotImplementedError

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class LowRank(nn.Module):
    """As LoRA stands in the place of a linear map."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer, *, dora=False):
        super().__init__()
        self.base_layer = base_layer
        given, taken = base_layer.weight.shape
        self.lora_A = nn.ModuleDict({"default": nn.Linear(taken, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, given, bias=False)})
        self.lora_variant = {"default": object()} if dora else {}
        self.active_adapters, self.merged, self.disable_adapters = ["default"], False, False

    @property
    def weight(self):
        return self.base_layer.weight

    def get_delta_weight(self, adapter):
        return 2.0 * self.lora_B[adapter].weight @ self.lora_A[adapter].weight

    def merge(self):
        with torch.no_grad():
            self.base_layer.weight += self.get_delta_weight("default")
        self.merged = True

    def forward(self, hidden):
        if self.merged or self.disable_adapters:
            return self.base_layer(hidden)
        return self.base_layer(hidden) + 2.0 * self.lora_B["default"](self.lora_A["default"](hidden))


class TrainedCopy(nn.Module):
    """As PEFT's ``modules_to_save`` stands in the place of a module, with a copy of it that is trained."""

    __module__ = "peft.utils.other"

    def __init__(self, original_module):
        super().__init__()
        self.original_module = original_module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original_module)})
        self.active_adapters, self.disable_adapters = ["default"], False

    def forward(self, *args):
        return (self.original_module if self.disable_adapters else self.modules_to_save["default"])(*args)


def with_adapters(model, *names, kind=LowRank, **settings):
    """A copy of a model with adapters in the modules of some names, and another that has them in its weights."""
    model, merged = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(0)
    for name in names:
        parent, _, child = name.rpartition(".")
        layer = kind(model.get_submodule(name), **settings)
        setattr(model.get_submodule(parent), child, layer)
        own = copy.deepcopy(layer)
        if kind is LowRank:
            own.merge()
        setattr(merged.get_submodule(parent), child, own.base_layer if kind is LowRank else own.modules_to_save["default"])
    return model.eval(), merged.eval()
