"""Writes docs/architectures.md from the zoo: ``python -m tests.architectures.page``; a test fails when the page is stale."""
# ruff: noqa: E501  (tables of the page have long lines)

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.streaming.decoders import REFUSED

from sinklab.attention.returned import unavailable
from sinklab.registry import probes

from .zoo import MEASURED, OFF_SEAM, SECOND_TIER, Entry

PATH = Path(__file__).parents[2] / "docs" / "architectures.md"

KINDS = {
    "decoder": "Decoders",
    "encoder": "Encoders",
    "encoder-decoder": "Encoder–decoders",
    "vision": "Vision",
    "audio": "Audio",
}

HEAD = ("family", "class", "backends", "calls", "replace", "what is special")

UNBOUNDED = {
    "chunked_attention": "chunked attention",
    "sparse": "sparse attention",
    "learned or sinusoidal": "positions in hidden states",
    "no position_ids": "no `position_ids`",
}
"""Parts of the reasons for which caches refuse families, and the words of the table."""

OPENING = """# Which models work

sinklab measures attention at the attention interface of transformers, through which most architectures call their
attention function. There are two tiers.

- **On the interface**: measured in full. Outputs are bit-identical with and without a session, every call is counted, and on
  a few rows of every call the measured scores, masks, biases and sink logits must reproduce the model's own head
  outputs.
- **Off the interface**: measured from the weights that the model returns, by `measure`, `audit` and `attend_returned`.
  Every table, summary, page and terminal is marked *second tier: from the weights that the model returns*.
  `attend`, and with it everything that edits attention or needs its scores and values, refuses such a model with
  `UnsupportedModelError`.

A model with only some modules off the interface belongs to the first tier, and these modules are named. A model that
returns nothing that could be checked is refused in both.

| | on the interface | second tier |
|---|---|---|
| where weights come from | recomputed, in linear memory | returned by the model (`output_attentions`) |
| memory | linear in the length | quadratic; announced in advance, and refused where there is less |
| outputs of the model | bit-identical with and without | bit-identical with and without |
| every call | counted | as many tensors as attention modules that ran |
| checked | head outputs from scores, masks, biases, sink logits | row sums; no weight on hidden keys; no unknown window |
| not checked | | that the returned weights are those that made the output |
| probes | all | {served}; not {unserved} |
| certificate, causes, interventions | yes | no, and they say so |
| cache policies | yes | where the cache itself can serve the model |
| implementation | any in the table | `eager`, which `measure` and `audit` load by themselves |
| encoder–decoders, masks of four dimensions | yes | no |

The {measured} families on the interface listed below are built at toy size from their real configs in the test suite and pass
all of it: unpadded, padded, with a cache where they decode, on every backend in the table. A family that is not listed
most likely works too: `attend` checks it and raises an error if it does not.

**Calls** is the number of attention calls in one forward pass of the toy model, which has two layers (ALBERT and
Qwen3-Next four; two on each side of an encoder–decoder). **Replace** says whether an operation such as
`sinklab_sigmoid` can replace the attention; where it cannot, running it raises. **Cache** says whether a decoder can stream with a
cache of bounded size such as `SinkCache`, tested against the published rule ([more families](streaming.md#models-with-several-kinds-of-layers));
where positions are in hidden states, the policy `recompute` works, and a sliding window in every layer has to be as wide as what is held.

Two kinds of models are audited differently:

- **Masked encoders** read samples with both special tokens of their tokenizer (`[CLS]` … `[SEP]`). Their loss is a masked-LM
  loss from a separate pass with 15 % of the tokens masked. XLM, Flaubert and the LM heads of the BERT family count as masked
  encoders if their attention looks ahead, which is tested by running them and not read from a config.
- **Encoder–decoders** read [pairs](corpora.md) of a source and a target, or the two halves of a text. Encoder, decoder and
  cross-attention are reported separately, and the loss is that of the target's tokens.

Neither has a cache policy. Encoder–decoders have no causes and no certificate either. A command that cannot serve a
model says so in one line.
"""

PICTURES = """## Pictures and sound from the command line

`sinklab audit` and `measure` read pictures and recordings through the processor of the checkpoint ([corpora](corpora.md#pictures)). Positions
are named from the configuration, and their number is checked on a sample. If the two disagree, positions have numbers only.

| models | positions | what is special |
|---|---|---|
| ViT, DeiT, DINOv2 (with and without registers), DINOv3, BEiT | `[CLS]`, `[DIST]`, `register 0` …, `patch (row, column)` | corner patches and registers are also looked at together, where they are at most a tenth of all positions |
| CLIP, SigLIP | as above | the vision tower is measured; the pooling head of SigLIP is off the interface and named as such |
| Swin | `place (row, column) of a window` | windows are in the batch axis: positions and sinks are those within a window; Swin v2 is off the interface |
| wav2vec2, HuBERT | `frame 12` | `--seq-len` frames |
| Whisper | `frame 12` | its encoder, half a minute at a time |
| spectrogram transformers (AST) | `[CLS]`, `[DIST]`, `patch (frequency, time)` | the length of their processor |
| VideoMAE | | refused: corpora hold no videos |
| ViT-MAE | | refused: it hides patches at random, so that no two forward passes agree |

In backbones without registers, artefacts often stand on a different patch in every picture (Darcet et al. 2023, arXiv 2309.16588). Such an
artefact has no fixed position and is not found as a sink; norms and activations show it.

## Models of pictures and text

On the command line, a model that continues texts (LLaVA, Qwen2-VL) is measured on texts, which run its language model alone. A session
sees every tower that runs. The column `module` names the tower of a row, but rows for the whole model cover the heads of all towers, and `layer`
counts through them: with a picture, layer 2 may be the first of the language model, which without one is layer 0. For numbers of
one tower, open the session on it, `attend(llava.model.language_model, probes)`, and run the whole model inside; its positions include the
pictures.

A tower that packs the patches of all pictures into one row (Qwen2-VL) has no separate samples in its hidden states, so `hidden_norm`,
`massive_activation` and edits of hidden states refuse it. They work on its language model.
"""

CLOSING = """## Refused at run time

| what | why | instead |
|---|---|---|
| Doge | looks its function up in its own table | none |
| GPT-2 with `reorder_and_upcast_attn` on `eager` | takes its own code path on this backend | `attn_implementation="sdpa"` |
| FlexAttention | its block mask cannot be read | `sdpa` or `eager` |
| continuous batching | the keys are filled in inside the kernel | a plain batch |
| a boolean mask of four dimensions on `eager` | eager attention of most models adds it as 0 and 1 and hides nothing | an additive mask, or `sdpa` |
| gradient checkpointing with gradients | every call would be counted twice | `torch.no_grad()`, or switch it off |
| an unknown keyword of the attention function | it may change the result | report the model |

## Special cases

**Several residual streams** (Gemma 3n, DeepSeek-V4, GLM-5 Next, HY-V4) are measured. A hidden state is the concatenation of all streams of a
token: its norm covers all of them, and a channel is stream × width + channel. `head_output` has no `relative_norm` there, edits of hidden
states are refused, and `origin` cannot follow them.

**Gates on heads before the output projection** (Qwen3-Next, Qwen3.5, AFMoE): attention is measured before the gate, `output_norm` and
`relative_norm` after it. Neither includes what comes after the projection: a norm of the sum over all heads (Gemma 2 and 3, OLMo 2),
which cannot be split by head, or a factor (Granite, DINOv2).

**Sparse models that choose their keys** (DeepSeek-V3.2) branch on the literal names `eager` and `sdpa`. A session keeps these names, so
the model attends only to its chosen keys, and the measured weights are zero everywhere else.
"""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def row(entry: Entry) -> tuple[str, ...]:
    backends = ", ".join(f"`{backend}`" for backend in entry.backends)
    replace = "yes" if entry.replaceable else "no"
    return f"`{entry.id}`", f"`{entry.model}`", backends, str(entry.calls), replace, "; ".join(entry.notes)


def cache(entry: Entry) -> str:
    """Whether a bounded cache serves the family, and why not."""
    reason = REFUSED.get(entry.id)
    return "yes" if reason is None else f"no: {next(words for part, words in UNBOUNDED.items() if part in reason)}"


def page() -> str:
    """The whole document."""
    unserved = [name for name in probes if unavailable(probes[name])]
    listed = {
        "served": ", ".join(f"`{name}`" for name in probes if name not in unserved),
        "unserved": ", ".join(f"`{name}`" for name in unserved),
    }
    parts = [OPENING.format(measured=len(MEASURED), **listed)]
    for kind, title in KINDS.items():
        entries, head = [entry for entry in MEASURED if entry.kind == kind], HEAD
        rows = [row(entry) for entry in entries]
        if kind == "decoder":
            head = (*HEAD[:-1], "cache", HEAD[-1])
            rows = [(*cells[:-1], cache(entry), cells[-1]) for entry, cells in zip(entries, rows, strict=True)]
        parts.append(f"## {title}\n\n" + table(head, rows) + "\n")
    own = [
        (
            f"`{entry.id}`",
            f"`{entry.model}`",
            "second" if entry in SECOND_TIER else "none",
            f"attention in its own code: `{entry.refused}`",
            "; ".join(entry.notes),
        )
        for entry in OFF_SEAM
    ]
    parts.append("## Off the interface\n\n" + table(("family", "class", "tier", "why", "what is special"), own) + "\n")
    return "\n".join([*parts, PICTURES, CLOSING])


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
