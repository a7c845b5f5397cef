"""What a card says of a run, kind by kind: table, finding, recommendation, limits and numbers, all of them in its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sinklab.errors import InputError
from sinklab.registry import spelled
from sinklab.report.card import Card, CardNumber
from sinklab.report.runs import IndexedRun, index_run
from sinklab.report.words import condition_name, is_number, loss_unit, number, percent, samples_of, sinks_of
from sinklab.results.blocks import Block, Grid, Heading, Say, cell_text
from sinklab.results.naming import counted
from sinklab.results.sections import sections
from sinklab.results.table import read_run
from sinklab.studies.card.reproduction import command_of, probe_settings, public_name, public_spec
from sinklab.studies.depend.words import bos_name, index_text

__all__ = ["card_of"]

Summary: TypeAlias = Mapping[str, Any]
"""``summary.json`` or ``run.json``, of whatever command."""

NO_MODEL = ("claim", "sweep", "pathways", "reproduce", "trigger", "retrieval", "backcopy")
"""Commands whose runs are about several models; of the last three, about toys that are trained for one problem."""

MOST_ROWS = 20
"""Rows of a card; the rest is in the table of the run."""

TASKS = {"next token": "text-generation", "masked token": "fill-mask", "target token": "translation"}
"""What a loss is of to the hub's name for such models."""

OF_DECODERS = ("cache", "depend", "pretrain")
"""Commands that serve models of the next token alone."""


def card_of(folder: Path) -> Card:
    """The card of the run in a folder.

    Raises:
        InputError: no finished run there, or one that says nothing about a model.
    """
    record = read_run(folder)
    kind = str(record.get("kind"))
    summary = read_run(folder, "summary.json") if (folder / "summary.json").is_file() else {}
    run = index_run(folder)
    if kind in NO_MODEL:
        raise InputError(f"{folder} is a run of {kind}, which says nothing about one model; there is no card of it")
    if run.status not in ("finished", "diverged", "stopped"):
        raise InputError(f"{folder} holds a run of {kind} that is {run.status}; a card is made of one that has ended")
    model = public_name(run.model)
    fill = KINDS.get(kind, _other)
    headings, rows, limits, numbers = fill(record, summary, run)
    if not model or not (run.finding or rows):
        raise InputError(f"{folder} is a run of {kind} that says nothing about a model as a whole, so there is no card of it")
    advice = _advice(kind, summary)
    corpus = summary.get("corpus") or _corpus(record)
    public = {spec: public_spec(spec) for spec in _specs(summary)}
    return Card(
        model=model, kind=kind, task=_task(kind, summary), corpus=public_name(str(corpus)),
        headings=headings, rows=rows, finding=_said(run.finding, public),
        recommendation=advice if advice != run.finding else "", limits=[_said(limit, public) for limit in limits],
        command=command_of(record, summary, model), made=dict(_made(record, summary, run)),
        numbers=[number for number in numbers if math.isfinite(number.value)],
    )  # fmt: skip


def _specs(summary: Summary) -> list[str]:
    """Tasks of a run as they were typed, with the folders of the machine in their settings."""
    tasks = summary.get("tasks")
    return [str(task["task"]) for task in tasks if isinstance(task, dict) and "task" in task] if isinstance(tasks, list) else []


def _said(sentence: str, public: Mapping[str, str]) -> str:
    """A sentence of the run with what it names as a card names it."""
    for own in sorted(public, key=len, reverse=True):  # one may begin with another
        sentence = sentence.replace(own, public[own])
    return sentence


Filled: TypeAlias = tuple[list[str], list[list[str]], list[str], list[CardNumber]]
"""Headings and rows of the table, limits, and numbers for the metadata."""


def _audit(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    threshold = f"{summary['threshold']:g}"
    rows, numbers = [], []
    for part in summary.get("parts") or [summary]:
        name = f"{part['part']}: " if part.get("part") else ""
        heads = f"{number(part['sink_heads'])} of {number(part['num_heads'])}"
        rows.append([f"{name}heads that sink at the strongest sink", heads])
        if (top := next(iter(sinks_of(part)), None)) and top.get("position") != 0 and is_number(top.get("rate")):
            title = f"{name}rate of the strongest sink, {top['name']}, threshold {threshold}"
            rows.append([title, percent(top["rate"])])
            numbers.append(CardNumber("sink_rate", title, float(top["rate"]), "percent"))
        rate = part.get("sink_rate_gu2024")
        title = f"{name}sink rate at the first position, threshold {threshold} (Gu et al. 2024, arXiv 2410.10781)"
        if is_number(rate):
            rows.append([title, percent(rate)])
            numbers.append(CardNumber("gu2024", title, float(rate), "percent"))
        weight = part.get("first_token_mean_weight")
        if is_number(weight):
            rows.append([f"{name}mean attention to the first position", percent(100 * weight)])
            numbers.append(CardNumber("mean_weight", f"{name}mean attention to the first position", float(weight), "weight"))
        for condition in (part.get("conditions") or [])[1:]:
            words = condition_name(condition["corpus"], condition["bos"], summary)
            rows.append([f"{name}sink rate at the first position, {words}", percent(condition.get("sink_rate_gu2024"))])
    if is_number(summary.get("loss")):
        rows.append([f"loss, {loss_unit(summary)}", f"{summary['loss']:.3f}"])
        numbers.append(CardNumber("loss", str(summary.get("loss_definition") or "loss"), float(summary["loss"]), "nats"))
    main = condition_name(summary.get("corpus"), summary.get("bos"), summary)
    limits = [
        f"{samples_of(summary)}: {main}; one draw, seed "
        f"{record['config'].get('seed')}. Rates are those of these samples and have no interval."
    ]
    limits += [f"Weights are {summary['tier']}, not proved to be those that made the outputs."] if summary.get("tier") else []
    cache = summary.get("cache")
    if isinstance(cache, dict) and "policies" in cache:
        texts = f"{counted(cache['documents'], 'text')} of {number(cache['tokens'])} tokens of {public_name(cache['corpus'])}"
        limits += [f"The recommendation rests on {texts}."]
    limits += list(summary.get("warnings") or [])
    return ["measurement", "value"], rows, limits, numbers


def _cache(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    headings, rows, limits = _of_blocks(sections()["cache"].blocks(summary))
    numbers = [
        CardNumber("loss", f"loss under {entry['label']}", float(entry["loss"]), "nats per token")
        for entry in summary["policies"]
    ]
    return headings, rows, [*limits, f"Tokens per second are those of one machine ({_hardware(record)})."], numbers


def _causes(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    heads = summary["heads"]
    rows, numbers = [], []
    for label, count in summary["counts"].items():
        named = [f"{head['layer']}.{head['head']}" for head in heads if head["label"] == label]
        shown = ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")
        rows.append([label, f"{count} of {len(heads)}", "–" if label == "undecided" else shown or "–"])
        numbers.append(CardNumber(f"heads_{label}", f"heads labelled {label} of {len(heads)} examined", float(count), "heads"))
    domains = ", ".join(map(public_name, summary["domains"])) + (" together" if len(summary["domains"]) > 1 else "")
    limits = [
        f"{counted(summary['texts'], 'text')} of {domains}; a head has a label where "
        f"its effect on the loss shows at a false discovery rate of {summary['level']:g}; effects below "
        f"{summary['minimal_effect']:g} {summary['unit']} count as none. Undecided means that these texts do not tell."
    ]
    return ["label", "heads", "layer.head"], rows, limits, numbers


def _denoise(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    rows, numbers = [], []
    states = summary["by_step"]
    last, shown = len(states) - 1, min(len(states), MOST_ROWS) - 1  # evenly, the first and the last among them
    for state in (states[row * last // shown] for row in range(shown + 1)):
        where, loss = f"{state['masked']:.1f} % of the tokens masked", state["loss"]
        rows.append([f"{state['masked']:.1f}", f"{state['sink_rate']:.1f}", "–" if loss is None else f"{loss:.3f}"])
        numbers.append(CardNumber("denoising_sink_rate", f"heads with a sink, {where}", float(state["sink_rate"]), "percent"))
        if loss is not None:
            numbers.append(CardNumber("masked_token_loss", f"loss of masked tokens, {where}", float(loss), "nats"))
    filled = "with the tokens of the text" if summary["fill"] == "text" else "as the model writes"
    limits = [
        f"{samples_of(summary)} of {public_name(str(summary['corpus']))} in {counted(summary['steps'], 'step')}, filled in by "
        f"{summary['order']}, {filled}; a head has a sink where a key has more than {summary['threshold']:g} of its rows on "
        "average. Numbers by state have no interval here.",
        *summary["notes"],
    ]
    return ["tokens masked, %", "heads with a sink, %", "loss, nats per masked token"], rows, limits, numbers


def _depend(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    rows, numbers, items = [], [], []
    for outcome in summary["tasks"]:
        task, unit, pair = public_spec(outcome["task"]), outcome["unit"], (outcome["with_sinks"], outcome["without"])
        mean, low, high = (f"{outcome['difference'][end]:+.3f}" for end in ("mean", "low", "high"))
        difference = f"{mean} [{low}, {high}]{'' if unit == 'fraction' else f' {unit}'}"
        rows.append([task, outcome["verdict"], difference, index_text(outcome["dependence"])])
        items.append(f"{counted(outcome['items'], 'item')} of {task}")
        if "mean" in outcome["dependence"]:
            title = f"{task}: index of dependence, {pair[0]} against {pair[1]}"
            numbers.append(CardNumber("sink_dependence", title, float(outcome["dependence"]["mean"]), "ratio"))
        numbers += [
            CardNumber(outcome["metric"], f"{task} under {entry['policy']}", float(entry["score"]["mean"]), unit)
            for entry in outcome["policies"]
            if entry["policy"] in pair
        ]
    limits = [
        f"{', '.join(items)}, {bos_name(summary['bos'])} in front, seed {record['config'].get('seed')}. The difference is that "
        f"of {pair[0]} (first tokens + window) less {pair[1]}, which hold as many tokens; intervals over items, "
        f"{100 * summary['level']:.4g} %.",
        *(summary.get("warnings") or ()),
    ]
    return ["task", "depends on the sink", "difference", "index of dependence"], rows, limits, numbers


def _pretrain(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    result, resolved = record.get("result") or {}, record.get("resolved") or {}
    rows, numbers = [], []
    for name, value in (
        ("parameters", number(resolved.get("parameters"))),
        ("attention operation", run.operation or "–"),
        ("steps", number(record.get("steps"))),
    ):
        rows.append([name, value])
    if is_number(result.get("held_out_loss")):
        rows.append(["loss, nats per held-out token", f"{result['held_out_loss']:.3f}"])
        numbers.append(CardNumber("held_out_loss", "held-out loss", float(result["held_out_loss"]), "nats per token"))
    if is_number(result.get("sink_rate")):
        threshold = f"{record['config']['watch']['threshold']:g}"
        title = f"sink rate at the first position, threshold {threshold} (Gu et al. 2024, arXiv 2410.10781)"
        rows.append([title, percent(result["sink_rate"])])
        numbers.append(CardNumber("gu2024", title, float(result["sink_rate"]), "percent"))
    seeds = record.get("seeds") or {}
    said = ", ".join(f"{name} {seed}" for name, seed in seeds.items())
    limits = [f"One training, seeds: {said}; another seed gives other numbers, and no interval is known from one."]
    return ["training", "value"], rows, limits, numbers


def _quantize(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    rows, numbers = [], []
    for entry in summary["schemes"]:
        name = f"{entry['scheme'].upper()}{', a scale for each token' if entry['per_token'] else ''}"
        rows.append([name, f"{entry['loss']:.3f}", f"{entry['gap']:+.3f} [{entry['low']:+.3f}, {entry['high']:+.3f}]"])
        numbers.append(CardNumber("loss", f"loss as {name}", float(entry["loss"]), str(summary["unit"])))
    limits = [
        f"{counted(summary['texts'], 'sample')} of {public_name(str(summary['corpus']))}, ranges from "
        f"{counted(summary['calibration'], 'other')}; the loss is that of the {summary['loss_of']}; effects below "
        f"{summary['minimal_effect']:g} {summary['unit']} count as none."
    ]
    return ["scheme", f"loss, {summary['unit']}", "gap to the model as it is, 95 %"], rows, limits, numbers


def _origin(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    headings, rows, limits = _of_blocks(sections()["origin"].blocks(summary))
    numbers = [
        CardNumber(
            "origin_loss_change", f"{origin['kind']} at {origin['place']}: change of the loss, {edit['on']} {edit['edit']}",
            float(edit["loss"]["mean"]), "nats",
        )
        for origin in summary["origins"]
        for edit in origin["edits"]
        if edit["loss"] is not None
    ]  # fmt: skip
    return headings, rows, [f"{public_name(str(summary['corpus']))}.", *limits], numbers


def _of_blocks(blocks: Iterable[Block]) -> tuple[list[str], list[list[str]], list[str]]:
    """Headings and rows of the tables that are not folded, each under its section, and the notes."""
    headings, rows, limits, title = list[str](), list[list[str]](), list[str](), ""
    for block in blocks:
        if isinstance(block, Heading):
            title = f"{block.text}: "
        elif isinstance(block, Say) and block.small:
            limits.append(block.text)
        elif isinstance(block, Grid) and not block.folded:
            headings = list(block.headings)
            rows += [[f"{title}{cell_text(row[0])}", *map(cell_text, row[1:])] for row in block.rows]
    return headings, rows, limits


def _other(record: Summary, summary: Summary, run: IndexedRun) -> Filled:
    """A run of any other command: the numbers of the whole model in its table, each with the settings of its probe."""
    under = _settings_of_metrics(record)
    rows, numbers = [], []
    for name, (value, unit) in list(run.numbers.items())[:MOST_ROWS]:
        title = name + under.get(name.partition(" · ")[0], "")  # behind the point: under what other condition
        rows.append([title, f"{number(value)} {unit}".strip()])
        numbers.append(CardNumber(name, title, value, unit or "1"))
    corpus, samples = summary.get("corpus") or _corpus(record), run.settings.get("samples")
    of = f"{samples} sample{'' if samples == '1' else 's'} of " if samples else ""  # settings are words
    limits = [f"{of}{public_name(str(corpus))}; numbers have no interval here."]
    return ["measurement", "value"], rows, limits if corpus else [], numbers


def _settings_of_metrics(record: Summary) -> dict[str, str]:
    """Metric to the settings that its probe had, as ``" (sink_rate:threshold=0.2)"``; none of a probe without settings."""
    probes = {str(probe["name"]): public_spec(spelled(probe)) for probe in probe_settings(record) if len(probe) > 1}
    return {
        str(metric.get("metric")): f" ({probes[metric['probe']]})"
        for metric in record.get("definitions") or []
        if isinstance(metric, dict) and metric.get("probe") in probes
    }


KINDS: dict[str, Callable[[Summary, Summary, IndexedRun], Filled]] = {
    "audit": _audit, "cache": _cache, "causes": _causes, "denoise": _denoise, "depend": _depend, "origin": _origin,
    "pretrain": _pretrain, "quantize": _quantize,
}  # fmt: skip
"""Command to what a card says of its runs."""


def _advice(kind: str, summary: Summary) -> str:
    """What a run recommends, in its own words."""
    if kind == "cache":
        return str(summary["recommendation"])
    cache = summary.get("cache")
    return str(cache["recommendation"]) if kind == "audit" and isinstance(cache, dict) and "policies" in cache else ""


def _task(kind: str, summary: Summary) -> str:
    if kind in OF_DECODERS:
        return "text-generation"
    if kind == "denoise":
        return "fill-mask"
    predicted = str(summary.get("loss_kind") or summary.get("loss_of"))
    task = TASKS.get(predicted)
    if task is None and predicted.partition(",")[0] == "class":  # behind a comma: whose, where samples have none
        task = {"image": "image-classification", "audio": "audio-classification"}.get(str(summary.get("kind")))
    return task or "other"


def _corpus(record: Summary) -> str:
    """Name of the corpus in a record: of a measurement, of a training, or of a command that reads several."""
    entries = (record.get("corpus"), record.get("data"))
    named = next((entry["name"] for entry in entries if isinstance(entry, dict) and entry.get("name")), None)
    config = record.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    domains, tasks = record.get("domains"), record.get("tasks")
    listed = ", ".join(str(domain.get("domain")) for domain in domains) if isinstance(domains, list) else ""
    listed = listed or (", ".join(dict.fromkeys(str(task.get("name")) for task in tasks)) if isinstance(tasks, list) else "")
    return str(named or (data.get("corpus") if isinstance(data, dict) else None) or listed)


def _hardware(record: Summary) -> str:
    hardware = record.get("hardware") or {}
    return f"{hardware.get('name', 'unknown')}, {record.get('dtype', 'unknown dtype')}"


def _made(record: Summary, summary: Summary, run: IndexedRun) -> Iterator[tuple[str, str]]:
    """Identities: versions, weights, texts, run."""
    versions = record.get("versions") or {}
    commit = f" ({str(record['commit'])[:12]})" if record.get("commit") else ""
    yield "sinklab", f"{versions.get('sinklab', '?')}{commit}"
    for name in ("torch", "transformers"):
        if name in versions:
            yield name, str(versions[name])
    weights = summary.get("revision") or record.get("weights_sha256")
    if weights:
        yield "weights", str(weights).removeprefix("sha256-")[:16]
    if run.tokens:
        texts = record.get("token_sha256")
        yield "tokens", str(texts.get("held_out", "") if isinstance(texts, dict) else run.tokens)[:16]
    yield "on", _hardware(record)
    if record.get("run_id"):
        yield "run", str(record["run_id"])
