"""What claims state, read from their files as text, so that they are listed in the time of a command without torch."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from sinklab.jobs.claim import Claim
from sinklab.jobs.scale import TRAINED_COSTS, Base
from sinklab.registry import claims
from sinklab.results.source_text import constants_of, file_of, text_of

__all__ = ["Stated", "stated"]

TEXTS = ("statement", "source", "reference", "published")


@dataclasses.dataclass(frozen=True)
class Stated:
    """The words of a claim, its cost at every scale, its bases, and whether it is measured on checkpoints."""

    name: str
    statement: str
    source: str
    reference: str
    published: str
    costs: dict[str, str]
    bases: tuple[Base, ...] = ("bos",)
    checkpoint: bool = False


def stated(name: str) -> Stated:
    """What the file of a claim states.

    A file that puts its claim together in another way than by one call of ``Claim`` with literal words is imported.

    Raises:
        UnknownNameError: no claim is called so.
        ContractError: its file cannot be found or imported.
    """
    claims.summary(name)  # refuses unknown names, with a suggestion
    tree = ast.parse(file_of("claims", name).read_text(encoding="utf-8"))
    return _read(name, tree) or _imported(name)


def _read(name: str, tree: ast.Module) -> Stated | None:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Claim"]
    if len(calls) != 1 or calls[0].args:
        return None
    arguments = {keyword.arg: keyword.value for keyword in calls[0].keywords if keyword.arg is not None}
    constants = _constants(tree)
    costs = _literal(arguments["costs"], constants) if "costs" in arguments else dict(TRAINED_COSTS)
    bases = _literal(arguments["bases"], constants) if "bases" in arguments else Claim.bases
    words = {field: _literal(arguments[field], constants) for field in TEXTS if field in arguments}
    if len(words) < len(TEXTS) or not all(isinstance(text, str) for text in words.values()) or not isinstance(costs, dict):
        return None
    if not isinstance(bases, tuple):
        return None
    return Stated(name=name, costs=costs, bases=bases, checkpoint="checkpoint" in arguments, **words)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Constants of a file, and those that it takes from private files beside it, which several claims share."""
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinklab.claims._"):
            beside = constants_of(ast.parse(file_of("claims", str(node.module).rpartition(".")[2]).read_text(encoding="utf-8")))
            constants |= {alias.asname or alias.name: beside[alias.name] for alias in node.names if alias.name in beside}
    return constants | constants_of(tree)


def _literal(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """The value of literals, module constants, ``+`` and f-strings of them; ``None`` for anything else."""
    if isinstance(node, (ast.JoinedStr, ast.BinOp)):
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
        plain = all(isinstance(constants.get(part.id), ast.Constant) for part in parts)
        called = any(isinstance(part, (ast.Call, ast.Attribute, ast.Subscript)) for part in ast.walk(node))
        return text_of(node, constants) if plain and not called else None
    if isinstance(node, ast.Name) and node.id in constants:
        return _literal(constants[node.id], constants)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _imported(name: str) -> Stated:
    claim: Claim = claims[name]()
    costs = {str(scale): str(cost) for scale, cost in claim.costs.items()}
    on_checkpoint = claim.checkpoint is not None
    return Stated(name, claim.statement, claim.source, claim.reference, claim.published, costs, claim.bases, on_checkpoint)
