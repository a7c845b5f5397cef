"""The command ``sinklab cache``: loss, speed and memory of a model under every cache policy, and which one to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinklab.cli import output
from sinklab.cli.libraries import prepare_libraries
from sinklab.cli.options import Bos, Device, Dtype, Json, Model, Overwrite, Revision, TrustRemoteCode, whole_numbers

__all__ = ["EPILOG", "cache"]

EPILOG = (
    "Examples:\n\n"
    "sinklab cache embedded:softmax\n\n"
    "sinklab cache ./my-checkpoint --text book.txt --window 256,1024 --sinks 0,1,4\n\n"
    "sinklab cache org/model --policies window,sink_window,full --tokens 4096 --documents 4 --out build/cache\n\n"
    "sinklab cache embedded:sigmoid --json > policies.json"
)


def cache(
    model: Model,
    text: Annotated[
        str,
        typer.Option("--text", "--corpus", metavar="FILE|NAME", help="A UTF-8 text, or a name from 'sinklab list corpora'."),
    ] = "python_source",
    policies: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Names from 'sinklab list policies', with commas; all by default.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Tokens held before the query, sinks included, with commas.",
            show_default="a quarter and half of the trained length, at most 1024",
        ),
    ] = None,
    sinks: Annotated[str, typer.Option(metavar="NUMBERS", help="First tokens that are kept, with commas.")] = "0,1,2,4,8",
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a text.", show_default="4 times the trained length, at most 8192, at least 4 windows"),
    ] = None,
    documents: Annotated[int, typer.Option(help="Texts to average over, at most.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of corpora that are drawn from.")] = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for summary.json, table.parquet, run.json and loss.png; none by default.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Compare cache policies on long texts: what each loses, how fast it is, what it holds, and which one to use.

    Dense attention, a window, sinks and a window, the window computed anew for every token, and every other policy at the same
    size.
    """
    windows, numbers = None if window is None else whole_numbers("--window", window), whole_numbers("--sinks", sinks)
    prepare_libraries()
    from sinklab.auditing.cache_policies import compare_policies

    with output.progress() as progress:
        result = compare_policies(
            model,
            corpus=text,
            policies=None if policies is None else [name.strip() for name in policies.split(",") if name.strip()],
            windows=windows,
            sinks=numbers,
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
    if as_json:
        output.print_json(result.summary)
        return
    output.print_policies(result.summary)
    if out is not None:
        typer.echo(f"\nplot  {out / 'loss.png'}")
