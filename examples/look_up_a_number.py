"""Look up a published number: which statement it stands in, what a run of ours found, and how to run it again.

python examples/look_up_a_number.py [NUMBER]
"""

from __future__ import annotations

import sys

from sinklab_claims.reproduce.claims import claims


def main(number: str = "18.18") -> None:
    found = claims(published=float(number))
    for row in found.record:
        print(f"{row['name']} ({row['reference']}): {row['statement']}")
        print(f"  published: {row['published']}")
        print(f"  here: {row['verdict'] or 'not run yet'}, {row['evidence'] or 'no evidence'}")
        print(f"  to run it: sinklab reproduce {row['name']}  ({row['cost']})")
    found.show()


if __name__ == "__main__":
    main(*sys.argv[1:])
