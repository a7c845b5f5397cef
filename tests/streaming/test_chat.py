"""Chat templates as tokenizers have them: what is read is what they write, and what they write anew is read again."""

import copy

import pytest
import torch
from tests.conftest import real

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.loading import load_model
from sinklab.streaming.chat import Chat
from sinklab.streaming.stream import Stream

TURN = "{{ raise_exception('turns must alternate') if (m.role == 'user') != (loop.index0 % 2 == 0) }}"
"""In a loop over turns without a system message."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{{ bos_token if loop.first }}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_31 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + TURN + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}" + TURN + "{% if m.role == 'user' %}[INST] "
    "{{ system + '\n\n' if system is defined and loop.last }}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
DROPS = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
)
OPENED = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
"""It begins the thoughts of the answer to come, and leaves them out of those that are over."""

EVERY = {
    "ChatML": CHATML, "Llama 3": LLAMA_3, "Llama 3.1": LLAMA_31, "Gemma": GEMMA, "Mistral": MISTRAL, "drops": DROPS,
}  # fmt: skip
SYSTEM, TURNS, ANSWERS = "be brief", ("one", "two", "three", "four"), (" ok ", "well", "</p>", "yes")
EXPECTED = {
    "Gemma": "<bos><start_of_turn>user\nbe brief\n\none<end_of_turn>\n<start_of_turn>model\n ok <end_of_turn>\n<start",
    "Mistral": "<bos>[INST] be brief\n\none[/INST] ok <eos>[INST] two[/INST]well<eos>[INST] three[/INST]",
    "drops": "<user>be brief\n\none<assistant> ok <user>two",
    "Llama 3": "<bos><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|><|start_header_id|>user<|end_header_id|>",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    fields = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return SinkLM(SinkLMConfig(**fields, max_position_embeddings=2048)).double().eval()


def templated(tokenizer, template: str):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


class Told:
    """A conversation whose answers are given, and all the ids that are read in it."""

    def __init__(self, chat: Chat, monkeypatch) -> None:
        self.chat, self.read = chat, []
        original = Stream._read

        def noted(source, ids, valid):
            self.read.extend(ids[0].tolist())
            return original(source, ids, valid)

        monkeypatch.setattr(Stream, "_read", noted)

    def exchange(self, turn: str, answer: str) -> None:
        self.chat.say(turn)
        self.answer(self.chat.tokenizer(answer, add_special_tokens=False)["input_ids"])

    def answer(self, ids: list[int]) -> None:
        rest = iter(ids)
        self.chat.stream._sampler = lambda logits: torch.tensor([next(rest)])
        self.chat.stream.generate(len(ids))

    @property
    def text(self) -> str:
        return self.chat.tokenizer.decode(self.read)


TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


class TestChat:
    @pytest.fixture
    def plain(self, tokenizer):
        return templated(tokenizer, TEMPLATE)

    @pytest.mark.parametrize("end", [True, False], ids=["the model ends its turn", "its turn is cut"])
    def test_turns_are_the_conversation(self, model, plain, end, monkeypatch):
        """What has been read after three turns is what the template makes of all of them, with the model's own words."""
        chat = Chat(model, system="be brief", tokenizer=plain, stop_ids=[1], policy={"name": "sink_window", "window": 80})
        answer = [token for sign in "ok" for token in plain(sign, add_special_tokens=False)["input_ids"]] + [1] * end
        told, messages = Told(chat, monkeypatch), [{"role": "system", "content": "be brief"}]
        for turn in ("one", "two", "three"):
            chat.say(turn)
            told.answer(answer)
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "ok"}]
        whole = plain.apply_chat_template(messages, tokenize=False)
        # The last answer is given out and not read; its last token, and what the template puts behind, are not there yet.
        assert whole.startswith(told.text)
        assert whole[len(told.text) :] == ("<eos>\n" if end else "k<eos>\n")

    def test_a_template_that_wants_a_user_keeps_its_head_too(self, model, plain):
        plain.chat_template = "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no user') }}{% endif %}" + TEMPLATE
        chat = Chat(model, system="be brief", tokenizer=plain)
        chat.say("hello").generate(1)
        held = chat.stream.reader.cache.describe(plain)
        assert "".join(held.loc[held["pinned"], "text"]) == "<bos>system\nbe brief<eos>\n<bos>user\n"

    def test_a_template_without_a_system_message_is_refused(self, model, plain):
        """Where it takes none in front of the first turn either."""
        plain.chat_template = "{% for m in messages %}{{ raise_exception('no role') }}{% endfor %}"
        with pytest.raises(ConfigurationError, match=r"refuses the messages \(user\): no role"):
            Chat(model, system="be brief", tokenizer=plain)
        plain.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
        with pytest.raises(ConfigurationError, match="leaves the system message out, also in front of the first turn"):
            Chat(model, system="be brief", tokenizer=plain)

    def test_without_a_template_turns_are_plain(self, model, tokenizer, monkeypatch):
        chat = Chat(model, system="be brief", tokenizer=tokenizer, policy={"name": "sink_window", "window": 80})
        assert chat.stream.stop == ("\nUser:",)
        script = [*tokenizer("ok\nUser:", add_special_tokens=False)["input_ids"]]
        tokens = iter(script)
        source = chat.say("one")
        monkeypatch.setattr(source, "_sampler", lambda logits: torch.tensor([next(tokens)]))
        assert "".join(token.text for token in source) == "ok"
        chat.say("two")
        held = source.reader.cache.describe(tokenizer)
        assert "".join(held.sort_values("token")["text"]) == ("<bos>be brief\n\nUser: one\nAssistant:ok\nUser: two\nAssistant:")


@pytest.mark.parametrize("name", EVERY)
def test_every_token_is_read_once(model, tokenizer, name, monkeypatch):
    """As the template writes it, with the model's own words, and the system message in front, pinned."""
    chat = Chat(model, system=SYSTEM, tokenizer=templated(tokenizer, EVERY[name]), stop_ids=(), policy="sink_window:window=900")
    told = Told(chat, monkeypatch)
    for turn, answer in zip(TURNS, ANSWERS, strict=True):
        told.exchange(turn, answer)
    assert chat.rereads == 0
    assert chat.stream.position == len(told.read) + 1  # the last token of the last answer is not read yet
    assert EXPECTED.get(name, "") in told.text
    cells = chat.stream.reader.cache.describe(chat.tokenizer)
    pinned = "".join(cells.loc[cells["pinned"], "text"])
    assert told.text.startswith(pinned)
    assert SYSTEM in pinned
    assert TURNS[0] not in pinned
    assert told.text.count(SYSTEM) == 1
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, answer in zip(TURNS, ANSWERS, strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    if name in ("ChatML", "Llama 3", "Llama 3.1"):
        whole = chat.tokenizer.apply_chat_template(messages, tokenize=False)
        assert "".join(whole.split()).startswith("".join(told.text.split()))  # white space around an answer is trimmed or not


@pytest.mark.parametrize(("template", "thought"), [(THOUGHTS, "<think>hm</think>\n"), (OPENED, "")])
def test_what_is_written_anew_is_read_again(model, tokenizer, template, thought, monkeypatch):
    """From the second turn on the stream is that of somebody who was given the whole conversation as it is written now."""
    tokenizer = templated(tokenizer, template)
    chat = Chat(model, system=SYSTEM, tokenizer=tokenizer, stop_ids=(), policy="sink_window:window=40")
    told, messages = Told(chat, monkeypatch), [{"role": "system", "content": SYSTEM}]
    for number, turn in enumerate(TURNS):
        messages.append({"role": "user", "content": turn})
        told.read.clear()
        chat.say(turn)
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert told.text == written
        assert chat.rereads == number
        fresh = Chat(model, system=SYSTEM, tokenizer=tokenizer, stop_ids=(), policy="sink_window:window=40").stream
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        fresh.feed(ids[len(tokenizer(chat._kept, add_special_tokens=False)["input_ids"]) :])
        assert torch.equal(chat.stream._logits, fresh._logits)
        answer = f"{thought}answer {number}"
        told.answer(tokenizer(answer, add_special_tokens=False)["input_ids"])
        messages.append({"role": "assistant", "content": answer})


def test_another_day(model, tokenizer, monkeypatch):
    """A date in the head changes: the conversation is read again, and what is pinned is what was pinned."""
    chat = Chat(model, system=SYSTEM, tokenizer=templated(tokenizer, LLAMA_31), stop_ids=(), policy="sink_window:window=900")
    told = Told(chat, monkeypatch)
    told.exchange("one", "ok")
    chat.tokenizer.chat_template = LLAMA_31.replace("26 Jul", "27 July")
    told.read.clear()
    told.exchange("two", "ok")
    assert chat.rereads == 1
    assert "26 Jul\n\nbe brief<|eot_id|><|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>" in told.text
    assert "27" not in told.text
    cells = chat.stream.reader.cache.describe(chat.tokenizer)
    assert "".join(cells.loc[cells["pinned"], "text"]).endswith("be brief<|eot_id|>")
    told.exchange("three", "ok")
    assert chat.rereads == 1


def test_errors(model, tokenizer):
    for settings, said in (
        ({"tokenizer": tokenizer, "keep": "x"}, "what a conversation keeps is its system message"),
        ({}, "a conversation needs a tokenizer"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Chat(model, **settings)
    with pytest.raises(InputError, match="the turn is empty"):
        Chat(model, tokenizer=tokenizer).say("  ")


@pytest.mark.real
@pytest.mark.parametrize("name", ["ChatML", "Llama 3", "Gemma", "Mistral"])
def test_a_tokenizer_of_a_real_checkpoint(name, monkeypatch):
    """A SentencePiece vocabulary, whose pieces begin with spaces: turns are read once, and the answer goes on from them."""
    loaded = load_model(real("tiny1m"))
    loaded.tokenizer.chat_template = EVERY[name]
    chat = Chat(loaded.model, system="Once upon a time", tokenizer=loaded.tokenizer, policy="sink_window:window=100")
    told = Told(chat, monkeypatch)
    for turn in ("A little girl.", "And then?", "Why?"):
        chat.say(turn).generate(12)
    assert chat.rereads == 0
    assert chat.stream.position == len(told.read) + 1
    assert told.text.count("Once upon a time") >= 1
    assert told.text.index("A little girl.") < told.text.index("And then?") < told.text.index("Why?")
