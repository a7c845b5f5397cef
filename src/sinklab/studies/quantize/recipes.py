"""Recipes: what was measured as settings of torchao, a Python file, and of llm-compressor, a YAML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sinklab.models.integer_linear import GROUP
from sinklab.results.summaries.quantize import QuantizeRecipe, QuantizeSummary
from sinklab.results.table import write_text
from sinklab.studies.quantize.scheme import WHOLE_BITS, Scheme, parse_schemes
from sinklab.studies.quantize.verdict import best_cure

__all__ = ["TORCHAO", "YAML", "llm_compressor_recipe", "recipe_of", "torchao_recipe", "write_recipes"]

TORCHAO, YAML = "quantize_torchao.py", "recipe.yaml"


def recipe_of(summary: QuantizeSummary, outside: Sequence[str], *, transposed: bool, ragged: str) -> QuantizeRecipe:
    """What both files are to say: the best of what these libraries have settings for.

    That is the scheme itself where activations stay whole and it has no gap, or a scale for each token; and the modules that a
    cure keeps whole, where it takes a gap away.

    Args:
        outside: linear maps outside of blocks, which stay as they are.
        transposed: whether some maps are ``Conv1D``, which neither library quantises.
        ragged: a map whose inputs make no whole groups, which neither library takes; empty where there is none.
    """
    (scheme,) = parse_schemes([summary["examined"]])
    per_token = scheme.activations != WHOLE_BITS
    base = next(entry for entry in summary["schemes"] if entry["scheme"] == scheme.name and entry["per_token"] == per_token)
    cures = [cure for cure in summary["cures"] if cure["configurable"]]
    if per_token and base["verdict"] == "none":
        cures = [cure for cure in cures if not cure["modules"]]  # the scale for each token is enough
    best = best_cure(cures, summary["minimal_effect"])
    modules = [] if best is None else [name for name in best["modules"] if "(" not in name]
    left = {"mean": base["gap"], "low": base["low"], "high": base["high"]} if best is None else best["left"]
    refused = {name: why for name, why in _refusals(scheme, transposed, ragged).items() if why}
    files = [name for name, library in ((TORCHAO, "torchao"), (YAML, "llm-compressor")) if library not in refused]
    return {
        "scheme": scheme.name,
        "per_token": per_token,
        "ignored": sorted({*outside, *modules}),
        "left": left,
        "files": files,
        "refused": refused,
    }


def _refusals(scheme: Scheme, transposed: bool, ragged: str) -> dict[str, str]:
    """Why a library cannot be given a scheme; empty where it can."""
    why = ""
    if transposed:
        why = "some linear maps are Conv1D, and it quantises nn.Linear alone"
    elif scheme.weights == WHOLE_BITS:
        why = "it has no scheme with weights as they are"
    elif scheme.weights <= 4 and ragged:
        why = f"it takes whole groups of {GROUP} inputs, and {ragged}"
    torchao = why
    if not why and scheme.activations not in (8, WHOLE_BITS):
        torchao = f"it has no integer scheme with activations of {scheme.activations} bits"
    return {"torchao": torchao, "llm-compressor": why}


def write_recipes(summary: QuantizeSummary, folder: Path) -> None:
    """Write the files of ``summary["recipe"]`` into a folder."""
    recipe = summary["recipe"]
    assert recipe is not None, "the summary of a finished measurement has one"
    for name, text in ((TORCHAO, torchao_recipe), (YAML, llm_compressor_recipe)):
        if name in recipe["files"]:
            write_text(text(summary), folder / name)


def torchao_recipe(summary: QuantizeSummary) -> str:
    """A Python file with ``quantize(model)``, by torchao's ``quantize_`` and its configuration classes (0.18)."""
    recipe = summary["recipe"]
    assert recipe is not None, "the summary of a finished measurement has one"
    (scheme,) = parse_schemes([recipe["scheme"]])
    group, per_token = scheme.weights <= 4, scheme.activations != WHOLE_BITS
    if per_token:
        config = "Int8DynamicActivationInt8WeightConfig" if scheme.weights == 8 else "Int8DynamicActivationIntxWeightConfig"
    else:
        config = "Int8WeightOnlyConfig" if scheme.weights == 8 else "IntxWeightOnlyConfig"
    arguments, names = "", [config]
    if "Intx" in config:
        granularity = f"PerGroup({GROUP})" if group else "PerAxis(0)"
        word = "weight_granularity" if per_token else "granularity"
        arguments = f"weight_dtype=torch.int{scheme.weights}, {word}={granularity}"
        names.append(granularity.partition("(")[0])
    imports = ", ".join(sorted((*names, "quantize_")))
    ignored = "".join(f"    {json.dumps(name)},\n" for name in recipe["ignored"])
    return f'''"""{_heading(summary)}"""

import torch
from torchao.quantization import {imports}

IGNORED = {{
{ignored}}}
"""Linear maps that stay in floating point."""


def quantize(model: torch.nn.Module) -> torch.nn.Module:
    """Quantise the linear maps of a model in place."""
    config = {config}({arguments})
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name not in IGNORED)
    return model
'''


def llm_compressor_recipe(summary: QuantizeSummary) -> str:
    """A YAML recipe with one ``QuantizationModifier``: weights, activations, and names to ignore."""
    recipe = summary["recipe"]
    assert recipe is not None, "the summary of a finished measurement has one"
    (scheme,) = parse_schemes([recipe["scheme"]])
    weights = f"num_bits: {scheme.weights}, type: int, symmetric: true, dynamic: false, "
    weights += f"strategy: group, group_size: {GROUP}" if scheme.weights <= 4 else "strategy: channel"
    lines = [f"# {line}" for line in _heading(summary).splitlines()]
    lines += ["default_stage:", "  default_modifiers:", "    QuantizationModifier:", "      ignore:"]
    lines += [f"        - {json.dumps(name)}" for name in recipe["ignored"]]
    if not recipe["ignored"]:
        lines[-1] += " []"
    lines += ["      config_groups:", "        group_0:", "          targets: [Linear]", f"          weights: {{{weights}}}"]
    if scheme.activations != WHOLE_BITS:
        numbers = f"num_bits: {scheme.activations}, type: int, symmetric: true, strategy: token, dynamic: true"
        lines.append(f"          input_activations: {{{numbers}}}")
    return "\n".join(lines) + "\n"


def _heading(summary: QuantizeSummary) -> str:
    """What the file is, and what was measured; what a name of a model holds must not end a string or a comment."""
    recipe = summary["recipe"]
    assert recipe is not None
    assert recipe["left"] is not None
    mean, low, high = (recipe["left"][name] for name in ("mean", "low", "high"))
    left = f"{mean:z.3f} [{low:z.3f}, {high:z.3f}]"
    name = json.dumps(summary["model"]).replace('"""', "'''")[1:-1]
    lines = f"{recipe['scheme'].upper()} for {name}, measured by sinklab: it leaves a gap of {left} {summary['unit']}."
    if summary["residual"]:
        lines += "\nThe gap is with the residual stream on grids too, which this recipe leaves in floating point."
    return lines
