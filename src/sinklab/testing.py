"""The contracts of plug-ins as functions that anybody can call: does this probe, this operation do what its kind promises?

    from sinklab.testing import check_operation, check_probe

    def test_my_probe():
        check_probe(MyProbe, threshold=0.5)

A check that fails raises :class:`~sinklab.errors.ContractError` with the name of the check, what was expected and what was
found. The built-in plug-ins pass the same checks. Everything runs on the CPU, offline, in seconds.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from sinklab.attention.operation import Operation
from sinklab.attention.probe import NEEDS, Definition, Probe
from sinklab.attention.session import attend
from sinklab.errors import ContractError, ResultError, SinklabError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.results.table import make_table, unpacked

__all__ = ["check_operation", "check_probe", "tiny_models"]

_COORDINATES = ("metric", "module", "layer", "head", "query_position", "key_position")


class _Checks:
    """Raises in the name of one plug-in."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def require(self, condition: bool, check: str, expected: str, got: object) -> None:
        if not condition:
            raise ContractError(f"{self.subject} breaks its contract, check {check!r}: expected {expected}, got {got}")

    def close(self, found: Tensor, expected: Tensor, tolerance: float, check: str, what: str) -> None:
        error = float((found.double() - expected.double()).abs().max())
        self.require(error <= tolerance, check, f"{what} within {tolerance:.1e}", f"a difference of {error:.1e}")


# --- probes ----------------------------------------------------------------------------------------------------------------


def tiny_models() -> dict[str, nn.Module]:
    """Two decoders with random weights, two layers and four heads each, in float64: Llama with grouped queries, and GPT-2."""
    shapes = {
        "llama": transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        ),
    }
    models = {}
    for name, config in shapes.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
            for parameter in model.parameters():
                # The usual initialisation is so small that all heads attend evenly, and a wrong probe would look right.
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.3)
        models[name] = model.eval()
    return models


def check_probe(probe_class: type[Probe], **parameters: Any) -> None:
    """Check that a probe changes nothing, follows the schema, and does not depend on how the samples are laid out.

    The checks, on the models of :func:`tiny_models`:

    - *declaration*: a name, a version from 1, ``needs`` that exist, a :class:`Definition` for each metric;
    - *logits unchanged*: bit-identical with and without the probe;
    - *rows*: the columns of the schema, a defined metric with the unit and range of its definition, finite values, counts of
      at least 1, no two rows for one place, and the same rows when asked twice;
    - *batch size*, *split and merge*, *left padding*, *right padding*: the same rows as from the samples one by one.

    Args:
        probe_class: a concrete subclass of :class:`Probe`.
        parameters: its parameters.

    Raises:
        ContractError: a check failed.
    """
    checks = _Checks(f"probe {getattr(probe_class, 'name', probe_class.__name__)!r}")
    _check_declaration(checks, probe_class)
    lengths = (5, 9, 3, 9)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(1, 50, (1, length), generator=generator) for length in lengths]
    for name, model in tiny_models().items():

        def measure(batches: Iterable[dict[str, Tensor]], model: nn.Module = model) -> Probe:
            probe = probe_class(**parameters)
            with torch.no_grad(), attend(model, probes=[probe]):
                for batch in batches:
                    model(**batch)
            return probe

        with torch.no_grad():
            before = model(input_ids=samples[1]).logits
            with attend(model, probes=[probe_class(**parameters)]):
                during = model(input_ids=samples[1]).logits
        changed = int((before != during).sum())
        checks.require(changed == 0, "logits unchanged", f"bit-identical logits of {name}", f"{changed} different numbers")

        alone = measure({"input_ids": sample} for sample in samples)
        rows = _check_rows(checks, probe_class, alone)
        same = [sample for sample, length in zip(samples, lengths, strict=True) if length == 9]
        one_by_one = _check_rows(checks, probe_class, measure({"input_ids": sample} for sample in same))
        together = _check_rows(checks, probe_class, measure([{"input_ids": torch.cat(same)}]))
        _check_same(checks, together, one_by_one, f"batch size ({name})")

        half = measure({"input_ids": sample} for sample in samples[:1])
        half.merge(measure({"input_ids": sample} for sample in samples[1:]))  # type: ignore[arg-type]
        _check_same(checks, _check_rows(checks, probe_class, half), rows, f"split and merge ({name})")
        for side in ("left", "right"):
            padded = _check_rows(checks, probe_class, measure([_padded(samples, side)]))
            _check_same(checks, padded, rows, f"{side} padding ({name})")


def _check_declaration(checks: _Checks, probe_class: type[Probe]) -> None:
    declared = {name: getattr(probe_class, name, None) for name in ("name", "version", "needs", "definitions")}
    name, version, needs, definitions = declared.values()
    checks.require(isinstance(name, str), "declaration", "a name (register the class)", repr(name))
    checks.require(isinstance(version, int) and version >= 1, "declaration", "a version from 1", repr(version))
    unknown = sorted(set(needs) - set(NEEDS)) if isinstance(needs, frozenset) else repr(needs)
    checks.require(not unknown, "declaration", f"needs among {', '.join(NEEDS)}", unknown)
    described = isinstance(definitions, Mapping) and all(isinstance(one, Definition) for one in definitions.values())
    checks.require(bool(definitions) and described, "declaration", "a Definition for every metric", repr(definitions))


def _check_rows(checks: _Checks, probe_class: type[Probe], probe: Probe) -> dict[tuple[Any, ...], tuple[float, int]]:
    """Rows as coordinates to value and count, after each has been looked at."""
    probe.finish()
    rows = list(unpacked(probe.rows()))
    checks.require(len(rows) > 0, "rows", "at least one row", "none")
    checks.require(list(unpacked(probe.rows())) == rows, "rows", "the same rows when asked twice", "others")
    try:
        make_table(rows, probe=probe.name, version=probe.version)
    except (ResultError, TypeError, ValueError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'rows': {error}") from error
    found: dict[tuple[Any, ...], tuple[float, int]] = {}
    for row in rows:
        metric, unit, value, count = (row.get(name) for name in ("metric", "unit", "value", "count"))
        known = ", ".join(probe_class.definitions)
        checks.require(metric in probe_class.definitions, "rows", f"a metric among {known}", metric)
        definition = probe_class.definitions[str(metric)]
        checks.require(unit == definition.unit, "rows", f"{metric} in {definition.unit}", unit)
        least, most = definition.range
        # Means of numbers inside the range may leave it by rounding.
        slack = 1e-6 * max([1.0, *(abs(bound) for bound in definition.range if math.isfinite(bound))])
        inside = isinstance(value, float) and math.isfinite(value) and least - slack <= value <= most + slack
        checks.require(inside, "rows", f"a number in [{least}, {most}] for {metric}", repr(value))
        checks.require(isinstance(count, int) and count >= 1, "rows", f"a count of at least 1 for {metric}", repr(count))
        place = tuple(row.get(name) for name in _COORDINATES)
        checks.require(place not in found, "rows", "one row for each place", f"two for {_words(place)}")
        found[place] = (float(value or 0.0), int(count or 0))
    return found


def _check_same(
    checks: _Checks,
    found: dict[tuple[Any, ...], tuple[float, int]],
    expected: dict[tuple[Any, ...], tuple[float, int]],
    check: str,
) -> None:
    different = sorted(map(_words, found.keys() ^ expected.keys()))
    checks.require(not different, check, "rows for the same places", f"{len(different)} others, such as {different[:1]}")
    for place, (value, count) in expected.items():
        # The models compute in float64; a probe may round to float32, 6e-8, in sums of a few dozen numbers.
        near = abs(found[place][0] - value) <= 1e-5 * max(abs(value), 1e-2)
        checks.require(near and found[place][1] == count, check, f"{value} of {count} at {_words(place)}", found[place])


def _padded(samples: list[Tensor], side: str) -> dict[str, Tensor]:
    longest = max(sample.shape[1] for sample in samples)
    ids, mask = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(2))
    for row, sample in enumerate(samples):
        where = slice(longest - sample.shape[1], None) if side == "left" else slice(0, sample.shape[1])
        ids[row, where], mask[row, where] = sample[0], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _words(place: tuple[Any, ...]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(_COORDINATES, place, strict=True) if value is not None)


# --- operations ------------------------------------------------------------------------------------------------------------


def check_operation(operation: Operation) -> None:
    """Check that an operation may stand in for softmax in any decoder.

    The checks:

    - *parameters*: it is registered, and ``to_dict`` and ``from_dict`` give it back;
    - *hidden keys*: their weights are exactly 0, also in rows that see no key; weights are float32 or wider;
    - *row sums*: one if ``normalized``, otherwise not always;
    - *blocks*: a block of rows computed alone is the same as within the whole;
    - *causality*: changing a token leaves earlier outputs bit-equal;
    - *extreme scores*: finite weights and gradients at scores of ±1e4;
    - *gradient*: ``torch.autograd.gradcheck`` in float64;
    - *grouped queries*: shared keys and values give what repeated ones give;
    - *bfloat16*: an error of at most twice that of a plain run, which rounds scores and weights to bfloat16 and nothing else;
    - *compile*: ``head_outputs`` is captured as one graph and gives the same;
    - *cached decoding*, *save and load*: in a small :class:`~sinklab.models.language_model.SinkLM`.

    Args:
        operation: an instance, with the parameters to check.

    Raises:
        ContractError: a check failed.
    """
    checks = _Checks(f"operation {getattr(operation, 'name', type(operation).__name__)!r}")
    generator = torch.Generator().manual_seed(0)
    try:
        again = Operation.from_dict(operation.to_dict())
    except (SinklabError, AttributeError, TypeError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'parameters': {error}") from error
    frozen = dataclasses.is_dataclass(operation) and operation.__dataclass_params__.frozen  # type: ignore[attr-defined]
    checks.require(frozen and again == operation, "parameters", f"a frozen dataclass equal to {operation}", again)
    _check_weights(checks, operation, 2.0 * torch.randn(2, 3, 7, 7, generator=generator))
    _check_head_outputs(checks, operation, generator)
    _check_in_model(checks, operation)


def _check_weights(checks: _Checks, operation: Operation, scores: Tensor) -> None:
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    holes = causal.clone()
    holes[3] = False
    for visible in (causal, holes):
        weights = operation.weights(scores, visible)
        checks.require(weights.dtype in (torch.float32, torch.float64), "hidden keys", "float32 or wider", weights.dtype)
        largest = float(weights.masked_fill(visible, 0.0).abs().max())
        checks.require(largest == 0.0, "hidden keys", "weights of exactly 0 on hidden keys", f"a weight of {largest:.1e}")
    sums = operation.weights(scores.double(), causal).sum(-1)
    off = float((sums - 1.0).abs().max())
    # Seven numbers of float64, each rounded once or twice: far below 1e-12. Anything that is not normalised is off by far more.
    expected = "rows that sum to one" if operation.normalized else "normalized = True, since all rows sum to one"
    checks.require((off <= 1e-12) == operation.normalized, "row sums", expected, f"a row that is off by {off:.1e}")

    whole = operation.weights(scores.double(), causal)
    parts = [operation.weights(scores[:, :, rows].double(), causal[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 7))]
    checks.close(torch.cat(parts, dim=2), whole, 1e-12, "blocks", "weights of a block of rows")

    everything = operation.weights(scores, None)
    seen = operation.weights(scores, torch.ones_like(causal))
    checks.close(everything, seen, 1e-6, "hidden keys", "weights with visible=None and with all keys visible")

    extreme = (torch.sign(scores) * 1e4).requires_grad_()
    weights = operation.weights(extreme, holes)
    (gradient,) = torch.autograd.grad(weights.sum(), extreme)
    for what, numbers in (("weights", weights), ("gradients", gradient)):
        checks.require(bool(numbers.isfinite().all()), "extreme scores", f"finite {what}", "infinite or undefined ones")

    point = scores[:1, :1, :4, :4].double().requires_grad_()

    def weigh(numbers: Tensor) -> Tensor:
        return operation.weights(numbers, holes[:4, :4])

    try:
        torch.autograd.gradcheck(weigh, (point,))
    except (RuntimeError, AssertionError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'gradient': {_first_line(error)}") from error


def _check_head_outputs(checks: _Checks, operation: Operation, generator: torch.Generator) -> None:
    queries = torch.randn(2, 4, 8, 16, generator=generator)
    keys, values = torch.randn(2, 2, 8, 16, generator=generator), torch.randn(2, 2, 8, 16, generator=generator)
    causal, scaling = torch.ones(8, 8, dtype=torch.bool).tril(), 0.25

    outputs, _ = operation.head_outputs(queries, keys, values, causal, scaling)
    changed = [tensor.clone() for tensor in (queries, keys, values)]
    for tensor in changed:
        tensor[:, :, 5:] = tensor[:, :, 5:] * -3.0 + 1.0
    after, _ = operation.head_outputs(changed[0], changed[1], changed[2], causal, scaling)
    moved = int((after[:, :, :5] != outputs[:, :, :5]).sum())
    checks.require(moved == 0, "causality", "outputs before a changed token bit-equal", f"{moved} different numbers")

    q, k, v = (tensor.double() for tensor in (queries, keys, values))
    exact, _ = operation.head_outputs(q, k, v, causal, scaling)
    repeated, _ = operation.head_outputs(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), causal, scaling)
    checks.close(repeated, exact, 1e-12, "grouped queries", "outputs with repeated keys and values")
    checks.close(outputs, exact, _float32_budget(exact), "grouped queries", "float32 outputs against float64")

    small = [tensor.bfloat16() for tensor in (queries, keys, values)]
    q, k, v = (tensor.double() for tensor in small)  # the inputs are rounded for both, so their rounding costs nothing
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.transpose(2, 3) * scaling
    reference = operation.weights(scores, causal) @ v
    plain = operation.weights(scores.bfloat16().double(), causal).bfloat16().double() @ v
    budget = 2.0 * float((plain.bfloat16().double() - reference).abs().max())
    found, _ = operation.head_outputs(small[0], small[1], small[2], causal, scaling)
    checks.require(found.dtype == torch.bfloat16, "bfloat16", "outputs in the dtype of the queries", found.dtype)
    checks.close(found, reference, budget, "bfloat16", "outputs")

    torch._dynamo.reset()
    compiled = torch.compile(operation.head_outputs, fullgraph=True, backend="aot_eager")
    try:
        captured, _ = compiled(queries, keys, values, causal, scaling)
    except Exception as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'compile': {_first_line(error)}") from error
    checks.close(captured, outputs, _float32_budget(exact), "compile", "outputs of the captured graph")


def _check_in_model(checks: _Checks, operation: Operation) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = SinkLMConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            operation=operation.to_dict(),
        )
        model = SinkLM(config).double().eval()
        tokens = torch.randint(0, 40, (2, 10))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        cache, pieces = None, []
        for piece in tokens.split([4, 1, 1, 3, 1], dim=1):
            step = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            pieces.append(step.logits)
        # float64 throughout; only the angles of the rotary embedding are float32, and they are the same in both.
        checks.close(torch.cat(pieces, dim=1), logits, 1e-9, "cached decoding", "logits of decoding in pieces")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
            same = torch.equal(again(input_ids=tokens).logits, logits)
    kept = getattr(again.layers[0].self_attn, "operation", None)
    checks.require(kept == operation, "save and load", f"{operation}", kept)
    checks.require(same, "save and load", "bit-identical logits", "others")


def _float32_budget(exact: Tensor) -> float:
    """Sums of 16 and of 8 products, each product and each sum rounded to 2**-24, and an exponential of a score up to 10."""
    return 64 * 2.0**-24 * 10 * max(1.0, float(exact.abs().max()))


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
