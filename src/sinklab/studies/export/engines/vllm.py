"""vLLM: flags of vllm serve; a window of the model's own and integers it has, first tokens that stay it has not."""

from __future__ import annotations

import json
import shlex
from typing import ClassVar

from sinklab.studies.export.base import Answer, Engine, ExportPlan, approximated, not_expressible

TYPES = {"int8": "int8_per_token_head", "int4": "int4_per_token_head"}


class Vllm(Engine):
    """``vllm serve`` with ``--hf-overrides`` and ``--kv-cache-dtype``; what it calls sinks are learned logits of a model."""

    name: ClassVar[str] = "vllm"
    file: ClassVar[str] = "vllm.sh"
    checked: ClassVar[str] = (
        "vllm/config/cache.py at commit 002f10e and model_executor/layers/attention/attention.py at 0014ca6 (after release "
        "0.25), read on 2026-11-22"
    )

    def stay(self, plan: ExportPlan) -> Answer:
        return not_expressible("it has no cache that keeps some tokens and evicts others (issue 1304 of vLLM, closed)")

    def window(self, plan: ExportPlan) -> Answer:
        return approximated(
            f"--hf-overrides sliding_window={plan.held}, the query counted: for models whose configuration has one window "
            "for all layers; others ignore it"
        )

    def integers(self, plan: ExportPlan) -> Answer:
        return approximated(
            f"--kv-cache-dtype {TYPES[str(plan.quantized)]}: of all tokens, a scale for each token and head; none stays "
            f"whole{plan.all_rounded}"
        )

    def text(self, plan: ExportPlan) -> str:
        flags = [f"exec vllm serve {shlex.quote(plan.model)}"]
        if self.evicts(plan):
            flags.append(f"--hf-overrides {shlex.quote(json.dumps({'sliding_window': plan.held}))}")
        if plan.quantized is not None:
            flags.append(f"--kv-cache-dtype {TYPES[plan.quantized]}")
        return " \\\n  ".join(flags) + "\n"

    def command(self, plan: ExportPlan) -> str:
        return f"sh {self.file}"


ENGINE = Vllm()
