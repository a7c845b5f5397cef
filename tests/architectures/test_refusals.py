"""Models that the seam cannot reach are refused with the reason; never an empty or a wrong report."""

import re

import pytest
import torch
from transformers import DogeConfig, DogeForCausalLM

from sinklab.attention.session import attend
from sinklab.errors import UnsupportedModelError

from .harness import Recorder, assert_identical, forward
from .zoo import GPT2, OFF_SEAM, ZOO, Entry, batch_of, build, grouped, model_of


@pytest.mark.parametrize(
    ("entry", "backend"),
    [pytest.param(entry, backend, id=f"{entry.id}-{backend}") for entry in OFF_SEAM for backend in entry.backends],
)
def test_models_off_the_seam_are_refused(entry: Entry, backend: str) -> None:
    model = model_of(entry.id, backend)
    before = forward(model, batch_of(entry))
    reason = rf"{entry.model} computes attention in its own code \({re.escape(str(entry.refused))} and 1 more\)"
    with pytest.raises(UnsupportedModelError, match=reason), attend(model, probes=[Recorder()]):
        forward(model, batch_of(entry))
    assert_identical(forward(model, batch_of(entry)), before)


def test_private_table_is_refused() -> None:
    # Doge looks its function up in an AttentionInterface of its own, which nobody outside can shadow.
    torch.manual_seed(0)
    model = DogeForCausalLM._from_config(DogeConfig(**grouped(keep_window_size=8)), attn_implementation="eager").eval()
    with (
        pytest.raises(UnsupportedModelError, match=r"DogeAttention.* ran without calling the attention interface"),
        attend(model, probes=[]),
    ):
        forward(model, batch_of(ZOO["llama"]))


def test_private_path_is_refused_and_the_other_backend_is_not() -> None:
    options = {"reorder_and_upcast_attn": True}
    eager, sdpa = (build(ZOO["gpt2"], backend, **options) for backend in ("eager", "sdpa"))
    with (
        pytest.raises(UnsupportedModelError, match=r"GPT2Attention.* ran without calling the attention interface"),
        attend(eager, probes=[]),
    ):
        forward(eager, batch_of(ZOO["gpt2"]))
    with attend(sdpa, probes=[], verify=True) as session:
        forward(sdpa, batch_of(ZOO["gpt2"]))
    assert sum(session.calls.values()) == GPT2["n_layer"]


def test_unknown_keyword_is_refused() -> None:
    model = model_of("llama")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn.*temperature_map"), attend(model, probes=[]):
        forward(model, {**batch_of(ZOO["llama"]), "temperature_map": torch.ones(1)})
    # The model was not harmed, and the next session works.
    with attend(model, probes=[], verify=True):
        forward(model, batch_of(ZOO["llama"]))


@pytest.fixture(scope="module")
def canvas() -> torch.nn.Module:
    """A DiffusionGemma: a canvas behind a prompt is seen both ways; the first layer holds 5 keys of the prompt."""
    pytest.importorskip("transformers.models.diffusion_gemma", reason="this release of transformers has no DiffusionGemma")
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    torch.manual_seed(0)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    experts = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 16}
    config = DiffusionGemmaConfig(text_config=grouped(head_dim=8, **layers, **experts), canvas_length=4)
    return DiffusionGemmaForBlockDiffusion._from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def test_a_canvas_behind_a_prompt(canvas: torch.nn.Module) -> None:
    prompt, tokens = torch.randint(2, 40, (2, 4)), torch.randint(2, 40, (2, 4))
    recorder = Recorder()
    with attend(canvas, probes=[recorder], verify=True):
        out = canvas(input_ids=prompt, decoder_input_ids=tokens, output_attentions=True)
    calls = [call for call in recorder.records if ".decoder." in call.site.module]
    for record, returned in zip(calls, out.attentions, strict=True):
        torch.testing.assert_close(record.weights, returned, rtol=0, atol=1e-6)
        assert record.call.query_positions[0].tolist() == [4, 5, 6, 7]
        assert record.call.key_positions[0].tolist() == list(range(8))


@torch.no_grad()
def test_keys_that_a_window_has_cut_unseen_are_refused(canvas: torch.nn.Module) -> None:
    prompt, tokens = torch.randint(2, 40, (2, 10)), torch.randint(2, 40, (2, 4))
    reason = r"decoder.layers.0.self_attn has 5 keys from before the call under a window of 6, .* texts of fewer than 5 tokens"
    with pytest.raises(UnsupportedModelError, match=reason), attend(canvas, probes=[Recorder()]):
        canvas(input_ids=prompt, decoder_input_ids=tokens)
