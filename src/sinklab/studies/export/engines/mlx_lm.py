"""mlx-lm: a script with a RotatingKVCache, which keeps first tokens and a window at the positions of the text."""

from __future__ import annotations

from typing import ClassVar

from sinklab.studies.export.base import PAST_TRAINING, Answer, Engine, ExportPlan, expressed, not_expressible


class MlxLm(Engine):
    """``mlx_lm.generate`` with a cache of its own making: ``--max-kv-size`` alone keeps four first tokens, always."""

    name: ClassVar[str] = "mlx-lm"
    file: ClassVar[str] = "mlx_lm_cache.py"
    checked: ClassVar[str] = "mlx-lm 0.32.2, its README and mlx_lm/models/cache.py, and run with it on 2026-11-22"

    def stay(self, plan: ExportPlan) -> Answer:
        if plan.num_first is None:
            return not_expressible("a RotatingKVCache keeps first tokens only")
        return expressed(f"RotatingKVCache(keep={plan.num_first})")

    def window(self, plan: ExportPlan) -> Answer:
        cache = f"RotatingKVCache(max_size={plan.held})"
        if not plan.num_first:  # the mask of a piece of a prompt is that of a window
            return expressed(cache)
        why = "in a longer piece of a prompt the mask would hide the first tokens from its later ones"
        return expressed(f"{cache}, prefill_step_size=1: {why}")

    def positions(self, plan: ExportPlan) -> Answer:
        if plan.policy.positions == "original":
            return expressed("keys keep the positions of the text")
        return not_expressible(
            f"keys keep the positions of the text, so the distance to the first tokens grows; {PAST_TRAINING}"
        )

    def integers(self, plan: ExportPlan) -> Answer:
        return not_expressible("a RotatingKVCache refuses to be quantised (NotImplementedError)")

    def text(self, plan: ExportPlan) -> str:
        options = ", prefill_step_size=1" if plan.num_first else ""
        return f'''
import sys

from mlx_lm import load, stream_generate
from mlx_lm.models.cache import RotatingKVCache


def make_cache(model):
    """One cache for each layer; for models whose layers are all of attention over the whole text."""
    return [RotatingKVCache(max_size={plan.held}, keep={plan.num_first}) for _ in model.layers]


def main():
    """Go on with the prompt, for 200 tokens: MODEL PROMPT."""
    model, tokenizer = load(sys.argv[1])
    cache = make_cache(model)
    for part in stream_generate(model, tokenizer, sys.argv[2], max_tokens=200, prompt_cache=cache{options}):
        print(part.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
'''

    def command(self, plan: ExportPlan) -> str:
        return f"python {self.file} MODEL 'a prompt'"


ENGINE = MlxLm()
