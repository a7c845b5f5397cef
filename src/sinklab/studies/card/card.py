"""card(): the section on attention sinks for a model's card, from the folder of a finished run alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sinklab.results.run import Listing
from sinklab.studies.arguments import command

__all__ = ["card"]


@command
def card(run: Path, *, yaml: bool = False) -> Listing:
    """Print a section for the model's card: what a run found, with numbers, conditions and limits, and how to repeat it.

    Works on runs of audit, cache, causes, depend and pretrain, and on every other run with a finding or numbers of the whole
    model. No model is opened and nothing is measured.

    Args:
        run: Output directory of a finished run.
        yaml: Begin with the metadata that the hub reads (model-index), which makes it a README.md.

    Raises:
        InputError: no finished run there, or one that says nothing about a model.

    Examples:
        sinklab card sinklab-audit/org-model >> README.md
        sinklab card build/cache --yaml > README.md
    """
    from rich.text import Text

    from sinklab.report.card import front_matter, markdown
    from sinklab.studies.card.contents import card_of

    content = card_of(run)
    text = markdown(content)
    front = front_matter(content) if yaml else ""
    text = (f"{front}\n{text}" if front else text).rstrip("\n")
    return Listing({**dataclasses.asdict(content), "text": text}, lambda record: [Text(record["text"])])
