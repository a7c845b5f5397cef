"""A model whose heads two processes share, with gloo: the table of one process, written once, and what cannot be shared."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers
from tests.attention.two_ranks import CACHE, SAMPLES, edited_logits, streamed

import sinklab
from sinklab.models.loading import hash_weights, load_model, wrap_model
from sinklab.results.table import read_run, read_table
from sinklab.studies.cache.cache import compare_policies

TOLERANCE = 1e-9
"""Everything is computed in float64. The two processes add up the outputs of their heads, and of their halves of the MLP, in
another order: sums of at most 48 terms, each off by 48 · 2^-53 of the sum of their sizes, in four places on the way to a
number. That is 1e-13 for hidden states of size 1 to 10, and the numbers of probes are means of smooth functions of them whose
slopes are below 1e3. A head in the wrong place, a share left out or counted twice moves numbers by 1e-3 and more."""

KEYS = ["probe", "metric", "module", "layer", "head", "query_position", "key_position", "corpus", "bos", "count", "unit"]


def save(folder: Path, *, heads: int, shared: int, broken: bool = False) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=shared, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(8 if "proj" in name else 1)  # so that heads differ
        if broken:
            model.model.layers[1].self_attn.q_proj.weight[-1, 0] = float("nan")  # in the share of the second process
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    """Folder of all that two processes left; one start for all tests, as starting costs more than running."""
    folder = tmp_path_factory.mktemp("ranks")
    save(folder / "llama", heads=4, shared=2)
    save(folder / "odd", heads=3, shared=3)
    save(folder / "few", heads=4, shared=1)
    save(folder / "nan", heads=4, shared=2, broken=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.attention.two_ranks", str(folder)]
    processes = [
        subprocess.Popen(
            command, env={**shared, "RANK": rank, "LOCAL_RANK": rank}, cwd=root, stderr=(folder / f"stderr-{rank}").open("w")
        )
        for rank in ("0", "1")
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], (folder / "stderr-0").read_text()[-4000:] + (folder / "stderr-1").read_text()[-4000:]
    return folder


@pytest.fixture(scope="module")
def records(ranks) -> list[dict]:
    return [json.loads((ranks / f"record-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def whole(ranks):
    return load_model(str(ranks / "llama"), device="cpu", dtype="float64")


def same(one: pd.DataFrame, both: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one[KEYS].reset_index(drop=True), both[KEYS].reset_index(drop=True))
    assert (one["value"].isna() == both["value"].isna()).all()
    assert (one["value"] - both["value"]).abs().max() < TOLERANCE


def test_the_table_is_that_of_one_process(ranks, whole):
    one, both = sinklab.audit(whole, cache=False, **SAMPLES), read_table(ranks / "audit" / "table.parquet")
    same(one.table, both)
    assert sorted(both.query("metric == 'gu2024'")["head"].dropna().unique()) == [0, 1, 2, 3]
    assert {"output_norm", "relative_norm", "entropy", "massive_value"} <= set(both["metric"])
    summary = json.loads((ranks / "audit" / "summary.json").read_text())
    assert summary["finding"] == one.summary["finding"]


def test_each_process_had_half_of_the_heads_and_both_have_the_same_bits(ranks, records):
    assert [record["rank"] for record in records] == [0, 1]
    assert [record["size"] for record in records] == [2, 2]
    assert [record["local"] for record in records] == [16, 16]  # rows of the map to queries: 2 heads of 8
    tables = [pd.read_parquet(ranks / f"audit-{rank}.parquet") for rank in (0, 1)]
    assert tables[0]["value"].equals(tables[1]["value"])


def test_the_model_is_known_by_the_same_identity(ranks, records, whole):
    for record in records:
        assert record["parameters"] == whole.num_parameters
        assert record["hashes"] == [hash_weights(whole.model)] * 2
    assert read_run(ranks / "audit")["model"]["revision"] == whole.revision


def test_heads_are_edited_where_they_are(ranks, whole):
    """Layer 0 loses a head of each process, layer 1 one of the second."""
    expected = edited_logits(whole.model)
    with torch.no_grad():
        assert (expected - whole.model(torch.arange(3, 15)[None]).logits).abs().max() > 1e-3
    for rank in (0, 1):
        assert (torch.load(ranks / f"edited-{rank}.pt") - expected).abs().max() < TOLERANCE


def test_cache_policies_hold_the_heads_of_each_process(ranks, whole):
    one, both = compare_policies(whole, **CACHE).table, read_table(ranks / "cache" / "table.parquet")
    one, both = (table[~table["metric"].str.contains("per_second")] for table in (one, both))
    same(one, both)
    assert {"loss", "bytes_held"} <= set(both["metric"])


def test_bounded_caches_give_the_tokens_of_one_process(records, whole):
    """Greedy and drawn, on both processes; each holds the keys of its own heads."""
    expected = streamed(whole.model)
    for record in records:
        assert record["streamed"]["generated"] == expected["generated"]
        assert record["streamed"]["streamed"] == expected["streamed"]
        assert 2 * record["streamed"]["bytes"] == expected["bytes"]


def test_a_model_that_its_user_cut_up_with_torch(ranks, whole):
    """Weights are DTensors over a mesh without a name, and no plan of transformers is involved."""
    result = sinklab.measure(wrap_model(whole.model), probes=["sink_rate", "head_output"], **SAMPLES)
    same(result.table, read_table(ranks / "users" / "table.parquet"))


def test_what_cannot_be_shared_is_refused_before_the_processes_meet(records):
    assert records[0]["refused"] == records[1]["refused"]
    odd, few, plan = (message.partition(" ") for message in records[0]["refused"])
    assert odd[2] == "has 3 attention heads, which 2 processes cannot share: 2 does not divide 3; start torchrun with 3 of them"
    assert few[2].startswith(
        "has 1 key-value heads, which 2 processes cannot share: each process needs one at least; spread it"
    )
    assert "has no tensor-parallel plan for SinkLM; spread it with `device_map` auto" in plan[2]
    assert [record["met"] for record in records] == [False, False]


def test_both_processes_refuse_what_one_of_them_finds(records):
    """Else one would wait for the other for ever."""
    for record in records:
        assert "has NaN or infinite weights: 1 of 512 numbers in model.layers.1.self_attn.q_proj.weight" in record["nan"]
        assert (
            "is tensor-parallel, and causes replays its heads from weights that one process does not have" in record["causes"]
        )
        assert "audit" in record["folder"]
        assert "already" in record["folder"] or "exists" in record["folder"]


def test_the_first_process_speaks_for_both(ranks, records):
    for record in records:
        assert record["status"] == [0, 2]
    assert "gu2024" in (ranks / "line-0.out").read_text()
    assert (ranks / "line-1.out").read_text() == ""
    error = (ranks / "wrong-0.err").read_text()
    assert error.startswith("error: ")
    assert "has 3 attention heads, which 2 processes cannot share" in error
    assert error.count("\n") == 1
    assert (ranks / "wrong-1.err").read_text() == ""
