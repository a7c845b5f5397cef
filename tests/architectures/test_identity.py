"""Looking changes nothing: outputs are bit-identical before, during and after a session, for every family and backend."""

import pytest

from sinklab.attention.session import attend

from .harness import Recorder, assert_identical, decode, every_backend, every_decoding_backend, forward
from .zoo import Entry, batch_of, model_of


@every_backend
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_sessions_are_bit_identical(entry: Entry, backend: str, padded: bool) -> None:
    model = model_of(entry.id, backend)
    batch = batch_of(entry, padded)
    before = forward(model, batch)
    for probes in ([], [Recorder()]):
        with attend(model, probes=probes, verify=True):
            assert_identical(forward(model, batch), before)
    assert_identical(forward(model, batch), before)


@every_decoding_backend
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_cached_decoding_is_bit_identical(entry: Entry, backend: str, padded: bool) -> None:
    model = model_of(entry.id, backend)
    before = decode(model, entry, padded)
    with attend(model, probes=[Recorder()], verify=True):
        during = decode(model, entry, padded)
    assert_identical(during, before)
    assert_identical(decode(model, entry, padded), before)
