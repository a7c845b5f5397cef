"""measure(): some probes, one model, one corpus, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from sinklab.errors import ConfigurationError
from sinklab.results.blocks import Block, Cell, Facts, Grid
from sinklab.results.run import Result, Run
from sinklab.studies import arguments

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.attention.probe import Probe


THRESHOLD = 0.3
"""Of the probes that have one, where no other is given."""


@arguments.command
def measure(
    model: arguments.ModelSource,
    *,
    probes: Annotated[Sequence[str | dict[str, Any] | Probe], arguments.Known("probes")],
    corpus: arguments.CorpusOfModel = "auto",
    seq_len: arguments.SeqLen = arguments.SEQ_LEN,
    samples: arguments.Samples = 100,
    threshold: arguments.Threshold = THRESHOLD,
    seed: arguments.Seed = 0,
    bos: arguments.Bos = "auto",
    batch_size: arguments.BatchSize = None,
    loading: arguments.Loading = arguments.Loading(),
    output: arguments.Output = arguments.Output(),
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run chosen probes over a model. With --json: one row of the table per line.

    Args:
        probes: Names from 'sinklab list probes', optionally with settings: entropy:sink_position=2.

    In Python:
        ``probes`` may be objects too. ``say`` gets warnings about texts that are too short, or longer than in training,
        and about windows in which few queries see the first position.

    Returns:
        The table is the answer; there is no summary.

    Raises:
        SinklabError: see the errors of loading, corpora and sessions.

    Examples:
        sinklab measure embedded:softmax --probe sink_rate --probe entropy
        sinklab measure ./my-checkpoint --probe null_mass --corpus random_tokens --out build/null
    """
    from sinklab.corpora import resolve_corpus
    from sinklab.corpora._reading import corpus_record, read_samples
    from sinklab.models.drawing import AUTO, default_corpus, draw_samples, reading_part
    from sinklab.models.losses import is_causal_lm
    from sinklab.models.positions import length_warnings
    from sinklab.registry import probes as registry
    from sinklab.registry import spelled
    from sinklab.results.metric import definitions
    from sinklab.sinks.short_rows import few_queries_warning
    from sinklab.streaming.limits import narrowest
    from sinklab.studies.measure import probing

    settings = {"seq_len": seq_len, "samples": samples, "threshold": threshold, "seed": seed, "bos": bos}
    with Run("measure", **vars(output), settings=settings) as run:
        if not probes:
            raise ConfigurationError(f"name at least one probe; known: {', '.join(registry)}")
        chosen = probing.make_probes(probes, threshold)
        chosen_settings = [registry.settings(probe) for probe in chosen]
        if threshold != THRESHOLD:
            _require_threshold(threshold, chosen_settings)
        loaded = reading_part(loading.open(model))
        text = default_corpus(loaded) if corpus == AUTO else resolve_corpus(corpus)
        with_bos = probing.uses_bos(loaded.encoder, bos)
        drawn = draw_samples(loaded, text, seq_len=seq_len, samples=samples, seed=seed, bos=with_bos)
        probing.require_length(loaded, drawn, seq_len)
        length = drawn.positions or seq_len
        probing.require_positions(chosen, length)
        rate_threshold = next((float(probe["threshold"]) for probe in chosen_settings if probe["name"] == "sink_rate"), None)
        sentences = length_warnings(loaded.model, drawn, rate_threshold)
        window = narrowest(loaded.model) if is_causal_lm(loaded.model) else None
        if rate_threshold is not None and window is not None and window < length:
            # The finding of an audit says it of its modules.
            sentences += filter(None, [few_queries_warning(length, window, rate_threshold)])
        for sentence in sentences:
            say(sentence)
        reading = read_samples(text, loaded.encoder, seq_len=seq_len, samples=samples, seed=seed, bos=with_bos)
        identity = probing.check_identity(loaded.model, drawn)
        session = probing.run_probes(
            loaded.model, drawn, chosen, batch_size=batch_size, progress=run.progress, stage=text.label
        ).session
        return run.finish(
            table=probing.labelled(session, loaded, run_id=run.id, corpus=text.label, bos=int(with_bos), seed=seed),
            display=display,
            loaded=loaded,
            config={"corpus": text.label, "seq_len": length, "probes": [spelled(probe) for probe in chosen_settings]},
            model=probing.model_facts(loaded, session),
            corpus=corpus_record(text, reading),
            token_sha256=drawn.sha256,
            probes=chosen_settings,
            definitions=definitions({probe.name: probe.metrics for probe in chosen}),
            checks=probing.checks(session, identity),
            calls=dict(session.calls),
        )


def _require_threshold(threshold: float, probes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a threshold that no probe takes, by their settings."""
    if not any(probe.get("threshold") == threshold for probe in probes):
        names = ", ".join(probe["name"] for probe in probes)
        raise ConfigurationError(
            f"`threshold` {threshold:g} has no effect on {names}: a probe has none, or names its own; leave it out, or "
            "measure sink_rate"
        )


def display(result: Result) -> Iterator[Block]:
    """A row a metric, at the first position where it has a number for each, and of an encoder–decoder one for each part."""
    parts = ["part"] if result.table["part"].notna().any() else []
    shown: list[list[Cell]] = []
    for (probe, metric, unit, part), rows in result.table.groupby(["probe", "metric", "unit", "part"], sort=True, dropna=False):
        keys = "all positions"
        for name in ("key_position", "query_position"):
            if rows[name].notna().any():
                rows, keys = (rows[rows[name] == 0], "position 0") if _has_each(rows, name) else (rows, "some positions")
        # Rows without a layer are the same numbers pooled over the model; where there is nothing else they are shown.
        rows = rows[rows["layer"].notna()] if rows["layer"].notna().any() else rows
        values = rows["value"].astype("float64")
        mean, least, most = (f"{number:.4g}" for number in (values.mean(), values.min(), values.max()))
        if unit == "index":  # between two channels there is none
            mean = "–"
        of_part = [part if isinstance(part, str) else ""] if parts else []
        shown.append([str(probe), str(metric), *of_part, keys, str(unit), len(rows), mean, least, most])
    headings = ["probe", "metric", *parts, "of", "unit", "values", "mean", "min", "max"]
    yield Grid(headings, shown, text=4 + len(parts))
    facts = [("tier", "; ".join(sorted(result.table["tier"].dropna().unique())))]
    facts += [("table", "" if result.folder is None else str(result.folder / "table.parquet"))]
    if facts := [fact for fact in facts if fact[1]]:
        yield Facts(facts)


def _has_each(rows: pd.DataFrame, name: str) -> bool:
    """Whether there is a number for each position from the first on, and not for the largest few alone."""
    positions = rows[rows[name].notna()].groupby(["module", "layer", "head"], dropna=False)[name]
    return bool((positions.nunique() == positions.max() + 1).all())
