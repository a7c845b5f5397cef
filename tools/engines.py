"""llama.cpp as a peer: its server, built once from a source distribution, at work under an exported script.

``server()`` builds it under build/engines (half an hour on two cores), or takes that of SINKLAB_LLAMA_SERVER.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = "llama-cpp-python==0.3.36"
OPTIONS = (
    *("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP"),
    *("LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL"),
)

Ask = Callable[..., dict[str, Any]]
"""Takes ids, a number of tokens and fields of a request; gives what ``/completion`` answers."""


def server() -> Path:
    """llama-server, with llama-quantize beside it."""
    if given := os.environ.get("SINKLAB_LLAMA_SERVER"):
        return Path(given)
    folder = ROOT / "build" / "engines"
    built = folder / "llama" / "bin" / "llama-server"
    if not built.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, SOURCE], check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
        off = [f"-D{option}=OFF" for option in OPTIONS]
        subprocess.run(["cmake", "-S", source, "-B", folder / "llama", "-DCMAKE_BUILD_TYPE=Release", *off], check=True)
        targets = ["--target", "llama-server", "llama-quantize", "-j", "2"]
        subprocess.run(["cmake", "--build", folder / "llama", *targets], check=True)
    return built


def widened(path: Path, folder: Path) -> Path:
    """The same model with every weight in float32, so that two programs multiply the same numbers."""
    wide = folder / f"{path.stem}-f32.gguf"
    if not wide.is_file():
        subprocess.run([server().parent / "llama-quantize", "--allow-requantize", path, wide, "F32", "1"], check=True)
    return wide


@contextlib.contextmanager
def serving(script: str, folder: Path, model: Path, *changes: str) -> Iterator[Ask]:
    """An exported script at work with a model and further options; what asks it draws from the whole distribution."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / "serve.sh"
    file.write_text(script.rstrip("\n") + f" --port {port} --threads 1 {' '.join(changes)}\n", encoding="utf-8")
    path = f"{server().parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(["sh", file, model], env={**os.environ, "PATH": path}, stdout=log, stderr=log)

    def ask(ids: list[int], number: int, **more: object) -> dict[str, Any]:
        drawn = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "ignore_eos": True}
        asked = {"prompt": ids, "n_predict": number, "n_probs": 1, "return_tokens": True, **drawn, **more}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return dict(json.load(answer))

    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError((folder / "serve.log").read_text()[-2000:])
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        yield ask
    finally:
        process.terminate()
        process.wait()
