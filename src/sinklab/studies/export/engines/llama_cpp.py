"""llama.cpp: flags of llama-server; first tokens stay, and half of the others go at once when the context is full."""

from __future__ import annotations

import re
from typing import ClassVar

from sinklab.policies.blocks import Blocks
from sinklab.studies.export.base import Answer, Engine, ExportPlan

PADDED = 256
"""The context is rounded up to a multiple of this (llama-context.cpp, pull request 17046), so only multiples are written."""

ONE = 'with "n_discard": 1 in a request one token goes for each that comes, as measured'

NEVER = {
    "several positions a token": r"Qwen(2|2_5_?|3)(VL|Omni)|Qwen2_5_VL|Qwen3_5|Qwen4Exp|PaddleOCR|Glm4v|GlmOcr|HunYuanVL",
    "rotations that differ by layer": r"Step3",
    "keys that stand for several tokens": r"DeepseekV4",
    "a projector file for pictures or sound": r"\w+ForConditionalGeneration$",
}
"""What the server does not shift (``get_can_shift`` of its caches, ``--mmproj``), by classes of transformers."""

TYPES = {"int8": "q8_0", "int4": "q4_0"}


class LlamaCpp(Engine):
    """``llama-server`` with a context of the size of the cache, ``--keep`` and ``--context-shift``."""

    name: ClassVar[str] = "llama.cpp"
    file: ClassVar[str] = "llama_cpp.sh"
    checked: ClassVar[str] = (
        "the options of llama.cpp at commits 25d5b0c (2025) and 00dc805 (2026), and the server that llama-cpp-python 0.3.36 "
        "bundles, run on 2026-11-30"
    )

    def unserved(self, plan: ExportPlan) -> str | None:
        found = next((what for what, pattern in NEVER.items() if re.match(pattern, plan.model_class)), None)
        return found and f"a {plan.model_class} has {found}, with which the server shifts nothing and stops when it is full"

    def stay(self, plan: ExportPlan) -> Answer:
        keep = _kept(plan)
        bos = ", and BOS, which it counts apart" if plan.bos else ""
        if plan.num_first is not None:
            return Answer("expressed", f"--keep {keep}{bos}")
        if plan.pinned[-1] + 1 > plan.held // 2:
            return Answer("not expressible", "it keeps first tokens only, and the last of these stands too far behind them")
        return Answer("approximated", f"--keep {keep}{bos}: all tokens up to the last of them")

    def rule(self, plan: ExportPlan) -> Answer:
        policy = plan.policy
        if not isinstance(policy, Blocks):
            return super().rule(plan)
        if policy.blocks != 2:
            return Answer(
                "not expressible", f"it gives up half of what is not kept, one of two blocks, and not one of {policy.blocks}"
            )
        # The shift comes before the token that would fill the context, so that two whole blocks are then held.
        size = _context(plan)
        says = f"--ctx-size {size} and --context-shift: when it is full, the older half of what is not kept goes at once"
        refused = "; a longer prompt is refused"
        if size == _needed(plan):
            return Answer("expressed", f"{says}{refused}")
        return Answer("approximated", f"{says}, blocks of {(size - 1 - policy.num_sinks) // 2} tokens{refused}")

    def window(self, plan: ExportPlan) -> Answer:
        bos = "; BOS stays too, where the tokenizer adds it" if plan.bos and not plan.pinned else ""
        return Answer(
            "approximated",
            f"--ctx-size {_context(plan)}, a multiple of {PADDED}: when it is full, the older half of what is not kept goes at "
            f"once; {ONE}; a longer prompt is refused{bos}",
        )

    def positions(self, plan: ExportPlan) -> Answer:
        if plan.policy.positions == "in_cache":
            return Answer("expressed", "the shift rotates keys to their new places")
        return Answer("not expressible", "the shift rotates keys to their new places in the context")

    def integers(self, plan: ExportPlan) -> Answer:
        kind = TYPES[str(plan.quantized)]
        return Answer(
            "approximated",
            f"--cache-type-k {kind} --cache-type-v {kind}: of all tokens, in blocks of 32 numbers; none stays "
            "whole, and keys are rounded again at every shift",
        )

    def text(self, plan: ExportPlan) -> str:
        flags = ["--parallel 1", f"--ctx-size {_context(plan)}", f"--keep {_kept(plan)}", "--context-shift", "--swa-full"]
        if plan.quantized is not None:
            kind = TYPES[plan.quantized]
            flags += ["--flash-attn on", f"--cache-type-k {kind}", f"--cache-type-v {kind}"]
        lines = ['exec llama-server --model "${1:?the first argument is the model as a GGUF file}"', *flags]
        return " \\\n  ".join(lines) + "\n"

    def command(self, plan: ExportPlan) -> str:
        return f"sh {self.file} model.gguf"


def _kept(plan: ExportPlan) -> int:
    """Tokens behind BOS that are kept; the server adds one for BOS where the tokenizer puts it in front."""
    last = plan.pinned[-1] + 1 if plan.pinned else 0
    return max(0, last - int(plan.bos))


def _context(plan: ExportPlan) -> int:
    """Tokens of the context: the multiple of :data:`PADDED` that is nearest to those needed."""
    return max(1, round(_needed(plan) / PADDED)) * PADDED


def _needed(plan: ExportPlan) -> int:
    """Tokens that the policy needs, the kept ones included, and where two halves are to be whole blocks that of the newest."""
    if isinstance(plan.policy, Blocks):
        return plan.held + 1
    return max(plan.held, plan.held - len(plan.pinned) + (plan.pinned[-1] + 1 if plan.pinned else 0))


ENGINE = LlamaCpp()
