"""Any dataset of Hugging Face's datasets library: a name on the hub, a folder of save_to_disk, parquet, JSON or CSV files."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sinklab.corpora.base import HELD_OUT_PERCENT, Identity, Split, TextCorpus, hash_files, is_held_out, visible_files
from sinklab.errors import ConfigurationError, InputError, first_line
from sinklab.registry import corpora

__all__ = ["HubDataset"]

SHUFFLED = 1000
LOOKED_AT = 20
COMMIT = re.compile(r"[0-9a-f]{40}")


@corpora.register("hub_dataset")
class HubDataset(TextCorpus):
    """One column of text, one document a row, read as a stream: nothing is downloaded ahead and memory does not grow.

    Passages are rows, mixed by a buffer of a thousand: those of the held-out split where one is named; else all rows of your
    own files, and of a dataset on the hub those held out of the split that training reads, until a thousand in a row are too
    short.

    Args:
        path: a name on the hub (``owner/name``), a data file, or a folder with data files or made by ``save_to_disk``.
        subset: configuration of the dataset.
        revision: branch, tag or commit on the hub. With a commit, an encoded copy is found again without the network.
        train_split: split that training reads.
        held_out_split: split that evaluation reads; by default 5 % of the rows of ``train_split``, by the hash of their text,
            and of your own files all rows where a model is measured.
        text_column: column with the text; by default ``text``, or else the only column of strings.

    Raises:
        ConfigurationError: options that do not go together.
        InputError: the hub out of reach, no such dataset, subset, split or column, or a file that cannot be read; on opening,
            which is when rows or (of a branch or tag) the identity are asked for.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        subset: str | None = None,
        revision: str | None = None,
        train_split: str = "train",
        held_out_split: str | None = None,
        text_column: str | None = None,
    ) -> None:
        if held_out_split == train_split:
            raise ConfigurationError(
                f"held_out_split and train_split are both {train_split!r}; held-out text must be other text"
            )
        local = Path(path).expanduser()
        self._local = local.absolute() if local.exists() else None
        self.path = self._local or path
        self.dataset = local.name if self._local else str(path)
        self.subset, self.revision, self.text_column = subset, revision, text_column
        self.train_split, self.held_out_split = train_split, held_out_split
        self._saved = local.is_dir() and any((local / name).is_file() for name in ("state.json", "dataset_dict.json"))
        if self._local and revision is not None:
            raise ConfigurationError(f"revision {revision!r} is of a dataset on the hub, and {self._local} is a local path")
        if self._saved and subset is not None:
            raise ConfigurationError(
                f"subset {subset!r} cannot be chosen: {self._local} was made by save_to_disk and holds one"
            )

    @property
    def label(self) -> str:
        return self.dataset

    @property
    def more(self) -> str:
        if self.held_out_split is not None:
            return f"name a held_out_split with more text than {self.held_out_split!r}"
        if self._local:
            return "give more rows"
        return (
            f"give more rows: of the split {self.train_split!r} the {HELD_OUT_PERCENT} % are read that training does not read, "
            f"until {self.patience:,.0f} in a row are shorter than a sample; of one that held_out_split names, all"
        )

    @property
    def patience(self) -> float:
        """None is given up on your own files, nor on a split that is named; what a training reads may be the whole web."""
        return math.inf if self._local or self.held_out_split is not None else super().patience

    @property
    def identity(self) -> Identity:
        source = f"dataset {self.dataset}" + (f", {self.subset}" if self.subset else "")
        if self._local:
            files = [self._local] if self._local.is_file() else list(visible_files(self._local).values())
            with self._explained():
                return Identity(
                    source,
                    f"sha256-{hash_files(self._local.parent if self._local.is_file() else self._local, files)}",
                    "the user's own",
                )
        revision = self.revision or ""
        if not COMMIT.fullmatch(revision):
            revision = str(self._builder().hash)
        return Identity(source, revision, f"see https://huggingface.co/datasets/{self.dataset}")

    def passages(self, seed: int) -> Iterator[str]:
        whole = self._local is not None and self.held_out_split is None
        return _mixed(self._texts(self.train_split) if whole else self.documents("held_out"), random.Random(seed))

    def documents(self, split: Split) -> Iterator[str]:
        if self.held_out_split is not None:
            yield from self._texts(self.train_split if split == "train" else self.held_out_split)
        else:
            yield from (text for text in self._texts(self.train_split) if is_held_out(text) == (split == "held_out"))

    def _read(self, rows: Any) -> Iterator[dict[str, Any]]:
        """Rows one by one, with the errors of the library explained."""
        with self._explained():
            iterator = iter(rows)
        while True:
            with self._explained():
                row = next(iterator, None)
            if row is None:
                return
            yield row

    def _texts(self, split: str) -> Iterator[str]:
        rows = self._rows(split)
        with self._explained():
            column = self._text_column(*_kinds(rows))
            texts = rows.select_columns([column])
        for row in self._read(texts):
            if row[column] is not None and row[column].strip():
                yield row[column]

    def _text_column(self, kinds: dict[str, str], strings: list[str]) -> str:
        """The column that was asked for, or ``text``, or the only one of strings."""
        column = self.text_column or ("text" if "text" in strings or len(strings) != 1 else strings[0])
        if column in strings:
            return column
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none"
        which = f" {column!r}" if strings or self.text_column is not None else ""
        several = f"; choose one with text_column: {', '.join(strings)}" if strings else ""
        raise InputError(f"dataset {self.dataset} has no column of text{which}; its columns: {listed}{several}")

    def _rows(self, split: str) -> Any:
        """The split as a ``datasets`` object that streams or is mapped from disk."""
        import datasets

        with self._explained():
            if self._saved:
                saved = datasets.load_from_disk(str(self._local))
                splits = dict(saved) if isinstance(saved, dict) else {"train": saved}
            else:
                splits = self._builder().as_streaming_dataset()
        if split not in splits:
            raise InputError(f"dataset {self.dataset} has no split {split!r}; it has {', '.join(map(str, splits))}")
        return splits[split]

    def _builder(self) -> Any:
        import datasets

        with self._explained():
            if self._local is None:
                return datasets.load_dataset_builder(self.dataset, self.subset, revision=self.revision)
            if self._local.is_dir():
                return datasets.load_dataset_builder(str(self._local), self.subset)
            return datasets.load_dataset_builder(str(self._local.parent), self.subset, data_files=self._local.name)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the library, which have many types, as one sentence; and its log lines about them kept back."""
        import datasets

        verbosity = datasets.logging.get_verbosity()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        try:
            yield
        except InputError:
            raise
        except ConnectionError as error:
            raise InputError(
                f"dataset {self.dataset!r} is no path here, and the hub is out of reach ({first_line(error)}); check the name "
                "and the network (HF_HUB_OFFLINE), or download it where there is one and give its folder"
            ) from error
        except Exception as error:
            raise InputError(f"dataset {self.dataset} cannot be read: {first_line(error)}") from error
        finally:
            datasets.logging.set_verbosity(verbosity)


def _kinds(rows: Any) -> tuple[dict[str, str], list[str]]:
    """Column to the type of its values in words, and the columns of text."""
    if rows.features is not None:
        kinds = {name: str(getattr(kind, "dtype", kind)) for name, kind in rows.features.items()}
        return kinds, [name for name, kind in kinds.items() if kind in ("string", "large_string")]
    kinds = {}  # not declared anywhere: the first rows show
    for row in islice(rows, LOOKED_AT):
        kinds |= {name: type(value).__name__ for name, value in row.items() if value is not None or name not in kinds}
    return kinds, [name for name, kind in kinds.items() if kind == "str"]


def _mixed(rest: Iterator[str], generator: random.Random) -> Iterator[str]:
    """The same texts in another order, :data:`SHUFFLED` of them held at a time."""
    buffer = list(islice(rest, SHUFFLED))
    while buffer:
        position = generator.randrange(len(buffer))
        buffer[position], chosen = buffer[-1], buffer[position]
        buffer[-1:] = islice(rest, 1)
        yield chosen
