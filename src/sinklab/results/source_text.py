"""Plug-ins read as text: where the file of one lies, and what strings stand in it, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from sinklab.errors import ContractError
from sinklab.registry import KINDS, entry_points

__all__ = ["constants_of", "file_of", "registers", "text_of", "unparsed"]


def file_of(plural: str, name: str) -> Path:
    """The file of a plug-in, of sinklab or of another package.

    Raises:
        ContractError: there is none.
    """
    if (marked := KINDS[plural].marked().get(name)) is not None:
        return marked.file
    outside = (point.value.partition(":")[0] for point in entry_points(plural) if point.name == name)
    for module in (f"sinklab.{plural}.{name}", *outside):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    raise ContractError(f"the file of {name!r} ({plural}) cannot be found")


def registers(node: ast.ClassDef | ast.FunctionDef, name: str) -> bool:
    """Whether a class or a function carries ``@kind.register("name")``."""
    return any(
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr == "register"
        and [getattr(argument, "value", None) for argument in decorator.args] == [name]
        for decorator in node.decorator_list
    )


def constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that are assigned at the top of a file."""
    found = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    annotated = (node for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    return found | {node.target.id: node.value for node in annotated if node.value is not None}  # type: ignore[union-attr]


def text_of(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The string that an expression of literals, module constants, ``+`` and f-strings would give; else its source."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name) and node.id in constants:
        return text_of(constants[node.id], constants)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    return ast.unparse(node)


def unparsed(node: ast.expr | None) -> str | None:
    """Source of an expression, ``None`` without one."""
    return None if node is None else ast.unparse(node)
