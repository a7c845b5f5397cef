"""A peer at work: reads and times tokens for the benchmark that started it, in the peer's own environment.

Requests are lines of JSON on standard input, answers lines of JSON on what was standard output; whatever a peer prints goes to
standard error. It imports nothing of sinklab: the environment has a transformers of 2023.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

CHUNK = 512
"""Tokens of a prompt at once: both peers attend densely to all of them, in one square of scores."""


class Peer:
    """One model under one library."""

    def __init__(self, library: str, folder: str, sinks: int, window: int, dtype: str) -> None:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        kind = {"torch_dtype": getattr(torch, dtype)}
        self.trim = lambda cache: cache
        if library == "attention_sinks":
            from attention_sinks import AutoModelForCausalLM

            sizes = {"attention_sink_size": sinks, "attention_sink_window_size": window}
            self.model = AutoModelForCausalLM.from_pretrained(folder, **sizes, **kind)
        else:
            self.model = transformers.LlamaForCausalLM.from_pretrained(folder, **kind)
            if library == "streaming_llm":
                from streaming_llm.enable_streaming_llm import enable_streaming_llm

                self.trim = enable_streaming_llm(self.model, start_size=sinks, recent_size=window)
        self.model.eval()
        self.held = sinks + window if library == "plain" else None
        self.cache = None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of some more tokens."""
        found = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        # A plain cache is held at a size: what it costs without any policy.
        if self.held is None or self.cache is None or self.cache[0][0].shape[2] < self.held:
            self.cache = self.trim(found.past_key_values)
        return found.logits

    @torch.no_grad()
    def read(self, tokens: list[int], prompt: int) -> torch.Tensor:
        """Logits of the tokens behind a prompt, read one by one."""
        self.cache = None
        given = torch.tensor([tokens])
        for start in range(0, prompt, CHUNK):
            self.step(given[:, start : min(start + CHUNK, prompt)])
        return torch.cat([self.step(given[:, index : index + 1]) for index in range(prompt, len(tokens))], dim=1)[0]

    @torch.no_grad()
    def time(self, steps: int) -> float:
        """CPU seconds of a step."""
        token = torch.tensor([[1]])
        start = time.process_time()
        for _ in range(steps):
            self.step(token)
        return (time.process_time() - start) / steps


def main() -> None:
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        answer: object = None
        if do == "load":
            peer = Peer(**request)
            answer = transformers.__version__
        elif do == "read":
            path = request.pop("path")
            save_file({"logits": peer.read(**request).float().contiguous()}, path)
        elif do == "time":
            answer = peer.time(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
