"""The command ``sinklab depend``: which scores of a model depend on the sink tokens that a cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.arguments import AsJson, Bos, Device, Dtype, ModelSource, Overwrite, Revision, TrustRemoteCode, command
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    pass

__all__ = ["depend"]


@command
def depend(
    model: ModelSource,
    *,
    task: list[str] | None = None,
    policies: str | None = None,
    window: int | None = None,
    sinks: Sequence[int] = (1, 4),
    items: int = 64,
    seed: int = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Path | None = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say which scores depend on the sink tokens: every task under every cache policy, with intervals.

    Prints a table and a verdict (yes, no, undecided) for each task, and up to where context is of use under each policy.

    The verdict compares two caches of the same size, one with sinks and one without. yes: the score is better with sinks by
    more than the task's minimal effect, whole interval. no: the whole interval lies within the minimal effect. undecided:
    neither, or a score at chance. docs/scores-that-depend-on-the-sink.md has the rules.

    Args:
        task: From 'sinklab list tasks', with settings if need be: needle(corpus=FILE); or lm_eval:TASK. Repeatable; by default
            long_text.
        policies: What to run besides the two that are compared: full, 8+1016 (sinks+window), name(setting=value); by default
            full, every number of sinks, recompute.
        window: Tokens before the query that a cache holds, sinks included; by default half the trained length, ≤ 1024.
        sinks: First tokens that are kept; the verdict is on the largest.
        items: Independent texts, or documents of the harness; more make intervals shorter.
        seed: Seed of the texts; the same seed gives the same tokens.
        out: Directory for table.parquet, summary.json, run.json and a plot for each task.

    Examples:
        sinklab depend embedded:softmax --task long_text
        sinklab depend embedded:softmax --task needle,line_lookup --window 120 --out build/depend
        sinklab depend ORG/MODEL --task 'long_text(corpus=book.txt)' --policies '8+1016, strided' --json
        sinklab depend ORG/MODEL --task lm_eval:arc_easy --window 64 --items 200  (needs sinklab[evaluation])
    """
    quiet_libraries()
    from sinklab.evaluation import depend as run
    from sinklab.registry import split_specs

    with output.progress() as progress:
        result = run(
            model,
            [part for given in task or ["long_text"] for part in split_specs(given)],
            policies=None if policies is None else split_specs(policies),
            window=window,
            sinks=sinks,
            items=items,
            seed=seed,
            bos=bos,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            out=out,
            overwrite=overwrite,
            progress=progress,
        )
    output.print_result(result, as_json)
