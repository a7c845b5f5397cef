"""When two texts count as one."""

from __future__ import annotations

import pytest

from sinklab.corpora._reading import RUN, count_repeats, token_runs


def test_runs_are_all_of_a_length():
    assert token_runs([1, 2, 3, 4], 3) == {(1, 2, 3), (2, 3, 4)}
    assert token_runs([1, 2], 3) == set()
    assert len(token_runs(range(40))) == 40 - RUN + 1


@pytest.mark.parametrize(("shared", "repeats"), [(RUN - 1, 0), (RUN, 1), (RUN + 5, 1)])
def test_a_text_repeats_another_from_so_many_tokens_on(shared, repeats):
    first = list(range(50))
    second = [*range(100, 110), *first[7 : 7 + shared], *range(200, 210)]
    assert count_repeats([first, second]) == repeats
    assert count_repeats([first, list(range(300, 340)), second, first]) == 1 + repeats


def test_short_texts_repeat_as_a_whole():
    assert count_repeats([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) == 1
