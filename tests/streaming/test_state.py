"""Saved states: going on from a file is going on, bit for bit, and a file that does not fit is refused."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import make_sinklm
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import SinkCache
from sinklab.errors import ConfigurationError, InputError
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.decoding import Sampling
from sinklab.streaming.reader import open_reader
from sinklab.streaming.state import load_state, save_state
from sinklab.streaming.stream import Stream
from sinklab.streaming.traits import fingerprint

POLICY = SinkWindow(num_sinks=2, window=9)


@pytest.fixture(scope="module")
def model():
    return make_sinklm()


@pytest.fixture
def prompt():
    torch.manual_seed(1)
    return torch.randint(2, 300, (1, 30))


def equal(one, two):
    return one.dtype == two.dtype and torch.equal(one, two)


class TestGoingOn:
    @pytest.mark.parametrize(
        "policy",
        [
            POLICY,
            SinkWindow(num_sinks=0, window=5),
            SinkWindow(num_sinks=3, window=4, positions="original"),
            Pinned(pinned=(1, 8)),
        ],
        ids=["2+9", "no sinks", "original positions", "pinned"],
    )
    @pytest.mark.parametrize("before", [1, 4, 30])
    def test_the_same_logits(self, model, prompt, policy, before, tmp_path):
        reader = open_reader(model, policy)
        reader.read(prompt[:, :before])
        save_state(reader, tmp_path / "state")
        loaded = load_state(tmp_path / "state", model)
        assert loaded.position == before
        assert loaded.policy == policy
        assert loaded.telemetry() == reader.telemetry()
        assert loaded.cache.describe().equals(reader.cache.describe())
        for piece in ([5], [6], [7, 8, 9], [10]):
            assert equal(loaded.read(torch.tensor([piece])), reader.read(torch.tensor([piece])))

    def test_rows_with_padding(self, model, prompt, tmp_path):
        reader = open_reader(model, POLICY)
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, :13] = 0
        reader.read(prompt[0, :20].expand(2, -1), mask)
        save_state(reader, tmp_path / "state")
        loaded = load_state(tmp_path / "state", model)
        for _ in range(15):
            given = torch.tensor([[5], [6]])
            assert equal(loaded.read(given), reader.read(given))
        assert loaded.telemetry().seen == (35, 22)

    def test_bfloat16(self, prompt, tmp_path):
        model = make_sinklm().to(torch.bfloat16)
        reader = open_reader(model, POLICY)
        reader.read(prompt)
        save_state(reader, tmp_path / "state")
        loaded = load_state(tmp_path / "state", model)
        assert loaded.cache.layers[0].keys.dtype == torch.bfloat16
        assert loaded.cache.layers[0].masters.dtype == torch.float32
        assert equal(loaded.read(prompt[:, :3]), reader.read(prompt[:, :3]))


class TestStreams:
    @pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 50, "seed": 3}], ids=["greedy", "drawn"])
    @pytest.mark.parametrize("tokens", [0, 1, 25])
    def test_the_same_tokens_and_text(self, model, prompt, tokenizer, settings, tokens, tmp_path):
        source = Stream(model, policy=POLICY, tokenizer=tokenizer, stop_ids=(), **settings).feed(prompt)
        if tokens:
            source.generate(tokens)
        source.save(tmp_path / "state")
        loaded = Stream.load(tmp_path / "state", model, tokenizer=tokenizer)
        assert loaded.position == source.position
        assert loaded.generate(40) == source.generate(40)
        assert loaded.rest() == source.rest()

    def test_rows_of_which_one_has_ended(self, model, prompt, tmp_path):
        rows = [prompt[0, :20].tolist(), prompt[0, :3].tolist()]
        tokens = Stream(model, policy=POLICY, stop_ids=()).feed(rows).generate(10)
        end = next(token.ids[0] for token in tokens if token.ids[0] not in [other.ids[1] for other in tokens])
        source = Stream(model, policy=POLICY, stop_ids=[end]).feed(rows)
        while True:
            if source.step().ended[0]:
                break
        source.save(tmp_path / "state")
        loaded = Stream.load(tmp_path / "state", model)
        found = loaded.generate(5)
        assert found == source.generate(5)
        assert found[0].ids[0] is None

    def test_settings_come_back_and_may_change(self, model, prompt, tokenizer, tmp_path):
        settings = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "stop": ["END"], "stop_ids": [4], "chunk": 9}
        Stream(model, policy=POLICY, tokenizer=tokenizer, **settings).feed(prompt).save(tmp_path / "state")
        loaded = Stream.load(tmp_path / "state", model, tokenizer=tokenizer)
        assert (loaded.stop, loaded.stop_ids, loaded.chunk) == (("END",), {4}, 9)
        assert loaded._sampler.sampling.top_p == 0.9
        changed = Stream.load(tmp_path / "state", model, tokenizer=tokenizer, temperature=0.0, stop=[])
        assert changed._sampler.sampling == Sampling()  # what was said of draws has no effect any more
        assert changed.stop == ()

    def test_errors(self, model, prompt, tmp_path):
        with pytest.raises(ConfigurationError, match="the stream has read nothing yet"):
            Stream(model, policy=POLICY).save(tmp_path / "state")
        reader = open_reader(model, POLICY)
        reader.read(prompt)
        save_state(reader, tmp_path / "state")
        Stream(model, policy=POLICY).feed(prompt).save(tmp_path / "stream")
        with pytest.raises(ConfigurationError, match="policy cannot change a stream that goes on; begin another one"):
            Stream.load(tmp_path / "stream", model, policy="window")
        with pytest.raises(InputError, match=r"the state of a cache and not of a stream; load it with load_state\(\)"):
            Stream.load(tmp_path / "state", model)


class TestRefusals:
    @staticmethod
    def written(path, change):
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["sinklab_state"])
        change(record)
        save_file(load_file(path), path, {"sinklab_state": json.dumps(record)})

    def flipped(self, path):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1  # in a key: the file is as well-formed as before
        path.write_bytes(content)

    DAMAGES = (
        *(
            (lambda self, path, kept=kept: path.write_bytes(path.read_bytes()[:kept]), "is cut short or no safetensors file")
            for kept in (0, 5, 200, -1)
        ),
        (lambda self, path: path.unlink(), "there is no state at .*; save one first"),
        (lambda self, path: save_file({"a": torch.zeros(1)}, path), "is no saved state but another safetensors file"),
        (lambda self, path: self.written(path, lambda record: record.update(format=99)), r"has format 99 .* reads format 5"),
        (flipped, "is damaged: its SHA-256 is not that of what was written"),
        (lambda self, path: self.written(path, lambda record: None), "is damaged: its SHA-256"),
    )

    @pytest.mark.parametrize(("damage", "said"), DAMAGES)
    def test_a_file_that_cannot_be_read(self, model, saved, damage, said):
        damage(self, saved)
        with pytest.raises((InputError, ConfigurationError), match=said):
            load_state(saved, model)

    def test_another_model(self, saved):
        trained = make_sinklm()
        with torch.no_grad():
            for weight in trained.parameters():
                weight.mul_(1.001)
        llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        )
        for other, said in (
            (trained, r"weights and config \w+, and this is a SinkLM in .*; load the model that it was written with"),
            (make_sinklm().to(torch.bfloat16), r"a SinkLM in torch.float32 .*, and this is a SinkLM in torch.bfloat16"),
            (llama, "a SinkLM in .*, and this is a LlamaForCausalLM"),
        ):
            with pytest.raises(InputError, match=said):
                load_state(saved, other)

    @pytest.fixture
    def saved(self, model, prompt, tmp_path):
        reader = open_reader(model, POLICY)
        reader.read(prompt)
        save_state(reader, tmp_path / "state")
        return tmp_path / "state"

    def test_nothing_to_save(self, model, tmp_path):
        with pytest.raises(ConfigurationError, match="has read nothing yet"):
            save_state(open_reader(model, POLICY), tmp_path / "state")
        with pytest.raises(ConfigurationError, match="has read nothing yet"):
            save_state(SinkCache(model), tmp_path / "state")
        for policy in ("full", "recompute"):
            reader = open_reader(model, policy)
            reader.read(torch.tensor([[5, 6]]))
            with pytest.raises(ConfigurationError, match=f"policy '{policy}' keeps no cache of slots"):
                save_state(reader, tmp_path / "state")

    def test_a_failed_write_leaves_the_old_file(self, model, prompt, saved, monkeypatch):
        before = saved.read_bytes()
        reader = open_reader(model, POLICY)
        reader.read(prompt[:, :3])

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_state(reader, saved, overwrite=True)
        assert saved.read_bytes() == before
        assert [path.name for path in saved.parent.iterdir()] == ["state"]


def test_the_fingerprint_does_not_depend_on_where_a_model_lies(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert fingerprint(again) == fingerprint(model)
