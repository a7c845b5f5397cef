"""Stream past every limit: more tokens than the model was trained on, in memory that does not grow, stopped and resumed."""

from __future__ import annotations

import sys
from pathlib import Path

from sinklab import load_model
from sinklab.streaming.stream import Stream


def main(name: str = "embedded:softmax") -> None:
    loaded = load_model(name)
    context = loaded.model.config.max_position_embeddings
    policy = {"name": "sink_window", "num_sinks": 4, "window": context // 2}
    source = Stream(loaded.model, policy=policy, tokenizer=loaded.tokenizer, temperature=0.8, top_k=50, seed=1, stop_ids=())
    source.feed("import os\n\n\ndef ")
    print(f"trained on {context} positions")
    for _ in range(3):
        text = "".join(token.text for token in source.generate(context))
        print(source.telemetry())
    print(f"the last words: {text[-60:]!r}")

    state = Path("stream.safetensors")
    source.save(state, overwrite=True)
    ahead = [token.id for token in source.generate(20)]
    again = Stream.load(state, loaded.model, tokenizer=loaded.tokenizer)
    print(f"resumed with the same tokens: {[token.id for token in again.generate(20)] == ahead}")

    held = again.reader.cache.describe(loaded.tokenizer)
    print(held.head(6).to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
