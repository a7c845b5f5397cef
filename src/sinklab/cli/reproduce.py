"""The command ``sinklab reproduce``: runs published statements and says what became of each, with a table and a figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape

from sinklab.cli import output
from sinklab.cli.claims import check_word, format_effect, print_verdicts, verdict_markup
from sinklab.cli.quiet import quiet_libraries
from sinklab.cli.stated import stated
from sinklab.errors import ConfigurationError
from sinklab.jobs.claim import COSTS, SCALES
from sinklab.registry import claims as registered
from sinklab.studies.arguments import AsJson, command

if TYPE_CHECKING:
    from sinklab.studies.reproduce.engine import Reproduced

__all__ = ["chosen", "reproduce"]


@command
def reproduce(
    names: list[str] | None = None,
    *,
    source: str | None = None,
    cost: str | None = None,
    all_claims: Annotated[bool, "--all"] = False,
    seeds: str = "0..2",
    scale: str = "tiny",
    out: Path = Path("sinklab-claims"),
    jobs: int | None = None,
    ray: str | None = None,
    retries: int = 2,
    plan: bool = False,
    as_json: AsJson = False,
) -> None:
    """Run published statements about sinks, and judge them: reproduced, not reproduced, or inconclusive.

    Writes SCALE/CLAIM/table.parquet, run.json and figure.png for every claim, and claims.html over all, into the output
    directory. Status 1: runs failed, and the others' results are kept.

    The same command again goes on where it was stopped; what is there is not run twice.

    Args:
        names: Names from 'sinklab claims'.
        source: All claims of a paper, such as gu2024.
        cost: Only those of a cost at the scale: seconds, minutes, hours, gpu.
        all_claims: All claims.
        seeds: Both ends included; a verdict needs three or more.
        scale: One of tiny, small, 60m, 1b.
        out: Output directory; the models in it are shared by all claims.
        jobs: Processes at a time; by default one per GPU, or cores over threads.
        ray: Train on a Ray cluster; OUT must be shared by its nodes.
        retries: How often a training that was killed goes on from its last checkpoint.
        plan: Train nothing: print a torchrun command for every training that is missing, for a cluster.

    Examples:
        sinklab reproduce repeated_token_laws  (seconds)
        sinklab reproduce sigmoid_has_no_sink sink_moves_to_bias  (minutes on two cores)
        sinklab reproduce --source gu2024 --cost minutes
        sinklab reproduce --all  (all that the tiny scale can test: an hour and a half on two cores)
        sinklab reproduce learning_rate --scale small --seeds 0..4  (hours)
        sinklab reproduce --source gu2024 --scale 60m --ray auto --out /shared/claims  (GPUs)
        sinklab reproduce learning_rate --scale 1b --plan --out /shared/claims  (commands for a scheduler)
    """
    wanted = chosen(names or [], source=source, cost=cost, all_claims=all_claims, scale=scale)
    quiet_libraries()
    from sinklab.report.claim_figure import write_claim_figure
    from sinklab.report.claims_page import write_claims_page
    from sinklab.studies.arguments import parse_seeds
    from sinklab.studies.reproduce.engine import reproduce as run
    from sinklab.studies.reproduce.kept import read_results

    if plan:
        from sinklab.studies.reproduce.engine import plan_runs

        commands = plan_runs(wanted, scale=scale, seeds=parse_seeds(seeds), out=out)  # type: ignore[arg-type]
        if as_json:
            output.print_json(commands)
        else:
            print("\n".join(commands))
        return
    if (out / "runs" / scale).is_dir():
        print(f"going on in {out}: what has been trained and measured there is not done again", file=sys.stderr)
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
                print(f"\n{row['name']}: {row['reason']}")
        print(f"\npage  {page}")
        for row in rows:
            if len(rows) == 1 and row["folder"] is not None:
                print(f"figure  {row['folder']}/figure.png\ntable  {row['folder']}/table.parquet")
    failed = [error for one in found for error in one.errors]
    for error in dict.fromkeys(failed):
        print(f"failed: {error}", file=sys.stderr)
    if failed:
        print(f"logs are in {out / 'logs'}; the same command again tries what failed", file=sys.stderr)
        raise SystemExit(1)


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
    from sinklab.studies.reproduce.kept import deciding_part

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
