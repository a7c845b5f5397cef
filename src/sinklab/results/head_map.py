"""Head map: a file that says how much each key-value head of a model holds, and which model that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sinklab.errors import InputError
from sinklab.results.file import read_object

__all__ = ["Budgets", "HeadMap"]

Budgets: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""``(num_sinks, window)`` of every key-value head of every layer."""

FORMAT = 1
"""Of a head map; raised when an older reader would misread it."""


class HeadMap(BaseModel):
    """A file of budgets, and which model they are for; ``sinklab cache MODEL --per-head`` writes one.

    Attributes:
        sinklab_heads: format of the file.
        name, fingerprint: of the model.
        source: what the budgets were chosen by.
        budgets: ``(num_sinks, window)`` of every key-value head of every layer.
    """

    model_config = ConfigDict(extra="ignore")

    sinklab_heads: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    name: str
    fingerprint: str
    source: str
    budgets: Budgets

    @classmethod
    def read(cls, path: Path) -> HeadMap:
        """What a file holds.

        Raises:
            InputError: no such file, or no head map.
        """
        try:
            return cls.model_validate(read_object(path))
        except FileNotFoundError:
            raise InputError(f"there is no head map {path}; 'sinklab cache MODEL --per-head' writes one") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise InputError(f"{path} is no head map: {where}: {problem['msg'][0].lower()}{problem['msg'][1:]}") from None
