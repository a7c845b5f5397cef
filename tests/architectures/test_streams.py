"""Models with several residual streams: a hidden state is all of them, one beside the other."""

import pytest
import torch
from torch import Tensor

from sinklab.attention.session import attend
from sinklab.errors import UnsupportedModelError
from sinklab.interventions.clamp_activation import ClampActivation
from sinklab.probes.head_output import HeadOutput
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.massive_activation import MassiveActivation

from .harness import assert_identical, forward
from .zoo import VOCAB, Entry, build, grouped, shape

FAMILIES = (
    Entry(
        "gemma3n_text",
        "decoder",
        "Gemma3nForCausalLM",
        grouped(
            head_dim=8,
            intermediate_size=[48, 48],
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
            num_kv_shared_layers=0,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0, 0.0],
        ),
    ),
    Entry("deepseek_v4", "decoder", "DeepseekV4ForCausalLM", shape()),
)
every_family = pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.id)


def ids(samples: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(4, VOCAB, (samples, length), generator=torch.Generator().manual_seed(1))}


@every_family
@pytest.mark.parametrize(("samples", "length"), [(2, 10), (4, 4)])  # as many samples and tokens as there are streams
def test_norms_are_those_of_all_streams(entry: Entry, samples: int, length: int) -> None:
    model, batch = build(entry), ids(samples, length)
    before, probes = forward(model, batch), [HiddenNorm(), MassiveActivation(), HeadOutput()]
    with attend(model, probes=probes, verify=True) as session:
        assert_identical(forward(model, batch), before)
    table = session.table()
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    stream = 0 if entry.id == "gemma3n_text" else 2
    for layer in (-1, 0):  # behind the last layer the model gives back one stream
        assert states[layer + 1].shape[stream] == 4
        expected = states[layer + 1].square().sum((stream, 3)).sqrt().mean(0)
        rows = table.query(f"metric == 'hidden_norm' and layer == {layer}").sort_values("key_position")
        torch.testing.assert_close(torch.tensor(rows["value"].to_numpy("float32")), expected)
    assert set(table.query("probe == 'massive_activation'")["layer"].dropna()) == {-1, 0, 1}
    # What a head's output is added to is a mixture of streams that no module gives back.
    assert "relative_norm" not in set(table["metric"])


@every_family
def test_edits_of_hidden_states_are_refused(entry: Entry) -> None:
    model = build(entry)
    edit = ClampActivation(limit=0.25)
    message = r"ForCausalLM has 4 residual streams; what edits hidden states knows one"
    with pytest.raises(UnsupportedModelError, match=message), attend(model, interventions=[edit]):
        forward(model, ids(2, 10))
