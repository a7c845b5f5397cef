"""The digest of sources: what is behind a number, and that a changed definition is computed again and nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import sinklab
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.probes import entropy
from sinklab.probes.entropy import Entropy
from sinklab.registry import probes as registry
from sinklab.results.sources import digest_of, modules_behind

SOURCE = Path(sinklab.__file__).parent


def test_origins():
    assert digest_of(entropy) == digest_of(Entropy) == digest_of("sinklab.probes.entropy")
    assert len(digest_of(entropy)) == 32
    assert digest_of(entropy, attend) == digest_of(attend, entropy) != digest_of(attend)
    assert len(digest_of(entropy, without=[Entropy])) == 32
    assert digest_of(entropy, without=[Entropy]) not in (digest_of(entropy), digest_of(entropy, without=[Entropy.update]))
    assert digest_of(entropy, without=[textwrap.dedent]) == digest_of(entropy)  # of no module behind it


def test_a_script_has_a_source_too(tmp_path, monkeypatch):
    """What is run as ``python script.py`` has a file and no spec."""
    script = types.ModuleType("a_script")
    script.__file__, script.__spec__ = str(tmp_path / "script.py"), None
    monkeypatch.setitem(sys.modules, "a_script", script)
    (tmp_path / "script.py").write_text("from sinklab.errors import InputError\n")
    assert modules_behind("a_script") == sorted(["a_script", *modules_behind("sinklab.errors")])


def test_what_is_behind_a_probe():
    behind = modules_behind(entropy)
    assert {"sinklab", "sinklab.probes", "sinklab.probes.entropy", "sinklab.attention.probe", "sinklab.registry"} <= set(behind)
    for part in ("report", "cli", "auditing", "causes", "models", "pretraining"):
        assert not [module for module in behind if module.startswith(f"sinklab.{part}.")]
    probes = {module.rpartition(".")[2] for module in behind if module.startswith("sinklab.probes.")}
    assert probes & set(registry) == {"entropy"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with imports of every form; the value says whether they count."""
    folder = tmp_path / "elsewhere"
    for path, text in {
        "__init__.py": "",
        "one.py": """
from typing import TYPE_CHECKING
import os, elsewhere.plain
from elsewhere import member
from . import sibling
from .deep import below
from sinklab import attach
if TYPE_CHECKING:
    from elsewhere import typed
else:
    from elsewhere import untyped
def f():
    from elsewhere.late import x
""",
        "plain.py": "import elsewhere.behind",
        **dict.fromkeys(("behind.py", "member.py", "sibling.py", "typed.py", "untyped.py", "late.py", "not_there.py"), "x = 1"),
        "deep/__init__.py": "from .above import x",
        "deep/above.py": "x = 1",
        "deep/below.py": "from ..sibling import x",
    }.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_forms_of_imports(package):
    behind = modules_behind("elsewhere.one")
    own = {name.removeprefix("elsewhere.") for name in behind if name.startswith("elsewhere.")}
    assert own == {
        "one", "plain", "behind", "member", "sibling", "deep", "deep.above", "deep.below", "untyped", "late",
    }  # fmt: skip
    assert "sinklab.models.attach" in behind
    assert "os" not in behind


def test_a_source_that_cannot_be_had(monkeypatch):
    with pytest.raises(ConfigurationError, match="the source of nowhere cannot be read, so numbers"):
        digest_of("nowhere")


MEASURE = """
import pathlib, sys
from sinklab.results.run import Run
from sinklab.results.sources import digest_of

with Run("trial", out=pathlib.Path(sys.argv[1]), resume=True) as run:
    computed = []
    for name in ("entropy", "sink_rate", "value_norm"):
        def compute():
            computed.append(name)
            return 1.0
        behind = digest_of("sinklab.attention.session", f"sinklab.probes.{name}")  # by name: nothing of them is imported
        run.store.cached(name, {"probe": name}, behind, compute)
print(*computed)
"""


def test_a_changed_source_is_computed_again_and_nothing_else_is(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "sinklab", ignore=shutil.ignore_patterns("__pycache__"))
    for changed, computed in [
        ([], "entropy sink_rate value_norm"),
        (["probes/entropy.py", "probes/null_mass.py", "report/html.py"], "entropy"),
        (["attention/call.py"], "entropy sink_rate value_norm"),  # behind all of them
    ]:
        for file in changed:
            path = tmp_path / "sinklab" / file
            path.write_text(path.read_text() + "\n# another definition\n")
        assert measured(tmp_path) == computed


def measured(folder: Path) -> str:
    """Names of the probes that were computed, not taken from the store, with the source in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "out"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
