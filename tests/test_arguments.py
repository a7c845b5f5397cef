"""What a command does with the arguments that Python gives it, before it is called: numbers, lists, paths and their names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pytest

from sinklab.cli.commands import find_commands
from sinklab.corpora import resolve_corpus
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError
from sinklab.studies.arguments import BatchSize, CorpusSource, Loading, Options, Output, Samples, Threshold, _checked, command

if TYPE_CHECKING:
    from somewhere import Thing


@command
def planted(
    model: str,
    *,
    samples: Samples = 3,
    threshold: Threshold = 0.3,
    batch_size: BatchSize = None,
    seeds: Sequence[int] = (0,),
    domains: Annotated[Sequence[CorpusSource], "--corpus"] = (),
    things: Sequence[str | Thing] = (),
    thing: Thing | None = None,
    others: Sequence[str | Thing] | None = None,
    marked: Annotated[Sequence[Thing] | None, "--marked"] = None,
) -> dict[str, Any]:
    """Gives back what it is given."""
    return dict(samples=samples, threshold=threshold, batch_size=batch_size, seeds=seeds, domains=domains, thing=thing)


def test_numbers_of_numpy_are_those_of_python():
    """They would compute alike, and the record that is written at the end would refuse them."""
    given = planted(
        "m", samples=np.int64(3), threshold=np.float32(0.5), batch_size=np.int32(2), seeds=[np.int64(4), 5], thing=np.float64(1)
    )
    assert [type(given[name]) for name in ("samples", "threshold", "batch_size")] == [int, float, int]
    assert [type(seed) for seed in given["seeds"]] == [int, int]
    assert type(given["thing"]) is np.float64  # of what is not known, nothing is changed
    assert planted("m", threshold=0, batch_size=None)["threshold"] == 0


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"samples": 3.0}, "`samples` is 3.0; expected a whole number"),
        ({"samples": "3"}, "`samples` is '3'; expected a whole number"),
        ({"samples": None}, "`samples` is None; expected a whole number"),
        ({"batch_size": 2.5}, "`batch_size` is 2.5; expected a whole number"),
        ({"threshold": "0.3"}, "`threshold` is '0.3'; expected a number"),
        ({"domains": "python_source"}, "`domains` is 'python_source'; expected a list, also of one"),
        ({"domains": Path("text.txt")}, "`domains` is .*Path.*; expected a list, also of one"),
        ({"things": "thing"}, "`things` is 'thing'; expected a list, also of one"),
        ({"seeds": 3}, "`seeds` is 3; expected a list, also of one"),
        ({"things": len}, "`things` is <built-in function len>; expected a list, also of one"),
        ({"seeds": None}, "`seeds` is None; expected a list, also of one"),
        ({"things": None}, "`things` is None; expected a list, also of one"),
        ({"others": "thing"}, "`others` is 'thing'; expected a list, also of one"),
    ],
)
def test_other_types_are_refused_by_name(named, message):
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        planted("m", **named)


def test_every_command_takes_its_own_defaults():
    """Also where what an argument is declared to be is imported for type checkers alone."""
    planted("m", things=(), thing=None, others=None, marked=None)
    for place in find_commands().values():
        function = inspect.unwrap(place.load())
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty and not isinstance(parameter.default, Options):
                assert _checked(function, name, parameter.default) == parameter.default


def test_an_unknown_name_says_of_which_function_and_what_there_is():
    with pytest.raises(
        TypeError, match=r"^planted\(\) got an unexpected keyword argument 'corpus'; it takes model, samples, .*domains"
    ):
        planted("m", corpus="python_source")


def test_a_corpus_may_be_a_path_and_no_list(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some text.\n")
    assert isinstance(resolve_corpus(path), TextFile)
    with pytest.raises(
        InputError, match=r"^`corpus` is a list; expected a name, a path or a Corpus\. Texts in memory go into a file"
    ):
        resolve_corpus(["Some text."])


class TestOptionsInGroups:
    """Fields of dataclasses as arguments of their own."""

    @staticmethod
    def function():
        @command
        def look(model: str, *, samples: Samples = 3, loading: Loading = Loading(), output: Output = Output()) -> tuple:
            """Look."""
            return model, samples, loading, output

        return look

    def test_they_are_given_by_name_or_all_at_once(self):
        look = self.function()
        assert look("m", dtype="bfloat16", out="x") == ("m", 3, Loading(dtype="bfloat16"), Output(out="x"))
        assert look("m", loading=Loading(device="cpu"), dtype="float64")[2] == Loading(device="cpu", dtype="float64")

    def test_the_signature_has_them_one_by_one(self):
        names = list(inspect.signature(self.function()).parameters)
        assert names[:4] == ["model", "samples", "device", "dtype"]
        assert names[-3:] == ["out", "overwrite", "progress"]

    def test_they_are_checked_and_unknown_ones_are_named(self):
        with pytest.raises(ConfigurationError, match="`out` is 3"):
            self.function()("m", out=3)
        with pytest.raises(TypeError, match=r"dtyp.*it takes model, samples, device"):
            self.function()("m", dtyp="float32")
