"""The command ``sinklab cache``: loss, speed and memory of a model under every cache policy, and which one to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sinklab.arguments import AsJson, Bos, Device, Dtype, ModelSource, Overwrite, Revision, TrustRemoteCode, command
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries

__all__ = ["cache"]


@command
def cache(
    model: ModelSource,
    *,
    text: Annotated[str, "--text", "--corpus"] = "python_source",
    policies: str | None = None,
    window: Sequence[int] | None = None,
    sinks: Sequence[int] = (0, 1, 2, 4, 8),
    tokens: int | None = None,
    documents: int = 8,
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
    """Compare cache policies on long texts: what each loses, how fast it is, what it holds, and which one to use.

    Dense attention, a window, sinks and a window, the window computed anew for every token, and every other policy at the same
    size.

    Args:
        text: A UTF-8 text, or a name from 'sinklab list corpora'.
        policies: Names from 'sinklab list policies', with commas; all by default.
        window: Tokens held before the query, sinks included, with commas; by default a quarter and half of the trained length,
            at most 1024.
        sinks: First tokens that are kept, with commas.
        tokens: Tokens of a text; by default 4 times the trained length, at most 8192, at least 4 windows.
        documents: Texts to average over, at most.
        seed: Seed of corpora that are drawn from.
        out: Directory for summary.json, table.parquet, run.json and loss.png; none by default.

    Examples:
        sinklab cache embedded:softmax
        sinklab cache ./my-checkpoint --text book.txt --window 256,1024 --sinks 0,1,4
        sinklab cache org/model --policies window,sink_window,full --tokens 4096 --documents 4 --out build/cache
        sinklab cache embedded:sigmoid --json > policies.json
    """
    quiet_libraries()
    from sinklab.auditing.cache import compare_policies

    with output.progress() as progress:
        result = compare_policies(
            model,
            corpus=text,
            policies=None if policies is None else [name.strip() for name in policies.split(",") if name.strip()],
            windows=window,
            sinks=sinks,
            tokens=tokens,
            documents=documents,
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
