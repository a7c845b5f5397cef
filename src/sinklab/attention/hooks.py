"""Hooks on one model: what a forward is given, what its layers give back, and where edits of these enter."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import LayerOutput, Site, run_name
from sinklab.attention.editing import Editing
from sinklab.attention.forward import Forward
from sinklab.attention.host_arguments import given_cache
from sinklab.attention.maps import Names, picture_names
from sinklab.attention.modules import core_module
from sinklab.errors import SessionError, UnsupportedModelError


class _Hook:
    """A hook that acts where the context that runs the model is the one that records: hooks fire in every thread.

    No copy of its model takes it along: there it would show the session a model that is not its own, for good.
    """

    def __init__(self, model: str, active: Callable[[], bool], function: Callable[..., object], *given: object) -> None:
        self.model, self.active, self.function, self.given = model, active, function, given

    @seam.not_compiled
    def __call__(self, *args: object) -> object:
        return self.function(*self.given, *args) if self.active() else None

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            f"a {self.model} cannot be copied or pickled while a session looks at it, since the copy would keep the session's "
            "hooks; do so before or after the with block. state_dict() and save_pretrained() work inside it"
        )


class ModelHooks:
    """The hooks of one session on its model.

    Args:
        active: whether the context that runs the model is the one that records. Hooks fire in every thread.
        show: takes hidden states and attention outputs.
        asked: whether there are probes or interventions, which go by positions.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, editing: Editing, needs: frozenset[str], active: Callable[[], bool],
        show: Callable[[LayerOutput], None], asked: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.anatomy, self.editing, self.needs, self.asked = model, anatomy, editing, needs, asked
        self.active, self.show = active, show
        self.now = Forward()  # what is known of the forward that runs, or ran last
        self.depth = self.forwards = 0  # forwards of models inside models that have begun, and how often the model has run
        self.sites: list[Site] = []  # the attention modules seen, in the order of their first call
        self._sites: dict[str, Site] = {}
        self._layers: dict[str, Site] = {}
        self.early_masks: deque[seam.MaskRecord] = deque(maxlen=8)
        self.named: list[Names] = []  # what the tokens of the last forward with pictures stand for

    @property
    def running(self) -> bool:
        """Whether the model is inside its forward."""
        return self.depth > 0

    def on_mask(self, record: seam.MaskRecord) -> None:
        """Keep what the host said about a mask until the forward ends."""
        (self.now.masks if self.running else self.early_masks).append(record)

    def forget(self) -> None:
        """The session is over: nothing of the last forward, its cache among it, is kept for as long as there are results."""
        self.now = Forward()
        self.early_masks.clear()

    def register(self) -> list[RemovableHandle]:
        """Put the hooks in place; each handle takes one away again."""
        handles, hook = [], functools.partial(_Hook, self.anatomy.model_class, self.active)
        for module in self.anatomy.models:
            handles.append(module.register_forward_pre_hook(hook(self._begin_forward), with_kwargs=True))
            # In front of what a cache does there: it would have planned a step that is never made.
            handles.append(module.register_forward_pre_hook(hook(self._require_places), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(hook(self._end_forward), always_call=True))
        watched = bool(self.needs & {"hidden_states", "head_outputs"})
        layers = list(enumerate(self.anatomy.layers.items()))
        if self.editing.of_hidden:
            # Before all hooks that show hidden states, to probes or to the caller: they see what the model goes on with.
            for index, (name, module) in layers:
                if index == 0:
                    edit = hook(self._edit_embeddings, name)
                    handles.append(module.register_forward_pre_hook(edit, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(hook(self._edit_layer, name, index), prepend=True))
        if self.anatomy.shares_layers and (watched or self.editing.of_hidden):
            for _, (name, module) in layers:
                handles.append(module.register_forward_pre_hook(hook(self._count_layer, name), prepend=True))
        for name, module in self.anatomy.attention.items():
            handles.append(module.register_forward_pre_hook(hook(self._begin_module, name), with_kwargs=True))
            if "attention_outputs" in self.needs:
                handles.append(module.register_forward_hook(hook(self._end_attention, name)))
            if "gated_heads" in self.needs and self.anatomy.gated(name):
                projection = self.anatomy.modules[str(self.anatomy.projection_name(name))]
                handles.append(projection.register_forward_pre_hook(hook(self._leave_gate, name, module)))
        if watched:
            for index, (name, module) in layers:
                handles.append(module.register_forward_pre_hook(hook(self._begin_layer, name, index), with_kwargs=True))
                handles.append(module.register_forward_hook(hook(self._end_layer, name, index)))
        return handles

    def site(self, name: str, module: nn.Module, width: int | None = None) -> Site:
        """The module as a site; made at its first call."""
        # A module whose own forward runs several times in one forward of the model (ALBERT's shared layer) stands for several
        # layers; a module that calls the function several times inside one forward (images of a batch) is one.
        run = self.now.starts[name] - 1
        label = run_name(name, run)
        site = self._sites.get(label)
        if site is None:
            kind = "cross" if name in self.now.cross or self.anatomy.is_cross(name) else "self"
            same_kind = sum(other.kind == kind for other in self.sites)
            site = Site(
                module=label,
                layer=same_kind,
                kind=kind,
                output_projection=self.anatomy.projection_name(name, width),
                gated=self.anatomy.gated(name),
                part=self.anatomy.part(name, kind == "cross"),
            )
            self._sites[label] = site
            self.sites.append(site)
        return site

    def _layer_site(self, name: str, index: int) -> Site:
        """A layer as a site, by its place among all layers."""
        run = self.now.layer_runs[name] - 1
        label, index = (run_name(name, run), len(self._layers)) if run >= 0 else (name, index)
        if label not in self._layers:
            self._layers[label] = Site(module=label, layer=index, part=self.anatomy.part(name))
        return self._layers[label]

    def _entrance(self, name: str) -> Site:
        """What enters the first layer, as a site."""
        return Site(module=f"{name}.input", layer=-1, part=self.anatomy.part(name))

    # --- hooks ---

    def _begin_forward(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        outermost = self.depth == 0
        if outermost:
            self._begin_record()
            if "pixel_values" in kwargs:
                self.named = picture_names(getattr(core_module(module), "config", None), kwargs)
        self.depth += 1
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = _given(module, args, kwargs, name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self.now.token_masks.append(mask.bool())
            elif outermost and (isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.ndim == 4)):
                self.now.masked_by_caller = True
        cache = given_cache(kwargs)
        self.now.inner_cache, self.now.cached = cache, None if cache is None else int(cache.get_seq_length())
        front = int(getattr(module, "tokens_in_front", 0))  # given with a text that begins; later its cache has them
        self.now.front = max(self.now.front, front)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
            self.now.token_ids.append(nn.functional.pad(ids.long(), (0 if self.now.cached else front, 0), value=-1))
            if module is self.anatomy.encoder:
                self.now.source_ids = ids.long()
        if self.now.position_ids is None and isinstance(kwargs.get("position_ids"), Tensor):
            self.now.position_ids = kwargs["position_ids"]

    def _begin_record(self) -> None:
        """A new record for the forward that begins, with the masks that were made before it."""
        self.now = Forward(early_masks=[record for record in self.early_masks if record.mask is not None])
        self.early_masks.clear()
        self.forwards += 1
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        if self.model.training and torch.is_grad_enabled() and recomputes:
            raise SessionError(
                f"{self.anatomy.model_class} has gradient checkpointing on: its attention would be counted twice; call "
                "model.gradient_checkpointing_disable() or measure under torch.no_grad()"
            )

    def _require_places(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a cache whose keys are not in the order of the text where somebody asks at which positions they are."""
        if self.depth:
            return
        cache = given_cache(kwargs)
        held = getattr(cache, "self_attention_cache", cache)
        if getattr(held, "keys_in_slots", False) and self.asked:
            raise UnsupportedModelError(
                f"a {type(held).__name__} gives attention its keys by slots, with copies of those that are pinned, so that "
                "what is asked of a position would be answered of another; measure or edit the model with its own cache "
                "(sinklab cache and cache.telemetry() say what a bounded one does), or open the session without probes"
            )

    def _end_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if self.depth == 0:
            return
        self.depth -= 1
        if self.depth == 0:
            silent = [name for name in self.now.starts if name not in self.now.called]
            self.now.masks.clear()
            self.now.early_masks.clear()
            self.now.residuals.clear()
            self.now.scored = None
            if silent and output is not None:
                raise UnsupportedModelError(
                    f"{silent[0]} ({type(self.anatomy.attention[silent[0]]).__name__}) ran without calling the attention "
                    f"interface, and so did {len(silent) - 1} more; its attention cannot be measured. Try another "
                    "attn_implementation"
                )

    def _begin_module(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.now.starts[name] += 1
        if any(isinstance(kwargs.get(key), Tensor) for key in ("key_value_states", "encoder_hidden_states")):
            self.now.cross.add(name)

    def _end_attention(self, name: str, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.show(self._layer_output("attention", self.site(name, module), output))

    def _leave_gate(self, name: str, attention: nn.Module, module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim == 3:
            self.show(self._layer_output("heads", self.site(name, attention), args[0]))

    def _edit_embeddings(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or self.now.layer_runs[name] > 1:
            return None
        edited = self._edited_hidden(self._entrance(name), hidden)
        if edited is None:
            return None
        return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": edited})

    def _edit_layer(self, name: str, index: int, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        edited = self._edited_hidden(self._layer_site(name, index), output)
        return (edited, *output[1:]) if edited is not None and isinstance(output, tuple) else edited

    def _edited_hidden(self, site: Site, output: object) -> Tensor | None:
        if not self.editing.edits_layer(site.layer):
            return None
        if self.anatomy.streams > 1:
            raise UnsupportedModelError(
                f"{self.anatomy.model_class} has {self.anatomy.streams} residual streams; what edits hidden states knows one"
            )
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            raise SessionError(
                f"{site.module}: what an intervention edits has no gradient; run the model under torch.no_grad()"
            )
        return self.editing.edit_layer(self._layer_output("layer", site, output))

    def _count_layer(self, name: str, module: nn.Module, args: tuple[object, ...]) -> None:
        self.now.layer_runs[name] += 1

    def _begin_layer(
        self, name: str, index: int, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor):
            if self.anatomy.streams == 1:  # of several streams a head's output is added to a mixture, which nobody sees
                self.now.residuals[name] = hidden.detach()
            if index == 0 and self.now.layer_runs[name] <= 1:
                self.now.embeddings = hidden.detach()

    def _end_layer(self, name: str, index: int, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.now.residuals.pop(name, None)  # of a deep model all of them together would be the largest thing in memory
        if self.now.embeddings is not None:
            # Positions are known only after the first attention call, so the embeddings wait for it.
            self.show(self._layer_output("layer", self._entrance(name), self.now.embeddings))
            self.now.embeddings = None
        self.show(self._layer_output("layer", self._layer_site(name, index), output))

    def _layer_output(self, kind: str, site: Site, output: object) -> LayerOutput:
        hidden = self.anatomy.hidden_states(output)
        if hidden is None:
            raise UnsupportedModelError(
                f"{site.module} gives no hidden states of shape (batch, seq_len, hidden_size); leave the "
                "probe or intervention out that asks for them, or open the session on a part of the model that gives them"
            )
        batch, length = hidden.shape[:2]
        known = self.now.positions.get(length)
        if known is None or known.positions.shape[0] != batch:
            known = self.now.counted(batch, length, hidden.device)
        return LayerOutput(site, kind, hidden.detach(), known.positions, known.documents)


def _given(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], name: str) -> object:
    """An argument of a module's call, by its name or by its place; ``None`` where it was not given."""
    if name in kwargs or len(args) < 2:  # the first is what the model reads, and never a mask
        return kwargs.get(name)
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)).get(name)
