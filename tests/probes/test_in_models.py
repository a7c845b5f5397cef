"""Probes on real random-weight models through a session: cached decoding, packed documents, sink logits, repeated tokens."""

import pytest
import torch
import transformers
from dense_oracle import assert_same, values_of
from tests.conftest import mask_of_documents

from sinklab.attention.forward import _documents
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.attention.visibility import Dense
from sinklab.errors import InputError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.entropy import Entropy
from sinklab.probes.head_output import HeadOutput
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.key_norm import KeyNorm
from sinklab.probes.max_logit import MaxLogit
from sinklab.probes.null_mass import NullMass
from sinklab.probes.outliers import Outliers
from sinklab.probes.query_key_angle import QueryKeyAngle
from sinklab.probes.score_gap import ScoreGap
from sinklab.probes.sink_rate import SinkRate
from sinklab.probes.value_norm import ValueNorm
from sinklab.testing import tiny_models

SEQUENTIAL = [
    AttentionReceived, NullMass, Entropy, HiddenNorm, KeyNorm, ValueNorm, QueryKeyAngle, ScoreGap, HeadOutput, MaxLogit,
]  # fmt: skip


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def sliding_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {**tiny_models(), "sliding": sliding_model()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding"])
def test_cached_decoding_equals_one_prefill(models, name):
    model, ids = models[name], tokens(2, 12)
    once, stepped = [cls() for cls in SEQUENTIAL], [cls() for cls in SEQUENTIAL]
    with torch.no_grad():
        with attend(model, probes=once):
            model(input_ids=ids)
        with attend(model, probes=stepped):
            cache = None
            for piece in ids.split([5, 1, 1, 3, 1, 1], dim=1):
                cache = model(input_ids=piece, past_key_values=cache, use_cache=True).past_key_values
    for expected, found in zip(once, stepped, strict=True):
        # float64 models; probes that round to float32 sum a dozen numbers
        assert_same(values_of(found), values_of(expected), rel=1e-4)


def test_packed_documents_equal_single_ones(models):
    model, first, second = models["llama"], tokens(1, 7, 1), tokens(1, 5, 2)
    classes = [SinkRate, AttentionReceived, Entropy, KeyNorm, QueryKeyAngle, ScoreGap, HeadOutput, HiddenNorm, Outliers]
    alone, packed = [cls() for cls in classes], [cls() for cls in classes]
    with torch.no_grad():
        with attend(model, probes=alone):
            for ids in (first, second):
                model(input_ids=ids, use_cache=False)
        with attend(model, probes=packed):
            places = torch.cat((torch.arange(7), torch.arange(5)))[None]
            model(input_ids=torch.cat((first, second), 1), position_ids=places, use_cache=False)
    for expected, found in zip(alone, packed, strict=True):
        assert_same(values_of(found), values_of(expected), rel=1e-4)


def test_packed_documents_behind_learned_tokens_are_refused():
    """All documents of a row give attention to one key, so the column of no document is what it is in a row of its own."""
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain, fronted = (SinkLM(SinkLMConfig(**shape, operation={"name": name})).eval() for name in ("softmax", "sink_token"))
    ids, places = tokens(2, 12), torch.cat((torch.arange(7), torch.arange(5)))[None]
    packed = mask_of_documents(places).expand(2, -1, -1, -1)
    behind = torch.nn.functional.pad(torch.nn.functional.pad(packed, (1, 0), value=True), (0, 0, 1, 0))
    behind[:, :, 0, 0] = True
    said = r"begins at index 8 sees earlier keys.*Give every document a row of its own"
    with pytest.raises(InputError, match=said):
        _documents(torch.cat((torch.zeros(1, 1), places + 1), 1), Dense(behind), 2, 13, None, ids.device)
    with torch.no_grad():
        padded = torch.tensor([[1] * 12, [1] * 5 + [0] * 7])  # positions of padding start nothing
        for model, mask in ((plain, packed), (plain, padded), (fronted, padded)):
            rate = SinkRate()
            with attend(model, probes=[rate]):
                position_ids = places if mask is packed else (mask.cumsum(1) - 1).clamp(min=0)
                model(input_ids=ids, position_ids=position_ids, attention_mask=mask)
            documents = {count for (metric, *_), (_, count) in values_of(rate).items() if metric == "gu2024"}
            assert max(documents) >= (4 if mask is packed else 2)


def test_against_the_weights_that_the_model_returns(models):
    model, ids = models["gpt2"], tokens(3, 10)
    received, rate, entropy = AttentionReceived(), SinkRate(threshold=0.2), Entropy()
    model.set_attn_implementation("eager")
    with torch.no_grad(), attend(model, probes=[received, rate, entropy]):
        attentions = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    seen = torch.arange(10, 0, -1)
    found, rates, entropies = values_of(received), values_of(rate), values_of(entropy)
    stacked = torch.stack(attentions).double()  # (layers, batch, heads, queries, keys)
    alphas = stacked.sum(3) / seen
    for layer, site in enumerate(sorted({key[1] for key in found})):
        for head in range(4):
            for position in range(10):
                value, count = found["mean_weight", site, head, position]
                assert value == pytest.approx(float(alphas[layer, :, head, position].mean()), abs=1e-6)
                assert count == 3 * (10 - position)
    expected = 100 * (alphas > 0.2).double().mean((0, 1, 2))
    assert [rates["gu2024", None, None, key][0] for key in range(10)] == pytest.approx(expected.tolist())
    rows = torch.special.entr(stacked).sum(-1)
    assert entropies["entropy", None, None, None][0] == pytest.approx(float(rows.mean()), abs=1e-6)


@pytest.mark.parametrize("logit", [-20.0, 0.0, 20.0])
def test_null_mass_of_a_learned_sink_logit(logit):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, logit)
    mass, rate = NullMass(), SinkRate()
    with torch.no_grad(), attend(model, probes=[mass, rate]):
        attentions = model(input_ids=tokens(2, 9), output_attentions=True).attentions
    expected = 1.0 - float(torch.stack(attentions).sum(-1).mean())
    found = values_of(mass)
    assert found["null_mass", None, None, None][0] == pytest.approx(expected, abs=1e-6)
    assert found["null_mass", None, None, None][0] + found["row_mass", None, None, None][0] == pytest.approx(1.0, abs=1e-6)
    null_means = 1.0 - torch.stack(attentions).sum(-1).mean(-1)  # (layers, batch, heads): mean over the queries of a document
    assert values_of(rate)["gu2024_null", None, None, None][0] == pytest.approx(100 * float((null_means > 0.3).double().mean()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding"])
def test_the_device_does_not_matter(models, name):
    model, ids = models[name], tokens(2, 12)
    rows = {}
    for device in ("cpu", "cuda"):
        probes = [cls() for cls in SEQUENTIAL]
        with torch.no_grad(), attend(model.to(device), probes=probes):
            model(input_ids=ids.to(device))
        rows[device] = [values_of(probe) for probe in probes]
    model.cpu()
    for expected, found in zip(rows["cpu"], rows["cuda"], strict=True):
        assert_same(found, expected, rel=1e-4)


class Lengths(Watcher):
    name, needs = "lengths", frozenset()

    def __init__(self):
        self.seen = []

    def update(self, call, statistics):
        self.seen.append(call.kv_len)


def test_it_sees_and_gives_no_rows():
    watcher = Lengths()
    with torch.no_grad(), attend(tiny_models()["llama"], [watcher]) as session:
        session.model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    assert watcher.seen == [5, 5]
    assert len(session.table()) == 0
