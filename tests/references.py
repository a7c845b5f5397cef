"""Makes the reference sinks: draws rows, reads whole attention matrices in float64, and writes what they come to.

``SINKLAB_REAL_MODELS=… python -m tests.references`` writes ``src/sinklab/testing/reference_sinks``; models that are not there
keep the file that they have. Rows that a file has are kept.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tests.conftest import where_is

from sinklab.models.loading import LoadedModel, load_model
from sinklab.testing.references import THRESHOLD, dense_numbers

FOLDER = Path(__file__).parents[1] / "src" / "sinklab" / "testing" / "reference_sinks"

MODELS = {
    "embedded:softmax": None,
    "embedded:sigmoid": None,
    "shibatch/tiny1m": "tiny1m",
    "rxn4chemistry/rxnmapper": "rxnmapper-albert",
}
"""Name to the directory below SINKLAB_REAL_MODELS; ``None`` for those that come with the package."""

REACTIONS = (
    "CCO.CC(=O)O>>CC(=O)OCC.O",  # esterification
    "CC(=O)OCC.[Na+].[OH-]>>CC(=O)[O-].[Na+].CCO",  # saponification
    "c1ccccc1.BrBr>>Brc1ccccc1.Br",  # bromination
    "C=CC=C.C=C>>C1CCC=CC1",  # Diels-Alder
    "CC(=O)C.[H][H]>>CC(O)C",  # reduction
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1.Cl",  # amide
    "CBr.[Na+].[C-]#N>>CC#N.[Na+].[Br-]",  # substitution
    "O=Cc1ccccc1.CC(=O)C>>CC(=O)C=Cc1ccccc1.O",  # aldol condensation
)
"""What the encoder reads: reactions of textbooks."""

ROWS, LENGTH = 16, 64


def where(name: str) -> str | None:
    """What to load, if it is there."""
    directory = MODELS[name]
    if directory is None:
        return name
    path = where_is(directory)
    return str(path) if path else None


def own_text(loaded: LoadedModel) -> list[list[int]]:
    """Rows that a decoder draws from itself at temperature 1, behind its BOS."""
    model, generator = loaded.model, torch.Generator().manual_seed(0)
    rows = torch.full((ROWS, 1), loaded.tokenizer.bos_token_id)
    with torch.no_grad():
        while rows.shape[1] < LENGTH:
            logits = model(input_ids=rows, use_cache=False).logits[:, -1].double()
            rows = torch.cat((rows, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    return rows.tolist()


def matrices(loaded: LoadedModel, rows: list[list[int]]) -> list[np.ndarray]:
    """Attention of every row in float64, ``(layers, heads, queries, keys)``."""
    model = loaded.model.double()
    if loaded.operation == "softmax":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        read = [model(input_ids=torch.tensor([row]), output_attentions=True).attentions for row in rows]
    return [torch.cat(layers).numpy() for layers in read]


def tolerances(attention: list[np.ndarray]) -> dict[str, float]:
    """How far float32 may be off: 1e-4 for means of weights; a rate by what lies within 1e-4 of where it jumps.

    Weights of float32 are off by some 1e-6 at these sizes, so that 1e-4 leaves room for other orders of summation.
    """
    near, alphas, ties = 1e-4, [], []
    for weights in attention:
        share = weights / weights.sum(-1, keepdims=True)
        alphas.append(abs(share[..., 0].mean(-1) - THRESHOLD) < near)
        others = weights[..., 1:].max(-1)
        # The first query of a causal row sees one key, where nothing can tie.
        ties.append(abs(weights[..., 0] - others) < near)
    rate = 100.0 * np.stack(alphas).mean(0).max()
    argmax = 100.0 * np.concatenate(ties, -1).mean(-1).max()
    means = ("qiu2025_first_attention", "first_token_share", "first_four_share")
    return {"gu2024": rate + near, "kaul2024_first_argmax": argmax + near, "entropy": 10 * near} | dict.fromkeys(means, near)


def make(name: str, source: str, before: dict[str, object] | None) -> dict[str, object]:
    """The fields of a file."""
    loaded = load_model(source)
    kind = "encoder" if loaded.tokenizer.mask_token is not None else "decoder"
    if before is not None:
        rows = before["rows"]
    else:
        rows = [loaded.tokenizer(text)["input_ids"] for text in REACTIONS] if kind == "encoder" else own_text(loaded)
    attention = matrices(loaded, rows)
    numbers = {definition: np.round(values, 8).tolist() for definition, values in dense_numbers(attention).items()}
    allowed = {definition: float(f"{value:.3g}") for definition, value in tolerances(attention).items()}
    return {"model": name, "revision": loaded.revision, "kind": kind, "numbers": numbers, "tolerances": allowed, "rows": rows}


def written(fields: dict[str, object]) -> str:
    """As JSON, a row of numbers a line."""
    lines = [f'  "{name}": {json.dumps(fields[name])}' for name in ("model", "revision", "kind", "tolerances")]
    numbers = [f'    "{name}": {json.dumps(values)}' for name, values in fields["numbers"].items()]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in fields["rows"])
    lines += ['  "numbers": {\n' + ",\n".join(numbers) + "\n  }", '  "rows": [\n' + rows + "\n  ]"]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        path, source = FOLDER / (name.replace("/", "-").replace(":", "-") + ".json"), where(name)
        if source is None:
            print(f"{name}: not there, its file stays as it is")
            continue
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        path.write_text(written(make(name, source, known)), encoding="utf-8")
        print(f"{name}: {path.name}")
