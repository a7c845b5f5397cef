"""The output projection that is found is the one the model uses: on the heads as they were seen, it gives what the model went
on with. A table over all families, and a few more whose projection has a rare name, a gate or a norm in front of it."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.session import attend
from sinklab.errors import UnsupportedModelError
from sinklab.probes.head_output import HeadOutput
from sinklab.studies.theory.no_op_certificate import certify

from .harness import Recorder
from .zoo import MEASURED, MOVED, SLIDING, ZOO, Entry, batch_of, build, experts, grouped, has_interface, image, shape

MORE = {
    entry.id: entry
    for entry in (
        Entry("bitnet", "decoder", "BitNetForCausalLM", grouped()),
        Entry("diffllama", "decoder", "DiffLlamaForCausalLM", grouped()),
        Entry(
            "modernbert_decoder",
            "decoder",
            "ModernBertDecoderForCausalLM",
            shape(local_attention=4, global_attn_every_n_layers=2),
        ),
        Entry("persimmon", "decoder", "PersimmonForCausalLM", shape()),
        Entry(
            "afmoe",
            "decoder",
            "AfmoeForCausalLM",
            experts(head_dim=8, num_experts=4, num_dense_layers=2, sliding_window=4, layer_types=SLIDING),
        ),
        Entry("jetmoe", "decoder", "JetMoeForCausalLM", grouped(kv_channels=8, num_local_experts=4, num_experts_per_tok=2)),
        Entry("internvl", "vision", "InternVLVisionModel", image(), inputs="pixels"),
        Entry("blip_2", "vision", "Blip2VisionModel", image(), inputs="pixels"),
        Entry(
            "wav2vec2_bert",
            "audio",
            "Wav2Vec2BertModel",
            shape(feature_projection_input_dim=8, conv_depthwise_kernel_size=3),
            inputs="features",
        ),
    )
}
FAMILIES = {**{entry.id: entry for entry in MEASURED}, **MORE}

FOUND: dict[str, tuple[str, ...]] = {
    "self_attn.o_proj": (
        "llama", "llama4", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2", "gemma3",
        "phi3", "olmo2", "olmo3", "stablelm", "cohere", "cohere2", "granite", "nanochat",
        "nemotron", "starcoder2", "smollm3",
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "gpt_oss", "granite_swa", "mimo_v2_flash", "bamba", "afmoe",
    ),
    "attention.o_proj": ("vit", "deit", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "swin"),
    "self_attn.out_proj": ("opt", "biogpt", "bart", "mbart", "marian", "pegasus", "whisper", "clip", "siglip"),
    "attention.out_proj": ("wav2vec2", "hubert"),
    "attention.out_lin": ("distilbert",),
    "attention.dense": ("gpt_neox", "albert"),
    "self_attn.dense": ("phi", "persimmon"),
    "attn.c_proj": ("gpt2", "gpt_bigcode"),
    "attn.out_proj": tuple(entry.id for entry in MOVED if has_interface(entry)),
    "attn.Wo": ("modernbert", "modernbert_decoder"),
    "SelfAttention.o": ("t5", "umt5"),
    "output.dense": ("bert", "roberta", "electra", "esm", "videomae"),
    "self_attn.linear_out": ("wav2vec2_bert",),
    "attention.projection_layer": ("internvl",),
    "self_attn.projection": ("blip_2",),
}  # fmt: skip
"""The end of the projection's name, and the families that have it so."""

NOT_FOUND = {
    "bitnet": "a norm over all heads stands in front of it",
    "diffllama": "two calls are subtracted, and a norm stands in front of it",
    "jetmoe": "every head has its own, in a mixture of experts",
}
GATED = {"qwen3_next", "afmoe"}
"""A sigmoid of the hidden state multiplies the heads in front of the projection."""
GOES_ON = {
    "albert": "the residual is added and normalised in the attention module itself",
    "bert": "the projection stands beside the attention module, which gives the heads",
    "roberta": "as bert",
    "electra": "as bert",
    "esm": "as bert",
    "videomae": "as bert",
}
"""Families whose attention module does not give the output of the projection, and why."""


class Heads(Recorder):
    """Keeps what heads gave."""

    needs = frozenset({"head_outputs"})


@functools.cache
def seen(family: str) -> tuple[list[Any], dict[str, list[tuple[Tensor, Tensor]]], dict[str, nn.Module]]:
    """Every call of one forward, input and output of every module in turn, and the modules."""
    entry = FAMILIES[family]
    model = build(entry, entry.backends[-1])
    modules = dict(model.named_modules())
    passed: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            passed.setdefault(name, []).append((args[0] if args else None, output[0] if isinstance(output, tuple) else output))

        return hook

    for name, module in modules.items():
        module.register_forward_hook(keep(name))
    batch = {"input_features": torch.randn(2, 10, 8)} if family == "wav2vec2_bert" else batch_of(entry)
    heads = Heads()
    with attend(model, [heads]), torch.no_grad():
        model(**batch)
    assert len(heads.records) == entry.calls
    return heads.records, passed, modules


def projected(family: str) -> list[tuple[Any, tuple[Tensor, Tensor], Tensor, Tensor]]:
    """Every call with input and output of its projection in the model, and what its attention module gave."""
    records, passed, _ = seen(family)
    turns: dict[str, int] = {}
    found = []
    for record in records:
        module, projection = record.site.module.partition("#")[0], record.site.output_projection
        turn = turns[module] = turns.get(module, -1) + 1
        found.append((record, passed[projection][turn], passed[module][turn][1]))
    return found


def test_the_table_is_whole() -> None:
    families = [family for named in FOUND.values() for family in named]
    assert sorted([*families, *NOT_FOUND]) == sorted(FAMILIES)
    assert not set(MORE) & set(ZOO)


@pytest.mark.parametrize(("name", "family"), [(name, family) for name, families in FOUND.items() for family in families])
def test_the_projection_is_found(name: str, family: str) -> None:
    for record in seen(family)[0]:
        # Cross-attention has the same child in a module of another name.
        ending = name if record.site.kind == "self" else name.partition(".")[2]
        assert f".{record.site.output_projection}".endswith(f".{ending}")
        assert record.call.projection.shape[1] == record.call.num_heads * record.call.head_outputs.shape[-1]


@pytest.mark.parametrize("family", [family for families in FOUND.values() for family in families if family not in GATED])
def test_heads_through_it_are_what_the_model_goes_on_with(family: str) -> None:
    modules = seen(family)[2]
    for record, (_, given), attention in projected(family):
        bias = modules[record.site.output_projection].bias
        heads, weight = record.call.head_outputs.flatten(2).double(), record.call.projection.double()
        added = torch.zeros(len(weight)) if bias is None else bias.detach().double()
        # A float32 sum of n products is off by n roundings of 2⁻²⁴ of the sum of their absolute values; one more for the bias.
        bound = (weight.shape[1] + 1) * 2.0**-24 * (heads.abs() @ weight.T.abs() + added.abs())
        expected = heads @ weight.T + added
        assert ((given.reshape(expected.shape) - expected).abs() <= bound).all()
        if family not in GOES_ON:
            assert ((attention.reshape(expected.shape) - expected).abs() <= bound).all()
        else:
            assert attention.shape != expected.shape or ((attention - expected).abs() > bound).any()


@pytest.mark.parametrize("family", sorted(NOT_FOUND))
def test_none_is_found_where_no_one_map_takes_the_heads_as_they_are(family: str) -> None:
    for record in seen(family)[0]:
        assert record.site.output_projection is None
        assert record.call.projection is None
    entry = FAMILIES[family]
    with pytest.raises(UnsupportedModelError, match=r"no one linear map of 4 heads × 8 inputs .* without a norm in between"):
        certify(build(entry, entry.backends[-1]), batch_of(entry))


@pytest.mark.parametrize("family", [family for families in FOUND.values() for family in families])
def test_a_gate_is_known_where_the_projection_takes_something_else_than_the_heads(family: str) -> None:
    for record, (entered, _), _ in projected(family):
        assert record.site.gated == (not torch.equal(entered.reshape(record.call.head_outputs.shape), record.call.head_outputs))
        assert record.site.gated == (family in GATED)


@pytest.mark.parametrize("family", sorted(GATED))
def test_what_a_head_adds_is_what_its_gate_lets_through(family: str) -> None:
    entry = FAMILIES[family]
    model, probe = build(entry, entry.backends[-1]), HeadOutput()
    entered: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_pre_hook(lambda _, args, name=name: entered.__setitem__(name, args[0]))
    with attend(model, [probe]) as session, torch.no_grad():
        model(**batch_of(entry))
    rows = [row for row in session.table().itertuples() if row.metric == "output_norm" and isinstance(row.module, str)]
    assert len(rows) == 4 * entry.calls
    for row in rows:
        heads, weight = entered[f"{row.module}.o_proj"], model.get_submodule(f"{row.module}.o_proj").weight.detach()
        columns = slice(row.head * heads.shape[-1] // 4, (row.head + 1) * heads.shape[-1] // 4)
        written = heads[..., columns] @ weight[:, columns].T
        assert row.value == pytest.approx(float(written.norm(dim=-1).mean()), rel=1e-5)


class Toy(nn.Module):
    """On the seam by its source; its children are given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, heads: Tensor) -> Any:
        return ALL_ATTENTION_FUNCTIONS


def found(width: int | None = 32, **children: nn.Module) -> str | None:
    return Anatomy(nn.ModuleDict({"a": Toy(**children)})).projection_name("a", width)


def test_a_name_that_is_not_known_is_found_by_what_it_takes() -> None:
    inputs = {
        name: nn.Linear(32, 32) for name in ("q_proj", "Wk", "lin_v", "query_key_value", "gate_proj", "g_proj", "linear_pos")
    }
    assert found(**inputs, merge=nn.Linear(32, 24)) == "a.merge"
    assert found(**inputs, merge=nn.Sequential(nn.Linear(32, 24), nn.Dropout())) == "a.merge.0"
    # Without a width names alone decide.
    assert found(None, **inputs, merge=nn.Linear(32, 24)) is None
    assert found(None, **inputs, Wo=nn.Linear(32, 24)) == "a.Wo"


def test_a_guess_is_never_made() -> None:
    assert found(q=nn.Linear(32, 32), k=nn.Linear(32, 32)) is None
    assert found(merge=nn.Linear(16, 32)) is None
    # The second of two maps in a row may happen to have the width of the heads.
    assert found(o_a_proj=nn.Linear(8, 32), o_b_proj=nn.Linear(32, 32)) is None
    assert found(one=nn.Linear(32, 32), other=nn.Linear(32, 32)) is None
    # A known name of another width takes something else, and nothing else is tried.
    assert found(o_proj=nn.Linear(16, 32), merge=nn.Linear(32, 32)) is None
    assert found(o_proj=nn.Linear(32, 32), merge=nn.Linear(32, 32)) == "a.o_proj"


def attention_classes() -> Iterator[tuple[str, list[str], list[str]]]:
    """Every class of transformers on the seam by its source: its linear children, and those that run behind the attention."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for source in re.split(r"^(?=class )", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            forward = re.search(r"^    def forward\(.*?(?=^    def |\Z)", source, flags=re.MULTILINE | re.DOTALL)
            if source.startswith("class ") and forward and "ALL_ATTENTION_FUNCTIONS" in forward[0]:
                linear = re.findall(r"self\.(\w+) = \(?\s*(?:torch\.)?(?:nn\.)?\w*(?:Linear|Conv1D)\(", source)
                behind = re.findall(r"self\.(\w+)\(", forward[0].rpartition("ALL_ATTENTION_FUNCTIONS")[2])
                yield re.findall(r"class (\w+)", source)[0], linear, [name for name in behind if name in linear]


def test_of_all_classes_of_transformers_none_gets_a_wrong_projection() -> None:
    right, missed = 0, []
    for name, linear, behind in attention_classes():
        picked = found(**{child: nn.Linear(32, 32) for child in linear})
        # What runs last; before it may be a gate, or a map of positions in a branch.
        assert picked in (None, *(f"a.{child}" for child in behind[-1:])), f"{name}: {picked}, but {behind} run"
        right += picked is not None
        if picked is None and behind:
            missed.append(name)
    assert right >= 300  # 400 in transformers 5.23
    others = {name for name in missed if not name.startswith("Inkling2")}  # whose map is gated in a module of its own
    assert others <= {"DeepseekV4Attention"}  # two maps in a row


def test_packed_weights_are_not_taken_for_numbers() -> None:
    packed = nn.Linear(32, 32)
    packed.weight = nn.Parameter(packed.weight.detach().to(torch.int8), requires_grad=False)
    anatomy = Anatomy(nn.ModuleDict({"a": Toy(o_proj=packed)}))
    assert anatomy.projection_name("a", 32) == "a.o_proj"
    assert anatomy.projection_weight("a", 32) is None
