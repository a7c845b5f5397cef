"""What goes into the wheel, the notes of a release, and the versions that every command runs on."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
from tests import release, wheel
from tests.every_command import LINES
from tests.versions import ROOT, SEAM, TESTS, environment, floors

from sinklab.cli.commands import find_commands
from sinklab.results.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", [wheel.PACKAGE, wheel.CLAIMS], ids=lambda package: package.name)
def test_every_file_of_the_packages_goes_into_the_wheel(package):
    patterns = PROJECT["tool"]["setuptools"]["package-data"][package.name]
    data = {path.relative_to(package).as_posix() for pattern in patterns for path in package.glob(pattern)}
    sources = {name for name in wheel.files(package) if name.endswith(".py")}
    assert wheel.files(package) == sources | {name for name in data if (package / name).is_file()}
    # setuptools finds packages by their __init__.py; a folder without one is left out with all that is in it.
    assert all((package / name).with_name("__init__.py").is_file() for name in sources)


def test_the_wheel_stays_small():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in wheel.files(wheel.PACKAGE):
            archive.write(wheel.PACKAGE / name, name)
    names = [name for name in wheel.files(wheel.PACKAGE) if name.endswith(".safetensors")]
    weights = sum((wheel.PACKAGE / name).stat().st_size for name in names)
    # Trained weights hardly compress: their exponents alone are alike.
    assert 0.9 * weights < packed.tell() < wheel.LARGEST


def test_the_notes_of_a_release_are_its_section():
    changelog = "# Changelog\n\nWords.\n\n## 0.2.0, unreleased\n\n- two\n\n## 0.1.0, 2026-11-22\n\n- one\n- more\n"
    assert release.notes(changelog, "0.2.0") == ("0.2.0, unreleased", "- two")
    assert release.notes(changelog, "0.1.0") == ("0.1.0, 2026-11-22", "- one\n- more")
    with pytest.raises(ValueError, match=r"no section '## 0\.1'; it has 0\.2\.0, unreleased, 0\.1\.0"):
        release.notes(changelog, "0.1")
    with pytest.raises(ValueError, match="says nothing of version 1"):
        release.notes("## 1\n\n## 0.9\n- words\n", "1")


def test_the_version_stands_in_one_place():
    assert release.version() == __version__
    assert "version" in PROJECT["project"]["dynamic"]


def test_the_notes_of_this_version_say_what_it_has():
    """By the doors of the README, and short enough to be read: what changed on the way is on a page of its own."""
    notes = release.notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)[1]
    assert re.findall(r"^### (.+)$", notes, re.MULTILINE)[:4] == ["Measure", "Explain", "Train without", "Stream with"]
    assert len(notes) < 10_000
    commands = {path.name for path in (ROOT / "src" / "sinklab" / "studies").iterdir() if (path / "__init__.py").is_file()}
    assert commands - set(re.findall(r"\w+", notes)) == set()


def test_extras_say_what_they_are_for():
    text = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `sinklab\[(\w+)\]` \|", text, re.MULTILINE) == list(PROJECT["project"]["optional-dependencies"])


def test_the_scripts_need_nothing_but_python():
    """So that a Python without torch can run them."""
    line = "import sys; sys.modules['torch'] = sys.modules['sinklab'] = None; import tests.wheel, tests.release"
    subprocess.run([sys.executable, "-c", line], cwd=ROOT, check=True)


def test_what_is_run_on_other_versions_is_there():
    assert [name for name in (*TESTS, *SEAM) if not (ROOT / name).exists()] == []


def test_every_command_is_run_on_other_versions():
    assert sorted(LINES) == sorted(find_commands())
    for name, lines in LINES.items():
        assert lines
        assert {line.split()[0] for line in lines} == {name}


def test_the_oldest_transformers():
    oldest = floors()["transformers"]
    try:
        python = environment(oldest)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"transformers {oldest} cannot be installed here: {error.stderr.strip().splitlines()[-1]}")
    done = subprocess.run(
        [python, "-m", "tests.every_command", "pretrain", "stream"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"transformers {oldest}.")
    assert done.stdout.count("\nok ") == len(LINES["pretrain"]) + len(LINES["stream"])
