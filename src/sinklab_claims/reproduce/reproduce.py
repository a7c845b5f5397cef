"""The command ``sinklab reproduce``: runs published statements and says what became of each, with a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from sinklab.errors import ConfigurationError
from sinklab.registry import claims as registered
from sinklab.results.blocks import Block, Facts
from sinklab.results.folder import default_out
from sinklab.results.progress import bars
from sinklab.results.run import Result
from sinklab.studies.arguments import WHOLE, Jobs, Retries, Seeds, WrittenTo, command, parse_seeds
from sinklab_claims.contract.claim import CHECKPOINT, SCALES, Scale
from sinklab_claims.reproduce.claims import check_paper, check_word, stated

SEEDS_OF_TINY, SEEDS = "0..7", "0..2"
"""By default. Trainings of seconds spread so widely that three leave most claims open; six decide where all are alike."""


@command
def reproduce(
    names: list[str] | None = None,
    *,
    models: Annotated[list[str] | None, WHOLE] = None,
    corpora: Annotated[list[str] | None, WHOLE, "--corpus"] = None,
    length: int | None = None,
    paper: str | None = None,
    all_claims: Annotated[bool, "--all"] = False,
    seeds: Seeds | None = None,
    scale: str = "tiny",
    base: Literal["bos", "no-bos"] | None = None,
    out: Annotated[Path | None, WrittenTo("sinklab-claims")] = None,
    jobs: Jobs = None,
    ray: str | None = None,
    retries: Retries = 2,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Run published statements about sinks, and judge them: reproduced, not reproduced, or inconclusive.

    Writes SCALE/CLAIM/table.parquet and run.json for every claim into the output directory. Status 1: some runs failed; the
    results of the others are kept.

    With --model nothing is trained: claims are measured on the models as they are, on texts drawn by the seeds. There is a
    verdict for each model, and one over models if the claim applies to three or more.

    The same command continues where it was stopped, and nothing is run twice. A result is not replaced by one with fewer seeds
    or models.

    Args:
        names: Names from 'sinklab claims'.
        models: A directory, a hub id, or embedded:softmax; NAME=DIR gives a directory the name NAME in results.
        corpora: Text for the models, one for all or one for each: a name from 'sinklab list corpora', or a UTF-8 text file.
            By default python_source.
        length: Tokens of a text that claims about caches read on the models; a cache holds a quarter of them. By default 1,024;
            at most four times the trained context.
        paper: All claims of a paper, such as gu2024.
        all_claims: All claims; what they take in all is shown before they start.
        seeds: Seeds of initial weights, data and texts: 0..2 (both ends included), or a list such as 0,3,7. By default 0..7
            where tiny models are trained and 0..2 elsewhere; a verdict needs three or more.
        scale: One of tiny, small, medium, for what is trained.
        base: bos, or no-bos: the first token random and positions learned (Gu's x1 random). By default as in the source of each
            claim; results on the other base go to SCALE-BASE.
        out: Output directory; the models in it are shared by all claims.
        ray: Train on a Ray cluster; OUT must be shared by its nodes.

    Returns:
        In ``listed`` a record for each claim; ``summary`` has them as ``claims``.

    Raises:
        UnknownNameError: a claim, paper or scale that is not there, with the nearest one that is.
        ConfigurationError: nothing is asked for, or nothing is left; seeds twice or none; a machine that cannot run a cell;
            models for a claim that takes training.
        InputError: a model, a text or a directory that cannot be used.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.

    Examples:
        sinklab reproduce repeated_token_laws  (seconds)
        sinklab reproduce sigmoid_has_no_sink sink_moves_to_bias  (minutes on two cores)
        sinklab reproduce --paper gu2024  (minutes for each of them)
        sinklab reproduce --all  (all that the tiny scale can test: hours on two cores)
        sinklab reproduce --all --model org/model --corpus notes.txt  (all that can be measured without training)
        sinklab reproduce learning_rate --scale small --seeds 0..4  (hours)
        sinklab reproduce emergence --scale medium  (minutes on one data-centre GPU; a day on one core)
        sinklab reproduce sink_moves_to_bias --base bos  (what becomes of it where every row begins with BOS)
        sinklab reproduce --paper gu2024 --scale small --ray auto --out /shared/claims  (on a cluster)
    """
    claim_names = chosen(names or [], paper=paper, all_claims=all_claims, scale=scale, base=base, on_models=models is not None)
    if models is None and (corpora is not None or length is not None):
        raise ConfigurationError(
            "reproduce: `corpora` and `length` are for `models`; what is trained has the text of its scale"
        )
    if length is not None and length < 256:
        raise ConfigurationError(f"reproduce: `length` {length} must be 256 or more: caches of a quarter of it are compared")
    if models is not None and (ray is not None or scale != "tiny" or base is not None):
        raise ConfigurationError(
            "reproduce: `ray`, `scale` and `base` are about training, and `models` are measured as they are"
        )
    out = default_out("sinklab-claims") if out is None else out
    tell = say or (lambda text: None)
    parsed_seeds = parse_seeds(seeds or (SEEDS_OF_TINY if scale == "tiny" and models is None else SEEDS))
    earlier = out / "runs" / scale if models is None else out / "measured" / CHECKPOINT
    if earlier.is_dir():
        tell(f"going on in {out}: what has been trained and measured there is not done again")
    if models is None:
        from sinklab_claims.reproduce import on_trainings

        if not earlier.is_dir():
            tell(on_trainings.foreseen(claim_names, cast(Scale, scale), parsed_seeds, base))
        results = on_trainings.reproduce(
            claim_names, scale=cast(Scale, scale), base=base, seeds=parsed_seeds, out=out, jobs=jobs, ray=ray, retries=retries
        )
    else:
        with bars("models and texts") as progress:
            from sinklab_claims.reproduce import on_checkpoints  # seconds, of which something is shown

            given: dict[str, Any] = {"seeds": parsed_seeds, "out": out, "jobs": jobs, "say": tell, "progress": progress}
            texts = corpora or ["python_source"]
            results = on_checkpoints.reproduce_on(models, claim_names, corpora=texts, length=length, **given)
    return _over_all(results, out, tell)


def _over_all(results: Sequence[Result], out: Path, tell: Callable[[str], None]) -> Result:
    """The results of single claims as one."""
    import pandas as pd

    from sinklab_claims.reproduce.show import show_results
    from sinklab_claims.verdict.records import read_results

    rows = [result.summary for result in results]
    errors = list(dict.fromkeys(error for row in rows for error in row["errors"]))
    if errors:
        tell(f"logs are in {out / 'logs'}; the same command again tries what failed")

    def shows(summary: Mapping[str, Any]) -> list[Block]:
        left_out = [(row["name"], row["reason"]) for row in summary["claims"] if row["folder"] is None]
        of_folder = {str(kept.folder.absolute()): kept for kept in read_results(out)}
        own = [of_folder[row["folder"]] for row in summary["claims"] if row["folder"] in of_folder]
        blocks = [*show_results([kept.record for kept in own]), *([Facts(left_out)] if left_out else [])]
        return [*blocks, *(Facts([("table", f"{kept.folder}/table.parquet")]) for kept in own[:1])]

    table = pd.concat([result.table for result in results])
    return Result({"claims": rows, "errors": errors}, table, {"kind": "reproduce"}, out, listed=rows, shows=shows)


def chosen(
    names: list[str], *, paper: str | None, all_claims: bool, scale: str, base: str | None = None, on_models: bool = False
) -> list[str]:
    """The claims that a command line asks for. Raises as :func:`reproduce`."""
    check_word(scale, SCALES, "scale")
    if paper is not None:
        check_paper(paper)
    if names and (all_claims or paper is not None):
        raise ConfigurationError("reproduce: give names, or `paper`, or `all_claims`; not names together with the others")
    if not (names or all_claims or paper is not None):
        raise ConfigurationError(
            "reproduce: no claim is asked for; give names from 'sinklab claims', or `paper`, such as gu2024, or `all_claims`"
        )
    claims = [stated(name) for name in names or registered]
    trained = [claim.name for claim in claims if not claim.checkpoint]
    if on_models and names and trained:
        can = ", ".join(name for name in registered if stated(name).checkpoint)
        raise ConfigurationError(
            f"reproduce: {', '.join(trained)} take training, which `models` have behind them; measured without it are {can}"
        )
    asked = [
        claim.name
        for claim in claims
        if (claim.checkpoint if on_models else claim.costs or names)
        and (base is None or bool(names) or base in claim.bases)
        and paper in (None, claim.source)
    ]
    if not asked:
        raise ConfigurationError(
            f"reproduce: no claim of paper {paper or 'any'} can be run so at scale {scale}; see: sinklab claims"
        )
    return asked
