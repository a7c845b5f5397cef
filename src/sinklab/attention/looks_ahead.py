"""Whether a model looks ahead: whether its attention sees later tokens of its own text, found out by running it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention import seam
from sinklab.attention.anatomy import off_seam_modules, on_seam_modules
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.modules import input_device
from sinklab.errors import SessionError

TOKENS = 4
"""Tokens that a model is asked with."""

_ROUNDING = 1e-4
"""Change of an output, over the largest one, that may be rounding: of experts that work on other groups of tokens."""

_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def looks_ahead(model: PreTrainedModel) -> bool:
    """Whether a query of the model sees a later token of its text, in any layer.

    Neither the class nor the config of a model says so: XLM, Flaubert and the LM heads of the BERT family are causal or not by
    a field that each calls otherwise, and GPT-NeoX is causal with ``is_decoder`` false. So a model in doubt is run on two texts
    of four tokens, once, that differ in the last one: what it gives for the others must not change. ``False`` also of a model
    that cannot be asked, because it reads no token ids alone.

    Raises:
        SessionError: a session on the model is open, and would count the question among its calls.
    """
    if model not in _known:
        _known[model] = _in_doubt(model) and _asked(model)
    return _known[model]


def _in_doubt(model: PreTrainedModel) -> bool:
    """Whether a module or a config does not say that it is causal; on the interface silence says it, as in transformers."""
    configs, seen = (model.config, model.config.get_text_config()), on_seam_modules(model).values()
    if not seen:
        return bool(off_seam_modules(model))
    return not all(getattr(one, "is_causal", True) for one in (*configs, *seen))


def _asked(model: PreTrainedModel) -> bool:
    if any(observer.owns(module) for observer in seam.active_observers() for module in model.modules()):
        raise SessionError(f"a session on this {type(model).__name__} is already active, and would count what it is asked")
    if getattr(model.config, "attention_type", None) == "block_sparse":
        # BigBird: on a short text it would change to full attention, and stay there for longer ones.
        return not model.config.is_decoder
    try:
        rows = model.get_input_embeddings().weight.shape[0]
        # From the middle of a vocabulary, where no special tokens are: XLM takes padding out by itself.
        tokens = ((torch.arange(TOKENS + 1) + rows // 2) % rows).to(input_device(model))
        with _at_rest(model), torch.no_grad():
            one, other = _earlier(model, tokens[:-1]), _earlier(model, torch.cat((tokens[:-2], tokens[-1:])))
        return bool((one - other).abs().max() > _ROUNDING * one.abs().max())
    except Exception:
        return False  # whatever keeps a model from reading a text is said where a text is to be read


@contextlib.contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and with the random numbers of the caller left as they are (hashes of Reformer are drawn)."""
    training = [module for module in model.modules() if module.training]
    device = input_device(model)
    try:
        for module in training:
            module.training = False
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for module in training:
            module.training = True


def _earlier(model: PreTrainedModel, text: Tensor) -> Tensor:
    """What the model gives for all tokens of a text but the last, by the same random numbers every time."""
    torch.manual_seed(0)
    outputs: Tensor = model(**lean_arguments(model, {"input_ids": text[None]}, logits=True))[0]
    return outputs[:, :-1].float()
