"""Commands are derived from functions: an option is one line, each has help, and its examples can be typed as they stand."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests.command_line import CliRunner

import sinklab
from sinklab.cli import commands
from sinklab.cli.app import app, make_app
from sinklab.cli.commands import find_commands
from sinklab.cli.derive import derive, read_docstring
from sinklab.errors import ConfigurationError, ContractError, calling
from sinklab.registry import claims, operations, policies, probes, recipes, split_specs, tasks

PACKAGE = Path(sinklab.__file__).parent

PLANTED = '''"""A planted command."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from sinklab.studies.arguments import Seed, WrittenTo, command
from sinklab.errors import ConfigurationError
from sinklab.results.run import Progress, Result
if TYPE_CHECKING:
    from somewhere import Model

@command
def planted(
    model: str | Model,
    *,
    probes: Sequence[str | Model] = ("entropy",),
    sizes: Sequence[int] | None = None,
    colour: Literal["red", "green"] = "red",
    careful: bool = True,
    loud: bool = False,
    seed: Seed = 0,
    out: Annotated[Path | None, WrittenTo("grown/{{model}}")] = None,
    tensors: Model | None = None,
    say: Callable[[str], None] = print,
    {more}
    progress: Progress | None = None,
) -> Result:
    """Grow a planted thing.

    Args:
        model: What is planted.
        probes: What looks, such as :class:`~sinklab.attention.probe.Probe`.
        sizes: How large, in ``metres``.
        colour: Of the thing.
        careful: Take care.
        loud: Say more.
        more: Much more.
        out: Where it grows.
        tensors: For those who call it from Python.
        say: Told how it goes.

    In Python:
        Sizes may be tensors.

    Raises:
        ConfigurationError: never shown.

    Examples:
        sinklab planted rose --size 1,2
    """
    if seed > 99:
        raise ConfigurationError("`seed` must be 99 or less, as `probes` knows, and `other` does not")
    progress("growing", 1, 1)
    said = dict(model=model, probes=probes, sizes=sizes, colour=colour, careful=careful, loud=loud, seed=seed)
    said["out"] = str(out)
    say("it grows") if loud else None
    said |= {{"errors": ["it wilts"] if seed == 7 else [], {given}}}
    return Result(said, None, {{"kind": "planted"}}, None, lambda result: ["grown"])
'''


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Writes the command into a package of its own and gives a way to run it."""
    package = tmp_path / "garden"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sinklab.cli.app.find_commands", lambda: {"planted": commands.Command("garden.planted:planted")})

    def run(*arguments: str, more: str = "", given: str = ""):
        (package / "planted.py").write_text(PLANTED.format(more=more, given=given))
        for name in ("garden", "garden.planted"):
            sys.modules.pop(name, None)
        return CliRunner().invoke(app, ["planted", *arguments])

    yield run
    for name in ("garden", "garden.planted"):
        sys.modules.pop(name, None)


def test_help_comes_from_the_function(planted):
    shown = " ".join(planted("--help").stdout.replace("│", " ").split())
    assert shown.startswith("Usage: sinklab planted [OPTIONS] MODEL Grow a planted thing.")
    assert "--probes --probe STR What looks, such as Probe. [default: entropy]" in shown
    assert "--sizes --size INT How large, in metres." in shown
    assert "--colour CHOICE Of the thing. [choices: red, green] [default: red]" in shown
    assert "--careful --no-careful Take care." in shown
    assert "--loud Say more." in shown
    assert "--no-loud" not in shown
    assert "Seed of the sampling" in shown
    assert "--json Print JSON on stdout" in shown
    assert "--out PATH Where it grows. By default grown/<model>." in shown
    assert not {"--progress", "--tensors", "--say"} & set(shown.split())
    assert "never shown" not in shown
    assert "may be tensors" not in shown
    assert "In Python" not in shown
    assert shown.endswith("Examples: sinklab planted rose --size 1,2")


def test_values_reach_the_function(planted):
    options = ["--probe", "entropy:sink_position=2,sink_rate", "--probes", "outliers", "--size", "1,2", "--size", "3"]
    done = planted("rose", *options, "--no-careful", "--colour", "green", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    for part in (
        '"probes": [\n    "entropy:sink_position=2",\n    "sink_rate",\n    "outliers"\n  ]',
        '"sizes": [\n    1,\n    2,\n    3\n  ]',
        '"careful": false',
        '"colour": "green"',
        '"out": "grown/rose"',
    ):
        assert part in done.stdout
    assert '"out": "here"' in planted("rose", "--out", "here", "--json").stdout
    loud = planted("a rose", "--loud")
    assert (loud.stdout, loud.stderr) == ("grown\n", "it grows\n")


def test_an_option_is_one_line(planted):
    assert "--more" not in planted("--help").stdout
    more = {"more": "more: float = 0.5,", "given": '"more": more'}
    assert "--more FLOAT" in planted("--help", **more).stdout
    assert '"more": 0.25' in planted("rose", "--more", "0.25", "--json", **more).stdout


def test_messages_name_options(planted):
    done = planted("rose", "--seed", "100")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: --seed must be 99 or less, as --probes knows, and `other` does not\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rose", "--sede", "1"], "Unknown option: --sede. Did you mean --seed?"),
        (["rose", "--output=x"], "Unknown option: --output. Did you mean --out? (see sinklab planted --help)"),
        (["rose", "--colour", "blue"], 'Invalid value "blue" for --colour. Choose from: "red", "green"'),
        (["rose", "--size", "1,x"], "--sizes '1,x' must be whole numbers with commas between them, such as 0,1,4"),
        ([], "error: MODEL is missing, as in: sinklab planted rose --size 1,2 (see sinklab planted --help)"),
        (["rose", "--seed"], "error: --seed has no value (see sinklab planted --help)"),
        (["rose", "tulip"], "error: 'tulip' is more than this command takes; what has spaces goes in quotes (see sinklab "),
    ],
)
def test_what_cannot_be_parsed_is_one_line(planted, arguments, message):
    done = planted(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_parts_that_failed_are_said_and_change_the_status(planted):
    done = planted("rose", "--seed", "7")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "grown\n", "failed: it wilts\n")


def test_errors_speak_as_the_caller_does():
    with pytest.raises(ConfigurationError, match=r"^`tokens` 1 and `bos` 2; lower `tokens`$"), calling(seq_len="tokens"):
        raise ConfigurationError("`seq_len` 1 and `bos` 2; lower `seq_len`")


def test_a_parameter_without_help_is_refused():
    def bare(*, silent: int = 0) -> None:
        """Does nothing."""

    with pytest.raises(TypeError, match="parameter 'silent' needs an entry under Args, or a Doc"):
        derive(bare, "bare")


@pytest.mark.parametrize("name", commands.find_commands())
def test_every_command_has_help_for_every_option(name):
    function = commands.find_commands()[name].load()
    derive(function, name)
    description, texts, examples = read_docstring(inspect.getdoc(function))
    assert description
    assert " ".join(function.__doc__.split("\n\n")[0].split()) == commands.find_commands()[name].summary
    assert set(texts) <= set(inspect.signature(function).parameters)
    assert f"sinklab {name} " in f"{examples} "


def test_further_names_of_options_are_words():
    derived = [derive(place.load(), name) for name, place in commands.find_commands().items()]
    further = {name for app in derived for argument in app.assemble_argument_collection() for name in argument.names[1:]}
    singular = {"--domain", "--model", "--name", "--policy", "--probe", "--scheme", "--sink"}
    declared = {"--domains", "--tasks", "--text", "--windows", "-q"}
    assert {name for name in further if not name.startswith("--no-")} == singular | declared


@pytest.mark.parametrize("name", commands.find_commands())
def test_help_is_for_those_who_type_a_line(name):
    assert "Python" not in CliRunner().invoke(app, [name, "--help"]).stdout.replace("Python source", "")


def test_another_package_adds_a_command(planted, monkeypatch):
    planted("--help")  # writes the package
    point = EntryPoint("grow", "garden.planted:planted", "sinklab.commands")
    monkeypatch.setattr(commands, "entry_points", lambda kind: [point] if kind == "commands" else [])
    found = commands.find_commands()
    assert found["grow"].summary == "Grow a planted thing."
    assert found["grow"].load().__name__ == "planted"
    monkeypatch.setattr(commands, "entry_points", lambda kind: [EntryPoint("audit", "nowhere:x", "sinklab.commands")])
    with pytest.raises(ContractError, match="two commands are called 'audit'; one of them is nowhere:x"):
        commands.find_commands()
    assert commands.Command("nowhere:x").summary.startswith("the command nowhere:x cannot be imported: ModuleNotFoundError")


def test_an_unknown_command_suggests_the_nearest():
    done = CliRunner().invoke(app, ["mesure", "x"])
    assert done.exit_code == 2
    assert 'Unknown command "mesure". Did you mean "measure"?' in done.stderr


def test_help_imports_nothing_heavy():
    lines = [["--help"], *([name, "--help"] for name in commands.find_commands())]
    program = (
        f"import sys\nfrom sinklab.cli.app import app\nfor line in {lines}:\n    try: app(line)\n    except SystemExit: pass\n"
    )
    program += "print(sorted({'torch', 'transformers', 'pandas', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


LINES = [
    line
    for place in find_commands().values()
    for line in re.findall(r"^ +(sinklab .*?)(?:  .*)?$", place.load().__doc__ or "", re.MULTILINE)
]

PLUGINS = {"operation": operations, "policies": policies, "probes": probes, "recipe": recipes, "tasks": tasks}
PLUGINS["operations"] = operations
"""Parameter of a command to the plug-ins that it names."""

NO_NAMES = {"all", "8+1016", "lm_eval:arc_easy"}
"""Words that such a parameter takes beside the names of plug-ins: every operation, the sizes of a policy, a task of lm-eval."""


def arguments_of(line: str) -> dict[str, object]:
    words = shlex.split(re.split(r" >>? ", line)[0])[1:]
    top, _ = make_app(words)
    return dict(top.parse_args(words, exit_on_error=False, print_error=False)[1].arguments)


@pytest.mark.parametrize("line", LINES)
def test_its_plug_ins_can_be_read(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for parameter, value in arguments_of(line).items():
        registry = PLUGINS.get(parameter)
        if parameter == "names" and line.startswith("sinklab reproduce"):
            registry = claims
        if registry is None:
            continue
        for spec in split_specs(value) if isinstance(value, str) else value:
            if spec not in NO_NAMES and "{" not in spec:
                assert registry.read(spec)["name"] in registry


SUGGESTED = re.compile(r"[`'‘]sinklab ([a-z]+)((?: [^`'’{}\"]*)?)[`'’]")


def suggested() -> set[tuple[str, str]]:
    """Command and the rest of the line, of every line in quotes that a message, sentence or docstring of the package names."""
    texts = (
        path.read_text(encoding="utf-8")
        for path in (*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "sinklab_claims").rglob("*.py"))
    )
    return {found.groups() for text in texts for found in SUGGESTED.finditer(text.replace("\n", " "))}


def test_every_line_that_is_suggested_has_a_command_and_options_that_are_there():
    lines = suggested()
    assert len(lines) > 10
    for name, rest in lines:
        known = set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, [name, "--help"]).stdout)) if "--" in rest else set()
        assert name in find_commands()
        assert set(re.findall(r"--[a-z-]+", rest)) <= known
