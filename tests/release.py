"""A release, built and tried but not published: ``python -m tests.release``, or ``make release``.

It leaves the source distribution and the wheel in ``dist``, and beside them its notes, from CHANGELOG.md.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from pathlib import Path

from tests.versions import ROOT, pinned
from tests.wheel import BUILD, attempt, build, check, make, run, tools


def version() -> str:
    """The version, from the only file that has it."""
    tree = ast.parse((ROOT / "src" / "sinklab" / "results" / "version.py").read_text(encoding="utf-8"))
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    return str(ast.literal_eval(assigned["__version__"]))


def notes(changelog: str, wanted: str) -> tuple[str, str]:
    """The heading of a version in a changelog, and what is below it.

    Raises:
        ValueError: there is no such section, or nothing is in it.
    """
    headings = list(re.finditer(r"^## (.+)$", changelog, re.MULTILINE))
    for place, heading in enumerate(headings):
        if re.match(rf"{re.escape(wanted)}(?![\w.])", heading[1]):
            end = headings[place + 1].start() if place + 1 < len(headings) else len(changelog)
            section = changelog[heading.end() : end].strip()
            if not section:
                raise ValueError(f"CHANGELOG.md says nothing of version {wanted}")
            return heading[1], section
    raise ValueError(f"CHANGELOG.md has no section '## {wanted}'; it has {', '.join(heading[1] for heading in headings)}")


def release(out: Path) -> str:
    """Build, check and describe; what was done, in lines.

    Raises:
        ValueError: no notes, a file that is too large, or another version in its name.
        AssertionError, CalledProcessError: twine refused a file, or the clean install does not work.
    """
    number = version()
    heading, section = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), number)
    made = build(out)
    for file in made:
        if f"sinklab-{number}" not in file.name:
            raise ValueError(f"{file.name} is not of version {number}")
    run([tools() / "twine", "check", "--strict", *made])
    with tempfile.TemporaryDirectory() as away:  # make demo, but from the wheel
        programs = make(BUILD / "release", sys.executable, [str(made[1]), f"torch=={pinned('torch')}"])
        versions = check(programs, Path(away), made[1], audit=())
    (out / "NOTES.md").write_text(f"# sinklab {heading}\n\n{section}\n", encoding="utf-8")
    sizes = [f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes" for file in made]
    dated = [] if "unreleased" not in heading else ["CHANGELOG.md still calls it unreleased; give the section its date first"]
    return "\n".join([*sizes, f"{out.relative_to(ROOT)}/NOTES.md", f"a clean install audits: {versions.strip()}", *dated])


def main() -> int:
    """Make the release; 1 if it does not pass."""
    passed, said = attempt(lambda: release(ROOT / "dist"))
    print(said if passed else f"no release: {said}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
