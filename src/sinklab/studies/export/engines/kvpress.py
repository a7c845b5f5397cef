"""kvpress: a script with StreamingLLMPress while tokens are decoded, and on the prompt, which is read densely before."""

from __future__ import annotations

from typing import ClassVar

from sinklab.studies.export.base import PAST_TRAINING, Answer, Engine, ExportPlan


class Kvpress(Engine):
    """``PrefillDecodingPress`` of two presses; kvpress reads a prompt densely and throws out tokens behind it."""

    name: ClassVar[str] = "kvpress"
    file: ClassVar[str] = "kvpress_cache.py"
    checked: ClassVar[str] = "kvpress 0.5.5 with transformers 5.2.0, its README and source, and run with them on 2026-11-22"

    def stay(self, plan: ExportPlan) -> Answer:
        if plan.num_first is None:
            return Answer("not expressible", "StreamingLLMPress keeps first tokens only")
        return Answer("expressed", f"StreamingLLMPress(n_sink={plan.num_first}), with scores that keep the order of the text")

    def window(self, plan: ExportPlan) -> Answer:
        return Answer(
            "approximated",
            f"DecodingPress(target_size={plan.held - 1}, compression_interval=1) while decoding; the tokens of the prompt see "
            "all that is before them, and it is cut when all of it has been read",
        )

    def positions(self, plan: ExportPlan) -> Answer:
        if plan.policy.positions == "original":
            return Answer("expressed", "keys keep the positions of the text")
        return Answer(
            "not expressible",
            "keys keep the positions of the text while tokens are decoded: DecodingPress takes no KeyRerotationPress; "
            f"{PAST_TRAINING}",
        )

    def integers(self, plan: ExportPlan) -> Answer:
        return Answer("not expressible", "QuantizedCache has not been seen to work with DecodingPress")

    def text(self, plan: ExportPlan) -> str:
        return f'''
import sys

import torch
from kvpress import DecodingPress, PrefillDecodingPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class InOrder(StreamingLLMPress):
    """Equal scores leave a top-k in any order, and the next step takes the order of the keys for that of the text."""

    def score(self, *arguments, **named):
        kept = super().score(*arguments, **named) > 0
        return kept * torch.arange(kept.shape[-1], 0, -1, device=kept.device)


def make_press(prompt_tokens):
    """Prompt and answer with {plan.num_first} first tokens and {plan.recent} others before the one at hand."""
    beyond = max(0.0, 1 - {plan.held - 1} / prompt_tokens)
    each = InOrder(n_sink={plan.num_first})
    return PrefillDecodingPress(
        prefilling_press=InOrder(n_sink={plan.num_first}, compression_ratio=beyond),
        decoding_press=DecodingPress(
            base_press=each, compression_interval=1, target_size={plan.held - 1}, hidden_states_buffer_size=0
        ),
    )


@torch.no_grad()
def answer(model, ids, count=200):
    """The likeliest tokens behind a prompt: int64 (1, tokens) to (1, count)."""
    cache, found = DynamicCache(), []
    position = torch.tensor([[ids.shape[1]]], device=ids.device)
    with make_press(ids.shape[1])(model):
        token = model(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(count):
            found.append(token)
            token = model(token, past_key_values=cache, position_ids=position).logits[:, -1].argmax(-1, keepdim=True)
            position = position + 1
    return torch.cat(found, dim=1)


def main():
    """Go on with the prompt, for 200 tokens: MODEL PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    print(tokenizer.decode(answer(model, tokenizer(sys.argv[2], return_tensors="pt").input_ids)[0]))


if __name__ == "__main__":
    main()
'''

    def command(self, plan: ExportPlan) -> str:
        return f"python {self.file} MODEL 'a prompt'"


ENGINE = Kvpress()
