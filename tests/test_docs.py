"""Documents that cannot drift: examples run, recipes keep the contracts, derived parts are fresh, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from docs.site.sources import FENCE
from tests.command_line import CliRunner
from tests.conftest import TINY, real

from sinklab.cli.app import app
from sinklab.cli.commands import find_commands
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import KINDS
from sinklab.testing import check_policy

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# --- derived parts ---


@pytest.fixture(scope="module")
def refresh():
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DERIVED = [path for path in DOCUMENTS if "<!-- begin " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", DERIVED, ids=lambda path: path.stem)
def test_derived_parts_are_fresh(refresh, path):
    text = path.read_text(encoding="utf-8")
    assert refresh.refreshed(text) == text, "run: make docs"


def test_what_comes_with_the_package_is_what_modules_and_results_say(refresh):
    assert json.loads(refresh.DEFINITIONS_FILE.read_text()) == json.loads(json.dumps(refresh.definitions())), "run: make docs"
    assert refresh.KEPT.read_text(encoding="utf-8") == refresh.results(), "run: make docs"


def test_the_page_for_pypi_is_the_readme_without_what_has_no_address(refresh):
    page = refresh.PYPI.read_text(encoding="utf-8")
    assert page == refresh.for_pypi((ROOT / "README.md").read_text(encoding="utf-8")), "run: make docs"
    assert not re.search(r"!\[|\]\((?!https?://)", page)
    assert "## Four doors" in page


# --- examples ---

HEAVY = {"quantisation_table": pytest.mark.thorough}
"""Half a minute of a core."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("example", [pytest.param(path, id=path.stem, marks=HEAVY.get(path.stem, ())) for path in EXAMPLES])
def test_examples_run(example, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = {"in_a_notebook": [str(checkpoint)]}.get(example.stem, [])
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    expected = {
        "in_a_notebook": r"HeadView: On .*\n(.*\n)*layer.*\n0 +\d.*\n(.*\n)*MeasuredWeights\(\d+ layers, 1 sample, ",
        "quantisation_table": r"Without quantisation: 2\.\d+ nats a token\n(.*\n)+W8A8 +[a-z ]+2(.*\n)+W4A16 +[a-z]+ +2",
        "look_up_a_number": r"published: Softmax 18\.18(.*\n)+  to run it: sinklab reproduce \w+ ",
        "find_causes": r"1\.1 (text-dependent|active|undecided), weight on the sink 0\.\d\d\n(.*\n)+"
        r"5\.0 text-dependent(.*\n)+.*'undecided': 4, 'not-run': 0}",
        "measure_any_transformer": r"Session\(LlamaForCausalLM, 2 modules seen, 2 calls.*\n(.*\n)+Session\(ViTModel, 2 modules",
        "watch_a_trainer": r"softmax\n(.*\n)?loss .*'step 60: 2\.\d+'\]\nsink_loss_gap .*'step 60: 0\.[2-9]\d'\]\n"
        r"gated\n(.*\n)+sink_loss_gap .*'step 60: -?0\.0\d'\]\nloaded again: gated",
        "stream_for_ever": r"trained on 256 positions\n(.*\n)+4\+128: 133 of 133 tokens .*\n(.*\n)+.*the same tokens: True",
        "chat_with_a_bounded_cache": r"you  Read a file\.  \(2\d tokens read\)\n(.*\n)+never evicted: .*You write Python",
        "change_a_trained_model": r"loss at the start +loss +sink rate \(%\).*\nsoftmax +2\.\d+ +2\.\d+ .*\n"
        r"gated:double=true +2\.\d+ +2\.\d+(.*\n)+sink_logit:initial=-4 .*\n(.*\n)*softpick ",
        "replace_softmax": r"sdpa +mean mass of a row: 1\.000\nsinklab_sigmoid +mean mass of a row: 0\.[3-7]",
    }
    assert re.search(expected[example.stem], printed), printed


def test_the_readme_is_read_in_two_minutes():
    """At 250 words a minute, code and outputs apart, and no longer than a reader scrolls."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    assert len(FENCE.sub("", text).split()) <= 500


PRINTS = {
    ("README.md", 0): r"^$",
    ("README.md", 1): r"\n?4\+120: 1\d\d of 125 tokens",
    ("docs/measure.md", 0): r"layer +head +value\n",
}


@pytest.mark.parametrize(("page", "number"), PRINTS)
def test_the_first_examples_run(page, number, checkpoint, capsys):
    exec(blocks(ROOT / page, "python")[number].replace("embedded:softmax", str(checkpoint)), {})
    printed = capsys.readouterr().out
    assert re.search(PRINTS[page, number], printed), printed


def test_the_examples_of_the_interventions_print_what_they_say(capsys):
    """On the embedded model; losses are float32 means, shown to three digits."""
    path = ROOT / "docs" / "interventions.md"
    exec("\n".join(blocks(path, "python")), {})
    printed, expected = capsys.readouterr().out, "".join(blocks(path, "text"))
    number = r"-?\d+(?:\.\d+)?"
    assert re.sub(number, "#", printed) == re.sub(number, "#", expected)
    found, said = ([float(one) for one in re.findall(number, text)] for text in (printed, expected))
    assert found == pytest.approx(said, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "model", "out"),
    [("README.md", "build/models/smollm2-135m", "demo-llm"), ("docs/measure.md", "embedded:sigmoid", "demo-sigmoid")],
)
def test_the_summaries_are_those_that_an_audit_prints(page, model, out, tmp_path, monkeypatch):
    """Word for word; numbers within a tenth, because the text is the source of the Python that runs this."""
    monkeypatch.chdir(tmp_path)
    if model.startswith("build/"):
        Path("build").mkdir()
        Path("build/models").symlink_to(real(Path(model).name).parent)
    printed = CliRunner().invoke(app, ["audit", model, "--out", f"build/{out}"]).stdout
    (expected,) = (block for block in blocks(ROOT / page, "text") if block.startswith("sink "))
    expected = expected.partition("\n…")[0]  # shortened there
    printed = "\n".join(line.rstrip() for line in printed.splitlines())[: len(expected)]
    number = r"-?\d[\d,]*(?:\.\d+)?"
    assert re.sub(number, "#", printed) == re.sub(number, "#", expected)
    found, said = ([float(one.replace(",", "")) for one in re.findall(number, text)] for text in (printed, expected))
    assert found == pytest.approx(said, rel=0.1, abs=0.02)


# --- commands ---


def test_make_targets_in_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named
    assert named <= targets


# --- recipes ---


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Imports one recipe of CONTRIBUTING as the file that it says it is, and runs the test that stands below it there."""
    registered = []

    def load(file: str, *, kind: str = "", **fixtures: object):
        programs = [*blocks(ROOT / "CONTRIBUTING.md", "python"), ""]
        (number,) = (number for number, block in enumerate(programs) if block.startswith(f"# src/{file}"))
        source, below = programs[number : number + 2]
        path = tmp_path / Path(file).name
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(file.removesuffix(".py").replace("/", "."), path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        kind = kind or Path(file).parent.name
        registered.append((kind, path.stem))
        if "def test_" in below and not below.startswith("# src/"):
            names = dict(vars(module))
            exec(below, names)
            (test,) = (names[name] for name in names if name.startswith("test_"))
            test(**fixtures)
        return KINDS[kind][path.stem]

    yield load
    for kind, name in registered:
        del KINDS[kind]._objects[name]


def test_add_a_probe(recipe):
    probe = recipe("sinklab/probes/largest_weight.py")
    from sinklab.attention.session import attend
    from sinklab.testing import tiny_models

    model = tiny_models()["gpt2"]
    with torch.no_grad():
        for layer in model.transformer.h:  # no scores, so every row is uniform: 1, 1/2, 1/3
            layer.attn.c_attn.weight[:, :64] = 0
            layer.attn.c_attn.bias[:64] = 0
        with attend(model, probes=[probe()]) as session:
            model(input_ids=torch.tensor([[3, 1, 4]]))
    values = session.table()["value"].tolist()
    assert len(values) == 2 * 4
    assert values == pytest.approx([(1 + 1 / 2 + 1 / 3) / 3] * 8, rel=1e-12)


def test_add_an_operation(recipe):
    operation = recipe("sinklab/operations/squared_relu.py")
    scores = torch.tensor([[[[-1.0, 2.0, 3.0]]]], dtype=torch.float64)
    seen = torch.tensor([True, True, False])
    # Half of 0, 4 and 9 over three keys; the last one hidden, over two.
    assert operation(scale=0.5).weights(scores, None).flatten().tolist() == pytest.approx([0.0, 2 / 3, 1.5])
    assert operation(scale=0.5).weights(scores, seen).flatten().tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_add_an_intervention(recipe):
    keep_largest = recipe("sinklab/interventions/keep_largest.py")
    with pytest.raises(ConfigurationError, match="count must be 1 or more, got 0"):
        keep_largest(count=0)
    weights, nothing = torch.tensor([[[[0.1, 0.5, 0.2]]]]), torch.tensor([[[0.2]]])
    edited, mass = keep_largest(count=2).edit_weights(None, weights, nothing, 0, 1)
    assert edited.flatten().tolist() == pytest.approx([0.0, 0.5, 0.2])
    assert mass is nothing


def test_add_a_corpus(recipe, tokenizer):
    encoder = Encoder(vocab_size=len(tokenizer), bos_token_id=0, tokenizer=tokenizer)
    corpus = recipe("sinklab/corpora/counting.py", encoder=encoder)()
    rows = [corpus.sample(encoder, seq_len=16, samples=4, seed=seed, bos=False) for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    first, second = map(int, tokenizer.decode(rows[0][0]).split()[:2])
    assert second == first + 1


def test_add_a_position_scheme(recipe):
    recipe("sinklab/positions/logarithmic.py")
    model = SinkLM(SinkLMConfig(**TINY, position={"name": "logarithmic", "slope": 2.0})).eval()
    tokens = torch.arange(12)[None]
    bias = model.position.score_bias(torch.tensor([[3]]), torch.tensor([[0, 2, 3]]))
    assert bias.flatten().tolist() == pytest.approx([-2 * math.log(4), -2 * math.log(2), 0.0])
    with torch.no_grad():
        whole = model(tokens).logits
        first = model(tokens[:, :7], use_cache=True)
        rest = model(tokens[:, 7:], past_key_values=first.past_key_values).logits
    # float32 in two layers, in another order of summation.
    torch.testing.assert_close(torch.cat((first.logits, rest), dim=1), whole, rtol=0, atol=1e-5)


def test_add_a_cache_policy(recipe):
    every_other = recipe("sinklab/policies/every_other.py")
    with pytest.raises(ConfigurationError, match="count 0 must be 1 or more, and positions original"):
        every_other(count=0)
    assert every_other(count=2).visible(torch.tensor(9), torch.arange(12)).nonzero().flatten().tolist() == [6, 8, 9]
    check_policy(every_other(count=3))


def test_add_a_claim(recipe):
    assert recipe("sinklab_claims/small_learning_rate.py", kind="claims").__name__ == "small_learning_rate"


def test_add_a_recipe(recipe):
    config = recipe("sinklab/recipes/short_window.py")()
    assert (config.name, config.model.window) == ("short_window", 8)


# --- what else the documents promise ---


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_summary_keys_are_documented(checkpoint, tmp_path):
    out = tmp_path / "out"
    options = ["--corpus", "random_tokens", "--samples", "2", "--seq-len", "8", "--certificate", "--causes", "--origin"]
    assert CliRunner().invoke(app, ["audit", str(checkpoint), *options, "--out", str(out)]).exit_code == 0
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    section = text.split("# summary.json")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {key for row in rows for key in re.findall(r"`([a-z0-9_]+)`", row)}
    assert documented == set(json.loads((out / "summary.json").read_text()))
    assert {path.name for path in out.iterdir()} == set(_first_column(text, "| file | what it is |"))


def test_files_are_listed_for_every_command_that_leaves_some():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = _first_column(text, "| command | what else its output directory holds |")
    one_thing = {"compare", "export"}  # a page, files for somebody else: no run
    with_out = {name for name, place in find_commands().items() if "out" in inspect.signature(place.load()).parameters}
    assert sorted(listed) == sorted(with_out - one_thing)


def _first_column(text: str, heading: str) -> list[str]:
    """Names in backquotes in the first column of the table below a heading."""
    rows = text.split(heading)[1].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([a-z.]+)`", row.split("|")[1])]


def test_no_file_names_a_place_on_somebodys_machine():
    place = re.compile(r"(?<![\w.])/(?:home|root|Users|mnt|opt|work)/\w")
    for path in [*DOCUMENTS, *EXAMPLES, *(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile"]:
        found = place.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)} names {found[0]}…"


def test_every_variable_of_the_environment_is_listed():
    read = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"SINKLAB_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(SINKLAB_\w+)` ", page, re.MULTILINE))
