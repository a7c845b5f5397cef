"""attend(): look at the attention of one model for the duration of a ``with`` block, and change it where one asks for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import Anatomy, off_seam_modules, over_depth, require_module, without_towers
from sinklab.attention.call import AttentionCall, LayerOutput, Site, Statistics
from sinklab.attention.editing import Editing
from sinklab.attention.forward import describe_call
from sinklab.attention.hooks import ModelHooks
from sinklab.attention.intervention import Intervention, described
from sinklab.attention.maps import AttentionMaps, Decoder, called, shared_names, token_text
from sinklab.attention.modules import has_all_heads, out_of_torch, submodule
from sinklab.attention.operation import Operation
from sinklab.attention.positions import Positions
from sinklab.attention.probe import NEEDS, Probe, named_twice
from sinklab.attention.statistics.columns import FEW_PAIRS, LogSumExpCapture, column_statistics
from sinklab.attention.verify import verify_call, verify_statistics
from sinklab.attention.visibility import Everything
from sinklab.errors import ConfigurationError, MeasurementError, SessionError, UnsupportedModelError
from sinklab.results.blocks import counted, front_names
from sinklab.results.progress import warn

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.report.heads import HeadView, Shown

STATISTICS_NEEDS = frozenset(NEEDS) - {"depth", "head_outputs", "hidden_states", "attention_outputs", "gated_heads", "vectors"}


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
        model: any transformers model whose attention goes through the attention interface, or a module that runs one. What
            ``torch.compile``, data parallelism or Fabric has put round it is no part of the names of its modules.
        probes: what to measure; none is allowed, and still proves that every attention module was seen.
        interventions: what to edit (``sinklab list interventions``), in order; see :mod:`sinklab.attention.intervention`.
        verify: prove on a few query rows of every call that the measured scores, masks and sink logits give the model's own
            head outputs; edits begin from what has been proved.

    Yields:
        The session; :meth:`Session.table` has the results, also after the block.

    Raises:
        UnsupportedModelError: attention that cannot be seen, or that received something that sinklab does not know.
        SessionError: another session on the model, a model that did not run, gradients that are recomputed or wanted of edits.
        ConfigurationError: an intervention of a layer, module or head that the model has not, or of a module that did not run.
        MeasurementError: ``verify`` found a call that cannot be accounted for.
    """
    session = Session(model, probes, interventions, verify=verify)
    with session._recording():
        yield session


class Session:
    """What is being seen of one model; made by :func:`attend`.

    Attributes:
        tier: where the weights come from, in words, if not from the attention interface.
        calls: qualified module name to the number of attention calls seen.
        sites: the attention modules seen, in the order of their first call.
        off_seam: attention-like modules of the model that compute attention in their own code and are not measured.
        checks: what has been verified, for the run record.
    """

    tier: str | None = None

    def __init__(
        self, model: nn.Module, probes: Sequence[Probe] = (), interventions: Sequence[Intervention] = (), *, verify: bool = True
    ) -> None:
        model = require_module(model)
        _require_objects("probe", probes, Probe)
        _require_objects("intervention", interventions, Intervention)
        for probe in probes:
            unknown = sorted(set(probe.needs) - set(NEEDS))
            if unknown:
                raise ConfigurationError(f"probe {probe.name!r} needs {', '.join(unknown)}; known needs: {', '.join(NEEDS)}")
        self.model = model = out_of_torch(model)
        self.probes = list(probes)
        self.interventions = list(interventions)
        self.verify = verify
        self.calls: Counter[str] = Counter()
        self.off_seam = off_seam_modules(model)
        self.checks = {"calls_verified": 0, "rows_verified": 0, "largest_error": 0.0}
        self._anatomy = self._dissected(model)
        self._name = self._anatomy.model_class
        if not self._anatomy.attention and not self.off_seam:
            raise UnsupportedModelError(
                f"{self._name} has no attention that could be measured: no module calls the attention "
                "interface of transformers, and none looks like attention in its own code. Models of state spaces and "
                "recurrences (Mamba, RWKV) have none"
            )
        if not self._anatomy.attention:
            where = f" ({self.off_seam[0]} and {len(self.off_seam) - 1} more)" if len(self.off_seam) > 1 else ""
            raise UnsupportedModelError(
                f"{self._name} computes attention in its own code{where}, not through the attention interface "
                "of transformers, so no call can be seen or edited. If a newer version of transformers has the family on the "
                "interface, use that version; `measure`, `audit` and attend_returned() work from the weights that it returns"
            )
        if not has_all_heads(model):
            raise UnsupportedModelError(
                f"{self._name} is tensor-parallel: other processes have some of its heads, of which nothing "
                "would be seen. Load it in one process, with `device_map` if it is large"
            )
        self._editing = Editing(self.interventions, self._anatomy)
        self._needs = frozenset().union(*(probe.needs for probe in self.probes)) if self.probes else frozenset()
        proof = {"log_sum_exp"} if verify and "columns" in self._needs else set()
        self._statistics_needs = self._needs & STATISTICS_NEEDS | proof
        depth = enumerate(over_depth(model) if "depth" in self._needs else ())
        self._depth = {id(submodule(model, name)): Site(name, layer, "depth", part="depth") for layer, name in depth}
        self._longest = 0
        self._operations: set[Operation] = set()
        self._noted: set[str] = set()
        self._hooks = ModelHooks(
            model, self._anatomy, self._editing, self._needs, self._active, self._show_layer,
            asked=bool(self.probes or self.interventions),
        )  # fmt: skip
        self.sites = self._hooks.sites

    def _dissected(self, model: nn.Module) -> Anatomy:
        """The modules that the session looks at."""
        return Anatomy(model, without_towers(model))

    # --- results ---

    def table(self, **constants: object) -> pd.DataFrame:
        """Rows of all probes as a pandas table in the long schema (:data:`sinklab.results.table.COLUMNS`).

        ``constants`` are columns that are the same for all rows, such as ``run_id``, also in place of what the session says of
        model, operation and interventions. Two probes of one name are a :class:`SessionError`: rows have no more.
        """
        known = {
            "model": self._model_name,
            "operation": self.operation,
            "intervention": described(self.interventions),
            "tier": self.tier,
        }
        table = table_of(self.probes, **(known | constants))
        parts = {site.module: site.part for site in self.sites}
        if any(parts.values()):
            named = table["module"].map(lambda name: parts.get(name) or self._anatomy.part(name), na_action="ignore")
            table["part"] = named.fillna(table["part"]).astype("string")
        return table

    def show(self, tokenizer: Decoder | None = None, *, threshold: float = 0.3, about: Shown | None = None) -> HeadView:
        """Draw the heads: a grid, coloured by what the probes measured of them, which shows itself in a notebook.

        With a probe :class:`~sinklab.attention.maps.AttentionMaps` heads are coloured by the attention that they give to the
        sinks, and each opens its map; numbers per head of other probes are further colours.

        Args:
            tokenizer: turns the ids that the model was given back into text; ids are shown without.
            threshold: mean weight from which a position is named a sink.
            about: what the model was shown, where that is more than token ids.
        """
        import pyarrow as pa

        from sinklab.report import heads
        from sinklab.report.maps import Maps
        from sinklab.report.numbers import Numbers

        table, about = self.table(intervention=None), about or heads.Shown(model=self._model_name)
        if self.tier:
            about = dataclasses.replace(about, notes=[*about.notes, f"{self.tier[0].upper()}{self.tier[1:]}."])
        drawn = next((probe for probe in self.probes if isinstance(probe, AttentionMaps) and probe.modules), None)
        maps = received = None
        if drawn is not None:
            arrays = drawn.arrays()
            front = front_names(drawn.front)
            # Padding comes last.
            sides = {
                part: [[*front, *(token_text(tokenizer, one) for one in row if one >= 0)] for row in ids.tolist()]
                for part, ids in drawn.ids.items()
            }
            targets = sides.pop("decoder", [])
            if about.names is None and self._hooks.named:
                about = dataclasses.replace(about, names=shared_names(self._hooks.named))
            if arrays:
                tokens = next(iter(sides.values()), [])
                named = self._hooks.named or ([] if about.names is None else [about.names] * len(arrays["weights"]))
                tokens = called(named, tokens)
                length = max(drawn.lengths)
                maps = Maps(arrays["weights"], arrays["scores"], arrays["scores_range"], tokens, drawn.modules, length, targets)
            received = heads.Received(drawn.modules, **drawn.columns(), front=drawn.front)
        view: HeadView = heads.head_view(
            [(site.layer, site.module, site.part) for site in self.sites if site.kind == "self" or site.part],
            about=about,
            operation=self.operation,
            received=received,
            maps=maps,
            numbers=Numbers(pa.Table.from_pandas(table, preserve_index=False), {}) if len(table) else None,
            threshold=threshold,
        )
        return view

    def __repr__(self) -> str:
        probes = ", ".join(probe.name for probe in self.probes) or "none"
        seen = f"{counted(len(self.sites), 'module')} seen, {counted(self.calls.total(), 'call')}"
        edits = f", interventions: {', '.join(edit.name for edit in self.interventions)}" if self.interventions else ""
        return f"Session({self._name}, {seen}, probes: {probes}{edits})"

    @property
    def normalized(self) -> bool:
        """Whether every operation seen gives rows that, with their null mass, sum to one."""
        return all(operation.normalized for operation in self._operations)

    @property
    def operation(self) -> str:
        """Names of the operations seen, joined by `` + `` where a model has several; empty before the first call."""
        return " + ".join(sorted({operation.name for operation in self._operations}))

    @property
    def _model_name(self) -> str:
        return getattr(getattr(self.model, "config", None), "name_or_path", "") or self._name

    # --- life ---

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        if any(other.owns(module) for other in seam.active_observers() for module in self._anatomy.attention.values()):
            raise SessionError(f"a session on this {self._name} is already active; pass all probes to one attend()")
        with contextlib.ExitStack() as stack:
            for handle in self._hooks.register():
                stack.callback(handle.remove)
            stack.enter_context(seam.shadow(self))
            stack.callback(self._hooks.forget)
            yield
        if not self.calls and not self._hooks.forwards:
            raise SessionError(
                f"{self._name} did not run while its session was open, so there is nothing to report; run this "
                "very model (not a copy, and in the same thread, which generate_batch() does not) inside the with block"
            )
        if not self.calls:
            raise UnsupportedModelError(
                f"{self._name} ran {self._hooks.forwards} times and no attention call was seen; it uses a table "
                "or a path of its own. Try attn_implementation='sdpa' or 'eager'"
            )
        self._editing.check_used(self.sites, self._longest)

    def _active(self) -> bool:
        """Whether the context that runs the model is the one that records; hooks fire in every thread."""
        return self in seam.active_observers()

    # --- the observer that the seam calls ---

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is one of this model's attention modules."""
        return id(module) in self._anatomy.names or id(module) in self._depth

    @property
    def running(self) -> bool:
        """Whether the model is inside its forward."""
        return self._hooks.running

    def on_mask(self, record: seam.MaskRecord) -> None:
        """Keep what the host said about a mask until the forward ends."""
        self._hooks.on_mask(record)

    def on_attention(
        self, native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:  # fmt: skip
        """Run the model's own function, then reduce what it did to statistics and show them to the probes."""
        if id(module) in self._depth:
            result = native(module, query, key, value, attention_mask, **kwargs)
            self._show_depth(native, module, (query, key, value, result[0]), kwargs["scaling"])
            return result
        name = self._anatomy.names[id(module)]
        _require_numbers(name, query)
        unknown = host_arguments.unknown_keywords(kwargs)
        if unknown:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) was given the keyword {', '.join(unknown)}, which sinklab does not know "
                "and which may change the attention; measuring would be guessing. Please report the model"
            )
        host_arguments.require_readable(attention_mask, name, module)
        captured = LogSumExpCapture()
        few = query.device.type == "cpu" and query.shape[2] * key.shape[2] <= FEW_PAIRS  # of which nobody asks for one
        with captured if not few and _may_give_log_sum_exp(native, module, query, attention_mask) else contextlib.nullcontext():
            result = native(module, query, key, value, attention_mask, **kwargs)
        self.calls[name] += 1
        self._hooks.now.called.add(name)
        # Measuring is not part of the model: under autocast its own products would be rounded to half precision.
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            heads, value_dim = query.shape[1], result[0].shape[-1]
            width = heads * value_dim
            site = self._hooks.site(name, module, width)
            tensors = (query, key, value, attention_mask, result[0], captured.log_sum_exp)
            call = describe_call(native, module, site, tensors, kwargs, self._hooks.now)
            self._operations.add(call.operation)
            if "head_outputs" in self._needs:
                residual = self._hooks.now.residuals.get(self._anatomy.layer_of.get(name, ""))
                # Seen before accelerate moves it, where a layer is the first one on its device.
                call.residual = None if residual is None else residual.to(query.device)
                call.projection = self._anatomy.projection_weight(name, width)
            self._hooks.now.positions[call.q_len] = Positions(call.query_positions, call.query_documents)
            if self.verify and not (module.training and kwargs.get("dropout")):
                self._record_check(*self._proved(call, attention_mask, native))
            if self.interventions:
                self._longest = max(self._longest, int(call.key_positions.max()) + 1)
            edited = self._editing.edit(call, module, kwargs.get("dropout") or 0.0, isinstance(result[1], Tensor))
            if edited is not None:
                if result[0].requires_grad:
                    raise SessionError(
                        f"{name}: what an intervention recomputes has no gradient; run the model under torch.no_grad()"
                    )
                call, weights = edited
                assert call.head_outputs is not None  # the edited ones
                result = (call.head_outputs.reshape(result[0].shape), weights, *result[2:])
            scored, self._hooks.now.scored = self._hooks.now.scored, (query, key)
            if scored is not None and scored[0] is query and scored[1] is key:
                # DiffLlama: the same weights, of other values. Half of its heads are subtracted from the others behind them.
                self._note_once(
                    f"{type(module).__name__} uses the weights of its heads twice, and may subtract some heads from others; "
                    "each head is counted once and by itself, and their difference is the metric difference_weight"
                )
            elif self.probes:
                needs = self._statistics_needs
                statistics = column_statistics(call, needs) if needs else Statistics()
                if self.verify:
                    verify_statistics(call, statistics)
                self._show_call(call, statistics)
        return result

    @torch.no_grad()
    def _show_depth(self, native: seam.Native, module: nn.Module, tensors: tuple[Tensor, ...], scaling: float | None) -> None:
        """Show attention over blocks, ``(batch, tokens, queries or blocks, hidden_size)``: each token is a text of blocks."""
        query, key, value, outputs = (tensor.detach() for tensor in tensors)
        (batch, tokens, heads, _), blocks, device = query.shape, key.shape[2], query.device
        query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        alone = torch.zeros(batch * tokens, 1, dtype=torch.int64, device=device)
        padding = self._hooks.now.counted(batch, tokens, device).positions.reshape(-1, 1) < 0
        places = torch.arange(blocks, device=device).expand(batch * tokens, -1)
        call = AttentionCall(
            self._depth[id(module)], query[:, :, None], key[:, None], value[:, None],
            query.shape[-1] ** -0.5 if scaling is None else scaling, Everything(device),
            seam.operation_of(module, native),
            query_positions=alone.masked_fill(padding, -1), key_positions=places,
            query_documents=alone.masked_fill(padding, -1), key_documents=alone.expand(-1, blocks),
            head_outputs=outputs.transpose(1, 2).reshape(batch * tokens, 1, heads, -1),
        )  # fmt: skip
        if self.verify:
            self._record_check(*verify_call(call))
        statistics = column_statistics(call, frozenset({"columns"}))
        for probe in self.probes:
            if "depth" in probe.needs:
                probe.update(call, statistics)

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            warn(text)

    def _show_call(self, call: AttentionCall, statistics: Statistics) -> None:
        for probe in self.probes:
            if type(probe).update is not Probe.update:
                probe.update(call, statistics)

    @staticmethod
    def _proved(call: AttentionCall, mask: object, native: seam.Native) -> tuple[int, float]:
        try:
            return verify_call(call)
        except MeasurementError as error:
            if isinstance(mask, Tensor) and mask.dtype == torch.bool and "eager" in getattr(native, "__name__", ""):
                raise MeasurementError(
                    f"{error}. Its mask is boolean, which eager attention of most models adds to scores as 0 and 1, so that "
                    "nothing is hidden: give an additive mask (0 and torch.finfo(dtype).min), or use attn_implementation='sdpa'"
                ) from error
            raise

    def _record_check(self, rows: int, error: float) -> None:
        self.checks["calls_verified"] += 1
        self.checks["rows_verified"] += rows
        self.checks["largest_error"] = max(self.checks["largest_error"], error)

    def _show_layer(self, output: LayerOutput) -> None:
        need = {"layer": "hidden_states", "attention": "attention_outputs", "heads": "gated_heads"}[output.kind]
        with torch.no_grad(), torch.autocast(output.hidden_states.device.type, enabled=False):
            for probe in self.probes:
                if need in probe.needs:
                    probe.update_layer(output)


def _require_numbers(name: str, query: Tensor) -> None:
    """Refuse a call whose tensors hold no numbers, or hold them a second time."""
    if torch._C._current_graph_task_id() != -1:
        raise SessionError(f"{name} was called while gradients are recomputed; switch gradient checkpointing off to measure")
    if torch.compiler.is_exporting() or torch._C._functorch.is_batchedtensor(query):
        raise SessionError(
            f"{name} is being exported or runs under torch.vmap, which shows no numbers; do so outside of attend()"
        )


def _may_give_log_sum_exp(native: seam.Native, module: nn.Module, query: Tensor, mask: object) -> bool:
    """Whether the function that a module calls may run a kernel that :class:`LogSumExpCapture` knows."""
    if getattr(native, "__name__", "") == "flex_attention_forward":
        return False
    if not hasattr(native, "_sinklab_operation"):
        return True
    operation = seam.operation_of(module, native)
    if query.device.type == "cpu" or not operation.is_softmax:
        return operation.is_softmax
    null = type(operation).null_scores is not Operation.null_scores
    return mask is None and (not null or query.dtype in (torch.bfloat16, torch.float16))


def _require_objects(kind: str, given: object, base: type) -> None:
    """Refuse one plug-in in place of a list of them, and names and classes in the list."""
    plural = f"{kind}s"
    if isinstance(given, (str, base, type)) or not isinstance(given, Iterable):
        raise ConfigurationError(f"`{plural}` is {getattr(given, 'name', given)!r}; expected a list of {plural}")
    for one in given:
        if isinstance(one, str):
            raise ConfigurationError(f"`{plural}` holds a name; make one of it with sinklab.registry.{plural}.make({one!r})")
        if isinstance(one, type):
            raise ConfigurationError(f"`{plural}` holds a class; make one of it: {one.__name__}(…)")


def table_of(probes: Sequence[Probe], **constants: object) -> pd.DataFrame:
    """Rows of some probes in the long schema, what they were shown being at its end; ``constants`` as of :func:`make_table`."""
    from sinklab.results.table import make_table

    twice = named_twice(probes)
    if twice is not None:
        raise SessionError(
            f"the table of two probes of the name {twice!r}: its rows have the name of a probe and not its settings, so that "
            "they could not be told apart; read the `rows()` of each probe, or open a session for each"
        )
    return make_table(({**row, "probe": probe.name} for probe in probes for row in probe.rows()), **constants)
