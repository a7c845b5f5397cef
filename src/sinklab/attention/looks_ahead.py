"""Whether a model looks ahead: whether its attention sees later tokens of its own text, found out by running it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.anatomy import off_seam_modules, on_seam_modules
from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.modules import input_device
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import SessionError

TOKENS = 4
"""Tokens that a model is asked with."""

_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def looks_ahead(model: PreTrainedModel) -> bool:
    """Whether a query of the model sees a later token of its text, in any layer.

    Neither the class nor the config of a model says so: XLM, Flaubert and the LM heads of the BERT family are causal or not by
    a field that each calls otherwise, GPT-NeoX is causal with ``is_decoder`` false, and a Llama with ``is_causal`` false is
    not, though its modules say that they are. So a model in doubt is run on four tokens, once: on the attention interface its
    masks are read, off it the weights that it returns.

    Args:
        model: with one stack of layers that reads token ids.

    Returns:
        ``False`` also of a model that cannot be asked: it reads no token ids alone, returns no weights, or computes something
        else when it is asked for them (Falcon on ``sdpa``). It is taken for what a model that generates text should be.

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
    if getattr(model.config, "attention_type", None) == "block_sparse":
        # BigBird: on a short text it would change to full attention, and stay there for longer ones.
        return not model.config.is_decoder
    try:
        rows = model.get_input_embeddings().weight.shape[0]
        # From the middle of a vocabulary, where no special tokens are: XLM takes padding out by itself.
        tokens = ((torch.arange(TOKENS) + rows // 2) % rows)[None].to(input_device(model))
        with _at_rest(model), torch.no_grad():
            return _masks_look_ahead(model, tokens) if on_seam_modules(model) else _weights_look_ahead(model, tokens)
    except SessionError:
        raise
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


class _Later(Watcher):
    """Notes whether a query sees a later key of its own text."""

    name: ClassVar[str] = "later"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.seen = False

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind == "self":
            visible = call.visible.block(0, call.q_len, 0, call.kv_len)
            later = call.key_positions[:, None, None] > call.query_positions[:, None, :, None]
            self.seen = self.seen or bool((visible & later).any())


def _arguments(model: PreTrainedModel, tokens: Tensor) -> dict[str, object]:
    return lean_arguments(model, {"input_ids": tokens}, logits=True)


def _masks_look_ahead(model: PreTrainedModel, tokens: Tensor) -> bool:
    probe = _Later()
    with attend(model, [probe], verify=False):
        model(**_arguments(model, tokens))
    return probe.seen


def _weights_look_ahead(model: PreTrainedModel, tokens: Tensor) -> bool:
    plain = model(**_arguments(model, tokens))[0]
    asked = model(**_arguments(model, tokens), output_attentions=True)
    if not torch.equal(plain, asked[0]):
        return False  # these are not the weights of the model as it is
    return any(bool((weights.triu(1) > 0).any()) for weights in asked.attentions)
