"""Options that several commands share, so that they have one name and one help."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from sinklab.errors import ConfigurationError

__all__ = [
    "BatchSize",
    "Bos",
    "CorpusOption",
    "Device",
    "Dtype",
    "Json",
    "Model",
    "Overwrite",
    "Revision",
    "Samples",
    "Seed",
    "SeqLen",
    "Threshold",
    "TrustRemoteCode",
    "whole_numbers",
]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="embedded:softmax, embedded:sigmoid, a directory, or a hub id.")]
CorpusOption = Annotated[
    str, typer.Option("--corpus", metavar="NAME|FILE", help="A name from 'sinklab list corpora', or a UTF-8 text file.")
]
SeqLen = Annotated[int, typer.Option(help="Tokens in a sample, the beginning-of-sequence token included.")]
Samples = Annotated[int, typer.Option(help="Samples to average over.")]
Threshold = Annotated[float, typer.Option(help="A head has a sink on a key when its mean weight there exceeds this.")]
Device = Annotated[str, typer.Option(help="auto (CUDA if there is any), cpu, cuda, cuda:1, …")]
Dtype = Annotated[
    str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), float32, bfloat16, float16, float64.")
]
Seed = Annotated[int, typer.Option(help="Seed of the sampling; the same seed gives the same tokens.")]
Bos = Annotated[
    Literal["auto", "always", "none"],
    typer.Option(help="Beginning-of-sequence token in front: what the tokenizer does by itself, always, or none."),
]
BatchSize = Annotated[int | None, typer.Option(help="Samples a forward pass; chosen from the lengths by default.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with the checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as ``0,1,4``.

    Raises:
        ConfigurationError: anything but whole numbers with commas between them.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigurationError(f"{option} {text!r} must be whole numbers with commas between them, such as 0,1,4")
    return [int(part) for part in parts]
