"""Sweeps: which cells there are, that processes are run again and stopped, what comes out, and what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest
import torch
from tests.command_line import CliRunner
from tests.jobs.conftest import cells_of, run_here
from tests.training.conftest import EIGHT_STEPS, short

from sinklab.cli.app import app
from sinklab.errors import ConfigurationError, InputError
from sinklab.jobs import cell as cell_module
from sinklab.jobs import driver
from sinklab.jobs.cell import PLAN, SHARED, SweepPlan, read_plan, run_cell
from sinklab.jobs.driver import run_sweep
from sinklab.jobs.estimate import estimate_mean
from sinklab.jobs.grid import make_cells, parse_grid
from sinklab.jobs.processes import REFUSED, Watch, last_line, run_processes, serve
from sinklab.results.folder import FolderLock
from sinklab.results.table import read_run, read_table, write_json
from sinklab.sinks.short_rows import few_queries_warning, short_rows_warning
from sinklab.studies.arguments import parse_seeds
from sinklab.training import process
from sinklab.training.config import PretrainingConfig

RATE = "optimizer.learning_rate"

# --- the grid -------------------------------------------------------------------------------------------------------------


def test_cells_are_all_combinations_with_every_seed_the_first_seed_first():
    cells = make_cells(PretrainingConfig(), {"lr": [1e-3, 4e-3], "model.window": [None, 8]}, seeds=[5, 6])
    assert [(cell.settings[RATE], cell.settings["model.window"], cell.seed) for cell in cells] == [
        *[(1e-3, None, 5), (1e-3, 8, 5), (4e-3, None, 5), (4e-3, 8, 5)],
        *[(1e-3, None, 6), (1e-3, 8, 6), (4e-3, None, 6), (4e-3, 8, 6)],
    ]
    for cell in cells:
        assert cell.config.optimizer.learning_rate == cell.settings[RATE]
        assert cell.config.model.window == cell.settings["model.window"]
        assert cell.config.data.seed == cell.config.training.seed == cell.seed
    assert cells[0].name.startswith("learning_rate=0.001,window=null,seed=5-")
    assert len({cell.name for cell in cells}) == 8


def test_names_depend_on_what_is_varied_and_on_nothing_else():
    def name(value: str, **changes) -> str:
        return make_cells(PretrainingConfig(), {"data.corpus": [value]}, **changes)[0].name

    assert name("a") == name("a", changes=["training.steps=300"])
    assert len({name("a"), name("b"), name("a", seeds=[0]), name("a", seeds=[1])}) == 4
    assert name("a/b") != name("a b")  # which read the same
    assert name("./some where/a b.txt").startswith("corpus=.-some-where-a-b.txt-")
    assert name("[-5.5] b").startswith("corpus=-5.5-b-")  # with the sign of the number, and without the bracket
    assert len(name("x" * 300).encode()) < 200


def test_an_operation_in_the_grid_drops_the_settings_of_the_one_before():
    base = PretrainingConfig.parse({"model": {"operation": {"name": "sigmoid", "scale": 0.5}}})
    cells = make_cells(base, parse_grid(["operation={name: softmax},{name: sigmoid, scale: 2.0}"]))
    assert [cell.config.model.operation for cell in cells] == [{"name": "softmax"}, {"name": "sigmoid", "scale": 2.0}]


@pytest.mark.parametrize(
    ("item", "path", "values"),
    [
        ("lr=1e-3,4e-3", RATE, [1e-3, 4e-3]),
        ("optimizer.learning_rate=5e-3", RATE, [5e-3]),
        ("operation=softmax,sigmoid", "model.operation.name", ["softmax", "sigmoid"]),
        ("operation={name: softmax}", "model.operation", [{"name": "softmax"}]),
        ("model.window=8", "model.window", [8]),
        ("optimizer.betas=[0.9,0.95],[0.9,0.99]", "optimizer.betas", [[0.9, 0.95], [0.9, 0.99]]),
        ("training.compile=null,true", "training.compile", [None, True]),
    ],
)
def test_the_grid_of_the_command_line(item, path, values):
    assert parse_grid([item]) == {path: values}
    with pytest.raises(ConfigurationError, match=f"names {path} twice; give all of its values at once"):
        parse_grid([item, f"{path}=1"])
    with pytest.raises(ConfigurationError, match=r"`grid` 'lr=\[1': the values are no list in YAML"):
        parse_grid([item, "lr=[1"])


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ({"lr": [1e-3, 1e-3]}, {}, "optimizer.learning_rate has the value 0.001 twice"),
        ({"layers": [1, 1.0]}, {}, r"cells num_hidden_layers=1-\w{8} and num_hidden_layers=1.0-\w{8} are one configuration"),
        ({"lr": [1e-3]}, {"seeds": [0, 0]}, "`seeds` has the value 0 twice"),
        ({"lr": [1e-3]}, {"changes": [f"{RATE}=1"]}, "optimizer.learning_rate is both set and varied"),
        ({"data.seed": [1]}, {"seeds": [0]}, "`seeds` sets data.seed too"),
        ({"lr": [1e-3]}, {"seeds": [0], "changes": ["training.seed=1"]}, "`seeds` sets training.seed too"),
        ({"heads": [2, 5]}, {"seeds": [1]}, "cell num_attention_heads=5,seed=1-.*: model: hidden_size 128 is not a multiple"),
        ({"operation": ["softmx"]}, {}, "cell operation=softmx-.*: no operation is called 'softmx'. Did you mean 'softmax'"),
    ],
)
def test_cells_that_cannot_be_are_refused_by_name(grid, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_cells(PretrainingConfig(), grid, **options)


def test_seeds():
    assert parse_seeds("0..4") == [0, 1, 2, 3, 4]
    assert parse_seeds("7, 0..1,3") == [7, 0, 1, 3]
    for wrong in ("", "a", "4..0", "-1", "0..", "1.5"):
        with pytest.raises(ConfigurationError, match="expected seeds such as"):
            parse_seeds(wrong)


# --- processes ------------------------------------------------------------------------------------------------------------


class Events(Watch):
    """What happened, in order."""

    def __init__(self) -> None:
        super().__init__(cells=0, earlier=0)
        self.events: list[tuple[str, str]] = []

    def again(self, name, why):
        self.events.append(("again", f"{name}: {why}"))

    def ended(self, name, outcome):
        super().ended(name, outcome)
        self.events.append(("ended", name))


@pytest.fixture
def processes(tmp_path):
    """Run small programs by name; gives the errors and what the watch saw."""

    def call(programs: dict[str, str], jobs=2, retries=2, outcome=lambda name: "done", watch=None, gpus=()):
        watch = watch or Events()
        commands = {name: ["tests.jobs.program", program, str(tmp_path / name)] for name, program in programs.items()}
        logs = {name: tmp_path / f"{name}.log" for name in programs}
        options = {"jobs": jobs, "retries": retries, "watch": watch, "gpus": gpus}
        errors = run_processes(commands, logs.__getitem__, outcome, **options)
        return errors, watch

    return call


ONCE = "import os, sys\nif not os.path.exists(sys.argv[1]):\n    open(sys.argv[1], 'w').close()\n    {}\n"
"""A program that does something in its first attempt, and nothing in the second."""


def test_no_more_at_a_time_than_jobs(processes, tmp_path):
    timed = "import sys, time; start = time.time(); time.sleep(0.1); print(start, time.time(), file=open(sys.argv[1], 'w'))"
    errors, _ = processes(dict.fromkeys("abcde", timed), jobs=2)
    assert errors == {}
    spans = [tuple(map(float, (tmp_path / name).read_text().split())) for name in "abcde"]
    assert max(sum(start <= begin < stop for start, stop in spans) for begin, _ in spans) <= 2


@pytest.mark.parametrize(
    ("death", "why"),
    [
        ("print('step 3', flush=True); os.kill(os.getpid(), 9)", "killed by SIGKILL, as a machine does that runs out of mem"),
        ("sys.exit('KeyError: 1')", "KeyError: 1"),
        ("sys.exit(7)", "ended with status 7 and said nothing"),
    ],
    ids=["killed", "error", "silent"],
)
def test_one_that_dies_is_run_again(processes, death, why):
    errors, watch = processes({"a": ONCE.format(death), "b": "pass"})
    assert errors == {}
    ((_, said),) = [event for event in watch.events if event[0] == "again"]
    assert said.startswith(f"a: {why}")
    assert ("said last: step 3" in said) == ("SIGKILL" in said)


def test_one_that_always_dies_fails_and_the_others_are_kept(processes):
    errors, watch = processes({"a": "import sys; sys.exit('ValueError: no')", "b": "pass"}, retries=2)
    assert errors == {"a": "ValueError: no (attempt 3)"}
    assert sorted(event for event in watch.events if event[0] == "ended") == [("ended", "a"), ("ended", "b")]


def test_an_error_of_ours_is_not_tried_again(processes):
    errors, watch = processes({"a": f"import sys; print('error: no such corpus', file=sys.stderr); sys.exit({REFUSED})"})
    assert errors == {"a": "no such corpus"}
    assert watch.events == [("ended", "a")]


class Unreachable(OSError, ValueError):
    """What hub clients raise: a network that is down, and a name that was therefore not found."""


@pytest.mark.parametrize(
    ("error", "again"),
    [
        *((error, False) for error in (TypeError, KeyError, AssertionError, NotImplementedError, ImportError)),
        *((error, True) for error in (OSError, MemoryError, torch.OutOfMemoryError, RuntimeError, Unreachable)),
    ],
)
def test_an_error_is_tried_again_if_it_may_pass(error, again, capsys):
    def work():
        raise error("it")

    with pytest.raises(error if again else SystemExit, match="it" if again else str(REFUSED)):  # the first ends with status 1
        serve(work)
    if not again:
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "Traceback (most recent call last):"
        assert said[-1].startswith(f"{error.__name__}: ")


CHECKPOINT = (
    "import signal, sys, time\n"
    "def stop(number, frame):\n    open(sys.argv[1], 'w').write('checkpoint'); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)"
)


def test_an_interrupted_sweep_lets_its_cells_write_a_checkpoint(processes, tmp_path):
    class Interrupts(Events):
        def tick(self):
            if all(last_line(tmp_path / f"{name}.log") == "ready" for name in "ab"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes(dict.fromkeys("abc", CHECKPOINT), jobs=2, watch=Interrupts())
    assert [(tmp_path / name).exists() for name in "abc"] == [True, True, False]


DRIVER = """
import sys
from pathlib import Path
from sinklab.jobs.processes import Watch, run_processes
program, out, log = sys.argv[1:]  # a script without a guard, which no process runs again
command = {"a": ["tests.jobs.program", program, out]}
run_processes(command, lambda name: Path(log), str, jobs=1, retries=0, watch=Watch(1, 0))
"""


def test_a_cell_stops_when_its_driver_is_gone(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))}
    line = [sys.executable, str(tmp_path / "driver.py"), CHECKPOINT, str(tmp_path / "a"), str(tmp_path / "a.log")]
    driver = subprocess.Popen(line, env=environment)
    wait_for(lambda: last_line(tmp_path / "a.log") == "ready")
    driver.kill()
    driver.wait()
    wait_for((tmp_path / "a").exists)


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_cells_are_spread_over_the_gpus(processes, tmp_path):
    program = "import os, sys, time; open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.2)"
    processes(dict.fromkeys("abc", program), jobs=3, gpus=["4", "6"])
    assert [(tmp_path / name).read_text() for name in "abc"] == ["4", "6", "4"]


# --- sweeps ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Have sweeps run in this process; gives the names of the cells that each of them ran."""
    ran: list[list[str]] = []

    def run_local(plan, names, **options):
        ran.append(list(names))
        return run_here(plan, names, **options)

    monkeypatch.setattr(driver, "run_local", run_local)
    return ran


@pytest.fixture(scope="module")
def six(tmp_path_factory, text, cache):
    """A sweep of two rates and three seeds. Shared: copy its folder before changing it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "run_local", run_here)
        out = tmp_path_factory.mktemp("sweeps") / "six"
        return run_sweep(short(text), {"lr": [5e-3, 1e-3]}, out, seeds=[0, 1, 2], cache=cache, progress=False)


@pytest.fixture
def swept(here, text, cache, tmp_path):
    """Sweep the eight steps: ``swept({"lr": [1e-3]}, "training.steps=4", seeds=[0])``."""

    def call(grid, *changes, **options):
        options = {"cache": cache, "progress": False, **options}
        return run_sweep(short(text), grid, tmp_path / "sweep", changes=changes, **options)

    return call


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """What two runs of one configuration have in common."""
    return table[table["metric"] != "tokens_per_second"].drop(columns="run_id").reset_index(drop=True)


def test_a_sweep_leaves_runs_a_table_and_what_the_seeds_agree_on(six, finished):
    assert six.summary["errors"] == []
    cells = pd.read_csv(six.folder / "cells.csv")
    pd.testing.assert_frame_equal(cells.drop(columns="error"), cells_of(six).drop(columns="error"))
    assert cells["error"].isna().all()
    assert list(cells["seed"]) == [0, 0, 1, 1, 2, 2]
    assert set(cells["status"]) == {"finished"}
    table = read_table(six.folder / "table.parquet")
    assert list(table["run_id"].unique()) == list(cells["run_id"])
    # A cell is a run like any other.
    (first,) = cells["cell"][:1]
    run = read_run(six.folder / first)
    assert run["run_id"] == cells["run_id"][0]
    assert run["config"] == finished.record["config"]
    pd.testing.assert_frame_equal(numbers(table[table["run_id"] == run["run_id"]]), numbers(finished.table))
    # Mean and interval: half a width is 4.302653 standard errors for three values.
    fast, slow = six.summary["settings"]
    assert (fast["settings"], fast["finished"], fast["diverged"], fast["other"]) == ({RATE: 5e-3}, 3, 0, 0)
    values = cells["held_out_loss"][::2]
    loss = fast["held_out_loss"]
    assert loss["values"] == list(values)
    assert loss["mean"] == pytest.approx(values.mean())
    assert loss["interval"][1] - loss["mean"] == pytest.approx(4.302653 * values.std() / 3**0.5, rel=1e-6)
    assert slow["held_out_loss"]["mean"] > loss["interval"][1]
    assert list(read_plan(six.folder).cells) == list(cells["cell"])


def test_a_resumed_sweep_keeps_what_has_ended_and_may_grow(swept, here, tmp_path):
    first = swept({"lr": [5e-3]}, seeds=[0])
    with pytest.raises(InputError, match=r"sweep holds a sweep; go on with it with `resume`, or choose another `out`"):
        swept({"lr": [5e-3]}, seeds=[0])
    grown = swept({"lr": [5e-3]}, "training.keep=1", seeds=[0, 1], resume=True)
    assert here == [list(cells_of(first)["cell"]), list(cells_of(grown)["cell"][1:])]
    assert cells_of(grown)["run_id"][0] == cells_of(first)["run_id"][0]
    assert "mean" not in grown.summary["settings"][0]["held_out_loss"]  # of two seeds there are values, and no interval
    swept({"lr": [5e-3]}, seeds=[0, 1], resume=True)
    assert len(here) == 2  # nothing was left to do
    with pytest.raises(
        ConfigurationError, match=r"has cells that are not asked for now, 1 of them, such as .*seed=1-.*more may"
    ):
        swept({"lr": [5e-3]}, seeds=[0], resume=True)
    with pytest.raises(ConfigurationError, match=r"is a run of another configuration: training.steps was 8 and is 4"):
        swept({"lr": [5e-3]}, "training.steps=4", seeds=[0, 1], resume=True)


def test_auto_is_one_dtype_for_all_cells_on_whatever_machine_they_run(swept, monkeypatch, tmp_path):
    """A sweep that is planned where bfloat16 is fast and resumed where it is not."""

    monkeypatch.setattr(process, "has_bfloat16", lambda device: True)
    first = swept({"lr": [5e-3]}, "training.dtype=auto", seeds=[0])
    monkeypatch.setattr(process, "has_bfloat16", lambda device: False)
    grown = swept({"lr": [5e-3]}, "training.dtype=auto", seeds=[0, 1], resume=True)
    runs = [read_run(grown.folder / name) for name in cells_of(grown)["cell"]]
    assert [(run["config"]["training"]["dtype"], run["resolved"]["dtype"]) for run in runs] == [("bfloat16", "bfloat16")] * 2
    assert (first.record["dtype"], grown.record["dtype"]) == ("bfloat16", "bfloat16")
    assert list(cells_of(grown)["cell"][:1]) == list(cells_of(first)["cell"])


def test_a_window_in_which_an_even_head_passes_for_a_sink_is_said(swept):
    """After eight steps heads look at all keys alike: in a window of eight tokens the first one gets H(8) / 8, 0.34."""
    result = swept({"model.window": [8, None]}, seeds=[0])
    windowed, plain = result.summary["settings"]
    assert (windowed["sink_rate"]["values"], plain["sink_rate"]["values"]) == ([100.0], [0.0])
    (warning,) = result.summary["warnings"]
    assert warning.startswith("In a window of 8 tokens 8 of the 32 queries of a row see the first position, and a head that")
    assert warning.endswith("gives it 0.34 of what they have, more than 0.3: that many heads do so says nothing of a sink.")
    runs = [read_run(result.folder / name) for name in cells_of(result)["cell"]]
    assert [run.get("warning") for run in runs] == [warning, None]
    assert "does not compare with that of other windows" in few_queries_warning(64, 16, 0.3)
    assert few_queries_warning(64, 32, 0.3) == few_queries_warning(64, None, 0.3) == ""
    assert few_queries_warning(8, 64, 0.3) == short_rows_warning(8, 0.3) != ""


def test_numbers_that_do_not_compare_between_cells_are_named(swept):
    front = {"model.operation": [{"name": "softmax"}, {"name": "sink_token", "count": 2}]}
    (warning,) = swept(front, seeds=[0]).summary["warnings"]
    assert warning.startswith("With sink_token position 0 is that of a learned token, whose sink rate this is: the text begins")
    one = {"train": "a", "held_out": "b", "tokenizer": "c"}
    assert driver._other_text([one, {**one, "train": "d"}]) == []
    assert "different tokenizers, and a loss is per token" in driver._other_text([one, {**one, "tokenizer": "d"}])[0]
    assert "evaluated on different held-out text" in driver._other_text([one, {**one, "held_out": "d"}])[0]


def test_one_that_diverges_is_a_result(swept):
    result = swept({"lr": [1e-2, 1e6]}, "optimizer.name=sgd", "optimizer.max_grad_norm=0")
    assert result.summary["errors"] == []
    assert list(cells_of(result)["status"]) == ["finished", "diverged"]
    assert [(row["finished"], row["diverged"]) for row in result.summary["settings"]] == [(1, 0), (0, 1)]
    assert result.summary["settings"][1]["held_out_loss"] == {"values": []}
    assert set(result.table["run_id"]) == set(cells_of(result)["run_id"])


@pytest.fixture
def change_text(text):
    """Puts other words in front of the text, which is as it was after the test."""
    before = text.read_text()
    yield lambda: text.write_text("other words\n\n" + before)
    text.write_text(before)


def test_another_text_than_planned_is_refused_and_the_others_are_kept(swept, here, monkeypatch, change_text):
    inner = driver.run_local

    def run_local(plan, names, **options):
        errors = inner(plan, names[:1], **options)
        change_text()
        return errors | inner(plan, names[1:], **options)

    monkeypatch.setattr(driver, "run_local", run_local)
    result = swept({"lr": [5e-3, 1e-3]})
    (error,) = result.summary["errors"]
    assert "gives another text on" in error
    assert list(cells_of(result)["status"]) == ["finished", "failed"]
    assert f"{cells_of(result)['cell'][1]}: {cells_of(result)['error'][1]}" == error
    assert set(result.table["run_id"]) == {cells_of(result)["run_id"][0]}
    assert result.summary["settings"][1]["other"] == 1


def test_cells_that_are_added_read_the_text_of_those_that_have_ended(swept, here, change_text):
    first = swept({"lr": [5e-3]}, seeds=[0])
    planned = read_plan(first.folder).texts
    change_text()
    with pytest.raises(InputError, match=r"gives another text than cell .*seed=0-.* has read, .* bring the old text back"):
        swept({"lr": [5e-3]}, seeds=[0, 1], resume=True)
    again = swept({"lr": [5e-3]}, seeds=[0], resume=True)  # nothing is left to read it
    assert len(here) == 1
    assert list(cells_of(again)["cell"]) == list(cells_of(first)["cell"])
    assert read_plan(first.folder).texts == planned


def test_an_interrupted_sweep_writes_what_there_is_and_says_how_to_go_on(swept, monkeypatch, tmp_path):
    def run_local(plan, names, **options):
        if begins:
            run_cell(plan.folder, names[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "run_local", run_local)
    rates, more = [5e-3, 1e-3], [5e-3, 1e-3, 2e-3]
    on = "the same command goes on from there"
    for begins, rate, resume, how in ((0, rates, False, ""), (1, rates, False, "go on with `resume`"), (1, more, True, on)):
        with pytest.raises(KeyboardInterrupt) as caught:
            swept({"lr": rate}, resume=resume)
        notes = [f"what was trained is kept in {tmp_path / 'sweep'}: {how}"]
        assert getattr(caught.value, "__notes__", []) == (notes if begins else [])
    cells = pd.read_csv(tmp_path / "sweep" / "cells.csv")
    assert list(cells["status"]) == ["finished", "finished", "waiting"]
    monkeypatch.setattr(driver, "write_table", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as caught:
        swept({"lr": more}, resume=True)
    assert caught.value.__notes__ == notes
    assert len(read_table(tmp_path / "sweep" / "table.parquet"))


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        (["data.held_out_rows=99999"], {}, InputError, r"cell learning_rate=0.005-.*: too little held-out text"),
        (["training.device=cuda"], {}, ConfigurationError, r"cell learning_rate=0.005-.*: training.device is cuda and this"),
        ([], {"jobs": 0}, ConfigurationError, r"`jobs` must be at least 1 and `retries` at least 0, got 0 and 2"),
        ([], {"jobs": 2, "ray": "auto"}, ConfigurationError, r"`jobs` is for processes of this machine"),
    ],
    ids=["data", "device", "jobs", "both"],
)
def test_nothing_runs_when_something_is_wrong(swept, here, tmp_path, monkeypatch, changes, options, error, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(error, match=message):
        swept({"lr": [5e-3]}, *changes, **options)
    assert here == []
    assert not (tmp_path / "sweep").exists()


def test_a_directory_of_something_else_is_left_alone(swept, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"sweep holds something else than a sweep; choose another `out`"):
        swept({"lr": [5e-3]}, resume=True)


def test_two_processes_do_not_share_a_sweep_or_a_cell(swept, here, tmp_path, monkeypatch):
    (name,) = cells_of(swept({"lr": [5e-3]}))["cell"]
    monkeypatch.setattr(cell_module, "PATIENCE", 0)
    taken = rf"is in use by process {os.getpid()} on .*; wait for it, end it"
    with FolderLock(tmp_path / "sweep" / name), pytest.raises(InputError, match=rf"{name} {taken}"):
        run_cell(tmp_path / "sweep", name)
    with FolderLock(tmp_path / "sweep"), pytest.raises(InputError, match=rf"sweep {taken}"):
        swept({"lr": [5e-3]}, resume=True)
    assert not list(tmp_path.rglob("*.lock"))


def test_a_cell_of_a_store_is_waited_for_while_another_command_trains_it(swept, here, tmp_path, monkeypatch, capsys):
    """Trainings take longer than any patience; the plan of a store is known by its recipe, also of one made earlier."""
    (name,) = cells_of(swept({"lr": [5e-3]}))["cell"]
    monkeypatch.setattr(cell_module, "PATIENCE", 0)
    plan = tmp_path / "sweep" / PLAN
    write_json({**json.loads(plan.read_text()), "recipe": SHARED}, plan)
    held = threading.Event()

    def train():
        with FolderLock(tmp_path / "sweep" / name):
            held.set()
            time.sleep(0.5)

    other = threading.Thread(target=train)
    other.start()
    held.wait()
    assert run_cell(tmp_path / "sweep", name) == "finished"
    other.join()
    assert "waiting for another process that trains it\n" in capsys.readouterr().err


def test_as_many_jobs_as_cores_have_threads_for(tmp_path, monkeypatch):
    cells = {cell.name: cell for cell in make_cells(PretrainingConfig(), {"training.threads": [1, 2]})}
    plan = SweepPlan(tmp_path, "id", cells, {}, tmp_path)
    monkeypatch.setattr(driver, "_cores", lambda: 7)
    assert driver.default_jobs(plan) == 3
    monkeypatch.setattr(driver, "_gpus", lambda plan: ["0", "1"])
    assert driver.default_jobs(plan) == 2


def test_a_killed_cell_goes_on_to_the_same_numbers(text, cache, tmp_path, run):
    """The whole way once: an interpreter of its own, killed after a checkpoint, and another one that goes on."""
    changes = ("training.steps=80", "training.save_every=20", "training.log_every=20", "watch.every=40")
    folder = tmp_path / "sweep"

    def kill() -> None:
        while not list(folder.glob("*/checkpoints/checkpoint-20")):
            time.sleep(0.01)
        (log,) = folder.glob("logs/*.log")
        os.kill(int(log.read_text().split()[2]), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    result = run_sweep(short(text), {"lr": [5e-3]}, folder, changes=changes, jobs=1, cache=cache, progress=False)
    assert result.summary["errors"] == []
    (name,) = cells_of(result)["cell"]
    assert read_run(folder / name)["resumed"][0]["from"].startswith("checkpoint-")
    assert (folder / "logs" / f"{name}.log").read_text().count("--- process") == 2
    pd.testing.assert_frame_equal(numbers(result.table), numbers(run(*changes).table))


# --- what is shown --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sinklab(here, text, cache, tmp_path, monkeypatch):
    """Run ``sinklab sweep`` in an empty directory; gives status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str):
        changed = [f"--set={change}" for change in (f"data.corpus={text}", *EIGHT_STEPS)]
        done = CliRunner().invoke(app, ["sweep", *arguments, *changed, "--cache", str(cache)])
        return done.exit_code, done.stdout, done.stderr

    return call


def test_the_command_says_what_the_seeds_agree_on(six, sinklab, tmp_path):
    shutil.copytree(six.folder, tmp_path / "sinklab-sweeps" / "tiny")
    status, out, err = sinklab("tiny", "--grid", "lr=5e-3,1e-3", "--seeds", "0..2", "--resume")
    assert (status, err) == (0, "all 6 cells have ended already\n")
    heading, first, second, *_ = out.splitlines()
    low = estimate_mean(cells_of(six)["held_out_loss"][::2].tolist()).interval[0]
    assert heading.split() == ["learning_rate", "runs", "held-out", "loss", "(nats)", "sink", "rate", "(%)"]
    assert first.split()[:4] == ["0.005", "3", f"{cells_of(six)['held_out_loss'][::2].mean():.3f}", f"[{low:.3f},"]
    assert second.split()[0] == "0.001"
    assert "cells.csv" in out
    assert "table.parquet" in out


def test_the_command_tells_of_every_cell_and_prints_json(sinklab):
    status, out, err = sinklab("tiny", "--grid", "lr=5e-3,1e-3", "--json")
    assert status == 0, err
    result = json.loads(out)
    assert [row["settings"] for row in result["settings"]] == [{RATE: 5e-3}, {RATE: 1e-3}]
    assert result["errors"] == []
    # Not a terminal: a line per cell.
    first, second = err.splitlines()
    loss = result["settings"][0]["held_out_loss"]["values"][0]
    assert re.fullmatch(rf"\[1/2\] learning_rate=0.005-\w+: finished, held-out loss {loss:.3f}, sink rate .* %", first)
    assert second.startswith("[2/2] learning_rate=0.001-")
    status, out, err = sinklab("tiny", "--grid", "lr")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: --grid 'lr': expected path=value")
