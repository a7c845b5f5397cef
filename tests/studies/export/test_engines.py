"""llama.cpp, really run: the exported script serves, and its losses are those of our policies (``make test-engines``).

The text is what the server writes itself; its logarithms of probabilities are compared on the same tokens and weights.
"""

import pytest
import torch
from tests.conftest import real
from tools.engines import serving, widened

from sinklab import load_model
from sinklab.registry import policies
from sinklab.streaming.perplexity import losses
from sinklab.studies.export.base import ExportPlan, engines, exported

PROMPT = "The history of the river begins in the mountains, where"
NUMBER = 500


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "exports", "held", "more"),
    [
        # One token goes for each that comes: the server holds the context less one, that of the query among them.
        ("smollm2-135m", "sink_window:num_sinks=4,window=251", "sink_window:num_sinks=4,window=250", {"n_discard": 1}),
        ("smollm2-135m", "blocks:num_sinks=1,block=127", "blocks:num_sinks=1,block=127", {}),
        ("gemma3-270m", "sink_window:num_sinks=1,window=254", "sink_window:num_sinks=1,window=253", {"n_discard": 1}),
    ],
    ids=["one token", "half of it", "sliding windows"],
)
def test_the_server_does_what_the_cache_does(name, exports, held, more, tmp_path):
    path = widened(real(f"gguf/{name}.gguf"), tmp_path)
    loaded = load_model(path)
    ids = loaded.tokenizer(PROMPT)["input_ids"]
    bos = ids[0] == loaded.tokenizer.bos_token_id
    plan = ExportPlan(name, bos, policies.make(exports), None, (), type(loaded.model).__name__)
    whole = ("--cache-type-k f32", "--cache-type-v f32", "--flash-attn off")  # whose kernel rounds to 16 bits
    with serving(exported(engines()["llama.cpp"], plan).text, tmp_path, path, *whole) as ask:
        answer = ask(ids, NUMBER, **more)
    assert len(answer["tokens"]) == NUMBER  # twice the context
    written = iter(answer["completion_probabilities"])  # but of pieces of characters
    one, own = next(written), torch.full((NUMBER,), torch.nan)
    for index, token in enumerate(answer["tokens"]):
        if one is not None and one["id"] == token:
            own[index], one = -one["logprob"], next(written, None)
    found = losses(loaded.model, torch.tensor([[*ids, *answer["tokens"]]]), policies.make(held))[0, -NUMBER:]
    assert (found - own).nan_to_num().abs().max() < 2e-2  # measured 3e-4 and 5e-3; one token more or fewer held, 0.16
    assert found[~own.isnan()].mean() == pytest.approx(float(own[~own.isnan()].mean()), abs=5e-4)
