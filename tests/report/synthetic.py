"""Output directories of audits, made up: the files of a real audit with numbers drawn from a small attention model of numpy.

The maps and the per-head numbers come from the same random scores, so that they tell one story: some heads have a high
score on the sink key, the others look at recent keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from sinklab.results.sections import to_json
from sinklab.results.table import COLUMNS, write_json
from sinklab.studies.audit.found import AuditFound, Condition, Place, Places, SinksFound, finding

HOSTILE = "</script><img src=x onerror=alert(1)>"
WORDS = [
    "def", " read", "(", "path", ")", ":", "\n", "    ", "return", " json", ".", "load",
    "s", " if", " not", " None", " self",
]  # fmt: skip


class TableMaker:
    """Rows of the long table, kept as arrays."""

    def __init__(self, **constants: Any) -> None:
        self.constants = constants
        self.parts: list[dict[str, Any]] = []

    def add(
        self, probe: str, metric: str, unit: str, value: Any, *, count: int = 100, module: str | None = None, **at: Any
    ) -> None:
        """One part: ``value`` and the coordinates in ``at`` broadcast to one flat array each."""
        names = list(at)
        arrays = np.broadcast_arrays(np.asarray(value, dtype=float), *(np.asarray(at[name]) for name in names))
        part: dict[str, Any] = {"probe": probe, "metric": metric, "unit": unit, "value": arrays[0].ravel(), "count": count}
        part["module"] = module
        part.update({name: array.ravel() for name, array in zip(names, arrays[1:], strict=True)})
        self.parts.append({**self.constants, "version": 1, **part})

    def write(self, path: Path) -> None:
        """Write parquet with the columns of the schema, without going through pandas."""
        types = {"string": pa.string(), "Int64": pa.int64(), "Float64": pa.float64()}
        schema = pa.schema([(name, types[dtype]) for name, (dtype, _) in COLUMNS.items()])
        tables = []
        for part in self.parts:
            size = len(part["value"])
            columns = {}
            for name, kind in zip(schema.names, schema.types, strict=True):
                given = part.get(name)
                if isinstance(given, np.ndarray):
                    columns[name] = pa.array(given, type=kind)
                else:
                    columns[name] = pa.nulls(size, kind) if given is None else pa.repeat(pa.scalar(given, kind), size)
            tables.append(pa.table(columns))
        pq.write_table(pa.concat_tables(tables) if tables else schema.empty_table(), path)


def attention(rng: np.random.Generator, length: int, sink: float, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and causal softmax weights of one head, ``(length, length)``, with ``sink`` added to the scores of one key."""
    queries, keys = np.arange(length)[:, None], np.arange(length)[None, :]
    scores = rng.normal(0, 1.2, (length, length)) - 0.06 * np.abs(queries - keys)
    scores[:, position] += sink
    hidden = keys > queries
    exponent = np.where(hidden, -np.inf, scores)
    weights = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return np.where(hidden, np.nan, scores), weights / weights.sum(axis=1, keepdims=True)


def a_place(position: int | None, **about: Any) -> Place:
    """A place of the sinks: a position, or with its ``kind`` and ``name`` another one."""
    name = about.get("name") or f"position {position}"
    known = {"kind": "position", "name": name, "description": name, "rate": 40.0, "heads": [], "token_share": 1.0}
    return Place(**known | {"position": position} | about)


def a_condition(corpus: str, bos: int, rate: float, **about: Any) -> Condition:
    """The sink under a condition, by its rate at position 0."""
    known = {"loss": 3.0, "sink": "position 0", "sink_rate": rate, "top_position": 0, "top_rate": rate}
    return Condition(corpus=corpus, bos=bos, sink_rate_gu2024=rate, **known | about)


def sinks_found(sinks: Sequence[Place], heads: int, **places: list[Place]) -> dict[str, Any]:
    """Fields of what was found of the sinks: those given, and nothing else."""
    others = {"followed": [], "weak": [], "silent": []} | places
    where = Places(
        sinks=list(sinks), **others, threshold=0.3, definition="", corpus="python_source", bos=1, samples=3, seq_len=64,
        heads_by_weight=0,
    )  # fmt: skip
    return {
        "sinks": where, "sink_rate_gu2024": 0.0, "candidate_positions": 33,
        "candidates_by_module": {}, "windowed_modules": 0, "num_modules": 2, "longest_sample": None,
        "sink_role": sinks[0].description if sinks else "none", "sink_heads": (sinks[0].sinking or 0) if sinks else 0,
        "sink_heads_by_weight": 0, "num_heads": heads, "first_token_mean_weight": 0.2, "null_mass": 0.0, "definitions": {},
        "conditions": [a_condition("python_source", 1, 0.0)],
    }  # fmt: skip


def a_part(name: str, *sinks: Place, heads: int = 4, **about: Any) -> dict[str, Any]:
    """An entry of ``parts`` of the summary of an encoder–decoder."""
    found = SinksFound(**sinks_found(sinks, heads) | {"part": name} | about)
    return to_json(dataclasses.replace(found, finding=finding(found, 0.3)))


def write_audit(
    folder: Path,
    *,
    model: str = "embedded:softmax",
    operation: str = "softmax",
    layers: int = 6,
    heads: int = 2,
    kv_heads: int | None = None,
    seq_len: int = 64,
    samples: int = 3,
    tiles: int = 64,
    sink_position: int | None = 0,
    seed: int = 0,
    omit: frozenset[str] | set[str] = frozenset(),
    maps: bool = True,
    hostile: bool = False,
    position_rows: int | None = None,
    summary: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
) -> Path:
    """Write table.parquet, run.json, summary.json and maps.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or heads
    place = sink_position or 0
    side = min(tiles, seq_len)
    # Sinks grow with depth and not in every head; the first layer has none.
    strength = np.clip(rng.normal(4.5, 2.5, (layers, heads)) * np.linspace(0.1, 1.6, layers)[:, None], 0, 8)
    if sink_position is None:
        strength[:] = 0
    weights = np.zeros((samples, layers, heads, side, side), np.uint8)
    scores = np.zeros_like(weights)
    ranges = np.zeros((samples, layers, heads, 2), np.float32)
    received, above = np.zeros((2, layers, heads, side))
    entropy, entropy_rest = np.zeros((2, layers, heads))
    visible_rows = np.arange(side, 0, -1)
    for sample in range(samples):
        for layer in range(layers):
            for head in range(heads):
                raw, weight = attention(rng, side, strength[layer, head], min(place, side - 1))
                low, high = np.nanmin(raw), np.nanmax(raw)
                scores[sample, layer, head] = np.where(
                    np.isnan(raw), 0, 1 + np.round((np.nan_to_num(raw) - low) / (high - low) * 254)
                ).astype(np.uint8)
                weights[sample, layer, head] = np.round(255 * np.sqrt(weight))
                ranges[sample, layer, head] = low, high
                column = weight.sum(axis=0) / visible_rows
                received[layer, head] += column / samples
                above[layer, head] += (column > 0.3) * 100 / samples
                entropy[layer, head] += -(weight * np.log(weight + 1e-12)).sum(axis=1).mean() / samples
                rest = np.delete(weight, place, axis=1)[1:] if place < side else weight
                rest = rest / (rest.sum(axis=1, keepdims=True) + 1e-12)
                entropy_rest[layer, head] += -(rest * np.log(rest + 1e-12)).sum(axis=1).mean() / samples
    # The last key is seen by one query only: its mean weight says nothing, real audits leave it out too.
    above[..., -1] = 0
    if sink_position is None:
        above[..., :] = 0
    shown = min(position_rows or seq_len, seq_len)
    mean_weight, rate = np.zeros((2, layers, heads, shown))
    known = min(side, shown)
    mean_weight[..., :known], rate[..., :known] = received[..., :known], above[..., :known]
    if shown > known:
        mean_weight[..., known:] = rng.gamma(1.0, 1e-3, (layers, heads, shown - known))

    corpus = f"{HOSTILE}.txt" if hostile else "python_source"
    name = f"{model}{HOSTILE}" if hostile else model
    table = TableMaker(run_id="r1", model=name, revision="abc", operation=operation, corpus=corpus, bos=1, seed=seed)
    sink_mean = mean_weight[..., place]
    depth = np.arange(layers) / max(1, layers - 1)

    def per_head(probe: str, metric: str, unit: str, values: np.ndarray) -> None:
        """Values ``(layers, heads)`` or ``(layers, heads, positions)``."""
        for layer, of_layer in enumerate(values):
            at = dict(zip(("head", "key_position"), np.indices(of_layer.shape, sparse=True), strict=False))
            table.add(probe, metric, unit, of_layer, module=f"model.layers.{layer}.self_attn", layer=layer, **at)

    def wanted(probe: str) -> bool:
        return probe not in omit

    named = {
        "gu2024": float(rate[..., 0].mean()),
        "qiu2025_first_attention": float(mean_weight[..., 0].mean()),
        "kaul2024_first_argmax": float((strength > 2).mean() * 100),
        "first_token_share": float(mean_weight[..., 0].mean()),
        "first_four_share": float(mean_weight[..., :4].sum(-1).mean()),
    }
    if wanted("sink_rate"):
        table.add("sink_rate", "gu2024", "percent", rate.mean(axis=(0, 1)), key_position=np.arange(shown))
        per_head("sink_rate", "gu2024", "percent", rate)
        units = {"kaul2024_first_argmax": "percent"}
        for metric in ("qiu2025_first_attention", "kaul2024_first_argmax", "first_token_share", "first_four_share"):
            table.add("sink_rate", metric, units.get(metric, "fraction"), named[metric])
            share = sink_mean * 100 if metric in units else sink_mean
            per_head("sink_rate", metric, units.get(metric, "fraction"), share)
    if wanted("attention_received"):
        per_head("attention_received", "mean_weight", "fraction", mean_weight)
    if wanted("null_mass"):
        per_head("null_mass", "null_mass", "fraction", np.zeros((layers, heads)))
        per_head("null_mass", "row_mass", "fraction", np.ones((layers, heads)))
    if wanted("entropy"):
        per_head("entropy", "entropy", "nats", entropy)
        per_head("entropy", "entropy_without_sink", "nats", entropy_rest)
    small = min(shown, 64)
    if wanted("hidden_norm"):
        for layer in range(-1, layers):
            norm = rng.normal(8 + layer, 0.5, small)
            if layer >= 1 and sink_position is not None and place < small:
                norm[place] = 220 if layer < layers - 1 else 90
            at = {"layer": layer, "module": f"model.layers.{layer}"}
            table.add("hidden_norm", "hidden_norm", "norm", norm, key_position=np.arange(small), **at)
            table.add("hidden_norm", "first_to_rest_ratio", "ratio", norm[0] / norm[1:].mean(), **at)
    for probe, first, rest in (("key_norm", 4.0, 14.0), ("value_norm", 0.4, 3.0)):
        if wanted(probe):
            norms = rng.normal(rest * (1 + depth[:, None, None]), 0.3, (layers, kv_heads, small))
            if sink_position is not None and place < small:
                norms[..., place] = first
            per_head(probe, probe, "norm", norms)
    if wanted("score_gap"):
        per_head("score_gap", "sink_score", "score", strength - 1)
        per_head("score_gap", "other_score", "score", np.full((layers, heads), -1.5))
        per_head("score_gap", "gap", "score", strength + 0.5)
        per_head("score_gap", "sink_weight", "fraction", sink_mean)
    if wanted("massive_activation"):
        for layer in range(layers):
            peak = 180.0 if sink_position is not None and 1 <= layer < layers - 1 else 6.0
            at = {"layer": layer, "module": f"model.layers.{layer}"}
            table.add("massive_activation", "massive_count", "count", 2.0 if peak > 100 else 0.0, **at)
            table.add("massive_activation", "max_abs", "norm", peak, **at)
            table.add("massive_activation", "max_to_median", "ratio", peak / 0.12, **at)
    if wanted("outliers"):
        for layer in range(layers):
            at = {"layer": layer, "module": f"model.layers.{layer}.self_attn"}
            table.add("outliers", "max_inf_norm", "norm", 3 + 4 * depth[layer], **at)
            table.add("outliers", "kurtosis", "ratio", 3 + 60 * depth[layer], **at)
        table.add("outliers", "max_inf_norm", "norm", 7.0)
        table.add("outliers", "kurtosis", "ratio", 41.5)
    if wanted("head_output"):
        per_head("head_output", "relative_norm", "ratio", 0.4 / (1 + strength))
        per_head("head_output", "output_norm", "norm", 2 / (1 + strength))
    main = dict(table.constants)
    conditions = []
    for other, bos, factor in ((corpus, 1, 1.0), (corpus, 0, 0.7), ("random_tokens", 1, 0.8), ("repeated_token", 1, 0.0)):
        table.constants = {**main, "corpus": other, "bos": bos}
        if bos == 0 or other != corpus:
            table.add("sink_rate", "gu2024", "percent", rate.mean(axis=(0, 1))[:small] * factor, key_position=np.arange(small))
        top = float(rate[..., place].mean()) * factor
        loss = 3.2 + 0.4 * (1 - factor) if other == corpus else 9.1 + bos
        conditions.append(a_condition(other, bos, named["gu2024"] * factor, loss=loss, top_position=place, top_rate=top))
    table.write(folder / "table.parquet")

    tokens = [["<s>", *rng.choice(WORDS, seq_len - 1).tolist()] for _ in range(samples)]
    for line in tokens if hostile else ():
        line[3] = HOSTILE
    sink_token = HOSTILE if hostile else tokens[0][place] if place < seq_len else ""
    sinks = []
    if sink_position is not None:
        where = zip(*np.nonzero(rate[..., place]), strict=True)
        by_head = [(int(l), int(h), f"model.layers.{l}.self_attn", float(rate[l, h, place])) for l, h in where]
        by_head.sort(key=lambda entry: -entry[3])
        sinks.append(a_place(place, text=sink_token, rate=float(rate[..., place].mean()), heads=by_head, sinking=len(by_head)))
    found = AuditFound(
        **sinks_found(sinks, layers * heads), summary_version=1, model=name, revision=None, operation=operation, loss=3.2134,
        loss_kind="next token", loss_definition="cross-entropy of the next token", bits_per_byte=None,
        warnings=[], samples_definition=None, normalized=True, corpus=corpus, bos=1, bos_name="BOS", kind="text",
        seq_len=seq_len, samples=samples, threshold=0.3, off_seam_modules=[], layers_without_attention={}, tier=None,
        not_measured={},
    )  # fmt: skip
    found = dataclasses.replace(
        found, sink_rate_gu2024=named["gu2024"], definitions=named, conditions=conditions, candidate_positions=seq_len // 2 + 1,
        candidates_by_module={f"model.layers.{layer}.self_attn": seq_len // 2 + 1 for layer in range(layers)},
    )  # fmt: skip
    found = dataclasses.replace(found, finding=finding(found, 0.3))
    write_json(to_json(found) | (summary or {}), folder / "summary.json")
    settings = {"threshold": 0.3, "bos": 1}
    definition = {"probe": "sink_rate", "metric": "gu2024", "version": 1, "text": "", "paper": "Gu 2024", "unit": "percent"}
    write_json(
        {
            "kind": "audit",
            "config": {"model": name, "corpus": corpus, "seq_len": seq_len, "samples": samples, "seed": seed, **settings},
            "versions": {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0", "sinklab": "0.1.0"},
            "commit": "0123abc",
            "hardware": {"cpu": "2 cores", "device": "cpu"},
            "dtype": "float32",
            "wall_seconds": 31.4,
            "token_sha256": "9f" * 32,
            "definitions": [definition],
            "model": {"class": "SinkLM", "num_layers": layers, "num_heads": heads, "parameters": 3_400_000},
            "calls": {f"model.layers.{layer}.self_attn": 13 for layer in range(layers)},
            "checks": {"outputs_found_bit_identical": 1, "rows_verified": 2400, "largest_error": 2.4e-07},
            **(run or {}),
        },
        folder / "run.json",
    )
    if maps:
        modules = [f"model.layers.{layer}.self_attn" for layer in range(layers)]
        about = {"tokens": json.dumps(tokens), "seq_len": str(seq_len), "modules": json.dumps(modules)}
        arrays = {"weights": weights, "scores": scores, "scores_range": ranges}
        save_file(arrays, folder / "maps.safetensors", metadata=about | {"tile": str(-(-seq_len // side))})
    return folder
