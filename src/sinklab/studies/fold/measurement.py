"""The measurement behind fold_sinks(): calibrate, choose what is folded, and compare the loss of what may stand there."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinklab.attention.anatomy import on_seam_modules
from sinklab.attention.host_arguments import cache_argument
from sinklab.attention.modules import input_device
from sinklab.attention.operation import ATTRIBUTE, HeadShape, OperationState
from sinklab.corpora.samples import Samples
from sinklab.errors import InputError, UnsupportedModelError
from sinklab.models.attach import CONFIG_FIELD, attach_folded, head_shapes, recorded_heads
from sinklab.models.losses import cross_entropies, is_two_sided, loss_kind
from sinklab.operations.folded_sink import FoldedSink
from sinklab.results.blocks import counted, names
from sinklab.results.intervals import mean_over_items
from sinklab.results.progress import Progress, plan, silent
from sinklab.sinks import Sinks
from sinklab.studies.fold.calibration import Fit, Residuals, calibrate, check_fits, parameters_of
from sinklab.studies.fold.found import FoldedHead, Folding, Form, Silenced
from sinklab.studies.measure.probing import forward_arguments, sample_losses, tokens_at_once
from sinklab.studies.origin.measurement import birth_neurons

Births: TypeAlias = Sequence[tuple[str, list[int]]]
"""Linear maps by name, and the neurons by which each writes a sink."""

RESTS = 10.0
"""Percent of texts in which a head must sink to rest there: as in the count of sinking heads."""

MOST_MISSED = 0.25
"""Share of the weight on the sinks that the fit of a key–value head misses, above which the head is left alone."""

STRETCHES = 12
"""Of the curve of the losses, at most."""


class _Chosen(NamedTuple):
    name: str
    score: str
    value: str


FORMS = (
    _Chosen("constants", "linear", "mean"),
    _Chosen("constant score", "constant", "mean"),
    _Chosen("no value", "linear", "0"),
    _Chosen("learned sink logit (gpt-oss)", "constant", "0"),
)
"""What may stand in the place of the sinks, beside nothing."""


def require_foldable(model: PreTrainedModel, operation: str) -> None:
    """Refuse a model of which no sink can be folded."""
    recorded = getattr(model.config, CONFIG_FIELD, None) or {"operation": getattr(model.config, "operation", None) or {}}
    if isinstance(recorded, Mapping) and recorded.get("operation", {}).get("name") == FoldedSink.name:
        raise InputError(f"the sinks of this {type(model).__name__} are folded already")
    if operation != "softmax":
        raise UnsupportedModelError(f"a sink is folded into softmax attention, and this model has {operation}")
    if is_two_sided(model):
        raise UnsupportedModelError(f"{type(model).__name__} has an encoder and a decoder; fold one of them by itself")


def foldable_positions(sinks: Sinks) -> tuple[list[int], list[str]]:
    """Positions at which a model has its sinks whatever the text is, and a sentence on every sink that is elsewhere."""
    positions, notes = set[int](), list[str]()
    for sink in sinks.sinks:
        if sink.kind == "null":
            notes.append(f"{sink.describe().capitalize()} is explicit already.")
        elif sink.kind == "token":
            notes.append(f"{sink.name.capitalize()} moves with the text and is left as it is.")
        else:
            positions.update([sink.position] if sink.kind == "position" and sink.position is not None else sink.positions)
    return sorted(positions), notes


def fold(
    model: PreTrainedModel,
    calibration: Samples,
    samples: Samples,
    sinks: Sinks,
    *,
    margin: float,
    neurons: Births,
    progress: Progress,
) -> tuple[PreTrainedModel, Folding, dict[str, Tensor]]:
    """Fold the sinks of a model; in place, but for a :class:`~sinklab.models.language_model.SinkLM`, which is built anew.

    Args:
        calibration, samples: texts without padding, for the constants and for judging them.
        sinks: that were found on the former.
        margin: change of the loss in nats up to which a fold is taken; of one that costs more, layers are left as they are,
            those with the largest errors first.
        neurons: that write the sinks (:func:`~sinklab.studies.origin.measurement.birth_neurons`), to be silenced too.

    Returns:
        The folded model, what was found, and the entries of :func:`prefix_cache`; none of a model that no such cache serves.
    """
    positions, notes = foldable_positions(sinks)
    length = calibration.positions or 0
    if not positions:
        why = "Nothing to fold: no sink at a fixed position." if sinks.sinks else "Nothing to fold: no sink was found."
        nothing = Folding(why, [], len(calibration), len(samples), length, None, margin, [], [], [], [], [], {}, {}, notes)
        return model, nothing, {}
    shapes = head_shapes(model, calibration.take(slice(0, 1)).on(input_device(model), model.dtype), sources=True)
    causal = all(getattr(module, "is_causal", True) for module in on_seam_modules(model).values())
    behind_sinks = length - (positions[-1] + 1 if causal else len(positions))
    queries, needed = len(calibration) * behind_sinks, 2 * max(shape.head_dim for shape in shapes.values())
    if queries < needed:
        raise InputError(
            f"{len(calibration)} texts of {length} tokens have {queries} queries that see position {positions[-1]}, and a fit "
            f"takes {needed}, twice the numbers of a query; give a larger `seq_len` or more `samples`"
        )
    size = max(1, min(8, tokens_at_once(model) // max(length, 1)))
    judged = loss_kind(model) is not None and (samples.tokens is not None or samples.targets is not None)
    plan(
        progress, {"calibrating": len(calibration) * 1.3, "checking the fits": len(samples) * 1.3, "losses": 6.0 * len(samples)}
    )
    fits = calibrate(model, calibration, shapes, positions, batch_size=size, progress=progress)
    residuals = check_fits(model, samples, shapes, positions, fits, batch_size=size, progress=progress)
    resting = _resting(sinks)
    folded, left_alone = _choose(shapes, residuals, resting)
    with _largest_inputs(model) as largest:
        plain = _scored(model, samples, judged)
    prefix = None
    if loss_kind(model) == "next token" and positions == [0]:
        prefix = _prefixed_losses(model, samples, fits)
    inputs = {"as it is": max(largest.values(), default=0.0)}
    progress("losses", 1, 6)
    chosen_shapes = {name: dataclasses.replace(shape, folded=folded[name]) for name, shape in shapes.items()}
    parameters = {name: parameters_of(fits[name], heads) for name, heads in folded.items() if heads}
    model = attach_folded(model, FoldedSink(positions=tuple(positions)), chosen_shapes, parameters)
    losses, forms = {"as it is": plain}, list[Form]()
    behind = None if not judged else max(positions) + 1 if loss_kind(model) == "next token" else 0
    for number, form in enumerate(FORMS):
        _put(model, fits, folded, form)
        losses[form.name] = _scored(model, samples, judged)
        progress("losses", number + 2, 6)
        forms.append(_form(form, plain, losses[form.name], behind))
    best = min(forms[:2], key=lambda form: abs(form.change.mean))
    which = FORMS[forms.index(best)]
    _put(model, fits, folded, which)
    if behind is not None and abs(best.change.mean) > margin:
        best, losses[which.name], lines = _within(model, samples, plain, which, fits, folded, residuals, margin, behind)
        left_alone += lines
        forms[FORMS.index(which)] = best
    for name in parameters:
        _set(model, name, parameters_of(fits[name], ()))  # the sinks hidden, and nothing in their place
    losses["nothing"] = _scored(model, samples, judged)
    _put(model, fits, folded, which)
    progress("losses", 6, 6)
    forms = [dataclasses.replace(form, chosen=form.name == which.name) for form in forms]
    forms.append(_form(_Chosen("nothing", "–", "–"), plain, losses["nothing"], behind))
    if prefix is not None:
        forms.append(_form(_Chosen("a cached entry, not folded", "its mean key", "mean"), plain, prefix, behind))
    silenced = list[Silenced]()
    if behind is not None:
        silenced = _silence(model, samples, losses[which.name], neurons, margin, behind)
    with _largest_inputs(model) as largest:
        model(**forward_arguments(model, samples.take(slice(0, size)), full_logits=False))
    inputs["folded" if not any(one.kept for one in silenced) else "folded, neurons silent"] = max(largest.values(), default=0.0)
    if isinstance(getattr(model.config, CONFIG_FIELD, None), dict):
        getattr(model.config, CONFIG_FIELD)["heads"] = recorded_heads(model)
    heads = list(_heads(shapes, fits, residuals, resting, folded))
    places, curves = _curves(losses, which.name, behind) if behind else ([], {})
    found = Folding(
        _finding(forms, heads), positions, len(calibration), len(samples), length,
        None if behind is None else float(plain[:, behind:].nanmean()), margin, forms, heads, left_alone, silenced,
        places, curves, inputs, notes,
    )  # fmt: skip
    return model, found, {} if prefix is None else prefix_of(fits)


def folded_copies(
    model: PreTrainedModel, calibration: Samples, sinks: Sinks, operation: str
) -> Iterator[tuple[str, str, PreTrainedModel]]:
    """A model with its sinks folded, and the same with the neurons silent that write them; a name and a description of each.

    The copy that is given second is the first one, changed further. Nothing is judged by a loss; arguments as of :func:`fold`.
    """
    require_foldable(model, operation)
    positions, _ = foldable_positions(sinks)
    if not positions:
        return
    inputs = calibration.take(slice(0, 1))
    words = model.get_input_embeddings().parameters()  # often most of the weights, and never written
    copied = copy.deepcopy(model, {id(weight): weight for weight in words})
    shapes = head_shapes(copied, inputs.on(input_device(copied), copied.dtype), sources=True)
    fits = calibrate(copied, calibration, shapes, positions, batch_size=2, progress=silent)
    residuals = check_fits(copied, calibration, shapes, positions, fits, batch_size=2, progress=silent)
    folded, _ = _choose(shapes, residuals, _resting(sinks))
    shapes = {name: dataclasses.replace(shape, folded=folded[name]) for name, shape in shapes.items()}
    constants = {name: parameters_of(fits[name], heads) for name, heads in folded.items() if heads}
    copied = attach_folded(copied, FoldedSink(positions=tuple(positions)), shapes, constants)
    yield "folded", "the sinks folded into constants", copied
    neurons = birth_neurons(model, calibration.take(slice(0, 4)), sinks)
    for path, units in neurons:
        list(_made_zero(copied, path, units))
    if neurons:
        yield "folded, silent", "the sinks folded, and the neurons silent that write them", copied


def _resting(sinks: Sinks) -> set[tuple[str, int]]:
    """Module and head of those that rest on a sink at a fixed position."""
    fixed = [sink for sink in sinks.sinks if sink.kind in ("position", "group")]
    return {(head.module, head.head) for sink in fixed for head, rate in sink.heads if rate >= RESTS}


def constants_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The constants of a folded model by ``<attention module>.<parameter>``, of the layers that are folded."""
    states = {name: getattr(module, ATTRIBUTE, None) for name, module in on_seam_modules(model).items()}
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, state in states.items()
        if isinstance(state, OperationState) and state.shape.folded != ()
        for key, value in state.named_parameters()
    }


def prefix_cache(entries: Mapping[str, Tensor], batch: int = 1) -> DynamicCache:
    """A cache that holds the sink as one constant entry, for a model that is not folded; its text begins at position 1.

    Args:
        entries: ``<number of the layer>.key`` and ``.value``, ``(num_kv_heads, size)``, as ``prefix.safetensors`` has them.
        batch: rows of the text.
    """
    cache = DynamicCache()
    for layer in range(len(entries) // 2):
        key, value = (entries[f"{layer}.{kind}"].expand(batch, -1, -1)[:, :, None].clone() for kind in ("key", "value"))
        cache.update(key, value, layer)
    return cache


def prefix_of(fits: Mapping[str, Fit]) -> dict[str, Tensor]:
    """The entries of :func:`prefix_cache`, float32: means over the calibration texts."""
    parts = ((f"{layer}.key", fit.sink_key, f"{layer}.value", fit.value) for layer, fit in enumerate(fits.values()))
    return {name: tensor.float().contiguous() for one in parts for name, tensor in (one[:2], one[2:])}


@torch.inference_mode()
def _prefixed_losses(model: PreTrainedModel, samples: Samples, fits: Mapping[str, Fit]) -> Tensor:
    """Losses with the constant entry in front, in the place of a first token that all texts share, and else before it."""
    tokens = samples.tokens
    assert tokens is not None
    shared = int(bool((tokens[:, 0] == tokens[0, 0]).all()))
    entries = {name: entry.to(model.device, model.dtype) for name, entry in prefix_of(fits).items()}
    losses = []
    for row in tokens.to(model.device).split(2):
        given = row[:, shared:]
        places = torch.arange(1, 1 + given.shape[1], device=model.device).expand_as(given)
        cache = cache_argument(model, prefix_cache(entries, len(row)))
        logits = model(input_ids=given, position_ids=places, **cache).logits
        own = cross_entropies(logits[:, :-1], given[:, 1:])
        losses.append(nn.functional.pad(own, (row.shape[1] - 1 - own.shape[1], 0), value=math.nan).double().cpu())
    return torch.cat(losses)


def _choose(
    shapes: Mapping[str, HeadShape], residuals: Mapping[str, Residuals], resting: set[tuple[str, int]]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Key–value heads to fold: those of layers in which a head rests, but for those that do not fit; and what is left alone."""
    folded, lines = dict[str, tuple[int, ...]](), list[str]()
    for layer, (name, shape) in enumerate(shapes.items()):
        if not any(module == name for module, _ in resting):
            folded[name] = ()
            continue
        own = residuals[name]
        error, weight = (sums.unflatten(0, (shape.num_kv_heads, -1)).sum(1) for sums in (own.error, own.weight))
        missed = (error / weight.clamp_min(1e-300)).tolist()
        folded[name] = tuple(index for index, share in enumerate(missed) if share <= MOST_MISSED)
        left = [f"{index} ({100 * share:.0f} %)" for index, share in enumerate(missed) if share > MOST_MISSED]
        if left:
            lines.append(f"Layer {layer}, key–value head {names(left)}: the fit misses so much of the weight on the sinks.")
    return folded, lines


def _scored(model: PreTrainedModel, samples: Samples, judged: bool) -> Tensor:
    """Loss of every position of every sample; where there is none the output, flat, for its change."""
    if judged:
        return sample_losses(model, samples.scored or samples).double()
    with torch.inference_mode():
        states = [model(**forward_arguments(model, one, full_logits=False))[0].flatten(1) for one in samples.batches(4)]
    return torch.cat(states).double()


def _form(form: _Chosen, plain: Tensor, scored: Tensor, behind: int | None) -> Form:
    """A form from what :func:`_scored` gives; ``behind`` are the first losses, which are left out, ``None`` without losses."""
    if behind is None:
        loss, change = None, (scored - plain).norm(dim=1) / plain.norm(dim=1)
    else:
        loss, change = float(scored[:, behind:].nanmean()), (scored - plain)[:, behind:].nanmean(1)
    return Form(form.name, form.score, form.value, loss, mean_over_items(change.numpy()))


def _put(model: PreTrainedModel, fits: Mapping[str, Fit], folded: Mapping[str, Sequence[int]], form: _Chosen) -> None:
    for name, heads in folded.items():
        if heads:
            _set(model, name, parameters_of(fits[name], heads, form.score, form.value))


@torch.no_grad()
def _set(model: PreTrainedModel, name: str, values: Mapping[str, Tensor]) -> None:
    state = getattr(model.get_submodule(name), ATTRIBUTE)
    for key, value in values.items():
        getattr(state, key).copy_(value)


def _within(
    model: PreTrainedModel,
    samples: Samples,
    plain: Tensor,
    form: _Chosen,
    fits: Mapping[str, Fit],
    folded: dict[str, tuple[int, ...]],
    residuals: Mapping[str, Residuals],
    margin: float,
    behind: int,
) -> tuple[Form, Tensor, list[str]]:
    """Leave as few layers as they are as it takes to come within the margin, those whose weights are missed most first."""
    order = sorted((name for name, heads in folded.items() if heads), key=lambda name: -float(residuals[name].error.max()))
    everything, low, high = dict(folded), 1, len(order)

    def tried(count: int) -> tuple[Form, Tensor]:
        for place, name in enumerate(order):
            folded[name] = () if place < count else everything[name]
            state = getattr(model.get_submodule(name), ATTRIBUTE)
            state.shape = dataclasses.replace(state.shape, folded=folded[name])
            _set(model, name, parameters_of(fits[name], folded[name], form.score, form.value))
        losses = sample_losses(model, samples.scored or samples).double()
        return _form(form, plain, losses, behind), losses

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if abs(tried(middle)[0].change.mean) <= margin else (middle + 1, high)
    best, losses = tried(low)
    layers = list(folded)
    lines = [
        f"Layer {layers.index(name)} is left as it is: with it the loss changes by more than {margin:g} nats."
        for name in order[:low]
    ]
    return best, losses, lines


def _silence(
    model: PreTrainedModel, samples: Samples, before: Tensor, neurons: Births, margin: float, behind: int
) -> list[Silenced]:
    """Set the neurons that write a sink to zero, birth by birth, and keep what costs no more than the margin."""
    silenced = []
    for path, units in neurons:
        saved = [(tensor, tensor.clone()) for tensor in _made_zero(model, path, units)]
        losses = sample_losses(model, samples.scored or samples).double()
        differences = losses - before
        change = mean_over_items(differences[:, behind:].nanmean(1).numpy())
        kept = abs(change.mean) <= margin
        if kept:
            before = losses
        else:
            for tensor, old in saved:
                tensor.copy_(old)
        silenced.append(Silenced(path, units, change, float(differences[:, :behind].nanmean()) if behind else None, kept))
    return silenced


def _made_zero(model: PreTrainedModel, path: str, units: Sequence[int]) -> Iterator[Tensor]:
    """Set neurons to zero for all tokens, in the linear map of that name, by which they write, and in those beside it that make
    them; each parameter is given before it is changed."""
    parent = model.get_submodule(path.rpartition(".")[0])
    by, index = model.get_submodule(path), torch.tensor(units, device=model.device)

    def weight(part: nn.Module) -> Tensor:
        values = part.weight
        assert isinstance(values, Tensor)
        return values.data.T if isinstance(part, Conv1D) else values.data

    maps = [part for part in parent.modules() if isinstance(part, (nn.Linear, Conv1D)) and part is not by]
    made_by = [part for part in maps if weight(part).shape == weight(by).T.shape]
    changed = [(weight(by), 1), *((weight(part), 0) for part in made_by)]
    changed += [(part.bias.data, 0) for part in made_by if part.bias is not None]
    for values, axis in changed:
        yield values
        values.index_fill_(axis, index, 0.0)


@contextmanager
def _largest_inputs(model: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Largest absolute input of every linear map inside the layers."""
    found: dict[str, float] = {}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def note(name: str, args: tuple[object, ...]) -> None:
        if isinstance(args[0], Tensor) and args[0].numel():
            found[name] = max(found.get(name, 0.0), float(args[0].detach().abs().max()))

    handles = [
        part.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _heads(
    shapes: Mapping[str, HeadShape],
    fits: Mapping[str, Fit],
    residuals: Mapping[str, Residuals],
    resting: set[tuple[str, int]],
    folded: Mapping[str, Sequence[int]],
) -> Iterator[FoldedHead]:
    for layer, (name, shape) in enumerate(shapes.items()):
        fit, own, groups = fits[name], residuals[name], shape.num_heads // shape.num_kv_heads
        for head in range(shape.num_heads):
            group = head // groups
            yield FoldedHead(
                name, layer, head, (name, head) in resting, group in folded[name], float(own.explained[head]),
                float(own.error[head]), float(own.weight[head]), float(fit.mean_score[head]),
                float(fit.value[group].norm()), float(fit.value_spread[group]),
            )  # fmt: skip


def _curves(losses: Mapping[str, Tensor], chosen: str, behind: int) -> tuple[list[int], dict[str, list[float]]]:
    """Mean losses in stretches of tokens that double in length."""
    length = next(iter(losses.values())).shape[1]
    bounds = sorted(
        {min(length, behind + round(2**step)) for step in range(math.ceil(math.log2(max(2, length))) + 1)} | {behind}
    )
    bounds = [*bounds[: max(1, len(bounds) - 1)][-STRETCHES:], length]
    named = {"as it is": losses["as it is"], "folded": losses[chosen], "hidden, nothing there": losses["nothing"]}
    curves = {
        name: [float(values[:, low:high].nanmean()) for low, high in itertools.pairwise(bounds)]
        for name, values in named.items()
    }
    return bounds[:-1], curves


def _finding(forms: Sequence[Form], heads: Sequence[FoldedHead]) -> str:
    count = sum(head.folded for head in heads)
    said = f"{count} of {counted(len(heads), 'head')} folded"
    best = next(form for form in forms if form.chosen)
    hidden = next(form for form in forms if form.name == "nothing")
    if best.loss is None:
        changed, without = (f"{100 * form.change.mean:.1f} %" for form in (best, hidden))
        return f"{said}: the output changes by {changed} of its norm; hidden without constants by {without}."
    return f"{said}: the loss changes by {best.change.mean:+.4f} nats; hidden without constants by {hidden.change.mean:+.3f}."
