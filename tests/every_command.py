"""Every command once, on settings that take seconds: ``python -m tests.every_command [COMMAND …]``.

What is printed is checked elsewhere; this finds a command that another version of a library breaks. The commands are those of
the command line, and one without lines here fails a test.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import transformers
from tests.command_line import CliRunner
from tests.conftest import make_sinklm, make_tokenizer

from sinklab.cli.app import app
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import CONFIGS

QUICK = "--corpus random_tokens --samples 3 --seq-len 12"
STEPS = "--set training.steps=4 --set training.save_every=2 --set watch.every=2 --set training.evaluate_every=2"

LINES: dict[str, Sequence[str]] = {
    "audit": (f"audit softmax {QUICK} --out audit", f"audit llama {QUICK} --out audit_of_llama"),
    "measure": (
        f"measure llama --probe sink_rate --probe entropy {QUICK} --out measure",
        f"measure llama --probe head_output --device-map auto --max-memory cpu=80KB {QUICK} --out measure_spread",
    ),
    "cache": ("cache llama --text random_tokens --window 16 --sinks 0,4 --tokens 64 --documents 1 --out cache",),
    "export": ("export cache --to llama.cpp,kvpress --policy 'sink_window 4+12'",),
    "causes": ("causes llama --heads 0.0,0.0+0.1 --sink 0 --domains random_tokens --texts 8 --seq-len 16 --out causes",),
    "quantize": (f"quantize llama {QUICK} --samples 6 --calibration 2 --schemes w2a8,w4a16 --out quantize",),
    "origin": ("origin llama --corpus random_tokens --samples 3 --seq-len 12 --controls 1 --out origin",),
    "fold": ("fold softmax --corpus random_tokens --samples 2 --seq-len 12 --out fold",),
    "depend": ("depend llama --task long_text:corpus=random_tokens --window 16 --sinks 4 --items 2 --out depend",),
    "trigger": ("trigger --operation softmax --seeds 0 --cap 5 --samples 20 --out trigger",),
    "pretrain": (
        f"pretrain tiny {STEPS} --set training.gradient_checkpointing=true --out pretrain",
        f"pretrain tiny {STEPS} --set training.gradient_checkpointing=true --out pretrain --resume",
        f"pretrain tiny {STEPS} --init-from pretrain --set model.operation.name=sigmoid --out pretrain_from",
    ),
    "sweep": (f"sweep tiny --grid lr=1e-3,4e-3 {STEPS} --retries 0 --out sweep",),
    "reproduce": (
        "reproduce emergence --seeds 0 --retries 0 --out claims",
        "reproduce repeated_token_laws --model llama --seeds 0 --out claims",
    ),
    "stream": (
        "stream llama --prompt 'import os' --max-new-tokens 20 --window 8 --save state.safetensors",
        "stream llama --resume state.safetensors --max-new-tokens 5",
    ),
    "compare": ("compare audit audit_of_llama --out compare.html",),
    "card": ("card audit", "card cache", "card causes", "card quantize"),
    "report": ("report audit", "report causes", "report origin"),
    "claims": ("claims", "claims emergence"),
    "list": ("list",),
    "show": ("show sink_rate", "show tiny"),
}
"""Command to what is typed, in an order in which all can run: some take what others leave."""


def main(names: Sequence[str]) -> int:
    """Run the lines of some commands, by default of all, in a folder of their own; the number of lines that fail."""
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _short_trainings():
        _checkpoints()
        os.environ["SINKLAB_CACHE"] = str(Path(folder, "encoded"))
        for line in (line for name in names or LINES for line in LINES[name]):
            started = time.perf_counter()
            done = CliRunner().invoke(app, shlex.split(line))
            failed += done.exit_code != 0
            print(f"{'ok' if done.exit_code == 0 else 'FAILED'} {time.perf_counter() - started:5.1f} s  {line}", flush=True)
            if done.exit_code != 0:
                print(done.output)
                if done.exception is not None and not isinstance(done.exception, SystemExit):
                    traceback.print_exception(done.exception, file=sys.stdout)
    return failed


def _checkpoints() -> None:
    """``softmax``, a SinkLM, and ``llama``, a model of transformers, each with a tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, **sizes
    )
    for name, model in {"softmax": make_sinklm(), "llama": transformers.LlamaForCausalLM(config)}.items():
        model.save_pretrained(name)
        make_tokenizer().save_pretrained(name)


@contextlib.contextmanager
def _short_trainings() -> Iterator[None]:
    """Have claims train for eight steps; the processes that train read the configuration that this one writes."""

    def shortened(recipe: Callable[[], PretrainingConfig]) -> Callable[[], PretrainingConfig]:
        def configuration() -> PretrainingConfig:
            config = recipe()
            config.schedule.warmup_steps = 2
            config.training.steps = config.training.save_every = config.training.evaluate_every = 8
            return config

        return configuration

    short = {base: shortened(recipe) for base, recipe in CONFIGS["tiny"].items()}
    with mock.patch.dict(CONFIGS, tiny=short):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
