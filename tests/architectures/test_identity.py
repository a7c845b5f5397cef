"""Looking changes nothing: outputs are bit-identical before, during and after a session, for every family and backend."""

from __future__ import annotations

import pytest

from sinklab.attention.session import attend

from .harness import Recorder, assert_identical, decode, every_backend, every_decoding_backend, forward
from .zoo import ZOO, Entry, batch_of, model_of


@every_backend
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_empty_session_is_bit_identical(entry: Entry, backend: str, padded: bool) -> None:
    model = model_of(entry.id, backend)
    batch = batch_of(entry, padded)
    before = forward(model, batch)
    with attend(model, probes=[], verify=True):
        during = forward(model, batch)
    assert_identical(during, before)
    assert_identical(forward(model, batch), before)


@every_backend
def test_session_with_a_probe_is_bit_identical(entry: Entry, backend: str) -> None:
    model = model_of(entry.id, backend)
    batch = batch_of(entry, padded=True)
    before = forward(model, batch)
    with attend(model, probes=[Recorder()], verify=True):
        during = forward(model, batch)
    assert_identical(during, before)


@every_decoding_backend
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_cached_decoding_is_bit_identical(entry: Entry, backend: str, padded: bool) -> None:
    model = model_of(entry.id, backend)
    before = decode(model, entry, padded)
    with attend(model, probes=[Recorder()], verify=True):
        during = decode(model, entry, padded)
    assert_identical(during, before)
    assert_identical(decode(model, entry, padded), before)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "t5"])
def test_generate_gives_the_same_tokens(family: str) -> None:
    model = model_of(family, "sdpa")
    batch = {name: value for name, value in batch_of(ZOO[family]).items() if not name.startswith("decoder")}

    def generate() -> list[list[int]]:
        return model.generate(**batch, max_new_tokens=5, min_new_tokens=5, do_sample=False).tolist()

    before = generate()
    with attend(model, probes=[], verify=True):
        assert generate() == before
