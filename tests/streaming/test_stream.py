"""Streams: the tokens of generate() without its growth, text as it completes, rows, turns and what is kept."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import make_sinklm
from transformers import (
    BatchEncoding,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from sinklab import SinkCache
from sinklab.errors import ConfigurationError, InputError
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.streaming.decoding import Sampler, Sampling, TextDecoder
from sinklab.streaming.limits import fitting_policy
from sinklab.streaming.reader import open_reader
from sinklab.streaming.stream import Stream, stream

POLICY = SinkWindow(num_sinks=2, window=9)
"""12 slots: prompts of 40 tokens are longer, and 60 new tokens take every slot five times."""


@pytest.fixture(scope="module")
def model():
    """Random weights with sharp attention, in float64, so that every wrong key shows and no rounding turns a token."""
    model = make_sinklm().double()
    with torch.no_grad():
        for layer in model.layers:
            # What a head reads outweighs the token itself, which tied embeddings would make the next one.
            for name, factor in (("q_proj", 12), ("k_proj", 12), ("v_proj", 12), ("o_proj", 12)):
                getattr(layer.self_attn, name).weight.mul_(factor)
    model.generation_config = GenerationConfig(pad_token_id=1)  # no end: the tests want their tokens
    return model


@pytest.fixture(scope="module")
def prompt():
    torch.manual_seed(1)
    return torch.randint(2, 300, (1, 40))


def ids_of(tokens):
    return [token.id for token in tokens]


def generated(model, prompt, cache=None, **settings):
    found = model.generate(prompt, past_key_values=cache, max_new_tokens=60, **settings)
    return found[:, prompt.shape[1] :].tolist()


class TestTokens:
    @pytest.mark.parametrize("length", [1, 3, 12, 40])
    @pytest.mark.parametrize("chunk", [1, 7, 128])
    def test_greedy_tokens_are_those_of_generate(self, model, prompt, length, chunk):
        expected = generated(model, prompt[:, :length], SinkCache(num_sinks=2, window=9), do_sample=False)
        found = stream(model, prompt[:, :length], policy=POLICY, max_new_tokens=60, chunk=chunk)
        assert ids_of(found) == expected[0]

    def test_the_policy_matters_for_them(self, model, prompt):
        """Otherwise the equality above would say nothing."""
        bounded = ids_of(stream(model, prompt, policy=POLICY, max_new_tokens=60))
        assert bounded != ids_of(stream(model, prompt, policy=SinkWindow(num_sinks=0, window=9), max_new_tokens=60))
        assert bounded != generated(model, prompt, do_sample=False)[0]

    def test_a_policy_that_evicts_nothing_is_the_model(self, model, prompt):
        found = ids_of(stream(model, prompt, policy="full", max_new_tokens=60))
        assert found == generated(model, prompt, do_sample=False)[0]

    @pytest.mark.parametrize("settings", [{}, {"top_k": 20}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}])
    def test_draws_are_those_of_generate(self, model, prompt, settings):
        expected_settings = {"top_k": 0, "top_p": 1.0, **settings}
        torch.manual_seed(5)
        expected = generated(
            model, prompt, SinkCache(num_sinks=2, window=9), do_sample=True, temperature=0.8, **expected_settings
        )
        found = stream(model, prompt, policy=POLICY, max_new_tokens=60, temperature=0.8, seed=5, **settings)
        assert ids_of(found) == expected[0]

    @pytest.mark.parametrize("name", sorted(policies))
    def test_every_policy_streams(self, model, prompt, name):
        """A token is the likeliest behind the text so far, as a reader of the policy has it that reads that text at once."""
        small: dict[str, object] = {"window": 9, "dense": 4, "span": 24, "stride": 4}
        fields = {field.name for field in dataclasses.fields(policies[name])}
        policy = {"name": name, **{field: size for field, size in small.items() if field in fields}}
        found = ids_of(stream(model, prompt, policy=policy, max_new_tokens=15))
        text = torch.cat((prompt, torch.tensor([found])), dim=1)
        logits = open_reader(model, policy).read(text)
        assert logits[0, prompt.shape[1] - 1 : -1].argmax(dim=-1).tolist() == found

    def test_the_default_policy_fits_the_model(self, model):
        policy = fitting_policy(model)  # trained on 128 positions
        assert (policy.num_sinks, policy.window, policy.num_slots) == (4, 123, 128)
        assert fitting_policy(model, {"name": "sink_window", "window": 500}).window == 500
        assert fitting_policy(model, SinkWindow(window=500)).window == 500
        with pytest.raises(ConfigurationError, match=r"200\+1020 leaves no room for a window in the 128 tokens .* fewer sinks"):
            fitting_policy(model, {"name": "sink_window", "num_sinks": 200})

    def test_the_default_policy_fits_layers_that_slide(self):
        shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        mistral = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=1, sliding_window=64)).eval()
        source = Stream(mistral, stop_ids=()).feed([5, 6, 7])
        assert source.reader.policy.num_slots == 64
        source.generate(80)
        assert source.telemetry().evicted == (3 + 79 - 64,)
        assert fitting_policy(make_sinklm(window=32)).num_slots == 32  # whose configuration has another word for it

    def test_the_default_policy_leaves_room_for_positions_that_come_from_a_table(self):
        """Dynamic frequencies hold up to position 128: what is held and positions to count on must be below."""
        shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        llama = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=128, rope_parameters=scaling)).eval()
        source = Stream(llama, stop_ids=()).feed([5, 6, 7])
        assert source.reader.policy.num_slots == 64
        source.generate(300)
        assert source.telemetry().highest_position < 128

    def test_learned_positions_have_an_end(self):
        """In words and not as an index, which a GPU does not survive; in a padded row tokens are counted, not columns."""
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=20)).eval()
        source = Stream(model, policy="full", stop_ids=()).feed(torch.arange(15))
        assert len(source.generate(6)) == 6  # the last of them has not been read
        with pytest.raises(ConfigurationError, match="has embeddings for 20 positions, and policy 'full' is given token 21"):
            source.step()
        padded = open_reader(model, "full")
        tokens, mask = torch.ones(1, 24, dtype=torch.long), (torch.arange(24) >= 4).long()[None]
        assert padded.read(tokens, mask).isfinite().all()
        with pytest.raises(ConfigurationError, match="is given token 21"):
            padded.read(tokens[:, :1])


class TestFeeding:
    def test_text_in_the_middle_equals_one_text(self, model, prompt):
        source = Stream(model, policy=POLICY).feed(prompt[:, :10])
        first = ids_of(source.generate(6))
        source.feed(prompt[0, 10:].tolist())
        assert source.position == 46
        whole = torch.cat((prompt[:, :10], torch.tensor([first]), prompt[:, 10:]), dim=1)
        assert ids_of(source.generate(30)) == ids_of(stream(model, whole, policy=POLICY, max_new_tokens=30))

    @pytest.mark.parametrize("go_on", ["step", "read_on", "feed", "saved"])
    def test_a_prompt_that_is_left_within_is_read_on(self, model, prompt, tmp_path, go_on):
        def left(done, total):
            if done == 16:
                raise KeyboardInterrupt

        rows = [prompt[0, :31].tolist(), prompt[0, 9:14].tolist()]  # 26 columns of padding in the second
        source = Stream(model, policy=POLICY, chunk=8)
        with pytest.raises(KeyboardInterrupt):
            source.feed(rows, progress=left)
        assert (source.unread, source.position, source.reader.position) == (15, 31, 16)
        more = [[5], [6]] if go_on == "feed" else [[], []]
        if go_on == "read_on":
            said = []
            source.read_on(progress=lambda done, total: said.append((done, total)))
            assert said == [(8, 15), (15, 15)]
        elif go_on == "feed":
            source.feed(more)
        elif go_on == "saved":
            source.save(tmp_path / "state")
            source = Stream.load(tmp_path / "state", model)
            assert source.unread == 15
        whole = [row + behind for row, behind in zip(rows, more, strict=True)]
        expected = stream(model, whole, policy=POLICY, max_new_tokens=12)
        assert [token.ids for token in source.generate(12)] == [token.ids for token in expected]
        assert source.unread == 0

    def test_the_tokenizer_adds_its_tokens_once(self, model, tokenizer):
        source = Stream(model, policy=SinkWindow(num_sinks=1, window=40), tokenizer=tokenizer).feed("def f(").feed("x):")
        held = source.reader.cache.describe(tokenizer)
        assert held["text"].tolist().count("<bos>") == 1
        assert "".join(held["text"]) == "<bos>def f(x):"

    def test_a_prompt_of_a_template_brings_its_own_bos(self, model, tokenizer):
        source = Stream(model, policy=SinkWindow(num_sinks=1, window=40), tokenizer=tokenizer).feed("<bos>def f(x):")
        assert "".join(source.reader.cache.describe(tokenizer)["text"]) == "<bos>def f(x):"

    def test_a_reader_that_has_read_goes_on(self, model, tokenizer):
        reader = open_reader(model, SinkWindow(num_sinks=1, window=40))
        reader.read(torch.tensor([tokenizer("def f(")["input_ids"]]))
        source = Stream(model, policy=reader, tokenizer=tokenizer).feed("x):")
        assert "".join(source.reader.cache.describe(tokenizer)["text"]) == "<bos>def f(x):"

    def test_nothing_of_a_stream_grows(self, model, prompt):
        def numbers(source):
            tensors = [value for value in vars(source).values() if isinstance(value, torch.Tensor)]
            layers = source.reader.cache.layers
            tensors += [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
            tensors += [value for value in vars(source.reader.cache.table).values() if isinstance(value, torch.Tensor)]
            return sum(tensor.numel() for tensor in tensors)

        source = Stream(model, policy=POLICY).feed(prompt)
        source.generate(20)
        before = numbers(source)
        source.generate(300)
        assert numbers(source) == before
        assert (
            source.telemetry().bytes == 2 * 2 * (2 * 12 + 2) * 16 * 8
        )  # layers, heads, keys and values and masters, size, float64


class TestRows:
    def test_rows_of_a_batch_are_the_rows_alone(self, model, prompt):
        rows = [prompt[0, :31].tolist(), prompt[0, 9:14].tolist(), prompt[0, 3:26].tolist()]
        together = list(stream(model, rows, policy=POLICY, max_new_tokens=40))
        for row, ids in enumerate(rows):
            assert [token.ids[row] for token in together] == ids_of(stream(model, ids, policy=POLICY, max_new_tokens=40))

    def test_what_a_tokenizer_returns_is_its_ids_with_their_mask(self, model, prompt):
        padded = torch.stack((prompt[0, :12], torch.cat((torch.zeros(5, dtype=torch.long), prompt[0, :7]))))
        mask = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
        expected = [token.ids for token in Stream(model, policy=POLICY).feed(padded, mask).generate(10)]
        lists = stream(model, [prompt[0, :12].tolist(), prompt[0, :7].tolist()], policy=POLICY, max_new_tokens=10)
        assert [token.ids for token in lists] == expected
        for given in (
            BatchEncoding({"input_ids": padded, "attention_mask": mask}),
            {"input_ids": padded.tolist(), "attention_mask": mask.tolist()},
        ):
            assert [token.ids for token in Stream(model, policy=POLICY).feed(given).generate(10)] == expected
        for row in (prompt[0, :12].numpy(), [np.int64(token) for token in prompt[0, :12].tolist()]):
            assert ids_of(Stream(model, policy=POLICY).feed(row).generate(10)) == [ids[0] for ids in expected]
        with pytest.raises(InputError, match="rows of `input_ids` of one length"):
            Stream(model, policy=POLICY).feed({"input_ids": [[5, 6], [7]]})

    def test_a_row_that_has_ended_leaves_the_others_alone(self, model, prompt):
        rows = [prompt[0, :20].tolist(), prompt[0, 9:14].tolist()]
        alone = [ids_of(stream(model, ids, policy=POLICY, max_new_tokens=30)) for ids in rows]
        end = next(token for token in alone[0][3:] if token not in alone[1] and token not in alone[0][:3])
        at = alone[0].index(end)
        found = list(stream(model, rows, policy=POLICY, max_new_tokens=30, stop_ids=[end]))
        assert [token.ids[0] for token in found] == alone[0][: at + 1] + [None] * (29 - at)
        assert [token.ids[1] for token in found] == alone[1]
        assert found[at].ended == (True, False)

    def test_rows_keep_their_number(self, model, prompt):
        source = Stream(model, policy=POLICY).feed([[5, 6], [7]])
        with pytest.raises(ConfigurationError, match="the stream has 2 rows and is fed 1; begin another one"):
            source.feed(prompt)
        (token,) = source.generate(1)
        with pytest.raises(ConfigurationError, match=r"2 rows; ask for \.ids and \.texts"):
            _ = token.id


class TestEnds:
    def test_a_stop_token_ends_and_feeding_goes_on(self, model, prompt):
        tokens = ids_of(stream(model, prompt, policy=POLICY, max_new_tokens=20))
        end = tokens[8]
        source = Stream(model, policy=POLICY, stop_ids=[end]).feed(prompt)
        assert ids_of(source) == tokens[: tokens.index(end) + 1]
        assert source.ended
        assert source.last_ids == (end,)
        with pytest.raises(ConfigurationError, match=r"has ended; feed\(\) it more text"):
            source.step()
        source.feed([7, 8])
        assert len(source.generate(1)) == 1

    def test_a_stop_string_across_tokens_is_not_shown(self, tokenizer):
        decoder = TextDecoder(tokenizer, ["STOP"])
        pieces = []
        for token in (ord_id(tokenizer, sign) for sign in "aST.STSTOPx"):
            pieces.append(decoder.push(token))
            if decoder.stopped:
                break
        assert pieces == ["a", "", "", "ST.", "", "", "ST", "", "", ""]
        assert decoder.rest() == ""

    def test_the_last_token_brings_what_waits(self, model, tokenizer):
        """Random weights write bytes that are no characters, so much of the text waits for a token that does not come."""
        found = list(stream(model, "def f(x):", policy=POLICY, tokenizer=tokenizer, max_new_tokens=25))
        assert "".join(token.text for token in found) == tokenizer.decode(ids_of(found), skip_special_tokens=True)
        source = Stream(model, policy=POLICY, tokenizer=tokenizer).feed("def f(x):")
        first = "".join(token.text for token in source.generate(25))
        assert (first + source.rest()[0], source.rest()) == ("".join(token.text for token in found), ("",))


def ord_id(tokenizer, sign):
    (token,) = tokenizer(sign, add_special_tokens=False)["input_ids"]
    return token


class TestText:
    TEXT = "naïve café: 日本語のテキスト 🙂👩‍👩‍👧 done\n\tend"

    def test_characters_come_whole(self, tokenizer):
        decoder = TextDecoder(tokenizer)
        ids = tokenizer(self.TEXT, add_special_tokens=False)["input_ids"]
        assert len(ids) > len(self.TEXT)  # several tokens for a character: the case that matters
        pieces = [decoder.push(token) for token in ids]
        assert "".join(pieces) == self.TEXT
        assert not any("\ufffd" in piece for piece in pieces)

    def test_a_tokenizer_that_drops_a_space_in_front(self):
        """Sentencepiece as transformers has it: a space is part of a word's token, and bytes stand for what has no token."""
        from tokenizers import Tokenizer, decoders, models, normalizers
        from transformers import PreTrainedTokenizerFast

        words = ["<unk>", "▁the", "▁sea", "s"] + [f"<0x{byte:02X}>" for byte in range(256)]
        inner = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
        sign = [4 + byte for byte in "é🙂".encode()]
        ids = [1, 2, 3, *sign, 1, 2]
        assert tokenizer.decode(ids) == "the seasé🙂 the sea"
        decoder = TextDecoder(tokenizer)
        decoder.follow([1])
        assert [decoder.push(token) for token in ids[1:]] == [" sea", "s", "", "é", "", "", "", "🙂", " the", " sea"]

    def test_bytes_that_are_no_text_are_not_kept_for_ever(self, tokenizer):
        (first, *_) = tokenizer("é", add_special_tokens=False)["input_ids"]  # a first byte, again and again
        decoder = TextDecoder(tokenizer)
        pieces = [decoder.push(first) for _ in range(200)]
        assert 150 < sum(map(len, pieces)) <= 200
        assert len(decoder.state()["ids"]) <= 32

    def test_a_prompt_that_ends_inside_a_character(self, tokenizer):
        first, second = tokenizer("é", add_special_tokens=False)["input_ids"]
        decoder = TextDecoder(tokenizer)
        decoder.follow([*tokenizer("日a", add_special_tokens=False)["input_ids"], first])
        assert decoder.push(second) + decoder.push(ord_id(tokenizer, "b")) == "éb"


class TestKeeping:
    def test_a_kept_text_stays(self, model, tokenizer):
        kept = "KEEP THIS"
        source = Stream(model, policy=SinkWindow(num_sinks=2, window=9), tokenizer=tokenizer, keep=kept).feed(" x" * 40)
        source.generate(40)
        held = source.reader.cache.describe(tokenizer)
        size = len(tokenizer(kept)["input_ids"])
        assert source.reader.policy == SinkWindow(num_sinks=size, window=9)
        assert "".join(held.loc[held["pinned"], "text"]) == "<bos>KEEP THIS"
        assert len(held) == size + 10

    def test_it_is_the_same_as_more_sinks(self, model, prompt):
        kept, rest = prompt[0, :6].tolist(), prompt[0, 6:].tolist()
        found = ids_of(stream(model, rest, policy=POLICY, keep=kept, max_new_tokens=30))
        assert found == ids_of(stream(model, prompt, policy=SinkWindow(num_sinks=6, window=9), max_new_tokens=30))

    def test_what_does_not_fit_is_refused(self, model):
        message = (
            "100 tokens and the policy holds 301 with it; the model was trained to see 128 at once: choose a window of 27 or"
        )
        with pytest.raises(ConfigurationError, match=message):
            Stream(model, policy=SinkWindow(window=200), keep=[5] * 100)
        with pytest.raises(ConfigurationError, match="trained to see 128 at once: choose a shorter text"):
            Stream(model, keep=[5] * 130)
        with pytest.raises(ConfigurationError, match="policy 'window' cannot keep a text: it pins no tokens"):
            Stream(model, policy="window", keep=[5])
        with pytest.raises(ConfigurationError, match="this one goes on with a reader"):
            Stream(model, policy=open_reader(model, POLICY), keep=[5])


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"temperature": -1}, "temperature -1 must be 0"),
            ({"temperature": float("nan")}, "temperature nan must be 0"),
            ({"temperature": 1, "top_k": 0}, "top_k 0 must be 1 or more"),
            ({"temperature": 1, "top_p": 1.5}, "top_p 1.5 must be above 0 and at most 1"),
            ({"top_k": 5}, "top_k has no effect at temperature 0"),
            ({"top_p": 0.5}, "top_p has no effect at temperature 0"),
            ({"seed": 7}, "seed has no effect at temperature 0"),
            ({"chunk": 0}, "chunk 0 must be 1 or more"),
            ({"stop": "END"}, "stop is a list of strings"),
            ({"stop": ["END"]}, "need a tokenizer; give one, or stop_ids"),
            ({"policy": {"name": "sink_window", "window": 0}}, "window 0 must be 1 or more"),
        ],
    )
    def test_settings(self, model, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            Stream(model, **settings)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([], "there is nothing to read: a prompt needs a token or more in every row"),
            ([[5], []], "there is nothing to read"),
            (torch.zeros(1, 0, dtype=torch.long), "there is nothing to read"),
            ([5, 300], "token ids go from 5 to 300, and the model has 0 to 299"),
            (torch.zeros(1, 3), r"an integer tensor \(batch, length\); got torch.float32 of shape \(1, 3\)"),
            ("text", "text needs a tokenizer"),
            ({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 0]]}, "end with a token in every row: pad on the left"),
        ],
    )
    def test_prompts(self, model, given, message):
        with pytest.raises(InputError, match=message):
            Stream(model, policy=POLICY).feed(given)

    def test_logits_that_are_no_numbers(self):
        sampler = Sampler(Sampling(), torch.device("cpu"))
        with pytest.raises(InputError, match="NaN or infinite, so there is no next token"):
            sampler(torch.tensor([[1.0, 2.0], [0.0, float("nan")]]))


def test_the_document_runs(checkpoint, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "stream.md").read_text(encoding="utf-8").split("\n## Which policy")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(
            block.replace("embedded:softmax", str(checkpoint)).replace(
                "compile_steps(model)", "compile_steps(model, backend='eager')"
            ),
            names,
        )
    table = re.search(r"^```\n row  slot.*?^```", text, flags=re.MULTILINE | re.DOTALL)[0].splitlines()[1:-1]
    shown = names["cache"].describe().drop(columns=["id", "text"]).to_string(index=False).splitlines()
    assert [line.split() for line in shown] == [line.split() for line in table]
