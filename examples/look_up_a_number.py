"""Look up a published number: which statement it stands in, what a run of ours found, and how to run it again.

python examples/look_up_a_number.py [PAPER] [WORD]
"""

from __future__ import annotations

import sys

from sinklab_claims.reproduce.claims import claims


def main(paper: str = "gu2024", word: str = "sigmoid") -> None:
    rows = [row for row in claims(source=paper).record if word in f"{row['statement']} {row['published']}"]
    for row in rows:
        print(f"{row['name']} ({row['reference']}): {row['statement']}")
        print(f"  published: {row['published']}")
        print(f"  here: {row['verdict'] or 'not run yet'}, {row['evidence'] or 'no evidence'}")
        print(f"  to run it: sinklab reproduce {row['name']}  ({row['cost']})")
    print(f"{len(rows)} statements of {paper} about {word!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
