"""export(): the policy of a finished comparison as flags, a configuration or a script for another engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from sinklab.results.run import Listing
from sinklab.studies.arguments import ENGINES, command

Integers = Literal["int8", "int4"]


@command
def export(
    run: Path,
    *,
    to: Annotated[Sequence[str], ENGINES],
    policy: str | None = None,
    quantized: Integers | None = None,
    out: Path | None = None,
) -> Listing:
    """Write the cache policy that a run has chosen as flags or a script for another engine; nothing is measured.

    Where an engine follows the policy only in part, the terminal and the file list the differences. An engine that cannot
    keep the tokens that stay is refused.

    Args:
        run: Output directory of 'sinklab cache', or of an audit with its section on policies.
        to: kvpress, llama.cpp.
        policy: A row of the run's table by its name or label; by default the recommended one.
        quantized: Quantise the cache, int8 or int4; what that costs 'sinklab cache --quantized' measures.
        out: Directory for the files; by default export inside RUN. Files of the same names are replaced.

    Raises:
        InputError: no run of that kind, nothing recommended, or a policy that the run does not have.
        UnknownNameError: no such engine or policy.
        ConfigurationError: an engine that cannot do the policy, or bound the cache of the model at all; or integers that the
            policy cannot have.

    Examples:
        sinklab export build/cache --to llama.cpp,kvpress
        sinklab export build/cache --to llama.cpp --policy window
        sinklab export build/cache --to llama.cpp --policy blocks --out build/serve
    """
    from sinklab.results.file import check_file
    from sinklab.results.table import read_run, write_text
    from sinklab.studies.export.base import checked_engines, comparison_of, exported, plan_of, show_exports

    engines = checked_engines(to)
    plan = plan_of(comparison_of(run), policy, quantized, str(read_run(run).get("model", {}).get("class", "")))
    entries = [exported(engine, plan) for engine in engines]
    folder = out if out is not None else run / "export"
    for entry in entries:
        check_file(folder / entry.file, overwrite=True)
    for entry in entries:
        write_text(entry.text, folder / entry.file)
    return Listing([dataclasses.asdict(entry) for entry in entries], lambda _: show_exports(entries, folder))
