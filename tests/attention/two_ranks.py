"""What test_ranks.py has two processes do that share the heads of a model: ``python -m tests.attention.two_ranks FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.distributed
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sinklab
from sinklab.attention.placement import held
from sinklab.attention.ranks import ranks_of
from sinklab.attention.session import attend
from sinklab.cli.app import app
from sinklab.errors import SinklabError
from sinklab.interventions.zero_head import ZeroHead
from sinklab.models.loading import hash_weights, load_model, wrap_model
from sinklab.policies.sink_window import SinkWindow
from sinklab.probes.sink_rate import SinkRate
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.stream import Stream
from sinklab.studies.cache.cache import compare_policies

SAMPLES = {"corpus": "random_tokens", "samples": 3, "seq_len": 12}
CACHE = {"corpus": "random_tokens", "policies": ["sink_window"], "windows": [8], "sinks": [2], "tokens": 24, "documents": 1}
TOKENS = torch.arange(3, 15)[None]
HEADS = {0: [0, 3], 1: [2]}
"""Layer to heads that are zeroed; two processes have two heads of each layer."""


def edited_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Logits without these heads."""
    with torch.no_grad(), attend(model, [SinkRate()], [ZeroHead(heads=HEADS)]):
        return model(TOKENS).logits


def own_plan(folder: Path) -> transformers.PreTrainedModel:
    """The model of a user who cuts it up with torch, not with transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    colwise = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), {**colwise, "self_attn.o_proj": RowwiseParallel()})
    return model


def streamed(model: transformers.PreTrainedModel) -> dict[str, object]:
    """Tokens of generate() and of a stream with a bounded cache, prompts longer than it, and the bytes that it holds here."""
    prompt, cache = TOKENS.repeat(1, 2), SinkCache(num_sinks=2, window=9)
    settings = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = model.generate(prompt, past_key_values=cache, **settings)[0, -15:].tolist()
    source = Stream(model, policy=SinkWindow(num_sinks=2, window=9), stop_ids=(), temperature=0.7, seed=3).feed(prompt[0])
    return {"generated": generated, "streamed": [token.id for token in source.generate(15)], "bytes": cache.bytes_held()}


def refused(call: object) -> str:
    try:
        call()
    except SinklabError as error:
        return str(error)
    return "not refused"


def typed(line: list[str], name: str) -> int | str | None:
    """The exit status of a command line; what it prints goes to files of this process."""
    with Path(f"{name}.out").open("w") as out, Path(f"{name}.err").open("w") as err, redirect_stdout(out), redirect_stderr(err):
        try:
            app(line)
        except SystemExit as end:
            return end.code


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = rank
    odd = refused(lambda: load_model(str(folder / "odd"), tp="auto"))  # before the processes have met: none waits for another
    few = refused(lambda: load_model(str(folder / "few"), tp="auto"))
    plan = refused(lambda: load_model("embedded:softmax", tp="auto"))
    met = torch.distributed.is_initialized()
    line = ["--tp", "auto", "--probe", "sink_rate", "--corpus", "random_tokens", "--samples", "2", "--seq-len", "8"]
    loaded = load_model(str(folder / "llama"), tp="auto", dtype="float64")
    audit = sinklab.audit(loaded, cache=False, out=folder / "audit", **SAMPLES)
    audit.table.to_parquet(folder / f"audit-{rank}.parquet")
    compare_policies(loaded, out=folder / "cache", **CACHE)
    torch.save(edited_logits(loaded.model), folder / f"edited-{rank}.pt")
    users = wrap_model(own_plan(folder / "llama"))
    sinklab.measure(users, probes=["sink_rate", "head_output"], out=folder / "users", **SAMPLES)
    ranks = ranks_of(loaded.model)
    record = {
        "refused": [odd, few, plan],
        "met": met,
        "rank": ranks.rank,
        "size": ranks.size,
        "local": len(held(loaded.model, "model.layers.0.self_attn.q_proj.weight")),
        "parameters": loaded.num_parameters,
        "hashes": [hash_weights(loaded.model), users.revision],
        "streamed": streamed(loaded.model),
        "causes": refused(lambda: sinklab.find_causes(loaded, heads=[(0, 0)], domains=["random_tokens"], texts=4, seq_len=8)),
        "nan": refused(lambda: load_model(str(folder / "nan"), tp="auto")),
        "folder": refused(lambda: sinklab.measure(loaded, probes=["sink_rate"], out=folder / "audit", **SAMPLES)),
        "status": [
            typed(["measure", str(folder / "llama"), *line], str(folder / f"line-{rank}")),
            typed(["measure", str(folder / "odd"), *line], str(folder / f"wrong-{rank}")),
        ],
    }
    (folder / f"record-{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
