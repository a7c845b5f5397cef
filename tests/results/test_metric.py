"""Every number has one declaration, readable without torch, and whoever declares a second one under its name is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sinklab
from sinklab.errors import ContractError
from sinklab.registry import KINDS
from sinklab.results.metric import FRACTION, LOSS, PERCENTAGE, Metric, catalogue, definitions, definitions_of, metrics_of
from sinklab.results.table import make_table

IMPORT = "from sinklab.results.metric import Metric\n"


def read(folder: Path, **files: str) -> dict[str, Metric]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(IMPORT + text)
    return {name: declared.metric for name, declared in catalogue(folder).items()}


def test_the_whole_tree_has_one_definition_under_each_name():
    found = catalogue()
    assert found["loss"].metric == LOSS
    assert found["gu2024"].module == "sinklab.probes.sink_rate"
    assert found["gu2024"].file == Path(sinklab.__file__).parent / "probes" / "sink_rate.py"
    assert all(metric.unit and metric.text.endswith(".") for metric in (one.metric for one in found.values()))


def test_a_share_is_declared_as_one():
    """Over seeds its interval stays between its ends, and does so by the declared range alone."""
    shares = {name for name, one in catalogue().items() if one.metric.unit in ("fraction", "percent")}
    ranged = {name for name, one in catalogue().items() if one.metric.range in (FRACTION, PERCENTAGE)}
    gained = {"freed_to_first", "freed_to_own", "freed_to_content"}  # by what it gains, a key can lose
    beyond = {"excess_of_first", "excess_inside", "left_by_one", "deviation"}  # less than an even share, quotients
    others = {"output_gain", "lm_eval_score"}  # of gates and of metrics that others write
    assert shares - ranged == gained | beyond | others


def test_an_extreme_is_one_over_seeds():
    """What a text calls the largest or least of a run is that of all runs; a mean of extremes, or a spread, is a mean."""
    found = {name: one.metric for name, one in catalogue().items()}
    largest, least = (
        {name for name, metric in found.items() if re.match(begins, metric.text) or name.endswith(ends)}
        for begins, ends in (
            (r"(Largest|Highest|Maximum|Worst)\b", "_largest"),
            (r"(Least|Smallest|Lowest|Minimum)\b", "_smallest"),
        )
    )
    rates = {"sink_rate_max", "prefix_largest", "massive_ratio"}  # of shares and means over rows
    means = {"head_bos_weight_largest", "head_bos_weight_smallest"}  # of one head
    spreads = {"change_with_length", "rate_range"}
    violations = {"largest_violation", "bound_violation"}
    extremes = {how: {name for name, metric in found.items() if metric.over_seeds == how} for how in ("max", "min")}
    assert extremes == {"max": (largest | violations) - rates - spreads - means, "min": least - means}


@pytest.mark.parametrize("plural", ["probes", "read_outs"])
def test_the_text_says_what_the_import_says(plural):
    found = catalogue()
    for name in KINDS[plural]:
        plugin = KINDS[plural][name]
        imported = getattr(plugin, "metrics", None) or sys.modules[plugin.__module__].METRICS
        assert metrics_of(plural, name) == imported
        assert all(found[metric.name].metric == metric for metric in imported)


def test_reading_imports_nothing_heavy():
    code = (
        "import sys; from sinklab.results.metric import catalogue; catalogue(); print({'torch', 'pandas'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_constants_f_strings_and_what_is_imported(tmp_path):
    found = read(
        tmp_path,
        one='PAPER, LEAST = "A 2024", 3\nFIRST = Metric("first", "nats", f"From {LEAST} on.", paper=PAPER)\n',
        two='from sinklab.one import FIRST, LEAST\nclass P:\n    metrics = (FIRST, *(Metric(f"at_{n}", "nats", "t") for n in '
        "range(LEAST)))\n",
    )
    assert found["first"] == Metric("first", "nats", "From 3 on.", paper="A 2024")
    assert list(found) == ["first", "at_0", "at_1", "at_2"]


def test_metrics_of_a_file_are_in_its_order_whichever_another_file_asks_for(tmp_path):
    found = read(
        tmp_path,
        a='from sinklab.b import SECOND\nclass P:\n    metrics = (SECOND,)\n    own = Metric("own", "nats", "t")\n',
        b='FIRST = Metric("first", "nats", "t")\nSECOND = Metric("second", "nats", "t")\n',
    )
    assert list(found) == ["own", "first", "second"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"one": 'A = Metric("a", "nats", "t")\n', "two": 'B = Metric("a", "nats", "t")\n'},
            "metric 'a' is declared twice, in",
        ),
        ({"one": 'A, B = Metric("a", "nats", "t"), Metric("a", "bits", "t")\n'}, "declared twice, in"),
        ({"one": 'def f():\n    return Metric("a", "nats", "t")\n'}, r"one.py:3: a Metric is declared at the top of a file"),
        ({"one": 'import os\nA = Metric(os.name, "nats", "t")\n'}, r"one.py:3: .* not understood: 'os'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, files, message):
    with pytest.raises(ContractError, match=message):
        read(tmp_path, **files)


def test_a_plugin_of_another_package(monkeypatch):
    class Outside:
        metrics = (Metric("outside_number", "nats", "t"), Metric("gu2024", "percent", "t"))

    Outside.__module__ = "outside"
    monkeypatch.setitem(sys.modules, "outside", sys.modules[__name__])
    monkeypatch.setitem(KINDS["probes"]._objects, "outside", Outside)
    assert metrics_of("probes", "outside") == Outside.metrics
    with pytest.raises(ContractError, match="metric 'gu2024' is declared twice"):
        catalogue()


def test_definitions_of_a_run():
    metric = Metric("a", "nats", "What.", paper="P", version=2)
    entry = {"probe": "p", "metric": "a", "version": 2, "text": "What.", "paper": "P", "unit": "nats"}
    assert definitions({"p": (metric,)}) == [entry]


def test_definitions_of_a_table_are_those_of_the_catalogue_wherever_they_are_declared():
    """A few names at a time, all of them at once, and one that is declared nowhere, as the end of an interval."""
    known = catalogue()
    names = sorted(known)
    for some in (*([name] for name in names[::10]), names[:40], names, [*names[:3], "loss_low"]):
        table = make_table([{"probe": "p", "metric": known[name].metric if name in known else LOSS.bound("low"), "value": 1.0}
                            for name in some])  # fmt: skip
        found = {entry["metric"]: entry for entry in definitions_of(table)}
        assert found == {entry["metric"]: entry for entry in definitions({"p": [known[n].metric for n in some if n in known]})}


def test_a_run_parses_only_the_files_that_declare_what_it_has():
    """All of them take half a second of a slow core, more than some measurements."""
    code = (
        "import ast\n"
        "from sinklab.results.metric import definitions_of, LOSS\n"
        "from sinklab.results.table import make_table\n"
        "from sinklab.studies.origin.found import CHANNEL_WRITE\n"
        "metrics = (LOSS, LOSS.bound('low'), CHANNEL_WRITE)\n"
        "table = make_table([{'probe': 'p', 'metric': one, 'value': 1.0} for one in metrics])\n"
        "parse, files = ast.parse, []\n"
        "ast.parse = lambda text: files.append(text) or parse(text)\n"
        "print(len(definitions_of(table)), len(files))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, parsed = map(int, shown.split())
    assert found == 2
    assert 2 <= parsed < 10  # with what these import from
