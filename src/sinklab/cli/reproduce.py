"""The command ``sinklab reproduce``: runs published statements and says what became of each, with a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sinklab.cli import output
from sinklab.cli.claims import check_word, format_effect, print_verdicts, verdict_markup
from sinklab.cli.libraries import prepare_libraries
from sinklab.cli.options import Json
from sinklab.cli.stated import stated
from sinklab.errors import ConfigurationError
from sinklab.registry import claims as registered
from sinklab.reproduction.claim import COSTS, SCALES

if TYPE_CHECKING:
    from sinklab.reproduction.engine import Reproduced

__all__ = ["EPILOG", "chosen", "reproduce"]

EPILOG = (
    "Examples:\n\n"
    "sinklab reproduce repeated_token_laws  (seconds)\n\n"
    "sinklab reproduce sigmoid_has_no_sink sink_moves_to_bias  (minutes on two cores)\n\n"
    "sinklab reproduce --source gu2024 --cost minutes\n\n"
    "sinklab reproduce --all  (all that the tiny scale can test: an hour and a half on two cores)\n\n"
    "sinklab reproduce learning_rate --scale small --seeds 0..4  (hours)\n\n"
    "sinklab reproduce --source gu2024 --scale 60m --ray auto --out /shared/claims  (GPUs)\n\n"
    "sinklab reproduce learning_rate --scale 1b --plan --out /shared/claims  (commands for a scheduler)\n\n"
    "The same command again goes on where it was stopped; what is there is not run twice."
)


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLAIM…]", help="Names from 'sinklab claims'.")] = None,
    source: Annotated[str | None, typer.Option(help="All claims of a paper, such as gu2024.")] = None,
    cost: Annotated[str | None, typer.Option(help=f"Only those of a cost at the scale: {', '.join(COSTS)}.")] = None,
    all_claims: Annotated[bool, typer.Option("--all", help="All claims.")] = False,
    seeds: Annotated[str, typer.Option(metavar="0..2", help="Both ends included; a verdict needs three or more.")] = "0..2",
    scale: Annotated[str, typer.Option(help=f"One of {', '.join(SCALES)}.")] = "tiny",
    out: Annotated[Path, typer.Option(help="Output directory; the models in it are shared by all claims.")] = Path(
        "sinklab-claims"
    ),
    jobs: Annotated[
        int | None, typer.Option(help="Processes at a time.", show_default="one per GPU, or cores over threads")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="auto|ADDRESS", help="Train on a Ray cluster; OUT must be shared by its nodes.")
    ] = None,
    retries: Annotated[int, typer.Option(help="How often a training that was killed goes on from its last checkpoint.")] = 2,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Train nothing: print a torchrun command for every training that is missing, for a cluster."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run published statements about sinks, and judge them: reproduced, not reproduced, or inconclusive.

    Writes SCALE/CLAIM/table.parquet, run.json and figure.png for every claim, and claims.html over all, into the output
    directory. Status 1: runs failed, and the others' results are kept.
    """
    wanted = chosen(names or [], source=source, cost=cost, all_claims=all_claims, scale=scale)
    prepare_libraries()
    from sinklab.arguments import parse_seeds
    from sinklab.report.claim_figure import write_claim_figure
    from sinklab.report.claims_page import write_claims_page
    from sinklab.reproduction.engine import reproduce as run
    from sinklab.reproduction.kept import read_results

    if plan:
        from sinklab.reproduction.engine import plan_runs

        commands = plan_runs(wanted, scale=scale, seeds=parse_seeds(seeds), out=out)  # type: ignore[arg-type]
        if as_json:
            output.print_json(commands)
        else:
            typer.echo("\n".join(commands))
        return
    if (out / "runs" / scale).is_dir():
        typer.echo(f"going on in {out}: what has been trained and measured there is not done again", err=True)
    # The scale was looked up above, which a type checker cannot see.
    found = run(wanted, scale=scale, seeds=parse_seeds(seeds), out=out, jobs=jobs, ray=ray, retries=retries)  # type: ignore[arg-type]
    for one in found:
        if one.folder is not None:
            write_claim_figure(one.folder)
    page = write_claims_page([(kept.folder, kept.record) for kept in read_results(out)], out / "claims.html")
    rows = [_row(one, scale, parse_seeds(seeds)) for one in found]
    if as_json:
        output.print_json(rows)
    else:
        print_verdicts(rows)
        for row in rows:
            if len(rows) == 1:
                _print_parts(row)
            elif row["reason"]:
                typer.echo(f"\n{row['name']}: {row['reason']}")
        typer.echo(f"\npage  {page}")
        for row in rows:
            if len(rows) == 1 and row["folder"] is not None:
                typer.echo(f"figure  {row['folder']}/figure.png\ntable  {row['folder']}/table.parquet")
    failed = [error for one in found for error in one.errors]
    for error in dict.fromkeys(failed):
        typer.echo(f"failed: {error}", err=True)
    if failed:
        typer.echo(f"logs are in {out / 'logs'}; the same command again tries what failed", err=True)
        raise typer.Exit(1)


def chosen(names: list[str], *, source: str | None, cost: str | None, all_claims: bool, scale: str) -> list[str]:
    """The claims that a command line asks for.

    Raises:
        UnknownNameError: a claim, source, cost or scale that is not there, with the nearest one that is.
        ConfigurationError: nothing is asked for, or nothing is left.
    """
    check_word(scale, SCALES, "scale")
    if cost is not None:
        check_word(cost, COSTS, "cost")
    if source is not None:
        check_word(source, sorted({stated(name).source for name in registered}), "source")
    if names and (all_claims or source is not None):
        raise ConfigurationError("reproduce: give names, or --source, or --all; not names together with one of the others")
    if not (names or all_claims or source is not None or cost is not None):
        raise ConfigurationError(
            "reproduce: no claim is asked for; give names from 'sinklab claims', --source gu2024, --cost minutes, or --all"
        )
    found = [stated(name) for name in names or registered]
    found = [claim for claim in found if source in (None, claim.source) and (cost is None or claim.costs.get(scale) == cost)]
    if not found:
        raise ConfigurationError(
            f"reproduce: no claim has source {source or 'any'} and cost {cost or 'any'} at scale {scale}; see: sinklab claims"
        )
    return [claim.name for claim in found]


def _row(one: Reproduced, scale: str, seeds: Any) -> dict[str, Any]:
    from sinklab.reproduction.kept import deciding_part

    judgement = one.judgement
    parts = [finding.to_dict() for finding in judgement.findings]
    deciding = deciding_part({"parts": parts, "verdict": judgement.verdict}) or {}
    return {
        "name": one.claim,
        "source": stated(one.claim).source,
        "scale": scale,
        "verdict": judgement.verdict,
        "effect": deciding.get("mean"),
        "interval": deciding.get("interval"),
        "unit": deciding.get("unit"),
        "seeds": list(seeds) if one.folder is not None else [],
        "reason": judgement.reason,
        "parts": parts,
        "folder": None if one.folder is None else str(one.folder),
        "errors": one.errors,
    }


def _print_parts(row: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for part in row["parts"]:
        effect = format_effect(part["mean"], part["interval"], part["unit"])
        console.print(f"\n{escape(part['says'])}: {verdict_markup(part['verdict'])}")
        console.print(f"  {part['effect']} = {effect or 'no number'}; claimed: {part['expected']}", markup=False)
    if row["reason"]:
        console.print(f"\n{row['reason']}", markup=False)
