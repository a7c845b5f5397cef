"""Keys are numbered by their place in the document, whatever the cache, the window or the padding did to the tensors."""

import pytest
import torch
import transformers
from torch import Tensor

from sinklab.attention.anatomy import over_depth
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.attention.session import attend
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.sink_rate import SinkRate
from sinklab.results.progress import SinklabWarning

from .harness import STEPS, Recorded, Recorder, decode, recorded
from .zoo import LENGTH, PADDING, VOCAB, ZOO, Entry, batch_of, build, grouped, model_of, shape

WINDOW = 4
SLIDING_FAMILIES = ("mistral", "gemma3", "olmo3", "gpt_oss", "phi3", "cohere2")


def record_forward(family: str, backend: str, **batch: Tensor) -> list[Recorded]:
    return recorded(model_of(family, backend), batch)


def full_batch(padded: bool = False) -> dict[str, Tensor]:
    """The tokens of :func:`decode` in one go."""
    batch = batch_of(ZOO["llama"], padded)
    words = torch.randint(4, 40, (2, STEPS), generator=torch.Generator().manual_seed(2))
    return {
        "input_ids": torch.cat((batch["input_ids"], words), dim=1),
        "attention_mask": torch.cat((batch["attention_mask"], torch.ones(2, STEPS, dtype=torch.long)), dim=1),
    }


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, backend) for family in (*SLIDING_FAMILIES, "llama", "gpt2") for backend in ZOO[family].backends],
)
def test_positions_while_decoding(family: str, backend: str, padded: bool) -> None:
    """The oracle is the content: the first layer's key called position p must be the key of token p in one full forward."""
    recorder = Recorder()
    with attend(model_of(family, backend), probes=[recorder], verify=True):
        decode(model_of(family, backend), ZOO[family], padded)
    reference = record_forward(family, backend, **full_batch(padded))[0].call
    first = recorder.records[0].site.module
    records = [record for record in recorder.records if record.site.module == first]
    assert len(records) == 1 + STEPS
    seen = 0
    for step, record in enumerate(records):
        call = record.call
        newest = LENGTH - 1 + step
        for row in range(2):
            padding = PADDING if padded and row == 1 else 0
            assert call.query_positions[row, -1] == newest - padding
            for index, position in enumerate(call.key_positions[row].tolist()):
                if position < 0:
                    assert not record.visible[row % record.visible.shape[0], :, -1, index].any()
                    continue
                # float32 keys from products of another shape: the last bits may differ.
                torch.testing.assert_close(
                    call.keys[row, :, index], reference.keys[row, :, position + padding], rtol=1e-4, atol=1e-5
                )
                seen += 1
        visible = record.visible.expand(2, *record.visible.shape[1:])[0, 0, -1]
        positions = call.key_positions[0][visible].tolist()
        window = WINDOW if family in SLIDING_FAMILIES else newest + 1
        assert positions == list(range(newest + 1 - window, newest + 1))
    assert seen > 0


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "opt"])
def test_left_padding_does_not_move_positions(family: str, backend: str) -> None:
    batch = batch_of(ZOO[family], padded=True)
    for record in record_forward(family, backend, **batch):
        expected = torch.arange(LENGTH) - PADDING
        assert torch.equal(record.call.query_positions[1], expected.clamp_min(-1))
        assert torch.equal(record.call.key_positions[1], expected.clamp_min(-1))
        assert torch.equal(record.call.query_positions[0], torch.arange(LENGTH))
        assert torch.equal(record.call.query_documents[1], (expected >= 0).long() - 1)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_padding_does_not_change_the_measured_weights(family: str, backend: str) -> None:
    batch = batch_of(ZOO[family], padded=True)
    short = {name: tensor[1:, PADDING:] for name, tensor in batch.items()}
    positions = {"position_ids": (torch.arange(LENGTH) - PADDING).clamp_min(0).expand(2, -1)}
    long = record_forward(family, backend, **batch, **positions)
    alone = record_forward(family, backend, **short)
    for one, other in zip(long, alone, strict=True):
        torch.testing.assert_close(one.weights[1:, :, PADDING:, PADDING:], other.weights, rtol=1e-4, atol=1e-5)
        one_sum, other_sum = one.statistics.column_sum, other.statistics.column_sum
        assert one_sum is not None
        assert other_sum is not None
        torch.testing.assert_close(one_sum[1:, :, PADDING:], other_sum, rtol=1e-4, atol=1e-5)
        assert (one_sum[1, :, :PADDING] == 0).all()


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "xglm", "bert", "roberta", "llama"])
def test_what_we_run_on_rows_padded_on_the_left_is_what_the_text_alone_gives(family: str) -> None:
    """A model with a table of positions numbers padding too, unless it is told; RoBERTa's counts from the id of padding."""
    model = build(ZOO[family])
    padding = model.config.pad_token_id or 0
    ids = torch.randint(2, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    ahead = torch.full((1, PADDING), padding)
    padded = {
        "input_ids": torch.cat((ahead, ids), 1),
        "attention_mask": (torch.arange(PADDING + LENGTH) >= PADDING).long()[None],
    }
    with torch.no_grad():
        alone = model(**lean_arguments(model, {"input_ids": ids}, logits=True))[0]
        behind = model(**lean_arguments(model, padded, logits=True))[0][:, PADDING:]
    torch.testing.assert_close(behind, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_packed_documents_restart_the_count(family: str, backend: str) -> None:
    lengths = [[4, 6], [7, 3]]
    position_ids = torch.tensor([[position for length in row for position in range(length)] for row in lengths])
    documents = torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in lengths])
    batch = {"input_ids": batch_of(ZOO[family])["input_ids"], "position_ids": position_ids, "use_cache": False}
    for record in record_forward(family, backend, **batch):
        call = record.call
        for positions, found in ((call.query_positions, call.query_documents), (call.key_positions, call.key_documents)):
            assert torch.equal(positions, position_ids)
            assert torch.equal(found, documents)
        apart = documents[:, :, None] != documents[:, None]
        assert (record.weights.masked_select(apart[:, None]) == 0).all()


def test_restarting_positions_without_a_document_mask_are_one_document() -> None:
    # The model sees across the restart here (a mask was given, so the host does not look for documents): one document it is.
    batch = batch_of(ZOO["llama"])
    batch["attention_mask"][1, :PADDING] = 0
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]).expand(2, -1)
    for record in record_forward("llama", "eager", **batch, position_ids=position_ids):
        assert torch.equal(record.call.query_positions[0], torch.arange(LENGTH))
        assert (record.weights[0, :, 5:, :5] > 0).all()


def test_chunks_hide_what_came_before_them() -> None:
    chunked, full = record_forward("llama4", "eager", **batch_of(ZOO["llama4"]))
    same_chunk = torch.arange(LENGTH)[:, None] // 4 == torch.arange(LENGTH)[None] // 4
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    assert torch.equal(chunked.weights[0, 0] > 0, causal & same_chunk)
    assert torch.equal(full.weights[0, 0] > 0, causal)


def test_sparse_attention_keeps_its_few_keys() -> None:
    # The model branches on the literal names "eager" and "sdpa"; under any other name it would attend to every key.
    chosen = ZOO["deepseek_v32"].config["index_topk"]
    for backend in ZOO["deepseek_v32"].backends:
        for record in record_forward("deepseek_v32", backend, **batch_of(ZOO["deepseek_v32"])):
            expected = torch.arange(1, LENGTH + 1).clamp_max(chosen).expand(2, 4, -1)
            assert torch.equal((record.weights > 0).sum(-1), expected)


def test_two_sided_window_is_not_causal() -> None:
    first, last = record_forward("modernbert", "sdpa", **batch_of(ZOO["modernbert"]))
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]).abs()
    reach = build(ZOO["modernbert"]).config.local_attention // 2
    assert torch.equal(first.weights[0, 0] > 0, distance <= reach)
    assert (last.weights > 0).all()


def test_cross_attention_numbers_keys_by_the_encoder() -> None:
    records = record_forward("t5", "sdpa", **batch_of(ZOO["t5"], padded=True))
    cross = [record for record in records if record.site.kind == "cross"]
    assert len(cross) == 2
    for record in cross:
        assert torch.equal(record.call.query_positions, torch.arange(6).expand(2, -1))
        assert torch.equal(record.call.key_positions[0], torch.arange(LENGTH))
        assert record.call.key_positions[1].tolist() == [*range(LENGTH - PADDING), *[-1] * PADDING]
        assert (record.weights[1, :, :, LENGTH - PADDING :] == 0).all()


@pytest.mark.skipif(not hasattr(transformers, "Inkling2ForCausalLM"), reason="transformers has no Inkling 2 yet")
def test_blocks_of_a_model_are_no_tokens() -> None:
    """Inkling 2 also attends over its earlier blocks; the rate of the first token is that of its attention over tokens."""
    small = grouped(
        num_hidden_layers=4, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, unpadded_vocab_size=VOCAB, sliding_window=64,
        layer_types=["hybrid_sliding", "hybrid"] * 2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = build(Entry("inkling2", "decoder", "Inkling2ForCausalLM", small))
    ids = torch.randint(2, VOCAB, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        blocks: dict[str, torch.Tensor] = {}
        for name in over_depth(model):  # plain code: the weights of the module, from what it is given

            def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...], _: object, name: str = name) -> None:
                states = module.norm(torch.cat([given[0], given[1][:, :, None]], 2).float())
                queries = module.query.float().view(-1, states.shape[-1])
                blocks[name] = torch.einsum("qh,blkh->blqk", queries, states).mul(states.shape[-1] ** -0.5).softmax(-1)

            model.get_submodule(name).register_forward_hook(keep)
        with attend(model, [SinkRate(threshold=0.3), AttentionReceived()]) as session:
            model(input_ids=ids, use_cache=False)
    expected = [100 * (layer[..., 0].mean(-1) > 0.3).double().mean().item() for layer in weights]
    table = session.table()
    found = table[(table.metric == "gu2024") & (table.key_position == 0) & table.module.notna()]
    assert found.groupby("module", sort=False).value.mean().tolist() == pytest.approx(expected)
    depth = table[(table.part == "depth") & table.module.notna()]
    for name, weights in blocks.items():
        for metric, values in (("depth_weight", weights), ("depth_rate", 100.0 * (weights > 0.3))):
            rows = depth[(depth.module == name) & (depth.metric == metric)]
            assert rows.value.tolist() == pytest.approx(values.double().mean((0, 1)).flatten().tolist(), rel=1e-5), name
    assert table[table.part.notna()].metric.isin(["depth_weight", "depth_rate"]).all()
    assert len(table[(table.part == "depth") & table.module.isna()]) == 2 * max(one.shape[-1] for one in blocks.values())
    assert len(over_depth(model)) == 8  # in front of every sublayer but the first, and of the head
    assert not looks_ahead(model)


def test_a_head_whose_weights_are_used_twice_is_counted_once() -> None:
    """DiffLlama calls with the same queries and keys for each half of its values; heads are subtracted behind both calls."""
    model = build(Entry("diffllama", "decoder", "DiffLlamaForCausalLM", grouped()))
    ids = torch.randint(2, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = torch.stack(model(input_ids=ids, use_cache=False, output_attentions=True).attentions)
        with attend(model, [AttentionReceived()]) as session, pytest.warns(SinklabWarning, match="subtract some heads"):
            model(input_ids=ids, use_cache=False)
    table = session.table()
    found = table[(table.metric == "mean_weight") & (table.key_position == 0) & table["head"].notna()]
    assert (found["count"] == 2 * LENGTH).all()
    assert found.value.tolist() == pytest.approx(weights[..., 0].double().mean((1, 3)).flatten().tolist(), rel=1e-5)
    # Plain code, from the definition of the paper: the first half of the heads less lambda times the second.
    for layer, whole in zip(model.model.layers, weights.double(), strict=True):
        own = layer.self_attn
        factor = torch.exp(own.lambda_q1 @ own.lambda_k1) - torch.exp(own.lambda_q2 @ own.lambda_k2) + own.lambda_init
        effective = (whole[:, :2] - factor.double() * whole[:, 2:])[..., 0].mean((0, 2)).tolist()
        pairs = table[(table.metric == "difference_weight") & (table.key_position == 0)]
        assert pairs[pairs.layer == own.layer_idx].value.tolist() == pytest.approx(effective, rel=1e-4)


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4ForCausalLM"), reason="transformers has no DeepSeek V4 yet")
@pytest.mark.parametrize("window", [64, 16])
def test_keys_that_stand_for_several_tokens_have_no_position(window: int) -> None:
    """DeepSeek V4 puts compressed keys behind those of the tokens, also where a text is longer than its sliding window."""
    small = shape(
        num_key_value_heads=2, num_hidden_layers=3, head_dim=8, q_lora_rank=16, qk_rope_head_dim=4, index_topk=6,
        index_head_dim=8, index_n_heads=2, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        sliding_window=window, bos_token_id=1, eos_token_id=2,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    )  # fmt: skip
    model = build(Entry("deepseek_v4", "decoder", "DeepseekV4ForCausalLM", small))
    ids = torch.randint(2, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        with attend(model, [AttentionReceived()]) as session:
            model(input_ids=ids, use_cache=False)
    assert weights[1].shape[-1] > 40
    table = session.table()
    table = table[(table.metric == "mean_weight") & table["head"].notna()]
    assert table.key_position.max() == 39
    for layer, own in enumerate(weights):
        found = table[(table.layer == layer) & (table.key_position == 3)].sort_values("head")
        seen = (own[..., 3] > 0).sum((0, 2)).double()
        expected = own[..., 3].double().sum((0, 2)) / seen.clamp(min=1)
        assert found.value.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
