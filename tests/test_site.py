"""The documents: derived parts, links and pictures, and every block and command line of them, which run."""

from __future__ import annotations

import copy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from docs.site.blocks import RUN_BY, console_lines, python_blocks
from docs.site.sources import ROOT, SiteError, alternatives, anchors, links, navigation
from tests.command_line import CliRunner
from tests.conftest import make_sinklm

from sinklab.cli.app import app, make_app
from sinklab.registry import KINDS

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_every_page_is_in_the_navigation():
    """The message of what is raised says where to add a line."""
    listed = [page for section in navigation() for entry in section.entries for page in entry.pages]
    assert {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "claims.md"} <= set(listed)


@pytest.fixture
def small(tmp_path) -> Path:
    """A folder of documents with three pages, one of them in a folder."""
    (tmp_path / "docs" / "more").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n## Read\n\n- [One](one.md): first\n- [More](more): the rest\n")
    (tmp_path / "docs" / "one.md").write_text("# One `thing`\n")
    (tmp_path / "docs" / "more" / "two.md").write_text("# Two\n")
    return tmp_path


def test_a_folder_brings_its_pages(small):
    (section,) = navigation(small / "docs" / "index.md", small)
    assert [(entry.title, [page.name for page in entry.pages]) for entry in section.entries] == [
        ("One", ["one.md"]),
        ("More", ["two.md"]),
    ]


def test_a_page_outside_the_navigation_is_named_with_the_line_that_it_needs(small):
    (small / "docs" / "three.md").write_text("# Three `kinds`\n")
    with pytest.raises(SiteError, match=r"not in the navigation: docs/three\.md\. Add .*'- \[Three kinds\]\(three\.md\): what"):
        navigation(small / "docs" / "index.md", small)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_name_places_that_are_there(page):
    for _, _, target in links(page.read_text(encoding="utf-8")):
        name, mark, anchor = target.partition("#")
        if mark and not name.startswith(("http://", "https://")):
            goal = page.parent / name if name else page
            assert anchor in anchors(goal.read_text(encoding="utf-8")), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_picture_has_an_alternative_text(page):
    assert not alternatives(page.read_text(encoding="utf-8"))


def test_anchors_are_those_of_github():
    text = "# A sink: what?\n\n## `sink_rate`, once\n\n```\n# no heading\n```\n## A sink: what?\n### [linked](a.md) (2026)\n"
    assert anchors(text) == {"a-sink-what", "sink_rate-once", "a-sink-what-1", "linked-2026"}


HERE = [page for page, test in RUN_BY.items() if test == "tests/test_site.py"]


def test_every_python_block_is_run_or_says_that_it_is_not():
    without = sorted({block.page for block in python_blocks() if block.reason is None} - set(RUN_BY))
    assert not without, (
        f"no test runs the Python blocks of {', '.join(without)}: name one in RUN_BY of docs/site/blocks.py "
        "(tests/test_site.py runs all blocks of a page in turn), or say in the block '# not run by the tests: why'"
    )


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_that_is_named_reads_the_page(page):
    text = (ROOT / RUN_BY[page]).read_text(encoding="utf-8")
    assert RUN_BY[page] == "tests/test_site.py" or ("exec" in text and Path(page).stem in text)


@pytest.fixture(scope="module")
def stage(checkpoint, tokenizer, tmp_path_factory) -> Path:
    """A folder with what the pages speak of: a decoder and a masked model of transformers, texts, records, audits, a sweep."""
    folder = tmp_path_factory.mktemp("stage")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    masking = copy.deepcopy(tokenizer)
    masking.add_special_tokens({"mask_token": "<|mask|>"})
    config = transformers.BertConfig(vocab_size=len(masking), max_position_embeddings=128, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "bert")
    masking.save_pretrained(folder / "bert")
    words = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("my-text.txt", "notes.txt", "book.txt", "README.md"):
        (folder / name).write_text(words * 6, encoding="utf-8")
    lines = [f"{line} {number}" for number in range(20) for line in words.splitlines() if len(line) > 60]
    (folder / "reactions.txt").write_text("\n".join(lines), encoding="utf-8")
    cells = folder / "sinklab-sweeps" / "emergence" / "cells.csv"
    cells.parent.mkdir(parents=True)
    cells.write_text(
        "cell,optimizer.learning_rate,model.operation.name,seed,status,held_out_loss,sink_rate\n"
        + "".join(f"{seed},0.002,softmax,{seed},finished,{3 + seed},10.0\n" for seed in range(3))
    )
    for name in ("build/demo", "build/demo-sigmoid", "build/other"):
        line = f"audit {checkpoint} --corpus random_tokens --samples 2 --seq-len 8 --no-cache --out {folder / name}"
        assert CliRunner().invoke(app, shlex.split(line)).exit_code == 0
    return folder


SHORTER = {
    "compile_steps(model)": "compile_steps(model, backend='eager')",
    "samples=10": "samples=2",
    "documents=4": "documents=1",
    "steps=20)": "steps=2)",
    "layers=3, width=32, length=32": "layers=3, width=8, length=12",
    "seeds=[0])": "seeds=[0], cap=30)",
}
"""Of trainings only that they run is asked here."""


@pytest.mark.parametrize("page", HERE)
def test_the_blocks_of_a_page_run(page, stage, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(stage, tmp_path / "stage"))
    model = make_sinklm()
    rows = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    names: dict[str, object] = {
        "__name__": "__main__",
        "Path": Path,
        "folder": Path("build/demo"),
        "first": Path("build/demo"),
        "second": Path("build/demo-sigmoid"),
        "model": model,
        "probe_rows": rows,
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "arguments": transformers.TrainingArguments(
            "trained", max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
        ),
    }
    stand_ins = {"embedded:softmax": str(checkpoint), "org/model": "llama", **SHORTER}
    if page in ("docs/explain.md", "docs/theory.md"):
        del stand_ins["embedded:softmax"]  # they speak of its sink
    blocks = [block for block in python_blocks() if block.page == page]
    assert blocks
    for block in blocks:
        if block.reason is None:
            source = block.source
            for said, used in stand_ins.items():
                source = source.replace(said, used)
            exec(compile(source, f"{page}, block {block.number + 1}", "exec"), names)
    for registry in KINDS.values():  # what a page registers leaves with it
        registry._objects = {name: entry for name, entry in registry._objects.items() if entry.__module__ != "__main__"}


def test_every_command_line_is_known_and_parses():
    """A line is one of sinklab, in one process or in several, or a target of make, or installs the package."""
    for line in console_lines():
        words = shlex.split(line.text)
        if words[0] == "torchrun":
            words = words[words.index("sinklab") :]
        assert words[0] in ("sinklab", "make", "pip", "uvx") or (words[0] == "python" and (ROOT / words[1]).exists()), line
        if words[0] == "sinklab":
            make_app(words[1:])[0].parse_args(words[1:])


PAGES_WITH_LINES = sorted({line.page for line in console_lines() if line.reason is None})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_LINES)
def test_the_command_lines_of_a_page_run(page, stage, checkpoint, tmp_path, monkeypatch):
    """On random weights of 20,000 parameters in the place of every model; what they print is checked elsewhere."""
    monkeypatch.chdir(shutil.copytree(stage, tmp_path / "stage"))
    stand_ins = dict.fromkeys(("embedded:softmax", "embedded:sigmoid", "./my-checkpoint", "org/two"), checkpoint)
    stand_ins |= dict.fromkeys(("ORG/MODEL", "org/model", "org/one"), "llama")
    stand_ins |= dict.fromkeys(("./my-bert", "ORG/MASKED_MODEL", "./rxnmapper"), "bert")
    stand_ins |= {"org/name=./a-directory": f"three={checkpoint}", "--heads 10.5": "--heads 1.3", "/scratch/offload": "offload"}
    for line in console_lines():
        if line.page == page and line.reason is None:
            text = line.text.removeprefix("sinklab ")
            for said, used in stand_ins.items():
                text = text.replace(said, str(used))
            done = CliRunner().invoke(app, [*shlex.split(text), *(["--overwrite"] if text.startswith("audit") else [])])
            # Random weights have no sink; a line that needs one has then found the model, its text and that.
            assert done.exit_code == 0 or "error: no sink found" in done.stderr, f"{line.text}\n{done.output}"
