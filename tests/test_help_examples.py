"""The lines that the help shows as examples can be typed as they stand."""

from __future__ import annotations

import re
import shlex

import pytest

from sinklab.cli.app import make_app
from sinklab.cli.commands import find_commands
from sinklab.registry import claims, operations, policies, probes, recipes, split_specs, tasks

LINES = [
    line
    for place in find_commands().values()
    for line in re.findall(r"^ +(sinklab .*?)(?:  .*)?$", place.load().__doc__ or "", re.MULTILINE)
]

PLUGINS = {
    "operation": operations,
    "operations": operations,
    "policies": policies,
    "probes": probes,
    "recipe": recipes,
    "tasks": tasks,
}
"""Parameter of a command to the plug-ins that it names."""

NO_NAMES = {"all", "8+1016", "lm_eval:arc_easy"}
"""Words that such a parameter takes beside the names of plug-ins: every operation, the sizes of a policy, a task of lm-eval."""


def arguments_of(line: str) -> dict[str, object]:
    words = shlex.split(re.split(r" >>? ", line)[0])[1:]
    top, _ = make_app(words)
    return dict(top.parse_args(words, exit_on_error=False, print_error=False)[1].arguments)


def test_every_command_has_some():
    shown = {shlex.split(line)[1] for line in LINES}
    assert set(find_commands()) <= shown


@pytest.mark.parametrize("line", LINES)
def test_its_words_are_arguments_of_the_command(line):
    arguments_of(line)


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


def test_an_example_in_another_spelling_is_found():
    """The one that was there: labels of tables have brackets, which no list of operations takes."""
    line = "sinklab pathways --operations 'sigmoid(length_bias=true),sink_logit'"
    named = arguments_of(line)["operations"]
    with pytest.raises(ValueError, match="settings follow a colon: sigmoid:length_bias=true"):
        [operations.read(spec) for spec in split_specs(named)]
