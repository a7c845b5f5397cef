"""docs/footguns.md does what it says: every wrong block goes wrong as told, every right block is right."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from tests.streaming.decoders import REFUSED
from transformers import AttentionInterface, AttentionMaskInterface, FalconForCausalLM, LlamaForCausalLM
from transformers.masking_utils import eager_mask

from sinklab import attend
from sinklab.attention.seam import implementation_name, register_operation
from sinklab.attention.session import Session
from sinklab.errors import SessionError, UnsupportedModelError
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax

from .zoo import OFF_SEAM, SECOND_TIER, ZOO, Entry, batch_of, build

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "footguns.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))

Names = dict[str, Any]


def block(section: str, heading: str) -> str:
    """The one Python block after ``**Wrong.**`` or ``**Right.**``."""
    (source,) = re.findall(rf"\*\*{heading}\.\*\*.*?^```python\n(.*?)^```", SECTIONS[section], flags=re.MULTILINE | re.DOTALL)
    return source


def run(section: str, heading: str, names: Names) -> Names:
    exec(compile(block(section, heading), f"footguns.md, {section} {heading}", "exec"), names)
    return names


def my_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kwargs: Any) -> Any:
    """What somebody writes in a hurry; right as far as it is told what is hidden."""
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores.masked_fill(~attention_mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture
def names() -> Iterator[Names]:
    register_operation(Sigmoid()), register_operation(Softmax())
    before = set(AttentionInterface._global_mapping)
    masks = set(AttentionMaskInterface._global_mapping)
    yield {
        "torch": torch,
        "attend": attend,
        "register_operation": register_operation,
        "UnsupportedModelError": UnsupportedModelError,
        "AttentionInterface": AttentionInterface,
        "batch": batch_of(ZOO["llama"]),
        "my_attention": my_attention,
        "model": build(ZOO["llama"], "sdpa"),
    }
    for table, known in ((AttentionInterface, before), (AttentionMaskInterface, masks)):
        for name in set(table._global_mapping) - known:
            del table._global_mapping[name]


def logits(model: Any, batch: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(batch or batch_of(ZOO["llama"]))).logits


def reads_the_future(model: Any) -> bool:
    tokens = batch_of(ZOO["llama"])["input_ids"]
    other = tokens.clone()
    other[:, -1] = (tokens[:, -1] + 1) % 40
    first, second = (logits(model, {"input_ids": ids}) for ids in (tokens, other))
    return not torch.equal(first[:, :-1], second[:, :-1])


def test_there_are_twelve_and_each_is_whole() -> None:
    assert list(SECTIONS) == [str(number) for number in range(1, 13)]
    for section in SECTIONS:
        assert SECTIONS[section].index("**Problem.**") < SECTIONS[section].index("**Wrong.**")
        assert block(section, "Wrong")
        assert block(section, "Right")


def test_1_models_with_code_of_their_own(names: Names) -> None:
    names["bloom"] = build(ZOO["bloom"])
    before = logits(names["bloom"])
    assert torch.equal(run("1", "Wrong", names)["logits"], before)
    assert (
        "BloomForCausalLM computes attention in its own code (transformer.h.0.self_attention and 1 more)"
        in (run("1", "Right", names)["reason"])
    )


def test_2_function_without_mask_function(names: Names) -> None:
    assert not reads_the_future(names["model"])
    run("2", "Wrong", names)
    assert reads_the_future(names["model"])
    run("2", "Right", names)
    assert names["model"].config._attn_implementation == implementation_name("sigmoid")
    assert not reads_the_future(names["model"])


def test_3_operation_is_not_in_the_checkpoint(names: Names, tmp_path: Path) -> None:
    names["folder"] = tmp_path / "saved"
    names["model"].generation_config.eos_token_id = None
    run("3", "Wrong", names)
    saved = logits(names["model"])
    assert names["again"].config._attn_implementation == "sdpa"
    assert not torch.allclose(logits(names["again"]), saved, atol=1e-2)
    run("3", "Right", names)
    assert torch.equal(logits(names["again"]), saved)


def test_4_keywords_carry_mathematics(names: Names) -> None:
    names |= {"t5": build(ZOO["t5"]), "gpt_oss": build(ZOO["gpt_oss"])}
    pairs = batch_of(ZOO["t5"])
    own = logits(names["t5"], pairs)
    run("4", "Wrong", names)
    AttentionInterface.register("swallowing", names["swallowing"])
    AttentionMaskInterface.register("swallowing", eager_mask)
    names["t5"].set_attn_implementation("swallowing")
    assert (logits(names["t5"], pairs) - own).abs().max() > 0.05
    run("4", "Right", names)
    torch.testing.assert_close(logits(names["t5"], pairs), own, rtol=1e-4, atol=1e-5)
    assert "GptOssAttention has learned sink logits" in names["reason"]


def test_5_two_models_one_config(names: Names) -> None:
    names |= {"LlamaForCausalLM": LlamaForCausalLM, "config": build(ZOO["llama"], "sdpa").config}
    run("5", "Wrong", names)
    assert names["second"].config._attn_implementation == "sinklab_sigmoid"
    names["config"] = build(ZOO["llama"], "sdpa").config
    run("5", "Right", names)
    assert names["first"].config._attn_implementation == "sinklab_sigmoid"
    assert names["second"].config._attn_implementation == "sdpa"


def test_6_names_are_parsed(names: Names) -> None:
    names |= {"gemma2": build(ZOO["gemma2"]), "deepseek_v32": build(ZOO["deepseek_v32"])}
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM does not support .*scaled_dot_product_attention"):
        run("6", "Wrong", names)
    expected = logits(names["deepseek_v32"])
    run("6", "Right", names)
    assert names["name"] == "sinklab_sigmoid"
    assert isinstance(names["session"], Session)
    assert torch.equal(logits(names["deepseek_v32"]), expected)


def test_7_additive_masks(names: Names) -> None:
    names |= {"scores": torch.tensor([[1.0, 0.5, 2.0, 3.0]]), "visible": torch.tensor([[True, True, False, False]])}
    run("7", "Wrong", names)
    run("7", "Right", names)
    # All visible scores are positive, so the row sums to one; each of the two hidden keys adds 1 to the wrong denominator.
    grown = torch.expm1(torch.tensor([1.0, 0.5]))
    assert names["right"].sum().item() == pytest.approx(1.0)
    assert names["wrong"].sum().item() == pytest.approx((grown.sum() / (grown.sum() + 2)).item())


def test_8_gradient_checkpointing(names: Names) -> None:
    with pytest.raises(SessionError, match="gradient checkpointing"):
        run("8", "Wrong", names)
    run("8", "Right", names)
    assert names["session"].calls.total() == 2


def test_9_layer_index_is_not_an_identity(names: Names) -> None:
    names |= {"t5": build(ZOO["t5"]), "pairs": batch_of(ZOO["t5"])}
    run("9", "Wrong", names)
    assert len(names["session"].calls) == 6
    assert set(names["measured"]) == {0, 1}
    run("9", "Right", names)
    assert len(set(names["names"])) == 6


def test_10_asking_changes_falcon(names: Names, tmp_path: Path) -> None:
    names |= {"falcon": build(ZOO["falcon"], "sdpa"), "FalconForCausalLM": FalconForCausalLM, "falcon_folder": tmp_path}
    names["falcon"].save_pretrained(tmp_path)
    run("10", "Wrong", names)
    assert (names["output"].logits - logits(names["falcon"])).abs().max() > 0.1
    assert names["output"].attentions[0].triu(1).max() > 0.1
    run("10", "Right", names)
    assert names["same"]
    assert names["asked"].attentions[0].triu(1).max() == 0
    torch.testing.assert_close(names["plain"].logits, logits(names["falcon"]), rtol=1e-4, atol=1e-4)


def test_11_beginning_of_sequence(names: Names, tokenizer: Any, checkpoint: Path) -> None:
    names |= {"tokenizer": tokenizer, "text": "a sink", "checkpoint": checkpoint}
    run("11", "Wrong", names)
    assert names["tokens"]["input_ids"][0, 0] != tokenizer.bos_token_id
    run("11", "Right", names)
    assert [set(table["bos"]) for table in names["tables"]] == [{1}, {0}]
    assert all(len(table) for table in names["tables"])


def test_12_a_weight_that_is_somewhere_else(names: Names) -> None:
    expected, whole = logits(names["model"]), names["model"].model.layers[0].self_attn.o_proj.weight.detach().clone()
    names["offloaded"] = accelerate.cpu_offload(build(ZOO["llama"], "sdpa"), execution_device=torch.device("cpu"))
    assert names["offloaded"].device.type == "meta"
    run("12", "Wrong", names)
    assert torch.equal(names["ablated"], expected)
    run("12", "Right", names)
    assert torch.equal(names["numbers"], whole)
    with torch.no_grad():
        names["model"].model.layers[0].self_attn.o_proj.weight.zero_()
    torch.testing.assert_close(names["silent"], logits(names["model"]))
    assert (names["silent"] - expected).abs().max() > 1e-3


def cells_of(entry: Entry) -> list[str]:
    """The cells of its row in which nothing is told in words: class, backends, calls, replaceable, and served by a cache."""
    if entry in OFF_SEAM:
        return [f"`{entry.model}`", "second" if entry in SECOND_TIER else "none"]
    cells = [f"`{entry.model}`", ", ".join(f"`{backend}`" for backend in entry.backends), str(entry.calls)]
    cells.append("yes" if entry.replaceable else "no")
    return [*cells, "no" if entry.id in REFUSED else "yes"] if entry.kind == "decoder" else cells


def test_the_page_has_a_row_for_every_family() -> None:
    lines = [
        line.split("|")[1:-1]
        for line in (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    rows = {cells[0].strip(): [cell.strip().partition(":")[0] for cell in cells[1:]] for cells in lines}
    assert sorted(rows) == sorted(f"`{family}`" for family in ZOO)
    for family, entry in ZOO.items():
        expected = cells_of(entry)
        assert rows[f"`{family}`"][: len(expected)] == expected
