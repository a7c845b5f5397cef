"""The commands of ``sinklab``: each parses its options, calls the function of the same name, and prints what it returned."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from sinklab import __version__
from sinklab.cli import backcopy as backcopy_command
from sinklab.cli import cache as cache_command
from sinklab.cli import causes as causes_command
from sinklab.cli import claims as claims_command
from sinklab.cli import depend as depend_command
from sinklab.cli import output
from sinklab.cli import pathways as pathways_command
from sinklab.cli import plot as plot_command
from sinklab.cli import reproduce as reproduce_command
from sinklab.cli import retrieval as retrieval_command
from sinklab.cli import stream as stream_command
from sinklab.cli import sweep as sweep_command
from sinklab.cli import trigger as trigger_command
from sinklab.cli.describe import catalogue, describe
from sinklab.cli.guard import Guarded
from sinklab.cli.libraries import prepare_libraries
from sinklab.cli.options import (
    BatchSize,
    Bos,
    CorpusOption,
    Device,
    Dtype,
    Json,
    Model,
    Overwrite,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Threshold,
    TrustRemoteCode,
)
from sinklab.cli.pretrain import EPILOG, pretrain

__all__ = ["app"]

app = typer.Typer(
    cls=Guarded,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: [bold]sinklab audit embedded:softmax[/bold] needs no download and takes under a minute.",
)


@app.callback()
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error; works anywhere.")] = False,
) -> None:
    """Find attention sinks: which position, which token, which heads, and what they do."""
    del traceback  # taken by the guard before parsing; declared here so that --help tells of it
    if version:
        typer.echo(f"sinklab {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog="Examples:\n\n"
    "sinklab audit embedded:softmax\n\n"
    "sinklab audit ./my-checkpoint --corpus notes.txt --seq-len 256\n\n"
    "sinklab audit org/model --bos none --json > summary.json"
)
def audit(
    model: Model,
    corpus: CorpusOption = "python_source",
    seq_len: SeqLen = 64,
    samples: Samples = 100,
    threshold: Threshold = 0.3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: BatchSize = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    cache: Annotated[bool, typer.Option(help="Read a few long texts under cache policies too.")] = True,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="Certify which heads could not be silent without their sink.")
    ] = False,
    causes: Annotated[
        bool, typer.Option("--causes", help="Find out what every head does with the sink, by taking it away; a minute or more.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Output directory.", show_default="sinklab-audit/<model>")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Find the sinks of a model: one HTML report, one table, one summary.

    Writes run.json, table.parquet, summary.json, maps.safetensors and report.html into the output directory.
    """
    prepare_libraries()
    from sinklab.auditing import audit as run_audit

    folder = Path("sinklab-audit") / _folder_name(model) if out is None else out
    with output.progress() as progress:
        result = run_audit(
            model,
            corpus=corpus,
            seq_len=seq_len,
            samples=samples,
            threshold=threshold,
            device=device,
            dtype=dtype,
            seed=seed,
            bos=bos,
            batch_size=batch_size,
            revision=revision,
            trust_remote_code=trust_remote_code,
            cache=cache,
            certificate=certificate,
            causes=causes,
            out=folder,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        output.print_json(result.summary)
    else:
        output.print_summary(result.summary, str(folder / "report.html"))


@app.command(
    epilog="Examples:\n\n"
    "sinklab measure embedded:softmax --probe sink_rate --probe entropy\n\n"
    "sinklab measure ./my-checkpoint --probe null_mass --corpus random_tokens --out build/null"
)
def measure(
    model: Model,
    probe: Annotated[list[str], typer.Option("--probe", metavar="NAME", help="A name from 'sinklab list probes'; repeatable.")],
    corpus: CorpusOption = "python_source",
    seq_len: SeqLen = 64,
    samples: Samples = 100,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    bos: Bos = "auto",
    batch_size: BatchSize = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for table.parquet and run.json; nothing is written without.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Run chosen probes over a model. With --json: one row of the table a line."""
    prepare_libraries()
    from sinklab.auditing import measure as run_measure

    with output.progress() as progress:
        result = run_measure(
            model,
            probes=probe,
            corpus=corpus,
            seq_len=seq_len,
            samples=samples,
            device=device,
            dtype=dtype,
            seed=seed,
            bos=bos,
            batch_size=batch_size,
            revision=revision,
            trust_remote_code=trust_remote_code,
            out=out,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        result.table.to_json(sys.stdout, orient="records", lines=True, force_ascii=False)
    else:
        output.print_measurement(result.table)
        if out is not None:
            typer.echo(f"\ntable  {out / 'table.parquet'}")


app.command(epilog=backcopy_command.EPILOG)(backcopy_command.backcopy)
app.command(epilog=cache_command.EPILOG)(cache_command.cache)
app.command(epilog=causes_command.EPILOG)(causes_command.causes)
app.command(epilog=claims_command.EPILOG)(claims_command.claims)
app.command(epilog=depend_command.EPILOG)(depend_command.depend)
app.command(epilog=pathways_command.EPILOG)(pathways_command.pathways)
app.command(epilog=EPILOG)(pretrain)
app.command(epilog=sweep_command.EPILOG)(sweep_command.sweep)
app.command(epilog=plot_command.EPILOG)(plot_command.plot)
app.command(epilog=reproduce_command.EPILOG)(reproduce_command.reproduce)
app.command(epilog=retrieval_command.EPILOG)(retrieval_command.retrieval)
app.command(epilog=stream_command.EPILOG)(stream_command.stream)
app.command(epilog=trigger_command.EPILOG)(trigger_command.trigger)


@app.command("list", epilog="Examples:\n\nsinklab list\n\nsinklab list probes --json")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="probes, operations, interventions, positions, policies, corpora, tasks, recipes, read_outs, claims or "
            "models; by default all."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what there is to name on the command line, with one sentence each."""
    listed = catalogue(kind)
    if as_json:
        output.print_json(listed)
    else:
        output.print_catalogue(listed)


@app.command(epilog="Examples:\n\nsinklab show sink_rate\n\nsinklab show gu2024")
def show(
    name: Annotated[str, typer.Argument(help="A probe, an operation, a recipe, a corpus, …, or a metric of a probe.")],
    as_json: Json = False,
) -> None:
    """Say what a plug-in or a metric is: definition, parameters, papers."""
    descriptions = describe(name)
    if as_json:
        output.print_json([description.to_dict() for description in descriptions])
        return
    for description in descriptions:
        output.print_description(description)


@app.command(epilog="Example:\n\nsinklab compare sinklab-audit/embedded-softmax sinklab-audit/embedded-sigmoid --out both.html")
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR DIR…", help="Output directories of two or more audits.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the comparison as one HTML page too.")] = None,
    as_json: Json = False,
) -> None:
    """Put audits side by side."""
    from sinklab.report.compare import comparison_table, format_comparison, write_comparison
    from sinklab.report.data import read_audit
    from sinklab.report.words import verdict

    table = comparison_table(folders)
    page = write_comparison(folders, out) if out is not None else None
    if as_json:
        output.print_json(table.to_dict())
        return
    verdicts = [f"{name}: {verdict(read_audit(folder))}" for name, folder in zip(table.columns, folders, strict=True)]
    output.print_comparison(format_comparison(table), verdicts)
    if page is not None:
        typer.echo(f"\npage  {page}")


@app.command(epilog="Example:\n\nsinklab report sinklab-audit/embedded-softmax")
def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of an audit, or of causes.")]) -> None:
    """Make report.html again from the table of an audit; needs no model."""
    from sinklab.report.html import write_report

    typer.echo(str(write_report(folder)))


def _folder_name(model: str) -> str:
    """A model's name as one folder name: ``embedded-softmax``, ``org-model``, or the last part of a path."""
    name = Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
