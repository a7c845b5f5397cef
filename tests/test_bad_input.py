"""What a user can get wrong, on the real command line: one line on stderr, status 2, nothing written, what was kept said."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.command_line import CliRunner

from sinklab.cli import main
from sinklab.cli.app import app
from sinklab.cli.commands import find_commands
from sinklab.cli.derive import print_result
from sinklab.cli.guard import explain
from sinklab.errors import InputError
from sinklab.results.folder import FolderLock
from sinklab.results.run import Result
from sinklab.results.table import make_table
from sinklab.studies.audit import measurement

QUICK = ["--corpus", "random_tokens", "--samples", "3", "--seq-len", "12"]
AUDIT = ["audit", "--no-cache", *QUICK]


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result, out: Path) -> str:
    """The error line, after checking that it is all there is."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not out.exists()
    assert not [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]
    return result.stderr


def off_the_seam(folder: Path) -> Path:
    """A model whose attention is its own code, and whose weights are no matrix of queries and keys."""
    config = transformers.LongformerConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, attention_window=4
    )
    transformers.LongformerModel(config).save_pretrained(folder)
    return folder


def without(folder: Path, *patterns: str) -> Path:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()
    return folder


def with_nan(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pickled(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    return without(folder, "*.safetensors")


def with_config(folder: Path, **fields) -> Path:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MODELS = {
    "missing directory": (lambda f: f / "nowhere", r"there is no directory '.*nowhere'"),
    "pickle only": (pickled, r"only pickled weights \(pytorch_model\.bin\).*can run any code.*python -c"),
    "remote code": (
        lambda f: with_config(f, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        r"brings its own model code .*add --trust-remote-code",
    ),
    "unknown operation": (lambda f: with_config(f, operation={"name": "sigmoit"}), r"Did you mean 'sigmoid'"),
    "NaN weights": (with_nan, r"has NaN or infinite weights: 1 of 1536 numbers in layers\.0\.mlp\.up_proj\.weight"),
    "off the seam": (
        lambda f: off_the_seam(f.parent / "longformer"),
        r"LongformerModel computes attention in its own code and has windows",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case, own_checkpoint, tmp_path):
    build, message = MODELS[case]
    line = refused(run("audit", build(own_checkpoint), *QUICK, "--out", tmp_path / "out"), tmp_path / "out")
    assert re.search(message, line), line


OPTIONS = {
    "empty text": (["--corpus", "EMPTY"], "is empty: it holds no text"),
    "not UTF-8": (["--corpus", "LATIN"], "is not UTF-8 text: byte 0xe9 at offset 3"),
    "text too short": (["--corpus", "SHORT", "--seq-len", "400"], "is too short: it gives 0 of 3 samples of 400 tokens"),
    "no samples": (["--samples", "0"], "--samples must be at least 1, got 0"),
    "threshold": (["--threshold", "1.5"], "threshold 1.5 must be in [0, 1)"),
    "fp16 on a CPU": (["--dtype", "float16", "--device", "cpu"], "use --dtype float32 or bfloat16"),
    "batch size": (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    "bos": (["--bos", "sometimes"], 'Invalid value "sometimes" for --bos. Choose from: "auto", "always", "none"'),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, checkpoint, tmp_path):
    options, message = OPTIONS[case]
    texts = {"EMPTY": b"", "LATIN": "café".encode("latin1"), "SHORT": b"a few words\n"}
    for name, content in texts.items():
        (tmp_path / name).write_bytes(content)
    options = [str(tmp_path / option) if option in texts else option for option in options]
    assert message in refused(run("audit", checkpoint, *QUICK, "--out", tmp_path / "out", *options), tmp_path / "out")


def test_a_metric_in_place_of_a_probe_names_the_probe(checkpoint, tmp_path):
    line = refused(run("measure", checkpoint, *QUICK, "--probe", "gu2024", "--out", tmp_path / "out"), tmp_path / "out")
    assert "'gu2024' is no probe but a metric; take the probe 'sink_rate', which measures it" in line


@pytest.mark.parametrize("probe", ["entropy", "sink_rate:threshold=0.9"])
def test_a_threshold_that_no_probe_takes_is_refused(probe, checkpoint, tmp_path):
    options = ("--probe", probe, "--threshold", "0.1", "--out", tmp_path / "out")
    line = refused(run("measure", checkpoint, *QUICK, *options), tmp_path / "out")
    assert f"--threshold 0.1 has no effect on {probe.partition(':')[0]}: a probe has none, or names its own" in line


def test_bos_of_a_model_without_one(tmp_path):
    config = transformers.GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=16, bos_token_id=None, eos_token_id=None)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    line = refused(run("audit", tmp_path / "model", *QUICK, "--bos", "always", "--out", tmp_path / "out"), tmp_path / "out")
    assert "beginning-of-sequence" in line


class TestOutputDirectory:
    def test_one_that_exists_is_left_as_it_is_until_overwrite_is_said(self, checkpoint, tmp_path):
        out = tmp_path / "out"
        assert run(*AUDIT, checkpoint, "--out", out).exit_code == 0
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert set(before) >= {"run.json", "table.parquet", "report.html", "summary.json"}
        result = run("audit", checkpoint, *QUICK, "--out", out)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "exists; choose another with --out, or replace it with --overwrite" in result.stderr
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert run(*AUDIT, checkpoint, "--seed", "1", "--out", out, "--overwrite").exit_code == 0
        assert json.loads((out / "run.json").read_text())["config"]["seed"] == 1
        assert os.listdir(tmp_path) == ["out"]

    def test_a_limit_on_files_leaves_nothing_behind(self, tmp_path):
        """The limit of the process is the writer that fails: no mock stands between the command and the system."""
        out = tmp_path / "out"
        program = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        program += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        program += "from sinklab.cli import main; main()"
        quick = ["--operation=softmax", "--seeds=0", "--cap=2", "--samples=2"]
        command = [sys.executable, "-c", program, "trigger", *quick, "--quiet", f"--out={out}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        place = rf"{re.escape(str(tmp_path))}/\.out\.partial/.*"
        assert re.fullmatch(rf"error: File too large \({place}\); raise the limit .*\n", done.stderr), done.stderr
        assert os.listdir(tmp_path) == []


def test_ctrl_c_is_one_line_and_status_130(checkpoint, tmp_path, tmp_path_factory, monkeypatch):
    marker, out, printed = tmp_path / "measuring", tmp_path / "out", tmp_path_factory.mktemp("printed")

    def slow(*arguments, **options):
        marker.touch()
        time.sleep(600)

    def measure_for_ever():
        for descriptor, name in enumerate(("stdout", "stderr"), start=1):
            os.dup2(os.open(printed / name, os.O_CREAT | os.O_WRONLY), descriptor)
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115
        torch.set_num_threads(1)  # threads of the process that was forked are gone, and waiting for them never ends
        sys.argv = ["sinklab", *AUDIT, str(checkpoint), "--out", str(out)]
        main()

    monkeypatch.setattr(measurement, "run_probes", slow)
    process = multiprocessing.get_context("fork").Process(target=measure_for_ever, daemon=True)
    process.start()
    deadline = time.monotonic() + 300
    while not marker.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=60)
    assert [(printed / name).read_text() for name in ("stdout", "stderr")] == ["", "interrupted\n"]
    assert process.exitcode == 130
    assert os.listdir(tmp_path) == ["measuring"]


def test_in_a_real_process_the_libraries_keep_quiet_too(own_checkpoint, tmp_path):
    """A checkpoint that lacks tensors makes transformers print a page-long report, of which nothing may be seen."""
    with_config(own_checkpoint, num_hidden_layers=3)
    command = [sys.executable, "-m", "sinklab", "audit", str(own_checkpoint), *QUICK, "--quiet", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "lacks 9 of the tensors of SinkLM" in done.stderr


class TestGuard:
    def test_traceback_on_request(self, tmp_path):
        missing = tmp_path / "nowhere"
        for arguments, environment in [
            (("audit", missing, "--traceback"), {}),
            (("--traceback", "audit", missing), {}),
            (("audit", missing), {"SINKLAB_TRACEBACK": "1"}),
        ]:
            result = CliRunner(env=environment).invoke(app, [str(argument) for argument in arguments])
            assert result.exit_code == 2
            assert "Traceback (most recent call last)" in result.stderr
            assert result.stderr.splitlines()[-1].startswith("error: there is no directory")

    def test_a_bug_is_shown_as_a_bug(self, monkeypatch):
        monkeypatch.setattr("sinklab.cli.catalogue.catalogue", lambda kind: 1 / 0)
        result = run("list")
        assert isinstance(result.exception, ZeroDivisionError)
        assert result.exit_code == 1

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (InputError("two\n lines"), "two lines"),
            (InputError(f"seed {'9' * 5000} is no seed"), f"seed {'9' * 200}… is no seed"),
            (OSError(28, "No space left on device", "a/b"), "no space left on the disk (a/b); free some, or write elsewhere"),
            (PermissionError(13, "Permission denied", "a/b"), "Permission denied (a/b)"),
            (MemoryError(), "out of memory; lower --batch-size or --seq-len"),
            (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "out of memory; lower --batch-size or --seq-len"),
            (RuntimeError("DefaultCPUAllocator: you tried to allocate 8 bytes"), "out of memory at an allocation of 8 bytes;"),
            (OSError(30, "Read-only", "a/b"), "Read-only file system (a/b); write elsewhere with --out"),
            (OSError(5, "I/O", "a/b"), "Input/output error (a/b); the disk may be failing"),
            (OSError(12, "no memory"), "Cannot allocate memory; ask for smaller sizes"),
        ],
    )
    def test_lines(self, error, line):
        assert (explain(error) or "").startswith(line)

    @pytest.mark.parametrize("error", [RuntimeError("shape"), OSError("no number"), AssertionError(), TypeError("x")])
    def test_bugs_have_no_line(self, error):
        assert explain(error) is None


def test_what_cannot_be_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    lines = {
        "audit embedded:softmax --dtype int8": "there is no dtype 'int8' for a model; --dtype is auto, float64, ",
        "audit embedded:softmax --threshold 2": "--threshold 2.0 must be in [0, 1)",
        "audit embedded:softmax --seq-len 1": "--seq-len must be at least 2, got 1",
        "audit embedded:softmx": "no embedded model is called 'embedded:softmx'. Did you mean 'embedded:softmax'?",
        "quantize ./nowhere": "there is no directory './nowhere', and a hub id looks like org/model",
        "fold embedded:softmax --device gpu": "there is no device 'gpu'; --device is auto, cpu, cuda, ",
        "measure embedded:softmax --probe entropy --corpus nowhere.txt": "there is no text file 'nowhere.txt'",
        "cache embedded:softmax --corpus python_sorce": "no corpus is called 'python_sorce'. Did you mean 'python_source'?",
        "causes embedded:softmax --dtype x": "there is no dtype 'x'",
        "audit embedded:softmax --device-map x": "--device-map 'x' is none of auto, balanced, ",
        "quantize embedded:softmax --schemes w8a8,w9a9": "--schemes 'w9a9' is none of w and a with 2 to 8 bits each",
        "stream embedded:softmax --policy x": "no policy is called 'x'. Known: blocks, full, ",
        "depend embedded:softmax --tasks passkey,x": "no task is called 'x'",
        "export there --to x": "--to 'x' is none of kvpress, llama.cpp",
        "pretrain tini": "no recipe is called 'tini'. Did you mean 'tiny'?",
        "origin embedded:softmax --out there": "output directory there exists; choose another with --out, or ",
    }
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom sinklab.cli.app import app\n"
        "for line in sys.argv[1:]:\n    try: app(line.split())\n    except SystemExit: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *lines], cwd=tmp_path, capture_output=True, text=True, check=True)
    for said, expected in zip(done.stderr.splitlines(), lines.values(), strict=True):
        assert said.startswith(f"error: {expected}")


FOLDERS = {
    "audit": ["nowhere"],
    "measure": ["nowhere", "--probe", "entropy"],
    "cache": ["nowhere"],
    "causes": ["nowhere"],
    "origin": ["nowhere"],
    "fold": ["nowhere"],
    "quantize": ["nowhere"],
    "depend": ["nowhere"],
    "trigger": ["--seeds", "0"],
    "pretrain": ["tiny"],
    "sweep": ["tiny"],
    "reproduce": ["repeated_token_laws"],
}
"""Commands that write a folder, and what makes them write one; the models are not there, since none gets so far."""

FILES = ("compare", "export")
"""Commands whose ``out`` is a file, or a folder in which they replace files one by one (tests/results/test_file.py)."""

IN_PLACE = {"reproduce": Path("tiny") / "repeated_token_laws"}
"""What a command has for itself, of a folder that several may use."""


def error_of(*line: object) -> str:
    """The error of a line that is refused."""
    done = CliRunner().invoke(app, [str(word) for word in line])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    *before, error = done.stderr.splitlines()
    assert error.startswith("error: ")
    # What a command will take is said before it looks at a folder that others may use too.
    assert all(said.startswith("claims: 1, ") for said in before), done.stderr
    assert len(before) == (line[0] == "reproduce" and " is in use by " in error)
    return error


def test_these_are_all_that_write():
    writing = {name for name, place in find_commands().items() if "out" in inspect.signature(place.load()).parameters}
    assert writing == {*FOLDERS, *FILES}


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_another_process_uses(tmp_path, command, overwrite):
    line = [command, *FOLDERS[command], "--out", tmp_path / "out"]
    if overwrite:
        if "overwrite" not in inspect.signature(find_commands()[command].load()).parameters:
            return
        line.append("--overwrite")
    with FolderLock(tmp_path / "out" / IN_PLACE.get(command, "")) as lock:
        assert f" is in use by process {os.getpid()} on " in error_of(*line)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [lock.path]
    assert list(tmp_path.iterdir()) == []


ENDINGS = [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]


@pytest.mark.parametrize(("number", "status", "word"), ENDINGS)
def test_signals_leave_nothing(tmp_path, monkeypatch, number, status, word):
    """SIGTERM is Ctrl-C by another name: what was begun is put in order, and the handler is as it was."""
    monkeypatch.setattr("sinklab.models.loading.opened", lambda *_, **__: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    done = CliRunner().invoke(app, ["cache", "embedded:softmax", "--out", str(tmp_path / "new" / "out")])
    assert (done.exit_code, done.stdout, done.stderr) == (status, "", f"{word}\n")
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_always_goes_on_names_no_option_that_it_lacks(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("sinklab.studies.depend.measurement.outcome", lambda *_: signal.raise_signal(signal.SIGINT))
    small = ["--task", "passkey:distances=[]", "--window", "70", "--sinks", "4", "--items", "2"]
    done = CliRunner().invoke(app, ["depend", str(checkpoint), *small, "--out", str(tmp_path / "out"), "--overwrite"])
    kept = f"what was computed is kept in {tmp_path / '.out.partial' / 'store'}"
    assert done.stderr.endswith(f"interrupted; {kept}: the same command goes on from there\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["pretrain", "tiny", "--set", "data.corpus=nowhere.txt"], "there is no text file 'nowhere.txt'"),
        (["quantize", "embedded:softmax", "--corpus", "nowhere.txt"], "there is no text file 'nowhere.txt'"),
    ],
)
def test_what_cannot_begin_leaves_nothing_and_costs_nothing(tmp_path, line, problem):
    out = tmp_path / "new" / "out"
    assert problem in error_of(*line, "--out", out)
    assert list(tmp_path.iterdir()) == []
    out.mkdir(parents=True)
    (out / "run.json").write_text("{}")
    assert problem in error_of(*line, "--out", out, "--overwrite")
    assert [path.name for path in out.parent.rglob("*")] == ["out", "run.json"]
    assert (out / "run.json").read_text() == "{}"


@pytest.mark.parametrize(("by", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_training_that_a_signal_has_stopped(by, status, capsys):
    result = Result({"status": "stopped"}, make_table([]), {"kind": "pretrain", "stopped_by": by}, None, lambda _: ["stopped"])
    assert print_result(result) == status
    assert capsys.readouterr().out == "stopped\n"


def test_what_failed_names_options(capsys):
    result = Result({"errors": ["a: go on with `resume`"]}, make_table([]), {"kind": "sweep"}, None, lambda _: [])
    assert print_result(result, names={"resume": "--resume"}) == 1
    assert capsys.readouterr().err == "failed: a: go on with --resume\n"
