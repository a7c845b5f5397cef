"""An operation with tokens in front, known to the registry for the length of a test."""

import pytest
from tests.models.small_models import Fronted, make

from sinklab.models.language_model import SinkLM
from sinklab.registry import operations


@pytest.fixture
def fronted(monkeypatch):
    monkeypatch.setitem(operations._objects, "fronted", Fronted)

    def build(**fields) -> tuple[SinkLM, SinkLM]:
        """The model, and one without tokens in front and the same weights."""
        model = make(operation={"name": "fronted"}, **fields)
        plain = make(**fields | {"max_position_embeddings": 66})
        plain.load_state_dict({name: value for name, value in model.state_dict().items() if "front" not in name})
        return model, plain

    return build
