"""Talk for ever: the system message stays in the cache, of every turn only its own tokens are read, old turns are evicted.

python examples/chat_with_a_bounded_cache.py [MODEL]
"""

from __future__ import annotations

import sys

from sinklab import Chat


def main(name: str = "embedded:softmax") -> None:
    policy = {"name": "sink_window", "window": 60}
    chat = Chat(name, system="You write Python.", policy=policy, temperature=0.8, top_k=50)
    for turn in ("Read a file.", "Now write it.", "What was the first thing that I asked?"):
        before = chat.stream.position
        answer = chat.say(turn)
        print(f"you  {turn}  ({answer.position - before} tokens read)")
        print("it  ", repr("".join(token.text for token in answer.generate(40))))

    held = chat.stream.reader.cache.describe(chat.tokenizer)
    print("never evicted:", repr("".join(held.loc[held["pinned"], "text"])))
    print("held besides: ", repr("".join(held.loc[~held["pinned"]].sort_values("token")["text"])))
    print(chat.stream.telemetry())


if __name__ == "__main__":
    main(*sys.argv[1:])
