"""What a session is asked outside of a forward: its errors, its words, its table and its record of checks."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref

import pandas
import pytest
import torch
from tests.architectures.zoo import model_of
from tests.conftest import make_sinklm
from tests.models.adapted import Adapted
from tests.operators import Operators
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention import session
from sinklab.attention.call import AttentionCall
from sinklab.attention.probe import Watcher
from sinklab.attention.seam import register_operation
from sinklab.attention.session import attend, table_of
from sinklab.errors import ConfigurationError, InputError, SessionError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.models.attach import attach
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.entropy import Entropy
from sinklab.probes.head_output import HeadOutput
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.null_mass import NullMass
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import operations
from sinklab.streaming.cache import SinkCache

IDS = torch.arange(2, 14)[None]


class OwnAttention(nn.Module):
    """Attention in its own code."""

    def forward(self, states):
        return torch.softmax(states, -1)


class Odd(Watcher):
    name = "odd"
    needs = frozenset({"columns", "colums", "hidden"})


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4))


@pytest.mark.parametrize(
    ("model", "given", "error", "message"),
    [
        (make_sinklm, {"probes": [Odd()]}, ConfigurationError, r"^probe 'odd' needs colums, hidden; known needs: .*columns"),
        (lambda: nn.Sequential(OwnAttention()), {}, UnsupportedModelError, "^Sequential computes attention in its own code, n"),
        (
            lambda: nn.Sequential(*(OwnAttention() for _ in range(3))), {}, UnsupportedModelError,
            r"^Sequential computes attention in its own code \(0 and 2 more\), not through",
        ),
        (mamba, {}, UnsupportedModelError, "^MambaForCausalLM has no attention that could be measured"),
        (make_sinklm, {}, SessionError, "^SinkLM did not run while its session was open"),
        (make_sinklm, {"probes": SinkRate()}, ConfigurationError, "`probes` is 'sink_rate'; expected a list of probes"),
        (make_sinklm, {"probes": "sink_rate"}, ConfigurationError, "`probes` is 'sink_rate'; expected a list of probes"),
        (make_sinklm, {"probes": [SinkRate]}, ConfigurationError, r"`probes` holds a class; make one of it: SinkRate\(…\)"),
        (
            make_sinklm, {"interventions": ["zero_head"]}, ConfigurationError,
            r"make one of it with sinklab\.registry\.interventions\.make\('zero_head'\)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_looked_at_is_refused(model, given, error, message):
    with pytest.raises(error, match=message), attend(model(), **given):
        pass


def test_words_and_checks():
    model = make_sinklm()
    with torch.no_grad(), attend(model, [Entropy(), SinkRate()]) as session:
        assert session.operation == ""
        model(input_ids=IDS)
        model(input_ids=IDS)
    assert (session.operation, session.normalized) == ("softmax", True)
    assert repr(session) == "Session(SinkLM, 2 modules seen, 4 calls, probes: entropy, sink_rate)"
    assert session.checks["calls_verified"] == 4
    assert session.checks["rows_verified"] == 4 * 4
    assert 0 < session.checks["largest_error"] < 0.2
    sigmoid = make_sinklm({"name": "sigmoid"})
    with torch.no_grad(), attend(sigmoid) as session:
        sigmoid(input_ids=IDS)
    assert (session.operation, session.normalized) == ("sigmoid", False)


def test_few_operators_for_each_call():
    """On short texts, and on a GPU, the time of measuring is that of starting operators, some microseconds each."""
    model = make_sinklm()
    with torch.no_grad(), Operators() as plain:
        model(input_ids=IDS)
    counts = []
    for _ in range(2):  # what depends on the length alone is kept from the first time on
        with torch.no_grad(), Operators() as operators, attend(model, [SinkRate()]):
            model(input_ids=IDS)
        counts.append((operators.count - plain.count) / 2)
    assert counts[1] <= 250


def test_dropout_is_not_verified_where_it_acts():
    """A kernel that drops weights at random gives outputs that nobody can compute again; in evaluation mode it does not act."""
    model = make_sinklm()
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), attend(model) as session:
        model(input_ids=IDS)
    assert session.checks["calls_verified"] == 2


def test_the_table_names_model_and_operation():
    model = make_sinklm()
    with torch.no_grad(), attend(model, [SinkRate(), HiddenNorm()]) as session:
        model(input_ids=IDS)
    table = session.table()
    assert set(table["probe"]) == {"sink_rate", "hidden_norm"}
    assert set(table["model"]) == {"SinkLM"}
    assert set(table["operation"]) == {"softmax"}
    assert (str(table["model"].dtype), str(table["operation"].dtype)) == ("string", "string")
    model.config.name_or_path = "here/there"
    assert set(session.table()["model"]) == {"here/there"}


def test_the_table_names_what_was_changed():
    """The column is null when nothing was, also where the settings of an intervention change nothing."""
    model = make_sinklm()
    edits = [
        HideKey(heads={0: range(1), 1: ()}, spare=2),
        ZeroValue(heads={1: [0]}, place=torch.zeros(len(IDS), 1, dtype=torch.int64)),
        ZeroHead(heads={}),
    ]
    with torch.no_grad(), attend(model, [SinkRate()], edits) as session:
        model(input_ids=IDS)
    assert set(session.table()["intervention"]) == {
        'hide_key:heads={"0": [0], "1": []},place=0,spare=2; zero_value:heads={"1": [0]}'
    }
    assert set(session.table(intervention="mine")["intervention"]) == {"mine"}
    for unchanged in ([], edits[2:]):
        with torch.no_grad(), attend(model, [SinkRate()], unchanged) as session:
            model(input_ids=IDS)
        assert session.table()["intervention"].isna().all()


def test_two_probes_of_one_name_are_measured_and_have_no_common_table():
    """Two thresholds in one forward are fine; their rows would have the same name in every column."""
    model, probes = make_sinklm(), [SinkRate(threshold=0.99), SinkRate(threshold=0.0)]
    with torch.no_grad(), attend(model, probes) as session:
        model(input_ids=IDS)
    with pytest.raises(SessionError, match=r"two probes of the name 'sink_rate'.*`rows\(\)` of each probe"):
        session.table()
    strict, lenient = (table_of([probe]) for probe in probes)
    first = [of[(of["metric"] == "gu2024") & (of["key_position"] == 0)]["value"].mean() for of in (strict, lenient)]
    assert first == [0, 100]


def test_edits_need_a_forward_without_gradients():
    model = make_sinklm()
    refused = pytest.raises(SessionError, match=r"layers\.0\.self_attn: what an intervention recomputes has no gradient")
    with refused, attend(model, interventions=[ZeroHead(heads={0: (1,)})]):
        model(input_ids=IDS)


class Sees(Watcher):
    """Keeps what it is shown."""

    name = "sees"

    def __init__(self, *needs: str) -> None:
        self.needs = frozenset(needs)
        self.calls: list[AttentionCall] = []

    def update(self, call, statistics):
        self.calls.append(call)


def test_residual_and_projection_are_there_for_whom_they_are_needed():
    model = make_sinklm()
    for needs, there in (((), False), (("columns",), False), (("head_outputs",), True)):
        watcher = Sees(*needs)
        with torch.no_grad(), attend(model, [watcher]):
            model(input_ids=IDS)
        assert [(call.residual is not None, call.projection is not None) for call in watcher.calls] == [(there, there)] * 2
    assert watcher.calls[0].projection.equal(model.layers[0].self_attn.o_proj.weight)
    assert watcher.calls[0].residual.shape == (*IDS.shape, 32)


@pytest.mark.parametrize("verify", [True, False])
def test_calls_and_statistics_are_verified_or_neither(monkeypatch, verify):
    verified = []
    monkeypatch.setattr("sinklab.attention.session.verify_call", lambda call: verified.append("call") or (1, 0.5))
    monkeypatch.setattr("sinklab.attention.session.verify_statistics", lambda *_: verified.append("statistics"))
    with torch.no_grad(), attend(make_sinklm(), [SinkRate()], verify=verify) as session:
        session.model(input_ids=IDS)
    assert verified == (["call", "statistics"] * 2 if verify else [])
    assert session.checks == {"calls_verified": 2 * verify, "rows_verified": 2 * verify, "largest_error": 0.5 * verify}


@pytest.mark.parametrize(("dropout", "verified"), [(0.0, 2), (0.5, 0)])
def test_in_training_only_dropout_stands_in_the_way(dropout, verified):
    """Of proving a call, and of editing it."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, attention_dropout=dropout, **sizes)
    model = LlamaForCausalLM(config).train()
    with torch.no_grad(), attend(model) as session:
        model(input_ids=IDS)
    assert session.checks["calls_verified"] == verified
    with torch.no_grad(), attend(model, interventions=[ZeroHead(heads={0: (0,)})]):
        if dropout:
            with pytest.raises(SessionError, match="interventions have no attention dropout"):
                model(input_ids=IDS)
        else:
            model(input_ids=IDS)


class Fabric(nn.Module):
    """What ``Fabric.setup`` gives, as far as it holds a model: what it runs, and the model itself as ``module``."""

    def __init__(self, model):
        super().__init__()
        self._forward_module, self._original_module = nn.DataParallel(model), model

    @property
    def module(self):
        return self._original_module

    def forward(self, *args, **kwargs):
        return self._forward_module(*args, **kwargs)


def with_compiled_parts(model):
    """A copy, one layer compiled, and of the other the attention and a map inside it."""
    model = copy.deepcopy(model)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    attention = model.layers[1].self_attn
    attention.o_proj = torch.compile(attention.o_proj, backend="eager")
    model.layers[1].self_attn = torch.compile(attention, backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        Fabric,
        with_compiled_parts,
        lambda model: nn.DataParallel(with_compiled_parts(model)),
        lambda model: Adapted(model, prompt=False),
        lambda model: Adapted(with_compiled_parts(model), prompt=False),
    ],
)
def test_what_is_put_round_a_model_is_no_part_of_its_names(wrap):
    """In sites and tables, in edits by the name of a module, and in messages."""
    model = make_sinklm().eval()
    wrapped, name = wrap(model), "layers.1.self_attn"
    found = []
    for looked_at in (model, wrapped):
        edits = [ZeroHead(heads={name: [0]})]
        with attend(looked_at, [SinkRate(), HiddenNorm(), HeadOutput()], edits) as seen, torch.no_grad():
            logits = looked_at(input_ids=IDS.index_fill(1, torch.tensor([0]), 0)).logits
        found.append((logits, seen.table(), seen.sites, repr(seen)))
    (logits, table, sites, words), (logits_wrapped, table_wrapped, sites_wrapped, words_wrapped) = found
    assert torch.equal(logits, logits_wrapped)
    assert sites == sites_wrapped
    assert [site.module for site in sites] == ["layers.0.self_attn", name]
    assert words == words_wrapped
    pandas.testing.assert_frame_equal(table, table_wrapped)
    with pytest.raises(SessionError, match="SinkLM did not run while its session was open"), attend(wrapped):
        pass


def test_a_learned_prompt_and_compiled_encoders_are_no_part_of_names_either():
    with attend(Adapted(make_sinklm().eval(), prompt=True)) as seen, torch.no_grad():
        seen.model(input_ids=IDS)
    assert [site.module for site in seen.sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    model, tables = model_of("t5").eval(), []
    for prepared in (model, copy.deepcopy(model)):
        if prepared is not model:
            prepared.encoder = torch.compile(prepared.encoder, backend="eager")
        with attend(prepared, [SinkRate()]) as seen, torch.no_grad():
            prepared(input_ids=IDS, decoder_input_ids=IDS[:, :5])
        tables.append(seen.table())
    pandas.testing.assert_frame_equal(*tables)
    assert set(tables[0]["part"]) == {"encoder", "decoder", "cross-attention"}


def test_a_module_that_is_more_than_a_wrapper_is_looked_at_whole():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.second = make_sinklm().eval(), make_sinklm().eval()

        def forward(self, tokens):
            return self.module(tokens).logits + self.second(tokens).logits

    two = Two()
    with attend(two) as seen, torch.no_grad():
        two(IDS)
    assert [site.module.partition(".")[0] for site in seen.sites] == ["module", "module", "second", "second"]


def test_what_is_no_model_is_refused_with_what_to_give_instead():
    for function in (lambda model: attend(model).__enter__(), lambda model: attach(model, "sigmoid"), SinkCache):
        with pytest.raises(
            InputError, match=r"'org/model' is the name of a model; load it first: load_model\('org/model'\)\.mod"
        ):
            function("org/model")
        with pytest.raises(InputError, match="dict is no model; expected a module of torch"):
            function({})


@pytest.mark.parametrize(
    ("operation", "device", "dtype", "masked", "expected"),
    [
        ("softmax", "cpu", torch.float32, True, True),
        ("sink_logit", "cpu", torch.float32, True, True),
        ("sigmoid", "cpu", torch.float32, False, False),
        ("softmax", "cuda", torch.float32, False, True),
        ("softmax", "cuda", torch.float32, True, False),
        ("sink_logit", "cuda", torch.float32, False, False),
        ("sink_logit", "cuda", torch.bfloat16, False, True),
        ("sink_logit", "cuda", torch.bfloat16, True, False),
        ("sigmoid", "cuda", torch.bfloat16, False, False),
    ],
)
def test_nothing_is_captured_where_flex_attention_runs(operation, device, dtype, masked, expected):
    """Under the capture FlexAttention would not be compiled, and hold all scores. The paths that run are those of the table."""
    made = operations.make(operation)
    native = ALL_ATTENTION_FUNCTIONS[register_operation(made)]
    module = torch.nn.Linear(1, 1)
    module.operation = made
    query = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool) if masked else None
    assert session._may_give_log_sum_exp(native, module, query, mask) is expected

    def flex_attention_forward():
        """Named as the function of transformers is."""

    assert not session._may_give_log_sum_exp(flex_attention_forward, module, query, mask)


def test_an_export_inside_a_session_is_refused():
    model = make_sinklm()
    with pytest.raises(SessionError, match=r"self_attn is being exported or .*outside of"), attend(model, probes=[SinkRate()]):
        torch.export.export(model, (IDS,), strict=False)
    exported = torch.export.export(model, (IDS,), strict=False).module()
    assert torch.allclose(exported(IDS).logits, model(IDS).logits, atol=1e-6)


def test_keys_in_slots_are_not_measured_by_their_places():
    """With copies of the sinks in front, a prompt's last query stood at the prompt's length plus theirs."""
    model, tokens = make_sinklm().eval(), torch.arange(12)[None]
    for asked in ({"probes": [Entropy(sink_position=0)]}, {"interventions": [ZeroHead(heads={0: (0,)})]}):
        said = r"a SinkCache gives attention its keys by slots.* its own cache"
        with pytest.raises(UnsupportedModelError, match=said), torch.no_grad(), attend(model, **asked):
            model(tokens, past_key_values=SinkCache(model, num_sinks=2, window=20))
    refused, inner = SinkCache(model, num_sinks=2, window=20), model.base_model
    with torch.no_grad():
        expected = model(tokens, past_key_values=SinkCache(model, num_sinks=2, window=20)).logits
    with pytest.raises(UnsupportedModelError, match="by slots"), torch.no_grad(), attend(inner, [Entropy(sink_position=0)]):
        inner(tokens, past_key_values=refused)  # itself the module whose forwards the cache plans
    assert refused.get_seq_length() == 0
    with torch.no_grad():
        again = model(tokens, past_key_values=refused).logits  # as if nothing had been
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
    with torch.no_grad(), attend(model) as session:
        found = model(tokens, past_key_values=SinkCache(model, num_sinks=2, window=20)).logits
    assert session.checks["calls_verified"]
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens, past_key_values=DynamicCache()).logits)


def test_a_session_that_is_over_holds_no_cache_and_goes_through_pickle():
    """To another process, with all its results; a copy goes the same way."""
    model, tokens = make_sinklm(), torch.randint(0, 60, (2, 12))
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), attend(model, [SinkRate(), HiddenNorm()], [ZeroHead(heads={0: [1]})]) as over:
        model(input_ids=tokens, past_key_values=cache)
    held = weakref.ref(cache)
    del cache
    gc.collect()
    assert held() is None
    for other in (pickle.loads(pickle.dumps(over)), copy.deepcopy(over)):
        assert other.table().equals(over.table())
        assert repr(other) == repr(over)


def test_rows_under_vmap_are_refused():
    """Of a batched tensor no number can be read."""
    model, tokens = make_sinklm(), torch.randint(0, 60, (2, 12))
    refused = pytest.raises(SessionError, match=r"runs under torch\.vmap, .*outside of")
    with torch.no_grad(), refused, attend(model, [SinkRate()]):
        torch.vmap(lambda ids: model(input_ids=ids[None], use_cache=False).logits)(tokens)


@pytest.mark.parametrize("name", ["identity", "mlp_kernel"])
def test_weights_are_counted_without_their_sign(name):
    model = make_sinklm({"name": name}).eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad(), attend(model, [SinkRate(), AttentionReceived(), NullMass()], verify=True) as session:
        model(tokens)
    table = session.table()
    assert session.checks["calls_verified"] == 2
    assert not session.normalized
    fractions = table[table["metric"].isin(["first_token_share", "qiu2025_first_attention", "mean_weight", "row_mass"])]
    assert len(fractions) > 20
    assert (fractions["value"] >= 0).all()
    shares = table[table["metric"].isin(["first_token_share", "qiu2025_first_attention"])]
    assert (shares["value"] <= 1).all()
    # The first query sees one key, so its share is all of it, whatever the sign; the mean over 20 is at least 1/20.
    assert (shares[shares["metric"] == "qiu2025_first_attention"]["value"] >= 1 / 20 - 1e-6).all()
