"""transformers: a script that opens the model with the very cache that was measured, sinklab's."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from sinklab.policies.base import SlotPolicy
from sinklab.registry import policies
from sinklab.studies.export.base import Answer, Engine, ExportPlan, expressed, not_expressible


class Transformers(Engine):
    """A script around :func:`sinklab.open_reader`, which is what ``sinklab cache`` measures with."""

    name: ClassVar[str] = "transformers"
    file: ClassVar[str] = "transformers_cache.py"
    checked: ClassVar[str] = (
        "this release of sinklab; transformers itself has no cache that keeps first tokens since its release 4.53"
    )

    def stay(self, plan: ExportPlan) -> Answer:
        return expressed("sinklab's cache")

    def window(self, plan: ExportPlan) -> Answer:
        return expressed("sinklab's cache")

    def rule(self, plan: ExportPlan) -> Answer:
        return expressed("sinklab's cache")

    def positions(self, plan: ExportPlan) -> Answer:
        return expressed("sinklab's cache")

    def integers(self, plan: ExportPlan) -> Answer:
        if isinstance(plan.policy, SlotPolicy):
            return expressed("sinklab's cache")
        return not_expressible(f"a cache of integers is for policies of slots, and {plan.policy.name} is none")

    def text(self, plan: ExportPlan) -> str:
        quantized = plan.quantized if isinstance(plan.policy, SlotPolicy) else None
        settings = ", ".join(f"{json.dumps(name)}: {value!r}" for name, value in policies.settings(plan.policy).items())
        return f'''
import sys

from sinklab import Stream, load_model, open_reader
from sinklab.streaming.perplexity import losses

MODEL = {plan.model!r}
REVISION = {_commit(plan)!r}
POLICY = {{{settings}}}
QUANTIZED = {quantized!r}


def loss(model, tokens, first=1):
    """Losses in nats of the tokens from `first` on: int64 (batch, length) to float32 (batch, length - first)."""
    return losses(model, tokens, POLICY, first=first, quantized=QUANTIZED)


def main():
    """Go on with the prompt, for 200 tokens."""
    loaded = load_model(MODEL, revision=REVISION)
    reader = open_reader(loaded.model, POLICY, quantized=QUANTIZED)
    source = Stream(loaded.model, policy=reader, tokenizer=loaded.tokenizer).feed(sys.argv[1])
    for token in source.generate(200):
        print(token.text, end="", flush=True)
    print(*source.rest(), sep="")


if __name__ == "__main__":
    main()
'''

    def command(self, plan: ExportPlan) -> str:
        return f"python {self.file} 'a prompt'"


def _commit(plan: ExportPlan) -> str | None:
    """The commit of a hub repository; what was measured of a folder has a hash of its weights instead."""
    return plan.revision if plan.revision is not None and re.fullmatch("[0-9a-f]{40}", plan.revision) else None


ENGINE = Transformers()
