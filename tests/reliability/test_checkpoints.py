"""The short part of the fuzzer of checkpoints, and that it can fail."""

from __future__ import annotations

import contextlib
import io
import random
import shutil

import pytest
from tests.reliability.checkpoints import Subject, fault_of, load, mutate, read
from tests.reliability.sandbox import Ended

MUTATIONS = 40


@pytest.mark.parametrize("index", range(MUTATIONS))
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_checkpoint_loads_or_is_refused_in_one_line(checkpoint, tmp_path, index):
    folder = tmp_path / "it"
    shutil.copytree(checkpoint, folder)
    said = mutate(folder, random.Random(f"short {index}"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        read(Subject("sinklm", checkpoint, (load,)), folder)
    assert fault_of(Ended(0, printed.getvalue(), "", 0.0, late=False, network=False))[1] == "", said


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended(1, "", "Traceback\nKeyError: 'a'", 0.0, late=False, network=False), "fell"),
        (Ended(-9, "", "", 0.0, late=False, network=False), "died"),
        (Ended(0, "", "", 26.0, late=True, network=False), "late"),
        (Ended(0, '["read", ""]', "", 0.0, late=False, network=True), "network"),
        (Ended(0, '["refused", "two\\nlines"]', "", 0.0, late=False, network=False), "refused"),
    ],
)
def test_what_ends_otherwise_is_a_fault(ended, kind):
    found, fault = fault_of(ended)
    assert found == kind
    assert fault
