"""Sweeps on a Ray cluster of two nodes: the numbers of local cells, also when a worker is killed, and what is refused."""

import os
import signal
import sys
import threading
import time

import pandas as pd
import psutil
import pytest
from tests.jobs.conftest import cells_of
from tests.training.conftest import short

from sinklab.errors import ConfigurationError
from sinklab.jobs.driver import run_sweep
from sinklab.results.table import read_run, read_table

MEMORY = 80 * 2**20
"""Object store of a node in bytes, near the least that Ray takes; no cell puts anything there."""


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one CPU each; gives the address, and leaves no process behind."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else other tests keep its workers waiting
    handler = signal.getsignal(signal.SIGTERM)
    before = set(psutil.Process().children(recursive=True))
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    )
    try:
        nodes.add_node(num_cpus=1, object_store_memory=MEMORY)
        nodes.wait_for_nodes()
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own
        yield nodes.address
    finally:
        signal.signal(signal.SIGTERM, handler)
        ray.shutdown()
        nodes.shutdown()
        left = set(psutil.Process().children(recursive=True)) - before
        _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["metric"] != "tokens_per_second"].drop(columns="run_id").reset_index(drop=True)


def test_a_killed_worker_changes_no_number(cluster, text, cache, tmp_path, run):
    """One start of a cluster for all of this, which takes longer than the rest."""
    changes = ("training.steps=80", "training.save_every=20", "training.log_every=20", "watch.every=40")
    folder = tmp_path / "sweep"
    killed: list[str] = []

    def kill() -> None:
        while not (found := list(folder.glob("*/checkpoints/checkpoint-20"))):
            time.sleep(0.01)
        name = found[0].parent.parent.name
        os.kill(int((folder / "logs" / f"{name}.log").read_text().split()[2]), signal.SIGKILL)
        killed.append(name)

    threading.Thread(target=kill, daemon=True).start()
    result = run_sweep(short(text), {"lr": [5e-3, 1e-3]}, folder, changes=changes, ray=cluster, cache=cache, progress=False)
    assert result.summary["errors"] == []
    assert list(cells_of(result)["status"]) == ["finished", "finished"]
    for name, rate in zip(cells_of(result)["cell"], (5e-3, 1e-3), strict=True):
        alone = run(*changes, f"optimizer.learning_rate={rate}", folder=str(rate))
        pd.testing.assert_frame_equal(numbers(read_table(folder / name / "table.parquet")), numbers(alone.table))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a sweep leaves none of Ray's
    (name,) = killed
    assert read_run(folder / name)["resumed"][0]["from"].startswith("checkpoint-")

    with pytest.raises(ConfigurationError, match=r"takes 3 CPUs \(training.threads\) and 0 GPUs, and no node has them"):
        run_sweep(short(text), {"training.threads": [3]}, tmp_path / "wide", ray=cluster, cache=cache, progress=False)
    with pytest.raises(ConfigurationError, match=r"Ray must know how many threads it takes; set training\.threads"):
        run_sweep(short(text), {"training.threads": [None]}, tmp_path / "open", ray=cluster, cache=cache, progress=False)


def test_without_ray_the_sweep_says_what_to_install(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"`ray` needs Ray, which is not installed; try: pip install 'sinklab\[ray\]'"):
        run_sweep(short(text), {"lr": [1e-3]}, tmp_path / "sweep", ray="auto", progress=False)
    assert not (tmp_path / "sweep").exists()
