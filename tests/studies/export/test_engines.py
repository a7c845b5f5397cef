"""llama.cpp, built from a source distribution, runs the exported script; its losses are those of our cache.

``make test-engines``: builds llama-server under build/engines at the first call (half an hour on two cores), or takes that of
SINKLAB_LLAMA_SERVER. The text is what the server writes itself, each token drawn from the whole distribution; its own
logarithms of their probabilities are compared with those of our policies on the same tokens and the same weights.
"""

import contextlib
import json
import os
import socket
import subprocess
import tarfile
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from tests.conftest import real

from sinklab import load_model
from sinklab.registry import policies
from sinklab.streaming.perplexity import losses
from sinklab.studies.export.base import ExportPlan, engines, exported

ROOT = Path(__file__).parents[3]
ROOT = Path(__file__).parents[3]
SOURCE = "llama-cpp-python==0.3.36"
OPTIONS = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_USE_PREBUILT_UI",
           "LLAMA_OPENSSL")  # fmt: skip
PROMPT = "The history of the river begins in the mountains, where"


def server() -> Path:
    """llama-server; built once."""
    if given := os.environ.get("SINKLAB_LLAMA_SERVER"):
        return Path(given)
    folder = ROOT / "build" / "engines"
    built = folder / "llama" / "bin" / "llama-server"
    if not built.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [ROOT / ".venv" / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, SOURCE], check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
        off = [f"-D{option}=OFF" for option in OPTIONS]
        subprocess.run(["cmake", "-S", source, "-B", folder / "llama", "-DCMAKE_BUILD_TYPE=Release", *off], check=True)
        subprocess.run(
            ["cmake", "--build", folder / "llama", "--target", "llama-server", "llama-quantize", "-j", "2"], check=True
        )
    return built


def widened(path: Path, folder: Path) -> Path:
    """The same model with every weight in float32, so that the two programs multiply the same numbers."""
    wide = folder / "wide.gguf"
    subprocess.run([server().parent / "llama-quantize", "--allow-requantize", path, wide, "F32", "1"], check=True)
    return wide


@contextlib.contextmanager
def serving(script: str, folder: Path, model: Path, *changes: str):
    """The exported script at work with a model; gives a function that asks it to complete ids."""
    (folder / "serve.sh").write_text(script, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (folder / "serve.sh").read_text(encoding="utf-8").rstrip("\n") + f" --port {port} --threads 1 {' '.join(changes)}\n"
    (folder / "serve.sh").write_text(text, encoding="utf-8")
    path = f"{server().parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["sh", folder / "serve.sh", model], env={**os.environ, "PATH": path}, stdout=log, stderr=log)

    def ask(ids: list[int], number: int, **more: object) -> dict:
        asked = {"prompt": ids, "n_predict": number, "n_probs": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                 "seed": 1, "ignore_eos": True, "return_tokens": True, **more}  # fmt: skip
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    try:
        for _ in range(600):
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        yield ask
    finally:
        process.terminate()
        process.wait()


def written(name: str, spec: str, folder: Path, number: int, *changes: str, **more: object):
    """What the server wrote behind the prompt: all ids, its losses of the new ones, the model, and whether it was cut short."""
    path = widened(real(name), folder)
    loaded = load_model(path)
    bos = loaded.tokenizer.bos_token_id == loaded.tokenizer(PROMPT)["input_ids"][0]
    ids = loaded.tokenizer(PROMPT)["input_ids"]
    plan = ExportPlan(name, bos, policies.make(spec), None, (), type(loaded.model).__name__)
    with serving(exported(engines()["llama.cpp"], plan).text, folder, path, *changes) as ask:
        answer = ask(ids, number, **more)
    new = [one["id"] for one in answer["completion_probabilities"]]
    own = -torch.tensor([one["logprob"] for one in answer["completion_probabilities"]])
    return [*ids, *new], own, loaded.model


def ours(model: torch.nn.Module, ids: list[int], spec: str, number: int) -> torch.Tensor:
    """Losses of the last tokens under a policy."""
    return losses(model, torch.tensor([ids]), policies.make(spec))[0, -number:]


WHOLE = ("--cache-type-k f32", "--cache-type-v f32")
NUMBER = 500

pytestmark = [pytest.mark.slow, pytest.mark.real]


@pytest.mark.parametrize(
    ("name", "spec", "held", "more"),
    [
        # One token goes for each that comes: the server holds the context less one, that of the query among them.
        ("smollm2-135m", "sink_window:num_sinks=4,window=251", "sink_window:num_sinks=4,window=250", {"n_discard": 1}),
        ("smollm2-135m", "blocks:num_sinks=1,block=127", "blocks:num_sinks=1,block=127", {}),
        ("gemma3-270m", "sink_window:num_sinks=1,window=254", "sink_window:num_sinks=1,window=253", {"n_discard": 1}),
    ],
    ids=["one token", "half of it", "sliding windows"],
)
def test_the_server_does_what_the_cache_does(name, spec, held, more, tmp_path):
    ids, own, model = written(f"gguf/{name}.gguf", spec, tmp_path, NUMBER, *WHOLE, **more)
    assert len(own) == NUMBER  # past the context of 256, twice
    found = ours(model, ids, held, NUMBER)
    # Measured 1e-4; the server's window without sinks is 0.1 and more away, one token fewer held 1e-3.
    assert (found - own).abs().max() < 2e-3
    assert found[300:].mean() == pytest.approx(own[300:].mean(), abs=2e-4)
