"""Writes ``tests/streaming/peers.safetensors``: logits of the peers for a tiny model, so that parity is tested without them.

SINKLAB_PEERS=FOLDER python benchmarks/peers/reference.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from _peers import PEERS, Worker, peer_environments, save_for_peers  # noqa: E402
from tests.streaming.test_families import PEER_SINKS, PEER_WINDOW, STORED, make_model  # noqa: E402


def main() -> None:
    tokens = torch.randint(0, 96, (160,), generator=torch.Generator().manual_seed(1))
    stored = {"tokens": tokens}
    about: dict[str, str | int] = {"sinks": PEER_SINKS, "window": PEER_WINDOW}
    environments = peer_environments()
    with tempfile.TemporaryDirectory() as folder:
        save_for_peers(make_model(), folder)
        for name in PEERS:
            worker = Worker(environments[name])
            version = worker.ask("load", library=name, folder=folder, sinks=PEER_SINKS, window=PEER_WINDOW, dtype="float32")
            about[name] = f"transformers {version}"
            stored[name] = worker.read(tokens.tolist(), 0)
            worker.close()
    save_file(stored, STORED, metadata={"about": json.dumps(about)})


if __name__ == "__main__":
    main()
