"""attend(): look at the attention of one model for the duration of a ``with`` block, and change it where one asks for it."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy, off_seam_modules
from sinklab.attention.call import LayerOutput, Site, Statistics
from sinklab.attention.columns import capture_log_sum_exp, column_statistics
from sinklab.attention.describe import describe_call
from sinklab.attention.editing import Editing
from sinklab.attention.forward import Forward
from sinklab.attention.intervention import Intervention
from sinklab.attention.operation import Operation
from sinklab.attention.positions import Positions
from sinklab.attention.probe import NEEDS, Probe
from sinklab.attention.verify import verify_call, verify_statistics
from sinklab.errors import ConfigurationError, SessionError, UnsupportedModelError

__all__ = ["Session", "attend"]

NO_KWARGS: dict[str, Any] = {}
"""Default of the pre-hooks: while another thread registers a hook, torch may call it in this one without keyword arguments. The
hook then belongs to the other thread's session and returns at once."""

STATISTICS_NEEDS = frozenset(NEEDS) - {"head_outputs", "hidden_states", "attention_outputs"}


@contextlib.contextmanager
def attend(
    model: nn.Module, probes: Sequence[Probe] = (), interventions: Sequence[Intervention] = (), *, verify: bool = True
) -> Iterator[Session]:
    """Show every attention call of ``model`` to ``probes``, and let ``interventions`` edit it, until the block ends.

    The model keeps its attention implementation, and without interventions its outputs are bit-identical to those without a
    session. Other models in the process, and this model in other threads, are neither recorded nor edited.

    Heads that no intervention names keep their bits. Probes are shown a call as it is after edits of keys, values, visibility
    and scores, with the head outputs that the model goes on with; edits of weights show in these alone.

    Args:
        model: any transformers model whose attention goes through the attention interface.
        probes: what to measure; none is allowed, and still proves that every attention module was seen.
        interventions: what to edit (``sinklab list interventions``), in order; see :mod:`sinklab.attention.intervention`.
        verify: prove on a few query rows of every call that the measured scores, masks and sink logits give the model's own
            head outputs; edits begin from what has been proved.

    Yields:
        The session; :meth:`Session.table` has the results, also after the block.

    Raises:
        UnsupportedModelError: no attention module of the model can be seen, one ran without being seen, or one received
            something that sinklab does not know.
        SessionError: a session on the same model is already active, the model did not run at all, gradients are being
            recomputed, or interventions are asked of a model that records gradients.
        ConfigurationError: an intervention of a layer, module or head that the model has not, or of a module that did not run.
        MeasurementError: ``verify`` found a call that cannot be accounted for.
    """
    session = Session(model, probes, interventions, verify=verify)
    with session._recording():
        yield session


class Session:
    """What is being seen of one model; made by :func:`attend`.

    Attributes:
        calls: qualified module name to the number of attention calls seen.
        sites: the attention modules seen, in the order of their first call.
        off_seam: attention-like modules of the model that compute attention in their own code and are not measured.
        checks: what has been verified, for the run record.
    """

    def __init__(
        self, model: nn.Module, probes: Sequence[Probe] = (), interventions: Sequence[Intervention] = (), *, verify: bool = True
    ) -> None:
        for probe in probes:
            unknown = sorted(set(probe.needs) - set(NEEDS))
            if unknown:
                raise ConfigurationError(f"probe {probe.name!r} needs {', '.join(unknown)}; known needs: {', '.join(NEEDS)}")
        self.model = model
        self.probes = list(probes)
        self.interventions = list(interventions)
        self.verify = verify
        self.calls: Counter[str] = Counter()
        self.sites: list[Site] = []
        self.off_seam = off_seam_modules(model)
        self.checks = {"calls_verified": 0, "rows_verified": 0, "largest_error": 0.0}
        self._anatomy = Anatomy(model)
        if not self._anatomy.attention:
            where = f" ({self.off_seam[0]} and {len(self.off_seam) - 1} more)" if len(self.off_seam) > 1 else ""
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention in its own code{where}, not through the attention interface of "
                "transformers, so nothing can be measured. If a newer version of transformers has the family on the interface, "
                "use that version"
            )
        self._editing = Editing(self.interventions, self._anatomy)
        self._needs = frozenset().union(*(probe.needs for probe in self.probes)) if self.probes else frozenset()
        self._statistics_needs = self._needs & STATISTICS_NEEDS
        self._sites: dict[str, Site] = {}
        self._depth = 0
        self._longest = 0
        self._forwards = 0
        self._now = Forward()
        self._early_masks: deque[seam.MaskRecord] = deque(maxlen=8)
        self._operations: set[Operation] = set()
        self._written: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()

    # --- results ---

    def table(self) -> Any:
        """Rows of all probes as a pandas table in the long schema (:data:`sinklab.results.table.COLUMNS`)."""
        from sinklab.results.table import append, make_table

        tables = []
        for probe in self.probes:
            probe.finish()
            tables.append(make_table(probe.rows(), probe=probe.name, version=probe.version))
        table = append(tables)
        table["model"] = getattr(getattr(self.model, "config", None), "name_or_path", "") or type(self.model).__name__
        table["operation"] = self.operation
        return table.astype({"model": "string", "operation": "string"})

    def __repr__(self) -> str:
        probes = ", ".join(probe.name for probe in self.probes) or "none"
        seen = f"{len(self.sites)} modules seen, {self.calls.total()} calls"
        edits = f", interventions: {', '.join(one.name for one in self.interventions)}" if self.interventions else ""
        return f"Session({type(self.model).__name__}, {seen}, probes: {probes}{edits})"

    @property
    def normalized(self) -> bool:
        """Whether every operation seen gives rows that, with their mass on nothing, sum to one."""
        return all(operation.normalized for operation in self._operations)

    @property
    def operation(self) -> str:
        """Names of the operations seen, joined by `` + `` where a model has several; empty before the first call."""
        return " + ".join(sorted({operation.name for operation in self._operations}))

    # --- life ---

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        if any(other.owns(module) for other in seam.active_observers() for module in self._anatomy.attention.values()):
            raise SessionError(
                f"a session on this {type(self.model).__name__} is already active; pass all probes to one attend()"
            )
        with contextlib.ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(seam.shadow(self))
            yield
        if not self.calls and not self._forwards:
            raise SessionError(
                f"{type(self.model).__name__} did not run while its session was open, so there is nothing to report; run this "
                "very model (not a copy, and in the same thread) inside the with block"
            )
        if not self.calls:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} ran {self._forwards} times and no attention call was seen; it uses a table or "
                "a path of its own. Try attn_implementation='sdpa' or 'eager'"
            )
        self._editing.check_used(self.sites, self._longest)
        for probe in self.probes:
            probe.finish()

    def _hooks(self) -> list[Any]:
        handles = []
        for module in self._anatomy.models:
            handles.append(module.register_forward_pre_hook(self._begin_forward, with_kwargs=True))
            handles.append(module.register_forward_hook(self._end_forward, always_call=True))
        if self._editing.of_inputs:
            handles.append(self.model.register_forward_pre_hook(self._edit_arguments, with_kwargs=True, prepend=True))
        if self._editing.of_hidden:
            # Before all hooks that show hidden states, to probes or to the caller: they see what the model goes on with.
            for index, (name, module) in enumerate(self._anatomy.layers.items()):
                if index == 0:
                    handles.append(
                        module.register_forward_pre_hook(self._edit_embeddings(name), with_kwargs=True, prepend=True)
                    )
                handles.append(module.register_forward_hook(self._edit_layer(name, index), prepend=True))
        for name, module in self._anatomy.attention.items():
            handles.append(module.register_forward_pre_hook(self._begin_module(name), with_kwargs=True))
            if "attention_outputs" in self._needs:
                handles.append(module.register_forward_hook(self._end_attention(name)))
        if self._needs & {"hidden_states", "head_outputs"}:
            for index, (name, module) in enumerate(self._anatomy.layers.items()):
                handles.append(module.register_forward_pre_hook(self._begin_layer(name, index), with_kwargs=True))
                handles.append(module.register_forward_hook(self._end_layer(name, index)))
        return handles

    # --- the observer that the seam calls ---

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is one of this model's attention modules."""
        return id(module) in self._anatomy.names

    @property
    def running(self) -> bool:
        """Whether the model is inside its forward."""
        return self._depth > 0

    def on_mask(self, record: seam.MaskRecord) -> None:
        """Keep what the host said about a mask until the forward ends."""
        (self._now.masks if self.running else self._early_masks).append(record)

    def on_attention(
        self,
        native: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model's own function, then reduce what it did to statistics and show them to the probes."""
        name = self._anatomy.names[id(module)]
        if torch._C._current_graph_task_id() != -1:
            raise SessionError(
                f"{name} was called while gradients are recomputed; switch gradient checkpointing off to measure"
            )
        unknown = seam.unknown_keywords(kwargs)
        if unknown:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) was given the keyword {', '.join(unknown)}, which sinklab does not know "
                "and which may change the attention; measuring would be guessing. Please report the model"
            )
        seam.require_readable(attention_mask, name, module)
        with capture_log_sum_exp() as captured:
            result = native(module, query, key, value, attention_mask, **kwargs)
        self.calls[name] += 1
        self._now.called.add(name)
        # Measuring is not part of the model: under autocast its own products would be rounded to half precision.
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            site = self._site(name, module, query.shape[1] * result[0].shape[-1])
            tensors = (query, key, value, attention_mask, result[0], captured.log_sum_exp)
            call = describe_call(native, module, site, tensors, kwargs, self._now)
            self._operations.add(call.operation)
            if "head_outputs" in self._needs:
                call.residual = self._now.residuals.get(self._anatomy.layer_of.get(name, ""))
                call.projection = self._anatomy.projection_weight(name, query.shape[1] * result[0].shape[-1])
            self._now.positions[call.q_len] = Positions(call.query_positions, call.query_documents)
            if self.verify and not (module.training and kwargs.get("dropout")):
                self._record_check(*verify_call(call))
            if self.interventions:
                self._longest = max(self._longest, int(call.key_positions.max()) + 1)
            edited = self._editing.edit(call, module, kwargs.get("dropout") or 0.0, isinstance(result[1], Tensor))
            if edited is not None:
                if result[0].requires_grad:
                    raise SessionError(
                        f"{name}: what an intervention recomputes has no gradient; run the model under torch.no_grad()"
                    )
                call = edited.call
                result = (edited.outputs.reshape(result[0].shape), edited.weights, *result[2:])
            if self.probes:
                statistics = column_statistics(call, self._statistics_needs) if self._statistics_needs else Statistics()
                if self.verify:
                    verify_statistics(call, statistics)
                for probe in self.probes:
                    if type(probe).update is not Probe.update:
                        probe.update(call, statistics)
        return result

    def _site(self, name: str, module: nn.Module, width: int | None = None) -> Site:
        # A module whose own forward runs several times in one forward of the model (ALBERT's shared layer) stands for several
        # layers; a module that calls the function several times inside one forward (images of a batch) is one.
        turn = self._now.turns[name] - 1
        label = name if turn <= 0 else f"{name}#{turn}"
        site = self._sites.get(label)
        if site is None:
            kind = "cross" if name in self._now.cross or self._anatomy.is_cross(name) else "self"
            same_kind = sum(other.kind == kind for other in self.sites)
            site = Site(module=label, layer=same_kind, kind=kind, output_projection=self._anatomy.projection_name(name, width))
            self._sites[label] = site
            self.sites.append(site)
        return site

    def _record_check(self, rows: int, error: float) -> None:
        self.checks["calls_verified"] += 1
        self.checks["rows_verified"] += rows
        self.checks["largest_error"] = max(self.checks["largest_error"], error)

    # --- hooks; they fire in every thread that runs the model, so each asks first whether this context records ---

    def _active(self) -> bool:
        return self in seam.active_observers()

    def _begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] = NO_KWARGS) -> None:
        if not self._active():
            return
        if self._depth == 0:
            self._now = Forward(early_masks=[record for record in self._early_masks if record.mask is not None])
            self._early_masks.clear()
            self._forwards += 1
            if _recomputes(self.model) and self.model.training and torch.is_grad_enabled():
                raise SessionError(
                    f"{type(self.model).__name__} has gradient checkpointing on: its attention would be counted twice; call "
                    "model.gradient_checkpointing_disable() or measure under torch.no_grad()"
                )
        self._depth += 1
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = kwargs.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self._now.token_masks.append(mask.bool())
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
            self._now.token_ids.append(ids.long())
        cache = kwargs.get("past_key_values")
        self._now.cached = 0 if cache is None else int(cache.get_seq_length())
        if self._depth == 1:
            self._now.cache = cache
            if self._now.cached and self._now.token_ids:
                known, given = self._written.get(cache), self._now.token_ids[-1]
                if known is None or known.shape[1] < self._now.cached:
                    known = given.new_full((len(given), self._now.cached), -1)
                self._now.past_ids = known[:, : self._now.cached]
        if self._now.position_ids is None and isinstance(kwargs.get("position_ids"), Tensor):
            self._now.position_ids = kwargs["position_ids"]

    def _end_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._active() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._remember(getattr(output, "past_key_values", None) if self._now.cache is None else self._now.cache)
            silent = [name for name in self._now.turns if name not in self._now.called]
            self._now.masks.clear()
            self._now.early_masks.clear()
            self._now.residuals.clear()
            if silent and output is not None:
                raise UnsupportedModelError(
                    f"{silent[0]} ({type(self._anatomy.attention[silent[0]]).__name__}) ran without calling the attention "
                    f"interface, and so did {len(silent) - 1} more; its attention cannot be measured. Try another "
                    "attn_implementation"
                )

    def _remember(self, cache: Any) -> None:
        """Keep the ids of the tokens that a cache holds after a forward, for the next one that is given it."""
        past, ids = self._now.past_ids, self._now.token_ids
        if ids and hasattr(cache, "get_seq_length"):
            written = ids[-1] if past is None else torch.cat((past, ids[-1]), dim=1) if len(past) == len(ids[-1]) else None
            if written is not None and int(cache.get_seq_length()) == written.shape[1]:
                self._written[cache] = written

    def _begin_module(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] = NO_KWARGS) -> None:
            if self._active():
                self._now.turns[name] += 1
                if any(isinstance(kwargs.get(key), Tensor) for key in ("key_value_states", "encoder_hidden_states")):
                    self._now.cross.add(name)

        return hook

    def _end_attention(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._active():
                self._show_layer("attention", self._site(name, module), output)

        return hook

    def _edit_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] = NO_KWARGS) -> Any:
        return ((), self._editing.edit_arguments(module, args, kwargs)) if self._active() and not self.running else None

    def _edit_embeddings(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] = NO_KWARGS) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not self._active() or not isinstance(hidden, Tensor):
                return None
            edited = self._edited_hidden(Site(module=f"{name}.input", layer=-1), hidden)
            if edited is None:
                return None
            return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": edited})

        return hook

    def _edit_layer(self, name: str, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self._active():
                return None
            edited = self._edited_hidden(Site(module=name, layer=index), output)
            if edited is None:
                return None
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook

    def _edited_hidden(self, site: Site, output: Any) -> Tensor | None:
        if not self._editing.edits_layer(site.layer):
            return None
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            raise SessionError(
                f"{site.module}: what an intervention edits has no gradient; run the model under torch.no_grad()"
            )
        return self._editing.edit_layer(self._layer_output("layer", site, output))

    def _begin_layer(self, name: str, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] = NO_KWARGS) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if self._active() and isinstance(hidden, Tensor):
                self._now.residuals[name] = hidden.detach()
                if index == 0:
                    self._now.embeddings = hidden.detach()

        return hook

    def _end_layer(self, name: str, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._active():
                return
            if self._now.embeddings is not None:
                # Positions are known only after the first attention call, so the embeddings wait for it.
                self._show_layer("layer", Site(module=f"{name}.input", layer=-1), self._now.embeddings)
                self._now.embeddings = None
            self._show_layer("layer", Site(module=name, layer=index), output)

        return hook

    def _layer_output(self, kind: str, site: Site, output: Any) -> LayerOutput:
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise UnsupportedModelError(
                f"{site.module} gives no hidden states of shape (batch, seq_len, hidden_size); leave the "
                "probe or intervention out that asks for them"
            )
        batch, length = hidden.shape[:2]
        known = self._now.positions.get(length)
        if known is None or known.positions.shape[0] != batch:
            known = self._now.counted(batch, length, hidden.device)
        return LayerOutput(site, kind, hidden.detach(), known.positions, known.documents)

    def _show_layer(self, kind: str, site: Site, output: Any) -> None:
        shown = self._layer_output(kind, site, output)
        need = "hidden_states" if kind == "layer" else "attention_outputs"
        with torch.no_grad():
            for probe in self.probes:
                if need in probe.needs:
                    probe.update_layer(shown)


def _recomputes(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
