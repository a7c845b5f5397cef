"""Arguments: types are checked by name, options in groups, settings of a configuration, and what Python code gets wrong."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pytest
import torch
from tests.conftest import make_sinklm, make_tokenizer

import sinklab
from sinklab import attend
from sinklab.cli.commands import find_commands
from sinklab.configuration import check_numbers, with_overrides
from sinklab.corpora import resolve_corpus
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.architecture import Architecture
from sinklab.registry import operations, probes
from sinklab.sinks.finding import find_sinks
from sinklab.studies.arguments import BatchSize, CorpusSource, Loading, Options, Output, Samples, Threshold, _checked, command
from sinklab.studies.measure.probing import run_probes
from sinklab.training.config import PretrainingConfig

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
        ({"samples": None}, "`samples` is None; expected a whole number"),
        ({"batch_size": 2.5}, "`batch_size` is 2.5; expected a whole number"),
        ({"threshold": "0.3"}, "`threshold` is '0.3'; expected a number"),
        ({"domains": "python_source"}, "`domains` is 'python_source'; expected a list, also of one"),
        ({"domains": Path("text.txt")}, "`domains` is .*Path.*; expected a list, also of one"),
        ({"things": "thing"}, "`things` is 'thing'; expected a list, also of one"),
        ({"seeds": 3}, "`seeds` is 3; expected a list, also of one"),
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


def test_a_corpus_may_be_a_path_and_no_list(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some text.\n")
    assert isinstance(resolve_corpus(path), TextFile)
    with pytest.raises(InputError, match=r"^`corpus` is a list; expected a name, a path or a Corpus\. Texts in memory go into"):
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
        with pytest.raises(ConfigurationError, match="`progress` is True; expected a function of the stage, what is done"):
            self.function()("m", progress=True)
        with pytest.raises(
            TypeError, match=r"^look\(\) got an unexpected keyword argument 'dtyp'; it takes model, samples, device"
        ):
            self.function()("m", dtyp="float32")


IDS = torch.arange(2, 30)[None]


@pytest.fixture
def model():
    return make_sinklm().eval()


@pytest.mark.parametrize(
    ("name", "says"),
    [(3, "int"), (None, "NoneType"), (["embedded:softmax"], "list"), (torch.nn.Linear(1, 1), "Linear; wrap_model")],
)
def test_a_model_is_loaded_by_its_name(name, says):
    with pytest.raises(InputError, match=f"the name of a model is a text or a path, and this is of {says}"):
        sinklab.load_model(name)


def test_a_device_of_torch_is_one():
    assert sinklab.load_model("embedded:softmax", device=torch.device("cpu")).device == torch.device("cpu")


def test_a_model_is_not_saved_to_a_file(model, tmp_path):
    """transformers says so in its log, and returns as if it had."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is a file; give the directory that the checkpoint goes to"):
        sinklab.save_model(model, tmp_path / "file", make_tokenizer())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_stream_ends_after_a_whole_number_of_tokens(model):
    """After 2.5 it never did."""
    with pytest.raises(ConfigurationError, match=r"max_new_tokens must be a whole number, got 2\.5"):
        sinklab.stream(model, IDS, max_new_tokens=2.5)
    with pytest.raises(ConfigurationError, match="max_new_tokens 0 must be 1 or more"):
        sinklab.stream(model, IDS, max_new_tokens=0)


def test_settings_of_a_stream(model):
    for settings, says in (
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"top_p": [0.5], "temperature": 1}, "top_p is of list; expected a number"),
        ({"top_k": 2.5, "temperature": 1}, r"top_k must be a whole number, got 2\.5"),
        ({"seed": -1, "temperature": 1}, "seed -1 must be 0 or more"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            sinklab.Stream(model, **settings)


EMPTY = [torch.zeros(shape, dtype=torch.long) for shape in ((0, 5), (2, 0), (0, 0))]
PADDING = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5, dtype=torch.long)}


@pytest.fixture(scope="module")
def small_model():
    return make_sinklm()


@pytest.mark.parametrize("tokens", EMPTY, ids=lambda tokens: str(tuple(tokens.shape)))
def test_no_tokens_are_refused(small_model, tokens):
    for ask in (small_model, lambda ids: find_sinks(small_model, ids), lambda ids: run_probes(small_model, ids, [])):
        with pytest.raises(InputError, match=r"of shape \(\d, \d\) holds? no token; give at least one"):
            ask(tokens)


def test_sinks_are_not_looked_for_in_padding(small_model):
    with pytest.raises(InputError, match=r"attention_mask of shape \(2, 5\) holds no token"):
        find_sinks(small_model, PADDING)


@pytest.mark.parametrize("name", probes.names())
def test_a_probe_that_saw_padding_alone_has_no_rows(small_model, name):
    with torch.no_grad(), attend(small_model, probes=[probes.make(name)]) as session:
        small_model(**PADDING)
    table = session.table()
    assert not len(table) or (table["count"] == 0).all() or not table["value"].notna().any(), table


def test_a_name_is_no_probe(small_model):
    refused = pytest.raises(ConfigurationError, match=r"make one of it with sinklab.registry.probes.make\('entropy'\)")
    with refused, attend(small_model, probes=["entropy"]):
        pass


def test_dotted_paths_take_yaml():
    changes = ("model.window=64", "optimizer.betas=[0.8,0.99]", "training.compile=false", "data.corpus=./texts")
    more = ("name=windowed", "optimizer.learning_rate=1e-3", "data.revision=2024-01-01", "training.threads=null")
    config = with_overrides(PretrainingConfig(), [*changes, *more])
    assert config.model.window == 64
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.optimizer.learning_rate == 0.001
    assert (config.training.compile, config.training.threads) == (False, None)
    assert (config.data.corpus, config.name, config.data.revision) == ("./texts", "windowed", "2024-01-01")


def test_another_operation_drops_the_settings_of_the_former():
    config = PretrainingConfig(model=Architecture(operation={"name": "sigmoid", "bias": -2.0}))
    assert with_overrides(config, ["model.operation.name=softmax"]).model.operation == {"name": "softmax"}
    kept = with_overrides(config, ["model.operation.bias=-3"]).model.operation
    assert kept == {"name": "sigmoid", "bias": -3}
    at_the_top = Architecture(operation={"name": "sigmoid", "bias": -2.0})
    assert with_overrides(at_the_top, ["operation.name=softmax"]).operation == {"name": "softmax"}
    both = with_overrides(config, ["model.operation.name=sink_logit", "model.operation.initial=1.5"])
    assert both.model.operation == {"name": "sink_logit", "initial": 1.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.windw=3", r"there is no field 'model\.windw'\. Did you mean 'window'\? Known: "),
        ("modle.window=3", r"there is no field 'modle'\. Did you mean 'model'\?"),
        ("model.window", r"`changes` 'model\.window': expected path=value, such as optimizer\.learning_rate=1e-3"),
        ("training.steps=many", r"training\.steps = 'many': input should be a valid integer"),
        ("model.window=0", r"model\.window = 0: input should be greater than or equal to 1"),
        ("training.dtype=float16", r"training\.dtype = 'float16': input should be 'auto', 'bfloat16' or 'float32'"),
        ("model.window.size.name=3", r"model\.window = \{'size': \{'name': 3\}\}: input should be a valid integer"),
        ("model.operation.slope=2", r"operation 'softmax' has no setting 'slope'"),
        ("model.num_key_value_heads=3", r"num_key_value_heads 3 must divide num_attention_heads 2"),
        ("optimizer.betas=[0.9,1.0]", r"optimizer\.betas\.1 = 1\.0: input should be less than 1"),
        ("training.seed=-1", r"training\.seed = -1: input should be greater than or equal to 0"),
        ("training.seed=4294967296", r"training\.seed = 4294967296: input should be less than 4294967296"),
        ("training.snapshots=[0,3000]", r"training\.snapshots has step 3000, and the run has steps 0 to 2000"),
        ("training.micro_batch_size=3", r"batch_size 8 must be a multiple of micro_batch_size 3"),
    ],
)
def test_mistakes(override, message):
    with pytest.raises(ConfigurationError, match=message):
        with_overrides(PretrainingConfig(), [override])


def test_assignment_is_checked_too():
    config = PretrainingConfig()
    with pytest.raises(ConfigurationError, match=r"warmup_steps = -1: input should be greater than or equal to 0"):
        config.schedule.warmup_steps = -1
    with pytest.raises(ConfigurationError, match=r"there is no field 'warmup'\. Did you mean 'warmup_steps'\?"):
        config.schedule.warmup = 3


def test_it_survives_a_round_trip():
    config = with_overrides(PretrainingConfig(), ["model.operation.name=sigmoid", "data.random_positions=[1,3]"])
    assert PretrainingConfig.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "value", ["]", "1" + "0" * 5000, "[" * 3000, "{[1]: 2}", "!!python/object:os.system", ".nan", ".inf", str(2**63)]
)
def test_values_that_are_none_are_refused(value):
    """In an override and in a setting of a plug-in alike: what is not YAML, is not finite, or does not fit in 64 bits."""
    for ask in (
        lambda: with_overrides(PretrainingConfig(), [f"data.seed={value}"]),
        lambda: operations.make(f"relu:uncounted={value}"),
    ):
        with pytest.raises(ConfigurationError):
            ask()


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 0.0, True, "text", None])
def test_numbers_of_64_bits_pass(value):
    check_numbers("`x`", [value, {"y": (value,)}])


@pytest.mark.parametrize("value", [-(2**63) - 1, 2**63, float("nan"), -float("inf")])
def test_other_numbers_are_refused_wherever_they_stand(value):
    for inside in (value, [value], {"y": value}, {"y": [0, (value,)]}):
        with pytest.raises(ConfigurationError, match=r"^`x`.*(expected a finite number|has 64 bits; expected a whole number)"):
            check_numbers("`x`", inside)
