"""Export: what engines make of policies, and their files against documented options."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import policies
from sinklab.results.table import read_run
from sinklab.studies.cache.found import Comparison, Difference, PolicyEntry, QuantizedEntry, Size
from sinklab.studies.export.base import ExportPlan, checked_engines, engines, exported, plan_of

OPTIONS = {
    # tools/server/README.md of llama.cpp at commits 25d5b0c and 00dc805; --flash-attn takes a word since pull request 15434
    "llama.cpp": {
        "--model", "--parallel", "--ctx-size", "--keep", "--context-shift", "--swa-full", "--flash-attn",
        "--cache-type-k", "--cache-type-v",
    },
}  # fmt: skip
VALUES = {"--cache-type-k": {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"}}
SPECS = [
    "window:window=20", "sink_window:num_sinks=4,window=60", "sink_window:num_sinks=1,window=7,positions=original",
    "pinned:pinned=[0,3],window=40", "pinned:pinned=[0,300],window=20", "recompute",
    "blocks", "blocks:block=16,blocks=4",
]  # fmt: skip


def plan(spec: str, quantized: str | None = None, *, bos: bool = True, model: str = "org/model") -> ExportPlan:
    return ExportPlan(model, bos, policies.make(spec), quantized, ("Found out.",))


def answers(engine: str, spec: str, quantized: str | None = None) -> dict[str, str]:
    return {part.part: part.how for part in exported(engines()[engine], plan(spec, quantized)).parts}


def words(engine: str, spec: str, quantized: str | None = None, **about) -> list[str]:
    """The words of the command in a shell script."""
    entry = exported(engines()[engine], plan(spec, quantized, **about))
    code = [line for line in entry.text.splitlines() if not line.startswith("#")]
    return shlex.split("\n".join(code).replace("\\\n", ""))


def value(engine: str, option: str, spec: str, **about) -> str:
    found = words(engine, spec, **about)
    return found[found.index(option) + 1]


def joined(text: str) -> str:
    """Comment lines as one."""
    return " ".join(text.replace("\n#", " ").split())


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("name", engines())
def test_every_policy_for_every_engine_is_a_file_or_a_reason(name, quantized):
    for spec in SPECS:
        try:
            entry = exported(engines()[name], plan(spec, quantized, model='a"""b\nimport os  # `x`'))
        except ConfigurationError as error:
            refused = str(error)
            assert refused.startswith(f"{name} cannot do ")
            continue
        assert any(part.how != "not expressible" for part in entry.parts)
        # What the terminal says stands in the file too.
        head = joined(entry.text)
        for part in entry.parts:
            assert f"{part.part} ({part.wanted}): {part.how}: {part.says}." in head
        assert "Found out." in head
        if entry.file.endswith(".py"):
            ast.parse(entry.text)
        else:
            assert entry.text.startswith("#!/bin/sh\n")
            options = re.findall(r"^  (--[\w-]+)", entry.text, re.MULTILINE)
            assert set(options) <= OPTIONS[name]


class TestLlamaCpp:
    def test_the_context_holds_what_the_policy_holds(self):
        # 4 + 252 and the query, to the nearest size that the server keeps; BOS is counted apart where the tokenizer adds it
        assert value("llama.cpp", "--ctx-size", "sink_window:num_sinks=4,window=900") == "1024"
        assert value("llama.cpp", "--ctx-size", "sink_window:num_sinks=4,window=60") == "256"
        spec = "sink_window:num_sinks=4,window=252"
        assert value("llama.cpp", "--ctx-size", spec) == "256"
        assert value("llama.cpp", "--keep", spec) == "3"
        assert value("llama.cpp", "--keep", spec, bos=False) == "4"
        assert {"--context-shift", "--swa-full"} <= set(words("llama.cpp", spec))  # without the latter Gemma 3 does not shift

    @pytest.mark.parametrize(
        "name", ["Qwen2VLForConditionalGeneration", "Qwen3_5ForCausalLM", "Step3p5ForCausalLM", "DeepseekV4ForCausalLM",
                 "Gemma3ForConditionalGeneration"],
    )  # fmt: skip
    def test_a_model_that_is_never_shifted_is_refused(self, name):
        with pytest.raises(ConfigurationError, match=f"llama.cpp cannot bound the cache of org/model: a {name} has "):
            exported(engines()["llama.cpp"], dataclasses.replace(plan("sink_window"), model_class=name))
        for served in ("Gemma3ForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM"):
            assert exported(engines()["llama.cpp"], dataclasses.replace(plan("sink_window"), model_class=served)).text

    def test_tokens_that_stand_apart_are_kept_with_those_between_or_not_at_all(self):
        assert answers("llama.cpp", "pinned:pinned=[0,3],window=40")["tokens that stay"] == "approximated"
        assert value("llama.cpp", "--keep", "pinned:pinned=[0,3],window=40", bos=False) == "4"
        with pytest.raises(ConfigurationError, match="the last of these stands too far behind them"):
            exported(engines()["llama.cpp"], plan("pinned:pinned=[0,300],window=20"))

    def test_two_blocks_are_its_context_shift(self):
        # A context of 1 + 2 * 127 tokens and the newest is a multiple of 256.
        exact, other = "blocks:num_sinks=1,block=127", "blocks:num_sinks=4,block=100"
        assert answers("llama.cpp", exact) == {
            "rule": "expressed", "tokens that stay": "expressed", "positions": "expressed",
        }  # fmt: skip
        assert (value("llama.cpp", "--ctx-size", exact), value("llama.cpp", "--keep", exact)) == ("256", "0")
        assert "--context-shift" in words("llama.cpp", exact)
        assert answers("llama.cpp", other)["rule"] == "approximated"
        says = exported(engines()["llama.cpp"], plan(other)).parts[0].says
        assert "--ctx-size 256 " in says
        assert "blocks of 125 tokens" in says
        with pytest.raises(
            ConfigurationError, match="it gives up half of what is not kept, one of two blocks, and not one of 4"
        ):
            exported(engines()["llama.cpp"], plan("blocks:block=16,blocks=4"))

    def test_types_of_the_cache(self):
        for kind, wanted in (("int8", "q8_0"), ("int4", "q4_0")):
            found = words("llama.cpp", "window:window=20", kind)
            assert wanted in VALUES["--cache-type-k"]
            assert found[found.index("--cache-type-k") + 1] == found[found.index("--cache-type-v") + 1] == wanted
            assert found[found.index("--flash-attn") + 1] == "on"  # without it values cannot be quantised


def test_kvpress_cuts_behind_the_token_at_hand():
    press = exported(engines()["kvpress"], plan("sink_window:num_sinks=4,window=15")).text
    assert "target_size=19" in press
    assert "n_sink=4" in press
    assert answers("kvpress", "sink_window:num_sinks=4,window=15")["positions"] == "not expressible"
    assert answers("kvpress", "sink_window:num_sinks=4,window=15,positions=original")["positions"] == "expressed"


# --- a finished comparison -------------------------------------------------------------------------------------------------


LINE = ["embedded:softmax", "--text", "random_tokens", "--tokens", "72", "--documents", "2", "--window", "16"]
LINE += ["--sinks", "0,1,4"]
POLICIES = "full,window,sink_window,recompute"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of ``sinklab cache``."""
    folder = tmp_path_factory.mktemp("cache") / "run"
    line = ["cache", *LINE, "--policies", POLICIES, "--out", str(folder)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    return folder


def export(folder, *arguments: object, status: int = 0):
    done = CliRunner().invoke(app, ["export", str(folder), *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done


def test_the_command_says_what_is_in_its_files(finished, tmp_path):
    printed = export(finished, "--to", "kvpress,llama.cpp", "--out", tmp_path).stdout
    summary = read_run(finished, "summary.json")
    for name in ("kvpress_cache.py", "llama_cpp.sh"):
        assert str(tmp_path / name) in printed
        assert summary["recommendation"] in joined((tmp_path / name).read_text())


def row(settings: dict) -> PolicyEntry:
    return PolicyEntry(
        settings["name"], str(settings), settings.get("num_sinks", 0), 12, 13, 12, settings, 2.0, None, None, 64, None, None,
        None, 8, 1.0, 1.0, [2.0],
    )  # fmt: skip


def comparison(*rows: PolicyEntry, num_sinks: int | None = 1, quantized: tuple[QuantizedEntry, ...] = ()) -> Comparison:
    return Comparison(
        1, "m", None, "softmax", "book", 1, 2, 40, "", 20, None, [[1, 40]], list(rows), [], None,
        None if num_sinks is None else Size(num_sinks, 12), "Keep it.", quantized=list(quantized),
    )  # fmt: skip


@pytest.mark.parametrize(("measured", "kind"), [(["original"], "original"), (["original", "in_cache"], "in_cache")])
def test_the_recommended_policy_has_the_positions_that_were_measured(measured, kind):
    settings = {"name": "sink_window", "num_sinks": 1, "window": 12}
    chosen = plan_of(comparison(*(row({**settings, "positions": positions}) for positions in measured)))
    assert chosen.policy == policies.make({**settings, "positions": kind})
    assert chosen.found[0].startswith("Measured: 2.000 nats per token")


@pytest.mark.parametrize(("num_sinks", "known"), [(0, False), (1, True), (4, True)])
def test_what_integers_cost_is_said_where_the_policy_keeps_what_was_whole(num_sinks, known):
    """They were measured with the sink at position 0 in full precision; a window without sinks lets it go."""
    entry = QuantizedEntry("int8", "the sinks found", [0], 12, 40, Difference(0.001, 0.0, 0.002), 0.5)
    settings = {"name": "sink_window", "num_sinks": num_sinks, "window": 12}
    found = comparison(row(settings), num_sinks=num_sinks, quantized=(entry,))
    assert plan_of(found).quantized is None
    said = "int8 costs 0.0010 [0.0000, 0.0020]" if known else "What int8 costs was not measured."
    assert plan_of(found, quantized="int8").found[-1].startswith(said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "vllm"], "--to 'vllm' is none of kvpress, llama.cpp"),
        (["--to", "kvpress", "--policy", "recompute"], "kvpress cannot do recompute 16: it has no such rule"),
        (["--to", "kvpress", "--policy", "sink_window"], "--policy 'sink_window' stands for 2 rows"),
        (["--to", "kvpress", "--policy", "blocks"], "--policy 'blocks' is no row of this comparison"),
        (["--to", "kvpress", "--policy", "full"], "policy 'full' keeps everything, as every engine does by itself"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(finished, tmp_path, arguments, message):
    out = tmp_path / "out"
    said = export(finished, *arguments, "--out", out, status=2).stderr
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_nothing_recommended_is_a_reason():
    found = dataclasses.replace(comparison(num_sinks=None), recommendation="No recommendation: the model has no window.")
    with pytest.raises(InputError, match="recommends no policy"):
        plan_of(found)
    with pytest.raises(ConfigurationError, match="is none of kvpress"):
        checked_engines([""])
