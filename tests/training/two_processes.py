"""What test_distributed.py has two processes do, in a folder."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from sinklab.results.table import read_run, write_json
from sinklab.training import callback


def pretrain(*arguments: str) -> None:
    """``python -m sinklab pretrain …`` in this process."""
    sys.argv = ["sinklab", "pretrain", *arguments]
    try:
        runpy.run_module("sinklab", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def forget_the_second_half(run: Path) -> None:
    """Leave what a run leaves that was killed after its fourth step."""
    shutil.rmtree(run / "checkpoints" / "checkpoint-8")
    shutil.rmtree(run / "model")
    record = read_run(run)
    del record["result"]
    write_json({**record, "status": "running"}, run / "run.json")


def replicas_and_shards(folder: Path, config: str, cache: str) -> None:
    """Train in ``folder/ddp`` and ``folder/fsdp``, then half of each again; note of what kind the measured weights were."""
    weights: set[str] = set()
    measure_sinks = callback.measure_sinks

    def measured(model, *arguments, **options):
        weights.update(type(parameter).__name__ for parameter in model.parameters())
        return measure_sinks(model, *arguments, **options)

    callback.measure_sinks = measured
    for parallel in ("ddp", "fsdp"):
        whole, resumed = folder / parallel, folder / f"{parallel}-resumed"
        options = ("--set", f"training.parallel={parallel}", "--cache", cache, "--json")
        weights.clear()
        pretrain(config, *options, "--out", str(whole))
        if dist.get_rank() == 0:
            write_json({"weights": sorted(weights)}, folder / f"{parallel}.json")
            shutil.copytree(whole, resumed)
            forget_the_second_half(resumed)
        dist.barrier()
        pretrain(config, *options, "--out", str(resumed), "--resume")


def variants(folder: Path, config: str, cache: str) -> None:
    """Train with shards as ``folder/variants.json`` says: name of a folder to changes."""
    for name, changes in json.loads((folder / "variants.json").read_text()).items():
        options = [part for change in ("training.parallel=fsdp", *changes) for part in ("--set", change)]
        pretrain(config, *options, "--cache", cache, "--out", str(folder / name))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    dist.destroy_process_group()
