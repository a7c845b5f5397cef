"""The contract of operations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from sinklab.attention.host_arguments import cache_argument, returned_cache
from sinklab.attention.operation import HeadShape, Inputs, Operation, repeat_groups
from sinklab.attention.paths.table import PATHS, compute, obstacle
from sinklab.errors import ContractError, SinklabError, first_line
from sinklab.registry import operations
from sinklab.testing._checks import Checks, is_frozen, tiny_sinklm

_SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, hidden_size=24)
_BATCH, _LENGTH, _SCALING = 2, 8, 0.25


def check_operation(operation: Operation) -> None:
    """Check that an operation may stand in for softmax in any decoder.

    Learned parameters are checked at random values, not at their initial ones, and null scores at ±20 too: a mistake in a term
    that starts at zero shows only then. The checks:

    - *settings*: it is registered, and ``to_dict`` and ``from_dict`` give it back;
    - *parameters*: initial values are finite float32 tensors;
    - *shapes*: every part of the composition gives the shape that :class:`~sinklab.attention.operation.Operation` says;
    - *hidden keys*: their weights are exactly 0, also in rows that see no key; weights are float32 or wider;
    - *row sums*: weights and null mass sum to one in every row if ``normalized``, otherwise not always;
    - *blocks*: a block of rows computed alone is the same as within the whole;
    - *causality*: changing a token leaves earlier outputs bit-equal;
    - *extreme scores*: finite weights and gradients at scores of ±1e4;
    - *gradient*: ``torch.autograd.gradcheck`` in float64, of the weights, and of the outputs with respect to queries, keys,
      values and every parameter;
    - *grouped queries*: shared keys and values give what repeated ones give;
    - *bfloat16*: an error of at most twice that of a plain run, which rounds scores, weights and their products with the values
      to bfloat16 and nothing else;
    - *compile*: ``head_outputs`` is captured as one graph and gives the same;
    - *path …*: outputs and gradients of every fast path that serves the operation equal those of the plain reference;
    - *cached decoding*, *save and load*: in a small :class:`~sinklab.models.language_model.SinkLM`.

    Args:
        operation: an instance, with the settings to check.

    Raises:
        ContractError: a check failed.
    """
    checks = Checks(f"operation {getattr(operation, 'name', type(operation).__name__)!r}")
    generator = torch.Generator().manual_seed(0)
    try:
        again = operations.make(operation.to_dict())
    except (SinklabError, AttributeError, TypeError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'settings': {error}") from error
    checks.require(is_frozen(operation) and again == operation, "settings", f"a frozen dataclass equal to {operation}", again)
    for name, value in operation.parameters(_SHAPE).items():
        fine = value.dtype == torch.float32 and bool(value.isfinite().all())
        checks.require(fine, "parameters", f"finite float32 numbers for {name!r}", f"{value.dtype}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        call = _Call(operation, generator)
    _check_shapes(checks, operation, call)
    null = operation.null_scores(call.queries, _SCALING, call.state)
    scores = 2.0 * torch.randn(2, 4, 7, 7, generator=generator)
    _check_weights(checks, operation, scores, None)
    if null is not None:
        for size in (1.0, 20.0, -20.0):
            null_scores = size * (torch.randn(2, 4, 7, generator=generator) if size == 1.0 else torch.ones(1, 4, 1))
            _check_weights(checks, operation, scores, null_scores)
    _check_outputs(checks, operation, call)
    _check_gradients(checks, operation, call)
    for path in PATHS:
        _check_path(checks, operation, call, path)
    _check_in_model(checks, operation)


class _Call:
    """Random queries, keys, values and state of one causal call with grouped queries."""

    def __init__(self, operation: Operation, generator: torch.Generator) -> None:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        self.queries = normal(_BATCH, _SHAPE.num_heads, _LENGTH, _SHAPE.head_dim)
        self.keys = normal(_BATCH, _SHAPE.num_kv_heads, _LENGTH, _SHAPE.head_dim)
        self.values = normal(_BATCH, _SHAPE.num_kv_heads, _LENGTH, _SHAPE.value_dim)
        self.state = {name: value + 0.3 * normal(*value.shape) for name, value in operation.parameters(_SHAPE).items()}
        if operation.needs_layer_input:
            self.state["layer_input"] = normal(_BATCH, _LENGTH, _SHAPE.hidden_size)
        self.causal = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril()

    def in_dtype(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Queries, keys and values, and the state, in a dtype."""
        return [t.to(dtype) for t in (self.queries, self.keys, self.values)], {n: t.to(dtype) for n, t in self.state.items()}


def _check_shapes(checks: Checks, operation: Operation, call: _Call) -> None:
    of_rows = (_BATCH, _SHAPE.num_heads, _LENGTH)
    of_scores, of_outputs, of_head = (*of_rows, _LENGTH), (*of_rows, _SHAPE.value_dim), (_SHAPE.num_heads, _SHAPE.value_dim)

    def require(what: str, value: Tensor | None, shape: tuple[int, ...], *, may_broadcast: bool = False) -> None:
        if value is None:
            return
        sizes = tuple(value.shape)
        allowed = [{size, 1} if may_broadcast else {size} for size in shape]
        fits = len(sizes) == len(shape) and all(size in known for size, known in zip(sizes, allowed, strict=True))
        checks.require(fits, "shapes", f"{what} {shape}{', or 1 for a size' if may_broadcast else ''}", sizes)

    queries, keys = operation.features(call.queries, call.keys, call.state)
    require("mapped queries", queries, (*of_rows, queries.shape[-1]))
    groups = _SHAPE.num_heads // keys.shape[1] if keys.ndim == 4 else 0
    require("mapped keys", keys, (_BATCH, _SHAPE.num_heads // max(groups, 1), _LENGTH, queries.shape[-1]))
    scores = torch.zeros(of_scores)
    null = operation.null_scores(queries, _SCALING, call.state)
    require("null scores", null, of_rows, may_broadcast=True)
    require("weights", operation.weights(scores, call.causal, null), of_scores)
    require("null mass", operation.null_mass(scores, call.causal, null), of_rows)
    require("null value", operation.null_value(call.state), of_head, may_broadcast=True)
    require("output bias", operation.output_bias(call.state), of_head, may_broadcast=True)
    gain = operation.gain(call.state)
    if gain is not None:
        try:
            spread = tuple(torch.broadcast_shapes(gain.shape, of_outputs))
        except RuntimeError:
            spread = ()
        checks.require(spread == of_outputs, "shapes", f"a gain that broadcasts to {of_outputs}", tuple(gain.shape))
    outputs, weights = operation.head_outputs(call.queries, call.keys, call.values, call.causal, _SCALING, call.state)
    require("head outputs", outputs, of_outputs)
    require("weights beside head outputs", weights, of_scores)


def _check_weights(checks: Checks, operation: Operation, scores: Tensor, null: Tensor | None) -> None:
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    holes = causal.clone()
    holes[3] = False
    for visible in (causal, holes):
        weights = operation.weights(scores, visible, null)
        checks.require(weights.dtype in (torch.float32, torch.float64), "hidden keys", "float32 or wider", weights.dtype)
        largest = float(weights.masked_fill(visible, 0.0).abs().max())
        checks.require(largest == 0.0, "hidden keys", "weights of exactly 0 on hidden keys", f"a weight of {largest:.1e}")
    wide, wide_null = scores.double(), None if null is None else null.double()
    mass = operation.null_mass(wide, causal, wide_null)
    sums = operation.weights(wide, causal, wide_null).sum(-1) + (0.0 if mass is None else mass)
    off = float((sums - 1.0).abs().max())
    # Seven numbers of float64, each rounded once or twice: far below 1e-12. Anything that is not normalised is off by far more.
    expected = (
        "weights and null mass that sum to one" if operation.normalized else "normalized = True, since all rows sum to one"
    )
    checks.require((off <= 1e-12) == operation.normalized, "row sums", expected, f"a row that is off by {off:.1e}")

    def rows(start: int, stop: int) -> Tensor:
        part = wide_null if wide_null is None or wide_null.shape[2] == 1 else wide_null[:, :, start:stop]
        return operation.weights(wide[:, :, start:stop], causal[start:stop], part)

    parts = torch.cat([rows(0, 1), rows(1, 4), rows(4, 7)], dim=2)
    checks.close(parts, rows(0, 7), 1e-12, "blocks", "weights of a block of rows")
    everything, all_visible = operation.weights(scores, None, null), operation.weights(scores, torch.ones_like(causal), null)
    checks.close(everything, all_visible, 1e-6, "hidden keys", "weights with visible=None and with all keys visible")

    extreme = (torch.sign(scores) * 1e4).requires_grad_()
    weights = operation.weights(extreme, holes, null)
    (gradient,) = torch.autograd.grad(weights.sum(), extreme)
    for what, numbers in (("weights", weights), ("gradients", gradient)):
        checks.require(bool(numbers.isfinite().all()), "extreme scores", f"finite {what}", "infinite or undefined ones")

    point = scores[:1, :1, :4, :4].double().requires_grad_()
    nothing = [] if wide_null is None else [wide_null[:1, :1, :4].clone().requires_grad_()]

    def weigh(numbers: Tensor, *null_numbers: Tensor) -> Tensor:
        return operation.weights(numbers, holes[:4, :4], *null_numbers)

    _gradcheck(checks, weigh, point, *nothing)


def _check_outputs(checks: Checks, operation: Operation, call: _Call) -> None:
    causal = call.causal

    def run(dtype: torch.dtype, groups: int = 1) -> Tensor:
        (queries, keys, values), state = call.in_dtype(dtype)
        keys, values = repeat_groups(keys, groups), repeat_groups(values, groups)
        return operation.head_outputs(queries, keys, values, causal, _SCALING, state)[0]

    outputs, exact = run(torch.float32), run(torch.float64)
    changed = [tensor.clone() for tensor in (call.queries, call.keys, call.values)]
    for tensor in changed:
        tensor[:, :, 5:] = tensor[:, :, 5:] * -3.0 + 1.0
    state = dict(call.state)
    if "layer_input" in state:
        state["layer_input"] = state["layer_input"].clone()
        state["layer_input"][:, 5:] = 7.0
    after, _ = operation.head_outputs(changed[0], changed[1], changed[2], causal, _SCALING, state)
    moved = int((after[:, :, :5] != outputs[:, :, :5]).sum())
    checks.require(moved == 0, "causality", "outputs before a changed token bit-equal", f"{moved} different numbers")
    if not call.state or operation.is_softmax:
        groups = _SHAPE.num_heads // _SHAPE.num_kv_heads
        checks.close(run(torch.float64, groups), exact, 1e-12, "grouped queries", "outputs with repeated keys and values")
    checks.close(outputs, exact, _float32_budget(exact), "grouped queries", "float32 outputs against float64")

    (q, k, v), _ = call.in_dtype(torch.bfloat16)
    half, _ = operation.head_outputs(q, k, v, causal, _SCALING, call.state)
    # The inputs are rounded for both, so their rounding costs nothing.
    wide = {name: value.double() for name, value in call.state.items()}
    reference, _ = operation.head_outputs(q.double(), k.double(), v.double(), causal, _SCALING, wide)
    mapped = [tensor.double() for tensor in operation.features(q, k, call.state)]
    scores = (
        mapped[0] @ repeat_groups(mapped[1], mapped[0].shape[1] // mapped[1].shape[1]).transpose(2, 3) * _SCALING
    ).bfloat16()
    null = operation.null_scores(mapped[0], _SCALING, wide)
    weights = operation.weights(scores.double(), causal, null).bfloat16().double()
    mass = operation.null_mass(scores.double(), causal, null)
    groups = weights.shape[1] // v.shape[1]
    product = (weights @ repeat_groups(v.double(), groups)).bfloat16().double()
    plain = operation.finish(product, mass, wide).bfloat16()
    budget = 2.0 * float((plain.double() - reference).abs().max())
    checks.require(half.dtype == torch.bfloat16, "bfloat16", "outputs in the dtype of the queries", half.dtype)
    checks.close(half, reference, budget, "bfloat16", "outputs")

    torch._dynamo.reset()
    compiled = torch.compile(operation.head_outputs, fullgraph=True, backend="aot_eager")
    try:
        captured, _ = compiled(call.queries, call.keys, call.values, causal, _SCALING, call.state)
    except Exception as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'compile': {first_line(error)}") from error
    checks.close(captured, outputs, _float32_budget(exact), "compile", "outputs of the captured graph")


def _check_gradients(checks: Checks, operation: Operation, call: _Call) -> None:
    """Finite differences of the outputs in all inputs at once: a parameter whose gradient is lost shows here."""
    (queries, keys, values), state = call.in_dtype(torch.float64)
    names = list(state)
    rows = slice(0, 4)
    small = [tensor[:1, :, rows] for tensor in (queries, keys, values)]
    state_rows = [state[name][:1, rows] if name == "layer_input" else state[name] for name in names]
    points = [tensor.clone().requires_grad_() for tensor in (*small, *state_rows)]

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return operation.head_outputs(q, k, v, call.causal[rows, rows], _SCALING, dict(zip(names, rest, strict=True)))[0]

    _gradcheck(checks, attend, *points)


def _gradcheck(checks: Checks, function: Callable[..., Tensor], *points: Tensor) -> None:
    try:
        # fast_mode compares one random projection of the Jacobian: as sharp, and linear in the number of inputs.
        torch.autograd.gradcheck(function, points, fast_mode=True)
    except (RuntimeError, AssertionError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'gradient': {first_line(error)}") from error


def _check_path(checks: Checks, operation: Operation, call: _Call, path: str) -> None:
    """Outputs and all gradients of a path against the plain reference, causal and under a mask with a hole."""
    masked = call.causal.clone()
    masked[:, 2] = False
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 0.0)):
        for visible in (None, masked[None, None]):
            results = []
            for way in ("plain", path):
                (queries, keys, values), state = call.in_dtype(dtype)
                leaves = [tensor.requires_grad_() for tensor in (queries, keys, values, *state.values())]
                inputs = Inputs(
                    queries=queries,
                    keys=keys,
                    values=values,
                    visible=visible,
                    causal=visible is None,
                    scaling=_SCALING,
                    state=state,
                )
                if obstacle(way, operation, inputs):
                    break
                outputs, _ = compute(operation, inputs, way)
                target = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=dtype).view_as(outputs)
                results.append([outputs, *torch.autograd.grad((outputs * target).sum(), leaves, materialize_grads=True)])
            if len(results) < 2:
                continue
            names = ["outputs", *(f"gradient of {name}" for name in ("queries", "keys", "values", *call.state))]
            for name, plain, fast in zip(names, *results, strict=True):
                # float32: the budget of the outputs; a gradient is a sum over no more terms than those of the whole call.
                allowed = tolerance or 4 * _float32_budget(plain.detach().double())
                checks.close(fast.detach(), plain.detach(), allowed, f"path {path}", name)


def _check_in_model(checks: Checks, operation: Operation) -> None:
    model = tiny_sinklm(operation.to_dict(), vocab_size=40)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".operation_state." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(0, 40, (2, 10), generator=generator)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        cache, pieces = None, []
        for piece in tokens.split([4, 1, 1, 3, 1], dim=1):
            step = model(input_ids=piece, **cache_argument(model, cache), use_cache=True)
            cache = returned_cache(step)
            pieces.append(step.logits)
        # float64 throughout; only the angles of the rotary embedding are float32, and they are the same in both.
        checks.close(torch.cat(pieces, dim=1), logits, 1e-9, "cached decoding", "logits of decoding in pieces")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
            same = torch.equal(again(input_ids=tokens).logits, logits)
    loaded = getattr(again.layers[0].self_attn, "operation", None)
    checks.require(loaded == operation, "save and load", f"{operation}", loaded)
    checks.require(same, "save and load", "bit-identical logits", "others")


def _float32_budget(exact: Tensor) -> float:
    """Sums of 16 and of 8 products, each product and each sum rounded to 2**-24, and an exponential of a score up to 10."""
    return 64 * 2.0**-24 * 10 * max(1.0, float(exact.abs().max()))
