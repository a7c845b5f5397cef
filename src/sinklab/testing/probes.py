"""The contract of probes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import transformers
from torch import Tensor, nn

from sinklab.attention.probe import NEEDS, Probe
from sinklab.attention.session import attend
from sinklab.errors import ContractError, ResultError
from sinklab.results.metric import Metric
from sinklab.results.table import make_table, unpacked
from sinklab.testing._checks import Checks

_NUMBERS = ("layer", "head", "query_position", "key_position")
_COORDINATES = ("metric", "module", *_NUMBERS)


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


def check_probe(probe_class: type[Probe], **parameters: object) -> None:
    """Check that a probe changes nothing, follows the schema, and does not depend on how the samples are laid out.

    The checks, on the models of :func:`tiny_models`:

    - *declaration*: a name, ``needs`` that exist, ``metrics`` with versions from 1 and one name each;
    - *logits unchanged*: bit-identical with and without the probe;
    - *rows*: the columns of the schema, one of its metrics with values inside its range, finite values, counts of
      at least 1, whole numbers for layers, heads and positions, no two rows for one place, and the same rows when asked twice;
    - *batch size*, *order*, *left padding*, *right padding*: the same rows as from the samples one by one.

    Args:
        probe_class: a concrete subclass of :class:`Probe`.
        parameters: its parameters.

    Raises:
        ContractError: a check failed.
    """
    checks = Checks(f"probe {getattr(probe_class, 'name', probe_class.__name__)!r}")
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

        backwards = measure({"input_ids": sample} for sample in reversed(samples))
        _check_same(checks, _check_rows(checks, probe_class, backwards), rows, f"order ({name})")
        for side in ("left", "right"):
            as_batch = _check_rows(checks, probe_class, measure([padded(samples, side)]))
            _check_same(checks, as_batch, rows, f"{side} padding ({name})")


def _check_declaration(checks: Checks, probe_class: type[Probe]) -> None:
    declared = {name: getattr(probe_class, name, None) for name in ("name", "needs", "metrics")}
    name, needs, metrics = declared.values()
    checks.require(isinstance(name, str), "declaration", "a name (register the class)", repr(name))
    unknown = sorted(set(needs) - set(NEEDS)) if isinstance(needs, frozenset) else repr(needs)
    checks.require(not unknown, "declaration", f"needs among {', '.join(NEEDS)}", unknown)
    declares = isinstance(metrics, tuple) and bool(metrics) and all(isinstance(metric, Metric) for metric in metrics)
    checks.require(declares, "declaration", "a tuple of Metric", repr(metrics))
    for metric in metrics or ():
        whole = isinstance(metric.version, int) and metric.version >= 1
        checks.require(whole, "declaration", f"a version of {metric.name} from 1", repr(metric.version))
    names = [metric.name for metric in metrics or ()]
    checks.require(len(set(names)) == len(names), "declaration", "one metric under each name", ", ".join(names))


def _check_rows(checks: Checks, probe_class: type[Probe], probe: Probe) -> dict[tuple[object, ...], tuple[float, int]]:
    """Rows as coordinates to value and count, after each has been looked at."""
    declared = {metric.name: metric for metric in probe_class.metrics}
    try:
        for row in probe.rows():
            given = row.get("metric")
            checks.require(given in probe_class.metrics, "rows", f"a Metric among {', '.join(declared)}", given)
        rows = list(unpacked(probe.rows()))
        checks.require(len(rows) > 0, "rows", "at least one row", "none")
        checks.require(list(unpacked(probe.rows())) == rows, "rows", "the same rows when asked twice", "others")
        make_table(probe.rows(), probe=probe.name)
    except (ResultError, TypeError, ValueError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'rows': {error}") from error
    values: dict[tuple[object, ...], tuple[float, int]] = {}
    for single in rows:
        metric, value, count = single["metric"], single.get("value"), single.get("count")
        least, most = bounds = declared[metric].range
        # Means of numbers inside the range may leave it by rounding.
        slack = 1e-6 * max([1.0, *(abs(bound) for bound in bounds if math.isfinite(bound))])
        inside = isinstance(value, float) and math.isfinite(value) and least - slack <= value <= most + slack
        checks.require(inside, "rows", f"a number in [{least}, {most}] for {metric}", repr(value))
        checks.require(isinstance(count, int) and count >= 1, "rows", f"a count of at least 1 for {metric}", repr(count))
        for column in _NUMBERS:
            place = single.get(column)
            whole = place is None or (isinstance(place, int) and not isinstance(place, bool))
            checks.require(whole, "rows", f"a whole number, or nothing, as {column} of {metric}", repr(place))
        cell = tuple(single.get(name) for name in _COORDINATES)
        checks.require(cell not in values, "rows", "one row for each place", f"two for {_words(cell)}")
        values[cell] = (float(value or 0.0), int(count or 0))
    return values


def _check_same(
    checks: Checks,
    values: dict[tuple[object, ...], tuple[float, int]],
    expected: dict[tuple[object, ...], tuple[float, int]],
    check: str,
) -> None:
    different = sorted(map(_words, values.keys() ^ expected.keys()))
    checks.require(not different, check, "rows for the same places", f"{len(different)} others, such as {different[:1]}")
    for cell, (value, count) in expected.items():
        # The models compute in float64; a probe may round to float32, 6e-8, in sums of a few dozen numbers.
        near = abs(values[cell][0] - value) <= 1e-5 * max(abs(value), 1e-2)
        checks.require(near and values[cell][1] == count, check, f"{value} of {count} at {_words(cell)}", values[cell])


def padded(samples: list[Tensor], side: str) -> dict[str, Tensor]:
    """Samples ``(1, length)`` as one batch with padding at a side, its mask, and positions that count tokens."""
    longest = max(sample.shape[1] for sample in samples)
    ids, mask = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(2))
    for row, sample in enumerate(samples):
        where = slice(longest - sample.shape[1], None) if side == "left" else slice(0, sample.shape[1])
        ids[row, where], mask[row, where] = sample[0], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _words(cell: tuple[object, ...]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(_COORDINATES, cell, strict=True) if value is not None)
