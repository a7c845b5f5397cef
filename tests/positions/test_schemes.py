"""What every position scheme must do: decode from a cache, ignore padding, keep packed documents apart, save, load, learn."""

import pytest
import torch
from tests.conftest import TINY, mask_of_documents
from transformers import AutoModelForCausalLM

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import positions

TOKENS = torch.randint(2, 40, (2, 12), generator=torch.Generator().manual_seed(0))
EXACT = {"rtol": 0, "atol": 1e-11}
"""float64, some thousand roundings of 1e-16 at logits of about one, and angles of the rotary tables in float64 too."""

every_scheme = pytest.mark.parametrize("name", list(positions))


def make(name: str, **fields) -> SinkLM:
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**TINY, initializer_range=0.3, position={"name": name}, **fields)).double().eval()


@every_scheme
@torch.no_grad()
def test_decoding_from_a_cache(name):
    model = make(name, window=6)
    logits = model(input_ids=TOKENS).logits
    cache, pieces = None, []
    for piece in TOKENS.split([4, 1, 1, 5, 1], dim=1):
        step = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        pieces.append(step.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits, **EXACT)


@every_scheme
@torch.no_grad()
def test_left_padding(name):
    model = make(name)
    padding = torch.zeros(2, 3, dtype=torch.int64)
    padded = torch.cat((padding, TOKENS), dim=1)
    mask = torch.cat((padding, torch.ones_like(TOKENS)), dim=1)
    logits = model(input_ids=TOKENS).logits
    torch.testing.assert_close(model(input_ids=padded, attention_mask=mask).logits[:, 3:], logits, **EXACT)
    first = model(input_ids=padded[:, :8], attention_mask=mask[:, :8], use_cache=True)
    rest = model(input_ids=padded[:, 8:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.logits, logits[:, 5:], **EXACT)


@every_scheme
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(name):
    model = make(name)
    packed = torch.cat((TOKENS[:, :7], TOKENS[:, :5]), dim=1)
    position_ids = torch.cat((torch.arange(7), torch.arange(5)))[None]
    logits = model(input_ids=packed, position_ids=position_ids, attention_mask=mask_of_documents(position_ids)).logits
    torch.testing.assert_close(logits[:, :7], model(input_ids=TOKENS[:, :7]).logits, **EXACT)
    torch.testing.assert_close(logits[:, 7:], model(input_ids=TOKENS[:, :5]).logits, **EXACT)


@every_scheme
@torch.no_grad()
def test_other_implementations_of_softmax_agree(name):
    model = make(name)
    logits = model(input_ids=TOKENS).logits
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(model(input_ids=TOKENS).logits, logits, **EXACT)


@every_scheme
@torch.no_grad()
def test_save_and_load(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(again(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


@every_scheme
def test_every_parameter_learns_and_the_step_is_one_graph(name):
    torch.compiler.reset()  # what other tests have compiled counts towards the limit of recompilations
    model = make(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    loss = compiled(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert loss.item() == pytest.approx(model(input_ids=TOKENS, labels=TOKENS).loss.item(), rel=1e-12)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@every_scheme
@torch.no_grad()
def test_the_position_matters_or_it_does_not(name):
    """Two tokens swapped in the past: only the model without positions, of one layer, gives the same."""
    torch.manual_seed(0)
    fields = TINY | {"num_hidden_layers": 1}
    model = SinkLM(SinkLMConfig(**fields, initializer_range=0.3, position={"name": name})).double().eval()
    swapped = TOKENS[:, [1, 0, *range(2, 12)]]
    moved = float((model(input_ids=swapped).logits - model(input_ids=TOKENS).logits)[:, -1].abs().max())
    assert (moved < 1e-12) == (name == "no_position")
