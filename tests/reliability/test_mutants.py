"""The maker of mutants: which changes it makes of a text, and what its runs say of mutants that die, survive and are listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from tests.reliability import mutants

TEXT = '''
"""A file."""

__all__ = ["between"]

LIMIT: int = 3


@dataclass(frozen=True)
class Range:
    def between(self, low: int | None, high, strict=True):
        """Whether it lies between."""
        if low is None or self.value < low:
            raise ValueError(f"{low + 1} is {3 * low}")
        self.seen = high
        self.note(high)
        return self.value + 1 <= high and not strict
'''
WHERE = "Range.between"
CHANGES = [
    (": ", "LIMIT: int = 3 → LIMIT: int = 4"),
    (WHERE, "True → False"),
    (WHERE, "if low is None or self.value < low → if not (low is None or self.value < low)"),
    (WHERE, "low is None or self.value < low → low is None and self.value < low"),
    (WHERE, "low is None → low is not None"),
    (WHERE, "self.value < low → self.value <= low"),
    (WHERE, "raise ValueError(f'{low + 1} is {3 * low}') → pass"),
    (WHERE, "self.seen = high → pass"),
    (WHERE, "self.note(high) → pass"),
    (WHERE, "return self.value + 1 <= high and (not strict) → return None"),
    (WHERE, "self.value + 1 <= high and (not strict) → self.value + 1 <= high or not strict"),
    (WHERE, "self.value + 1 <= high → self.value + 1 < high"),
    (WHERE, "self.value + 1 → self.value - 1"),
    (WHERE, "self.value + 1 → self.value + 2"),
]


def test_all_changes_of_a_text():
    """No annotation, decorator, docstring, list of names or message is changed."""
    found = list(mutants.mutants_of_text(TEXT))
    assert [(mutant.function, mutant.change) for mutant in found][1:] == CHANGES[1:]
    assert (found[0].function, found[0].line) == ("", 6)
    assert [mutant.line for mutant in found[-5:]] == [17] * 5


def test_code_is_that_of_the_change_alone():
    text = "def f(x):\n    return 2 * x + 1\n"
    values = {}
    for mutant in mutants.mutants_of_text(text):
        space: dict = {}
        exec(mutants.mutated(text, mutant.number, "f.py"), space)
        values[mutant.change] = space["f"](3)
    assert values == {
        "return 2 * x + 1 → return None": None,
        "2 * x + 1 → 2 * x - 1": 5,
        "2 * x → 2 / x": pytest.approx(5 / 3),
        "2 * x → 3 * x": 10,
        "2 * x + 1 → 2 * x + 2": 8,
    }


def test_changes_that_read_alike_are_numbered_and_long_ones_are_cut_round_the_difference():
    text = "def f(x):\n    g(x < 1)\n    g(x < 1)\n    return " + " + ".join(f"x{number}" for number in range(60)) + "\n"
    names = [mutant.name for mutant in mutants.mutants_of_text(text)]
    assert len(set(names)) == len(names)
    assert "f: x < 1 → x <= 1" in names
    assert "f: 2. x < 1 → x <= 1" in names
    assert max(map(len, names)) < 2 * mutants.WIDTH + 20


@pytest.mark.parametrize("file", mutants.TESTED)
def test_the_list_of_survivors_is_about_mutants_of_the_file(file):
    names = {mutant.name for mutant in mutants.mutants_of(file)}
    reasons = mutants.listed(file)
    assert reasons.keys() <= names
    assert all(len(reason) > 20 for reason in reasons.values())
    assert all((mutants.ROOT / "tests" / test).is_file() for test in mutants.TESTED[file])


def test_a_run_says_what_dies_and_what_survives(tmp_path):
    """A package of one file with one weak test, in a process of its own."""
    (tmp_path / "src" / "sinklab").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "sinklab" / "__init__.py").write_text("")
    (tmp_path / "src" / "sinklab" / "small.py").write_text("def larger(x, y):\n    return x if x > y else y\n")
    (tmp_path / "tests" / "test_small.py").write_text(
        "from sinklab.small import larger\n\n\ndef test_larger():\n    assert (larger(1, 2), larger(2, 1)) == (2, 2)\n"
    )
    script = textwrap.dedent("""
        import json, pathlib, sys
        from tests.reliability import mutants
        here = pathlib.Path(sys.argv[1])
        mutants.ROOT, mutants.SOURCES, mutants.RECORD = here, here / "src" / "sinklab", here / "build"
        mutants.SURVIVORS, mutants.TESTED = here / "survivors.toml", {"small.py": ("test_small.py",)}
        sys.path.insert(0, str(here / "src"))
        entry = '[["small.py"]]\\nfunction = "larger"\\nchange = "%s"\\nreason = "both are the same"\\n'
        for change in ("x > y → x < y", "x > y → x >= y"):
            mutants.SURVIVORS.write_text(entry % change)
            print(json.dumps(mutants.main([])))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=mutants.ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # loading what the tests do not use takes seconds
        timeout=120,
        check=True,
    )
    first, second = done.stdout.split("file ")[1:]
    assert (json.loads(first.split()[-1]), json.loads(second.split()[-1])) == (1, 0)
    assert "small.py:2: larger: x > y → x >= y survives test_small.py" in first
    assert "small.py: listed, but no mutant of the file: larger: x > y → x < y" in first
    assert ["small.py", "2", "2", "1", "0", "50", "%"] in [line.split() for line in first.splitlines()]
    assert "survives" not in second
    (record,) = (tmp_path / "build").glob("small*.json")
    assert json.loads(record.read_text()) == {
        "larger: return x if x > y else y → return None": "killed",
        "larger: x > y → x >= y": "survived",
    }
