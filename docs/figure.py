"""Draws docs/attention.svg: one passage under the head of each embedded model that looks most at the first position."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from sinklab import load_model
from sinklab.corpora import resolve_corpus

SEQ_LEN, CELL, GAP, TOP, LEFT = 48, 7, 70, 64, 24
LOW, HIGH = torch.tensor([247.0, 248.0, 250.0]), torch.tensor([16.0, 42.0, 94.0])


def png(weights: Tensor) -> str:
    """Weights in [0, 1] as a data URI; shades follow the square root, so that small weights show; hidden cells are white."""
    shade = weights.clamp(0, 1).sqrt()[..., None]
    pixels = (LOW + (HIGH - LOW) * shade).round().to(torch.uint8)
    pixels[torch.ones_like(weights, dtype=torch.bool).triu(1)] = 255
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", weights.shape[1], weights.shape[0], 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(image).decode()


@torch.no_grad()
def strongest_head(name: str) -> tuple[Tensor, int, int, float]:
    """Weights ``(seq_len, seq_len)`` of the head with the largest mean weight on position 0, its place, and that mean."""
    loaded = load_model(name, attn_implementation="eager" if name.endswith("softmax") else None)
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=SEQ_LEN, samples=1, seed=0, bos=True)
    maps = torch.stack([layer[0] for layer in loaded.model(input_ids=tokens, output_attentions=True).attentions])
    on_first = maps[..., 0].mean(-1)
    layer, head = divmod(int(on_first.argmax()), on_first.shape[1])
    return maps[layer, head], layer, head, float(on_first[layer, head])


def main() -> None:
    """Write the figure and print what it shows."""
    side = SEQ_LEN * CELL
    width, height = 2 * LEFT + 2 * side + GAP, TOP + side + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Attention maps of two heads: softmax puts most weight on the first key, sigmoid does not" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#1b1f24">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, operation in enumerate(("softmax", "sigmoid")):
        weights, layer, head, mean = strongest_head(f"embedded:{operation}")
        x = LEFT + number * (side + GAP)
        title, detail = f"{operation}, layer {layer}, head {head}", f"mean weight on the first key: {mean:.2f}"
        parts += [
            f'<text x="{x}" y="26" font-weight="600">{escape(title)}</text>',
            f'<text x="{x}" y="48">{escape(detail)}</text>',
            f'<image x="{x}" y="{TOP}" width="{side}" height="{side}" href="{png(weights)}" '
            'style="image-rendering: pixelated"/>',
            f'<rect x="{x}" y="{TOP}" width="{side}" height="{side}" fill="none" stroke="#c8ccd2"/>',
            f'<text x="{x}" y="{TOP + side + 24}" fill="#57606a">keys, left to right; queries, top to bottom</text>',
        ]
        print(f"{operation}: layer {layer}, head {head}, mean weight on the first key {mean:.3f}")
    parts.append("</svg>")
    (Path(__file__).parent / "attention.svg").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
