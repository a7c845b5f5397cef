"""Peers of the streaming benchmarks: workers in environments of their own that answer over pipes, and the models they share."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PEERS = ("streaming_llm", "attention_sinks")


def peer_environments() -> dict[str, Path]:
    """Name to folder of the environments that ``benchmarks/peers/setup.sh`` has made in ``SINKLAB_PEERS``."""
    folder = Path(os.environ.get("SINKLAB_PEERS", "build/peers")).absolute()
    return {name: folder / name for name in PEERS if (folder / name / "bin" / "python").exists()}


class Worker:
    """A process of ``peers/worker.py``; it computes only while it is asked, so that all take turns."""

    def __init__(self, environment: Path) -> None:
        source = environment / "source"
        path = source.read_text().strip() if source.exists() else ""
        self._process = subprocess.Popen(
            [environment / "bin" / "python", Path(__file__).parent / "peers" / "worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, do: str, **request: Any) -> Any:
        """The answer to one request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker of a peer died at {do!r}; run {' '.join(map(str, self._process.args))} by hand")
        return json.loads(answer)

    def read(self, tokens: list[int], prompt: int) -> Tensor:
        """Logits ``(tokens - prompt, vocab_size)``."""
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/logits.safetensors"
            self.ask("read", tokens=tokens, prompt=prompt, path=path)
            return load_file(path)["logits"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_llama(seed: int = 0, *, sharpened: float = 8.0, **sizes: int) -> LlamaForCausalLM:
    """A random Llama with sharpened attention: at its default initialisation wrong positions would go unseen.

    Queries and keys are ``sharpened`` times as large as usual, values and outputs three times. 8 is for widths up to 128, where
    scores then have a deviation of 3; at width 512 it would be 13, and the rounding of the angles alone, in the peers as here,
    would move the logits by 1e-3.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=1 << 17, **sizes)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    weight.mul_(sharpened)
                elif "v_proj" in name or "o_proj" in name:
                    weight.mul_(3)
    return model


def save_for_peers(model: LlamaForCausalLM, folder: str) -> None:
    """Weights and a config that a transformers of 2023 reads."""
    config = model.config
    fields = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
    ]
    settings = {name: getattr(config, name) for name in fields}
    assert config.rope_parameters["rope_theta"] == 10_000.0
    settings |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    Path(folder, "config.json").write_text(json.dumps(settings))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
