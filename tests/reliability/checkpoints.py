"""A seeded fuzzer of checkpoints and results: ``python -m tests.reliability.checkpoints [--mutations 500] [--seed 0]``.

A good directory is damaged in one place (a value of a JSON file, bytes of any file, a header of safetensors, the tensors
themselves, or what a file is) and read again in a forked child with limits. Every reading must end in a value or in an error
of sinklab in one line; see :func:`fault_of`. Readings that end otherwise are printed; ``--only NUMBER`` runs one again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.reliability.sandbox import Ended, Limits, ran

__all__ = ["Subject", "fault_of", "main", "mutate", "read", "subjects"]

LONGEST = 1000
"""Characters of an error: one sentence, and a list of known names where there is one."""

LIMITS = Limits(seconds=25.0, memory=3 << 30)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 2**31, 2**63, -(2**63), 10**40, 1e308, 0.5, float("nan"), float("inf")),
    *(
        "",
        "x",
        "é" * 50,
        "\x00",
        "../x",
        "/etc/passwd",
        "a" * 100_000,
        [],
        {},
        [[]],
        [None],
        [5],
        ["x"],
        {"name": "x"},
        {"a": {}},
    ),
    *([0] * 10_000, {"": ""}, [1.5, "x", None, {}]),
)
"""What a field may be replaced by: every type of JSON, and the ends of their ranges."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A good directory, and what reads it.

    Attributes:
        name: for the record.
        folder: as it is written.
        readings: what is done with a damaged copy, each a function of its path.
    """

    name: str
    folder: Path
    readings: tuple[Callable[[Path], object], ...]


def subjects(scratch: Path) -> list[Subject]:
    """A decoder of transformers, a SinkLM, a model with an attached operation, an audit, a training run and a saved stream."""
    import torch
    import transformers
    from tests.conftest import make_sinklm, make_tokenizer

    import sinklab
    from sinklab.models.attach import attach, save_model
    from sinklab.streaming.stream import Stream

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    models = {
        "llama": transformers.LlamaForCausalLM(config),
        "sharded": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1
            )
        ),
        "sinklm": make_sinklm({"name": "sink_logit"}),
        "attached": attach(transformers.LlamaForCausalLM(config), "gated"),
    }
    found = []
    for name, model in models.items():
        save_model(model, scratch / name, tokenizer)
        if name == "sharded":
            shutil.rmtree(scratch / name)
            model.save_pretrained(scratch / name, max_shard_size="20KB")
            tokenizer.save_pretrained(scratch / name)
        found.append(Subject(name, scratch / name, (load,)))
    (scratch / "state").mkdir()
    saved = Stream(models["sinklm"].eval(), policy={"name": "sink_window", "num_sinks": 2, "window": 6}, tokenizer=tokenizer)
    saved.feed("def main():\n    return 0\n").generate(3)
    saved.save(scratch / "state" / "stream.safetensors")
    found.append(Subject("state", scratch / "state", (lambda folder: go_on(scratch / "sinklm", folder),)))
    quick: dict[str, Any] = {"samples": 3, "seq_len": 12, "corpus": "random_tokens"}
    sinklab.audit(str(scratch / "sinklm"), out=scratch / "audit", certificate=True, **quick)
    found.append(Subject("audit", scratch / "audit", (report, compare)))
    return found


def load(folder: Path) -> object:
    """A model and its tokenizer, one text and one forward pass."""
    import torch

    from sinklab.models.loading import load_model

    loaded = load_model(str(folder), device="cpu")
    ids = [2, 3, 5, 7]
    if loaded.tokenizer is not None:
        ids = loaded.encoder.encode("return self\n")[:16] or ids
    with torch.no_grad():
        return loaded.model(torch.tensor([ids])).logits.shape


def go_on(model: Path, folder: Path) -> object:
    """A saved stream, and three tokens more."""
    from sinklab.models.loading import load_model
    from sinklab.streaming.stream import Stream

    loaded = load_model(str(model), device="cpu")
    return Stream.load(folder / "stream.safetensors", loaded.model, tokenizer=loaded.tokenizer).generate(3)


def report(folder: Path) -> object:
    from sinklab.studies.audit.page import write_report

    return write_report(folder)


def compare(folder: Path) -> object:
    from sinklab.studies.audit.compare import comparison_table, format_comparison, write_comparison

    return format_comparison(comparison_table([folder, folder])), write_comparison([folder, folder], folder / "both.html")


def mutate(folder: Path, draw: random.Random) -> str:
    """Damage a directory in one place; says which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".html", ".png"))
    path = draw.choice(files)
    where = path.relative_to(folder).as_posix()
    if path.suffix == ".json" and draw.random() < 0.75:
        return f"{where}: {_change_json(path, draw)}"
    if path.suffix == ".safetensors" and draw.random() < 0.6:
        return f"{where}: {_change_header(path, draw) if draw.random() < 0.5 else _change_tensor(path, draw)}"
    return f"{where}: {_change_file(path, draw)}"


def _change_json(path: Path, draw: random.Random) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    places: list[tuple[str, Any, Any]] = []
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        name, value = waiting.pop()
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((f"{name}.{key}", value, key))
            if isinstance(inner, dict | list) and len(inner) < 400:
                waiting.append((f"{name}.{key}", inner))
    name, holder, key = draw.choice([place for place in places if place[0].count(".") == 1] if draw.random() < 0.5 else places)
    kind = draw.choice(("replace",) * 6 + ("remove", "nest", "scale"))
    if kind == "remove":
        del holder[key]
        said = "removed"
    elif kind == "nest":
        depth = draw.choice((3, 70, 3000))
        marker = "@nested@"
        holder[key] = marker
        text = json.dumps(content).replace(f'"{marker}"', "[" * depth + "]" * depth)
        path.write_text(text, encoding="utf-8")
        return f"{name} nested {depth} deep"
    elif kind == "scale" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        factor = draw.choice((2, 3, 7, 1000, 0.5, -1))
        holder[key] = holder[key] * factor
        said = f"times {factor}"
    else:
        holder[key] = draw.choice(VALUES)
        said = f"= {str(holder[key])[:40]!r}"
    path.write_text(json.dumps(content), encoding="utf-8")
    return f"{name} {said}"


def _change_header(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    key = draw.choice(sorted(header))
    field = draw.choice(sorted(header[key]))
    dtypes = ("I32", "BOOL", "F8_E4M3", "C64", "F64", "BF16", "I64", "U8", "Q9")
    header[key][field] = draw.choice(dtypes) if field == "dtype" and draw.random() < 0.8 else draw.choice(VALUES)
    text = json.dumps(header).encode()
    length = draw.choice((len(text),) * 6 + (2**62, 0, len(text) - 1, 2**64 - 1))
    path.write_bytes(struct.pack("<Q", length) + text + content[8 + size :])
    return f"header {key}.{field} = {str(header[key][field])[:40]!r}, length {length}"


def _change_tensor(path: Path, draw: random.Random) -> str:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, "pt") as opened:
        metadata, tensors = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    key = draw.choice(sorted(tensors))
    tensor = tensors[key]
    dtype = draw.choice(
        (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16, torch.int64, torch.uint8)
    )
    kind = draw.choice(("dtype", "shape", "flat", "remove", "rename", "nan", "inf", "huge", "empty", "more"))
    changed = {
        "dtype": lambda: tensor.to(dtype),
        "shape": lambda: tensor.reshape(-1)[: max(1, tensor.numel() // 2)].clone(),
        "flat": lambda: tensor.reshape(-1).clone(),
        "nan": lambda: tensor.float() * float("nan"),
        "inf": lambda: tensor.float() + float("inf"),
        "huge": lambda: tensor.float() * 1e30,
        "empty": lambda: tensor.reshape(-1)[:0].clone(),
    }
    if kind in ("remove", "rename"):
        del tensors[key]
    if kind in ("rename", "more"):
        tensors[f"{key}.more"] = tensor.clone()
    if kind in changed:
        tensors[key] = changed[kind]()
    save_file(tensors, path, metadata=metadata)
    return f"tensor {key}: {kind} {dtype if kind == 'dtype' else ''}"


def _change_file(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    kind = draw.choice(
        ("flip",) * 5 + ("cut",) * 3 + ("insert", "empty", "remove", "folder", "pipe", "loop", "away", "zeros", "twice")
    )
    place = draw.randrange(len(content)) if content else 0
    if kind == "flip":
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 3, 30))):
            changed[draw.randrange(min(len(changed), draw.choice((16, 400, 2**40))))] = draw.randrange(256)
        content = bytes(changed)
    elif kind == "cut":
        content = content[:place]
    elif kind == "insert":
        content = content[:place] + draw.randbytes(8) + content[place:]
    elif kind == "zeros":
        content = content[:place] + bytes(len(content) - place)
    elif kind == "twice":
        content += content
    elif kind == "empty":
        content = b""
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "away":
        path.symlink_to("/proc/self/environ")
    elif kind != "remove":
        path.write_bytes(content)
    return f"{kind} at {place}"


def read(subject: Subject, folder: Path) -> None:
    """Run the readings of a subject; the last line of stdout says how they ended."""
    from sinklab.cli.guard import explain
    from sinklab.errors import SinklabError

    for reading in subject.readings:
        try:
            reading(folder)
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            kind = "refused" if isinstance(error, SinklabError) else "system"
            print(f"\n{json.dumps([kind, line])}")
            return
    print(f"\n{json.dumps(['read', ''])}")


def fault_of(ended: Ended) -> tuple[str, str]:
    """How a reading ended, and what is wrong with that: nothing if it gave a value, or one line.

    A line of the operating system counts as one: a missing permission is nothing that sinklab could say better.
    """
    if ended.late:
        return "late", f"took longer than {LIMITS.seconds:.0f} s"
    if ended.network:
        return "network", "tried to reach a host"
    if ended.status < 0:
        return "died", f"signal {-ended.status}"
    try:
        kind, line = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        frames = [text for text in ended.stderr.splitlines() if text.strip()]
        return "fell", frames[-1] if frames else f"status {ended.status} and no word"
    if "\n" in line or len(line) > LONGEST:
        return kind, f"not one line, or longer than {LONGEST} characters: {line[:200]}"
    if kind == "refused" and line.startswith("out of memory"):
        return "memory", line
    return kind, ""


def _line_of(ended: Ended) -> str:
    return str(json.loads(ended.stdout.strip().splitlines()[-1])[1])


@contextlib.contextmanager
def _damaged(subject: Subject, scratch: Path, seed: int, index: int) -> Any:
    folder = scratch / "damaged" / subject.folder.name
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(subject.folder, folder)
    try:
        yield folder, mutate(folder, random.Random(f"{seed} {index}"))
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def main() -> int:
    """Run the mutations; 1 if one of them had a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.checkpoints")
    parser.add_argument("--mutations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one mutation, and show all that it says")
    parser.add_argument("--subject", help="of one subject only")
    parser.add_argument("--all", action="store_true", help="show every mutation and how it ended")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    ends: collections.Counter[tuple[str, str]] = collections.Counter()
    faults = 0
    with tempfile.TemporaryDirectory(prefix="sinklab-fuzz-") as place:
        scratch = Path(place)
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            known = subjects(scratch)
        for index in range(arguments.mutations) if arguments.only is None else [arguments.only]:
            subject = known[index % len(known)]
            if arguments.subject not in (None, subject.name):
                continue
            with _damaged(subject, scratch, arguments.seed, index) as (folder, said):
                ended = ran(lambda: read(subject, folder), scratch, scratch / "outputs", LIMITS)  # noqa: B023  called at once
                kind, fault = fault_of(ended)
                ends[subject.name, kind] += 1
                faults += bool(fault)
                if fault or arguments.only is not None or arguments.all:
                    print(f"{index} {subject.name} {said}\n    {kind}: {fault[:400] or _line_of(ended)}", flush=True)
                if arguments.only is not None:
                    print(ended.stdout, ended.stderr)
    for (name, kind), number in sorted(ends.items()):
        print(f"{name:<10} {kind:<8} {number:>5}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
