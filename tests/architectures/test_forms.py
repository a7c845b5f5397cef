"""The forms in which attention arrives: precisions, autocast, masks made by the user, static caches, beams, chunked prefill."""

import pandas
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sinklab.attention.call import LayerOutput
from sinklab.attention.forward import Forward, read_positions
from sinklab.attention.host_arguments import read_mask
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.attention.visibility import Dense
from sinklab.errors import MeasurementError, UnsupportedModelError
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.key_norm import KeyNorm
from sinklab.probes.sink_rate import SinkRate
from sinklab.probes.value_norm import ValueNorm

from .harness import Recorded, Recorder, assert_identical, forward, recorded, tensors
from .zoo import LENGTH, MEASURED, PADDING, ZOO, Entry, batch_of, build, model_of, shape

BACKENDS = ("eager", "sdpa")


@pytest.mark.parametrize(
    ("entry", "backend", "dtype"),
    [
        pytest.param(entry, backend, dtype, id=f"{entry.id}-{backend}-{dtype}")
        for entry in MEASURED
        if entry.id in ("llama", "gemma2", "gpt_oss", "granite_swa", "bert", "t5", "vit", "swin")
        for backend in entry.backends
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        if (entry.id, dtype) != ("gpt_oss", torch.float64)  # the expert layer of transformers does not multiply float64
    ],
)
def test_precisions_are_verified_within_their_own_rounding(entry: Entry, backend: str, dtype: torch.dtype) -> None:
    model = build(entry, backend).to(dtype)
    # Unpadded: in float64 transformers' eager softmax gives NaN for the fully hidden rows of padding.
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch_of(entry).items()}
    before = forward(model, batch)
    with attend(model, probes=[Recorder()], verify=True) as session:
        assert_identical(forward(model, batch), before)
    assert 0 <= session.checks["largest_error"] < 1
    assert session.checks["calls_verified"] == entry.calls


@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, backend) for family in ("llama", "gpt2", "t5", "gpt_oss") for backend in ZOO[family].backends],
)
def test_autocast(family: str, backend: str) -> None:
    model = model_of(family, backend)
    recorder = Recorder()

    def run() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(model, batch_of(ZOO[family], padded=True))

    before = run()
    with attend(model, probes=[recorder], verify=True):
        assert_identical(run(), before)
    for record in recorder.records:
        # Measuring is not rounded to half precision: what a probe computes inside is what it computes outside, and rows add
        # up as float32 rows do (ten terms of at most one).
        assert torch.equal(record.weights, record.call.weights(0, record.call.q_len))
        assert record.weights.dtype == torch.float32
        assert record.statistics.row_mass is not None
        assert record.statistics.null_mass is not None
        total = (record.statistics.row_mass + record.statistics.null_mass)[record.call.counted[:, None].expand(-1, 4, -1)]
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_of_the_user_with_a_head_axis(backend: str) -> None:
    visible = torch.ones(LENGTH, LENGTH).tril().bool().repeat(2, 4, 1, 1)
    visible[:, 1, 3:, 2] = False
    lowest = torch.finfo(torch.float32).min
    mask = visible if backend == "sdpa" else torch.zeros(visible.shape).masked_fill(~visible, lowest)
    model = model_of("llama", backend)
    batch = {"input_ids": batch_of(ZOO["llama"])["input_ids"], "attention_mask": mask}
    before, recorder = forward(model, batch), Recorder()
    with attend(model, probes=[recorder], verify=True):
        assert_identical(forward(model, batch), before)
    for record in recorder.records:
        assert torch.equal(record.weights > 0, visible)
        assert record.call.query_positions.tolist() == [list(range(LENGTH))] * 2


def additive(visible: Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(-1e9, torch.float32), (-1e4, torch.float32), (-1e4, torch.bfloat16), (-float("inf"), torch.float32)]
)
def test_whatever_number_hides_a_key_in_a_mask_of_the_user(hidden: float, dtype: torch.dtype, backend: str) -> None:
    visible = torch.ones(LENGTH, LENGTH).tril().bool().repeat(2, 1, 1, 1)
    visible[:, :, 3:, 2] = False
    model = build(ZOO["llama"], backend).to(dtype)
    batch = {"input_ids": batch_of(ZOO["llama"])["input_ids"], "attention_mask": additive(visible, hidden, dtype)}
    for record in recorded(model, batch):
        assert torch.equal(record.call.visible.block(0, LENGTH, 0, LENGTH), visible)
        assert record.call.bias is None


def test_layoutlm_has_one_row_of_its_mask_for_every_query() -> None:
    entry = Entry("layoutlm", "encoder", "LayoutLMModel", shape())
    model, batch = build(entry), batch_of(entry, padded=True)
    with torch.no_grad():
        expected = model(**batch, output_attentions=True).attentions
    for record, weights in zip(recorded(model, batch), expected, strict=True):
        counted = record.call.counted[:, None, :, None]
        assert ((record.weights - weights) * counted).abs().max() < 1e-5
        assert (record.call.query_positions[1, -PADDING:] == -1).all()


@pytest.mark.parametrize("backend", ZOO["swin"].backends)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_shift_of_swin_hides_and_its_bias_stays(backend: str, dtype: torch.dtype) -> None:
    """After a shift, windows at the lower and right edge hold patches of up to four regions, which do not see each other."""
    entry = ZOO["swin"]
    model = build(entry, backend).to(dtype)
    batch = {name: value.to(dtype) for name, value in batch_of(entry).items()}
    for index, record in enumerate(recorded(model, batch)):
        windows = len(record.call.queries)
        side = int((windows // 2) ** 0.5)  # of two images
        region = torch.zeros(2, side, side, 2, 2)
        if index % 2:  # every second block is shifted by one patch in windows of 2 × 2
            region[:, -1, :, 1, :] += 1
            region[:, :, -1, :, 1] += 2
        region = region.reshape(windows, 4)
        visible = (region[:, :, None] == region[:, None])[:, None]
        assert torch.equal(record.call.visible.block(0, 4, 0, 4).expand(windows, -1, -1, -1)[:, :1], visible)
        assert record.call.bias is not None
        assert float(record.call.bias.abs().max()) < 50  # and no -100
        assert record.statistics.column_count is not None
        assert record.statistics.column_count[:, 0].expand(windows, 4).tolist() == visible[:, 0].sum(1).tolist()


def _alibi(slope: float, length: int = LENGTH) -> Tensor:
    return -slope * (torch.arange(length)[:, None] - torch.arange(length)).abs()[None, None].float()


LOWEST = torch.finfo(torch.float32).min
LATE = torch.ones(LENGTH, LENGTH).tril().bool()[None, None]
T5 = torch.randn(1, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) * 30
BLOCKS = (torch.arange(LENGTH)[:, None] // 5 == torch.arange(LENGTH) // 5)[None, None]


@pytest.mark.parametrize(
    ("mask", "hidden"),
    [
        pytest.param(additive(LATE, -100.0), ~LATE, id="two values"),
        pytest.param(additive(LATE, -88.0, torch.bfloat16), ~LATE, id="two values in bfloat16"),
        pytest.param(additive(LATE, LOWEST) + additive(BLOCKS, -100.0), ~(LATE & BLOCKS), id="two values behind a causal mask"),
        pytest.param(
            T5 / 30 + additive(torch.cat([BLOCKS, BLOCKS | True]), -100.0), torch.cat([~BLOCKS, BLOCKS & False]), id="on a bias"
        ),
        pytest.param(additive(LATE, -80.0), None, id="two values of which none hides"),
        pytest.param(_alibi(1.0, 512), None, id="alibi"),
        pytest.param(_alibi(100.0), None, id="alibi in large steps"),
        pytest.param(torch.cat([_alibi(1.0), _alibi(1.0) - 100.0]), None, id="alibi from another key"),
        pytest.param(T5, None, id="relative bias"),
        pytest.param(torch.cat([T5, T5 * 2]), None, id="relative bias of every sample"),
        pytest.param(torch.full((1, 1, LENGTH, LENGTH), -100.0), None, id="one number everywhere"),
        pytest.param(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.long), None, id="whole numbers"),
    ],
)  # fmt: skip
def test_one_number_hides_and_a_bias_does_not(mask: Tensor, hidden: Tensor | None) -> None:
    q_len, kv_len = mask.shape[-2:]
    rule, bias = read_mask(mask, {}, torch.nn.Module(), "eager", q_len, kv_len, torch.device("cpu"))
    if hidden is None:
        assert rule.block(0, q_len, 0, kv_len).all()
        assert bias is not None
        assert torch.equal(bias, mask)
    else:
        assert torch.equal(rule.block(0, q_len, 0, kv_len).expand_as(mask), ~hidden.expand_as(mask))
        left = mask.masked_fill(hidden, 0.0)
        assert bias is None if not left.any() else bias is not None and torch.equal(bias, left)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_mask_of_the_user_is_what_no_query_sees(side: str, backend: str) -> None:
    """In front it may see itself: the diagonal is left open so that no row of a softmax is empty, and what stands there alone
    is no document of one token. Or the row is opened to everything, as transformers does it.
    """
    tokens = torch.ones(2, LENGTH, dtype=torch.bool)
    tokens[1, slice(0, PADDING) if side == "left" else slice(LENGTH - PADDING, LENGTH)] = False
    visible = torch.ones(LENGTH, LENGTH).tril().bool() & tokens[:, None, None]
    masks = [tokens.long(), additive(visible, LOWEST)]
    if side == "left":
        opened = visible | torch.eye(LENGTH, dtype=torch.bool), visible | ~visible.any(-1, keepdim=True)
        masks += [additive(mask, LOWEST) for mask in opened]
    tables = []
    for mask in masks:
        with attend(model_of("llama", backend), probes=[SinkRate(), AttentionReceived()], verify=True) as session:
            forward(session.model, {"input_ids": batch_of(ZOO["llama"])["input_ids"], "attention_mask": mask})
        tables.append(session.table())
    for table in tables[1:]:
        pandas.testing.assert_frame_equal(tables[0], table)


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        ([[1, 1, 1], [0, 1, 0], [0, 1, 1]], [True, False, False]),
        ([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 1, 1]], [True, True, False, False]),
        ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], [False] * 3),  # causal, without any
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], [False] * 3),  # in both directions
        ([[1, 1, 1], [1, 1, 0], [1, 1, 1]], [False] * 3),  # the first one is seen by all
        ([[1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]], [False] * 4),  # one reads all, and the others both ways
        ([[1, 1, 0], [1, 1, 0], [1, 1, 1]], [False] * 3),  # a prefix
    ],
)
def test_what_sees_everything_in_front_of_causal_rows_is_padding(mask: list[list[int]], padding: list[bool]) -> None:
    length = len(mask)
    seen, given = Dense(torch.tensor([[mask]], dtype=torch.bool)), Forward(masked_by_caller=True)
    of_queries, of_keys = read_positions(
        None, seen, given, (1, length, length), cross=False, position_ids=None, device=torch.device("cpu")
    )
    assert [position < 0 for position in of_queries.positions[0].tolist()] == padding
    assert torch.equal(of_queries.positions, of_keys.positions)


def test_tokens_that_are_all_alone_are_documents() -> None:
    mask = torch.eye(LENGTH, dtype=torch.bool).expand(2, 1, -1, -1)
    for record in recorded(
        model_of("llama", "sdpa"), {"input_ids": batch_of(ZOO["llama"])["input_ids"], "attention_mask": mask}
    ):
        assert record.call.query_positions.tolist() == [[0] * LENGTH] * 2


def test_packed_rows_of_a_mask_of_the_user_may_end_in_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 0]])
    document = torch.tensor([0] * 4 + [1] * 3 + [2] * 3)
    visible = (document[:, None] == document).tril() & (document < 2)[:, None]
    recorder = Recorder()
    with attend(model_of("llama", "sdpa"), probes=[recorder], verify=True):
        forward(
            model_of("llama", "sdpa"),
            {
                "input_ids": batch_of(ZOO["llama"])["input_ids"][:1],
                "attention_mask": visible[None, None],
                "position_ids": positions,
            },
        )
    for record in recorder.records:
        assert record.call.query_positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, -1, -1, -1]]
        assert record.call.key_documents.tolist() == [[0] * 4 + [1] * 3 + [-1] * 3]


PACKED = torch.tensor([[0] * 4 + [1] * 6, [-1] * 2 + [0] * 3 + [1] * 5])
"""Document of every token of two rows; the second one begins with padding."""


@pytest.mark.parametrize("positions", ["none", "restarting", "running on"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_that_a_mask_of_the_user_keeps_apart_are_documents(backend: str, positions: str) -> None:
    """Whether or not the position ids say so: the numbers are those of the documents one by one."""
    visible = ((PACKED[:, :, None] == PACKED[:, None]).tril() & (PACKED >= 0)[:, None])[:, None]
    restarting = torch.tensor([[*range(4), *range(6)], [0, 0, *range(3), *range(5)]])
    ids = {"none": {}, "restarting": {"position_ids": restarting}, "running on": {"position_ids": torch.arange(LENGTH)[None]}}
    tokens, probes = batch_of(ZOO["llama"])["input_ids"], [SinkRate(0.2), AttentionReceived()]
    model = model_of("llama", backend)
    with attend(model, probes=[recorder := Recorder(), *probes], verify=True) as packed:
        forward(model, {"input_ids": tokens, "attention_mask": additive(visible, LOWEST), **ids[positions]})
    for record in recorder.records:
        assert torch.equal(record.call.key_documents, PACKED)
        assert torch.equal(record.call.query_positions, restarting.masked_fill(PACKED < 0, -1))
    with attend(model, probes=[SinkRate(0.2), AttentionReceived()], verify=True) as alone:
        for row, document in ((0, 0), (0, 1), (1, 0), (1, 1)):
            forward(model, {"input_ids": tokens[row, PACKED[row] == document][None]})
    one, other = (session.table().query("probe != 'recorder'").reset_index(drop=True) for session in (packed, alone))
    # Rotated by other angles, scores agree to the last digits of float32, and weights with them.
    pandas.testing.assert_frame_equal(one, other, rtol=1e-4, atol=1e-5)


def test_documents_of_an_encoder_are_kept_apart_both_ways() -> None:
    visible, recorder = (PACKED[:1, :, None] == PACKED[:1, None])[:, None], Recorder()
    with attend(model_of("bert", "sdpa"), probes=[recorder], verify=True):
        model_of("bert", "sdpa")(batch_of(ZOO["bert"])["input_ids"], visible.expand(2, -1, -1, -1))  # by its place
    for record in recorder.records:
        assert torch.equal(record.call.key_documents, PACKED[:1].expand(2, -1))


@pytest.mark.parametrize("kind", ["window", "prefix seen by two branches", "causal"])
def test_masks_that_keep_nothing_apart_are_one_document(kind: str) -> None:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    branch = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    visible = {
        "causal": distance >= 0,
        "window": (distance >= 0) & (distance < 2),
        "prefix seen by two branches": (distance >= 0) & ((branch == 0) | (branch[:, None] == branch)),
    }[kind]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]]) if "prefix" in kind else None
    batch = {"input_ids": batch_of(ZOO["llama"])["input_ids"], "attention_mask": visible.expand(2, 1, -1, -1)}
    for record in recorded(model_of("llama", "sdpa"), {**batch, "position_ids": positions}):
        assert record.call.query_positions.tolist() == [list(range(LENGTH))] * 2
        assert record.call.query_documents.tolist() == [[0] * LENGTH] * 2


def test_a_boolean_mask_that_eager_adds_is_named() -> None:
    model = model_of("llama", "eager")
    visible = torch.ones(LENGTH, LENGTH).tril().bool().repeat(2, 1, 1, 1)
    with pytest.raises(MeasurementError, match=r"Its mask is boolean, which eager attention .* give an additive mask"):  # noqa: SIM117
        with attend(model, verify=True):
            forward(model, {"input_ids": batch_of(ZOO["llama"])["input_ids"], "attention_mask": visible})


def generated(family: str, backend: str, padded: bool = True, **options: object) -> list[Recorded]:
    model, recorder = model_of(family, backend), Recorder()
    batch = {name: value for name, value in batch_of(ZOO[family], padded=padded).items() if not name.startswith("decoder")}

    def run() -> Tensor:
        return model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)

    before = run()
    with attend(model, probes=[recorder], verify=True):
        assert torch.equal(run(), before)
    return recorder.records


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_static_cache(family: str, backend: str, padded: bool) -> None:
    """generate() builds the masks of a static cache before the forward; positions must be those of the growing cache.

    Without padding all rows share one mask, of which the model is handed a copy.
    """
    static = generated(family, backend, padded, cache_implementation="static")
    growing = generated(family, backend, padded)
    assert len(static) == len(growing) == 2 * 4
    for one, other in zip(static, growing, strict=True):
        assert one.site == other.site
        assert one.call.cached_keys == other.call.cached_keys
        assert torch.equal(one.call.query_positions, other.call.query_positions)
        for row in range(2):
            found, expected = (
                {
                    position: weight
                    for position, weight in zip(
                        record.call.key_positions[row].tolist(), record.weights[row, :, -1].T, strict=True
                    )
                    if position >= 0 and weight.sum() > 0
                }
                for record in (one, other)
            )
            assert found.keys() == expected.keys()
            for position, weight in expected.items():
                # float32 with keys in another order and shape.
                torch.testing.assert_close(found[position], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_empty_slots_of_a_static_cache_are_no_tokens(family: str, backend: str) -> None:
    """Nobody gives a mask that would end before them: their keys and values of 0 went into norms, behind the last token."""
    model, tokens = model_of(family, backend), batch_of(ZOO[family])["input_ids"]
    length, tables = tokens.shape[1], []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=length + 5)):
        recorder, probes = Recorder(), [KeyNorm(), ValueNorm()]
        with attend(model, probes=[recorder, *probes]) as session:
            for start, stop in ((0, 3), (3, length - 1), (length - 1, length)):
                places = torch.arange(start, stop).expand(len(tokens), -1)
                forward(model, {"input_ids": tokens[:, start:stop], "past_key_values": cache, "position_ids": places})
        for record in recorder.records:
            assert int(record.call.key_positions.max()) == int(record.call.query_positions.max())
        tables.append(session.table()[["probe", "module", "head", "key_position", "value", "count"]])
    assert len(tables[0]) == len(tables[1])
    pandas.testing.assert_frame_equal(tables[0], tables[1], rtol=1e-4)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_static_cache_of_an_encoder_decoder(family: str, padded: bool) -> None:
    """Cross-attention goes on, too, where the mask of the self-attention before it was built before the forward."""
    padded &= family != "whisper"
    static = generated(family, "sdpa", padded, cache_implementation="static")
    growing = generated(family, "sdpa", padded)
    for one, other in zip(static, growing, strict=True):
        assert one.site == other.site
        assert torch.equal(one.call.query_positions, other.call.query_positions)
        assert one.call.cached_keys == other.call.cached_keys


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_mask_of_the_user_goes_on_with_a_cache(kind: type[Cache]) -> None:
    """The host builds no mask then that would say where the queries begin; the cache does."""
    model, tokens = model_of("llama", "sdpa"), batch_of(ZOO["llama"])["input_ids"]
    tables = []
    with attend(model, probes=[AttentionReceived()]) as session:
        forward(model, {"input_ids": tokens})
    tables.append(session.table())
    recorder, seen, room = Recorder(), torch.ones(LENGTH, LENGTH).tril().bool(), LENGTH + 3
    cache = kind(config=model.config) if kind is DynamicCache else kind(config=model.config, max_cache_len=room)
    with attend(model, probes=[recorder, AttentionReceived()]) as session:
        for start, stop in ((0, 4), (4, LENGTH - 1), (LENGTH - 1, LENGTH)):
            mask = torch.nn.functional.pad(seen[start:stop], (0, room - LENGTH))[:, : stop if kind is DynamicCache else room]
            places = torch.arange(start, stop).expand(len(tokens), -1)
            batch = {"input_ids": tokens[:, start:stop], "past_key_values": cache, "position_ids": places}
            forward(model, {**batch, "attention_mask": mask.expand(len(tokens), 1, -1, -1)})
            call = recorder.records[-1].call
            assert call.query_positions[0].tolist() == list(range(start, stop))
            assert [place for place in call.key_positions[0].tolist() if place >= 0] == list(range(stop))
            assert call.cached_keys == start
    tables.append(session.table().query("probe == 'attention_received'").reset_index(drop=True))
    pandas.testing.assert_frame_equal(tables[0], tables[1], rtol=1e-4)


def test_a_function_of_the_user_s_own_is_causal_where_its_mask_function_says_so() -> None:
    """``sdpa_mask`` gives no mask where the kernel can be causal by itself; nothing in the name of the function says that."""

    def mine(*args: object, **kwargs: object) -> tuple[Tensor, None]:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", sdpa_mask)
    try:
        model, batch = build(ZOO["llama"], "sdpa"), {"input_ids": batch_of(ZOO["llama"])["input_ids"]}
        model.set_attn_implementation("mine")
        before, recorder = forward(model, batch), Recorder()
        with attend(model, probes=[recorder], verify=True):
            assert_identical(forward(model, batch), before)
    finally:
        del AttentionInterface._global_mapping["mine"], AttentionMaskInterface._global_mapping["mine"]
    assert all(not weights.triu(1).any() for weights in (record.weights for record in recorder.records))


def test_beams_keep_padding_apart() -> None:
    last = generated("llama", "sdpa", num_beams=3)[-1]
    assert last.call.key_positions[:3, 0].tolist() == [0, 0, 0]
    assert last.call.key_positions[3:, :PADDING].tolist() == [[-1] * PADDING] * 3
    assert (last.weights[3:, :, :, :PADDING] == 0).all()


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_prefill_in_chunks(family: str, backend: str, padded: bool) -> None:
    """The second chunk sees what the same queries see in one go, under the same positions."""
    model, batch = model_of(family, backend), batch_of(ZOO[family], padded)
    recorder, whole = Recorder(), Recorder()
    start = 6
    with attend(model, probes=[recorder], verify=True), torch.no_grad():
        first = model(
            input_ids=batch["input_ids"][:, :start], attention_mask=batch["attention_mask"][:, :start], use_cache=True
        )
        model(
            input_ids=batch["input_ids"][:, start:],
            attention_mask=batch["attention_mask"],
            past_key_values=first.past_key_values,
            use_cache=True,
        )
    with attend(model, probes=[whole], verify=True):
        forward(model, batch)
    for chunk, full in zip(recorder.records[2:], whole.records, strict=True):
        assert chunk.site == full.site
        assert torch.equal(chunk.call.query_positions, full.call.query_positions[:, start:])
        kept = chunk.call.kv_len
        assert torch.equal(chunk.call.key_positions, full.call.key_positions[:, LENGTH - kept :])
        torch.testing.assert_close(chunk.weights, full.weights[:, :, start:, LENGTH - kept :], rtol=1e-4, atol=1e-5)
        assert (full.weights[:, :, start:, : LENGTH - kept] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_padding_of_the_decoder_is_not_padding_of_the_encoder(family: str, backend: str) -> None:
    batch = batch_of(ZOO[family])
    batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    batch["decoder_attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["decoder_attention_mask"][1, LENGTH - PADDING :] = 0
    whole, short = list(range(LENGTH)), [*range(LENGTH - PADDING), *[-1] * PADDING]
    for record in recorded(model_of(family, backend), batch):
        decoder, cross = "decoder" in record.site.module, record.site.kind == "cross"
        assert record.call.query_positions[1].tolist() == (short if decoder else whole)
        assert record.call.key_positions[1].tolist() == (short if decoder and not cross else whole)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_padding_given_by_position(family: str) -> None:
    batch, recorder = batch_of(ZOO[family], padded=True), Recorder()
    model = model_of(family, "sdpa")
    with attend(model, probes=[recorder], verify=True), torch.no_grad():
        tensors(model(batch["input_ids"], batch["attention_mask"]))
    for record in recorder.records:
        assert (record.call.key_positions[1] == -1).tolist() == (batch["attention_mask"][1] == 0).tolist()


def test_each_tower_keeps_its_own_backend() -> None:
    model = build(ZOO["clip"], {"text_config": "eager", "vision_config": "sdpa"})
    batch = batch_of(ZOO["clip"], padded=True)
    before = forward(model, batch)
    with attend(model, probes=[Recorder()], verify=True) as session:
        assert_identical(forward(model, batch), before)
    assert session.calls.total() == 4


def test_block_masks_are_refused() -> None:
    blocks = create_block_mask(lambda batch, head, query, key: query >= key, 2, None, LENGTH, LENGTH, device="cpu")
    tokens = batch_of(ZOO["llama"])["input_ids"]
    with (
        pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn .* BlockMask.*sdpa"),
        attend(model_of("llama", "sdpa"), probes=[Recorder()]),
    ):
        forward(model_of("llama", "sdpa"), {"input_ids": tokens, "attention_mask": blocks})


def test_inner_model_and_embeddings_as_input() -> None:
    model = model_of("llama", "sdpa")
    batch = batch_of(ZOO["llama"], padded=True)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    with attend(model.model, probes=[Recorder()], verify=True) as session:
        forward(model, {"inputs_embeds": embeddings, **batch})
    assert session.calls == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma2", "deepseek_v3"])
def test_longer_sequences_stay_within_the_tolerance(family: str) -> None:
    longest = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    tokens = torch.randint(4, 40, (1, 300), generator=torch.Generator().manual_seed(3))
    for backend in ZOO[family].backends:
        model = build(ZOO[family], backend, **longest)
        with attend(model, probes=[], verify=True) as session:
            forward(model, {"input_ids": tokens})
        assert session.checks["calls_verified"] == 2
        # `eager` is the same products in the same order, and may come out to the bit.
        assert (0 if backend == "eager" else 1e-12) <= session.checks["largest_error"] < 0.5


class _Products(Watcher):
    """Products of the hidden states with themselves: what autocast would round."""

    name = "products"
    needs = frozenset({"hidden_states", "attention_outputs"})

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor, Tensor]] = []

    def update_layer(self, output: LayerOutput) -> None:
        states = output.hidden_states.float()
        self.seen.append((output.kind, states, states @ states.transpose(1, 2)))


def test_autocast_does_not_round_what_probes_compute_of_hidden_states() -> None:
    probe = _Products()
    with attend(model_of("llama", "sdpa"), probes=[probe]), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(model_of("llama", "sdpa"), batch_of(ZOO["llama"]))
    assert {kind for kind, _, _ in probe.seen} == {"layer", "attention"}
    for _, states, products in probe.seen:
        assert torch.equal(products, states @ states.transpose(1, 2))
