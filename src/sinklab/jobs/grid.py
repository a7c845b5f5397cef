"""The cells of a sweep: every combination of the values of some fields, each with every seed, validated before any runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence

from sinklab.configuration import read_yaml, with_overrides
from sinklab.errors import ConfigurationError, SinklabError
from sinklab.training.config import PretrainingConfig
from sinklab.training.tokenizer import hash_key

ALIASES = {
    "lr": "optimizer.learning_rate",
    "operation": "model.operation.name",
    "position": "model.position.name",
    "optimizer": "optimizer.name",
    "schedule": "schedule.name",
    "layers": "model.num_hidden_layers",
    "heads": "model.num_attention_heads",
    "context": "model.max_position_embeddings",
}
"""Short names of fields that sweeps are often over."""

NAME_LENGTH = 120
"""Characters of a cell's name before its hash; file systems take 255 bytes."""

KEY_LENGTH = 8
"""Characters of the hash that ends a cell's name."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Args:
        name: of its folder: what is varied, in words, and a hash of it.
        settings: dotted path to value, in the order of the grid; the seed is not among them.
        config: what is run.
        init_from: name of the cell of the same sweep from whose trained weights it starts; it must have ended before.
    """

    name: str
    settings: dict[str, object]
    config: PretrainingConfig
    init_from: str | None = None

    @property
    def seed(self) -> int:
        """Seed of the initialisation."""
        return self.config.training.seed


def make_cells(
    config: PretrainingConfig,
    grid: Mapping[str, Sequence[object]],
    seeds: Sequence[int] | None = None,
    changes: Sequence[str] = (),
) -> list[Cell]:
    """All combinations of the values in ``grid``, once per seed; the first seed of all of them comes first.

    Args:
        config: what the cells have in common.
        grid: field (see :func:`field_path`) to its values; a dictionary as a value sets the fields below, as in
            ``{"model.operation": [{"name": "sigmoid", "normalize": True}]}``.
        seeds: each is ``training.seed`` and ``data.seed`` of its cells; ``None`` leaves those of ``config``.
        changes: ``path=value``, applied to every cell.

    Raises:
        ConfigurationError: a field that does not exist, is varied twice or also changed; a value given twice, also in another
            spelling; a cell whose settings cannot be combined, by its name.
    """
    varied = {field_path(name): list(values) for name, values in grid.items()}
    if len(varied) < len(grid):
        raise ConfigurationError(f"the grid varies a field twice: {', '.join(grid)}")
    changed = {item.partition("=")[0] for item in changes}
    if both := sorted(changed & varied.keys()):
        raise ConfigurationError(f"{both[0]} is both set and varied; leave out one of `changes` and `grid`")
    if seeds is not None and (both := sorted({"training.seed", "data.seed"} & (varied.keys() | changed))):
        raise ConfigurationError(f"`seeds` sets {both[0]} too; leave out `seeds` or {both[0]}")
    axes: dict[str, Sequence[object]] = {**varied, "`seeds`": [0] if seeds is None else list(seeds)}
    for path, values in axes.items():
        texts = [_text(value) for value in values]
        if not texts:
            raise ConfigurationError(f"{path} has no values to run")
        if twice := [text for text in texts if texts.count(text) > 1]:
            raise ConfigurationError(f"{path} has the value {twice[0]} twice")
    cells: list[Cell] = []
    by_config: dict[str, str] = {}
    for seed in [None] if seeds is None else seeds:
        for combination in itertools.product(*varied.values()):
            cell = _cell(config, dict(zip(varied, combination, strict=True)), seed, changes)
            twin = by_config.setdefault(cell.config.model_dump_json(), cell.name)
            if twin != cell.name:  # as 1 and 1.0: it would be trained twice, and stand as two settings that agree
                raise ConfigurationError(f"cells {twin} and {cell.name} are one configuration; leave one of the two values out")
            cells.append(cell)
    return cells


def _cell(config: PretrainingConfig, settings: dict[str, object], seed: int | None, changes: Sequence[str]) -> Cell:
    """One combination of settings with one seed."""
    name = _cell_name(settings, seed)
    overrides = [*changes, *(f"{path}={_text(value)}" for path, value in settings.items())]
    overrides += [] if seed is None else [f"training.seed={seed}", f"data.seed={seed}"]
    try:
        return Cell(name, settings, with_overrides(config, overrides))
    except SinklabError as error:
        raise ConfigurationError(f"cell {name}: {error}") from error


def parse_grid(items: Sequence[str]) -> dict[str, list[object]]:
    """``path=value,value,…`` of the command line as field to values; values are YAML, so lists and dictionaries work."""
    grid: dict[str, list[object]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not text.strip():
            raise ConfigurationError(f"`grid` {item!r}: expected path=value,value,…, such as optimizer.learning_rate=1e-3,4e-3")
        try:
            values = read_yaml(f"[{text}]")
        except ValueError:
            raise ConfigurationError(f"`grid` {item!r}: the values are no list in YAML, a,b,…") from None
        path = field_path(name, values)
        if path in grid:
            raise ConfigurationError(f"`grid` names {path} twice; give all of its values at once: {path}=value,value,…")
        grid[path] = values
    return grid


def field_path(name: str, values: Sequence[object] = ()) -> str:
    """The dotted path of the field that ``name`` means: that of an alias, or the name itself.

    An alias of a field inside another, such as ``operation``, names the outer one when the ``values`` are dictionaries.
    """
    path = ALIASES.get(name, name)
    return path.removesuffix(".name") if any(isinstance(value, dict) for value in values) else path


def short_label(path: str) -> str:
    """A field in a word, for names and headings: ``learning_rate``, ``operation``."""
    *above, last = path.split(".")
    return above[-1] if last == "name" and above else last


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _cell_name(settings: Mapping[str, object], seed: int | None) -> str:
    paths = list(settings)
    labels = [short_label(path) for path in paths]
    labels = [path if labels.count(label) > 1 else label for path, label in zip(paths, labels, strict=True)]
    parts = [f"{label}={_word(value)}" for label, value in zip(labels, settings.values(), strict=True)]
    parts += [] if seed is None else [f"seed={seed}"]
    key = hash_key([[path, _text(value)] for path, value in settings.items()] + [seed])[:KEY_LENGTH]
    return f"{','.join(parts)[:NAME_LENGTH] or 'run'}-{key}"


def _word(value: object) -> str:
    text = value if isinstance(value, str) else _text(value)
    # By spaces first: a minus that a value begins with stays, a bracket that it begins with leaves nothing.
    return re.sub(r"[^\w.+-]+", " ", text).strip().replace(" ", "-") or "empty"
