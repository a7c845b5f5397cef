"""Tokenizers of a checkpoint that are damaged, hostile, or of another model."""

from __future__ import annotations

import json

import pytest

from sinklab.errors import InputError
from sinklab.models import tokenizer as module
from sinklab.models.loading import load_model


def change(folder, edit, name="tokenizer.json"):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    edit(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def pattern(expression):
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return lambda content: content.update(pre_tokenizer=split)


def tenfold(times):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return lambda content: content.update(normalizer={"type": "Sequence", "normalizers": [step] * times})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content["added_tokens"][0].update(id="x"), r"the tokenizer of .* cannot be loaded: "),
        (
            lambda content: content["post_processor"].update(special_tokens={}),
            r"fails on a plain text: .*or remove them to go on",
        ),
        (pattern(r"(a+)+$"), r"fails on a plain text: Onig: Regex search error: retry-limit"),
        (tenfold(3), r"makes [\d,]+ tokens of 74 characters"),
    ],
    ids=["a wrong type", "a template without its token", "a pattern that never ends", "a text that grows a thousandfold"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_that_explodes(own_checkpoint, edit, message, capfd):
    change(own_checkpoint, edit)
    with pytest.raises(InputError, match=message) as raised:
        load_model(str(own_checkpoint))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_hangs_is_given_up(own_checkpoint, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    change(own_checkpoint, tenfold(4))  # a quarter of a second
    with pytest.raises(InputError, match=r"does not come to an end: it has been reading 74 characters for 0\.01 s"):
        load_model(str(own_checkpoint))


def test_more_added_tokens_than_the_model_could_know(own_checkpoint):
    token = json.loads((own_checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"][0]
    change(
        own_checkpoint,
        lambda content: content["added_tokens"].extend(token | {"id": 1000 + n, "content": f"<{n}>"} for n in range(5000)),
    )
    with pytest.raises(InputError, match=r"tokenizer\.json adds 5,002 tokens, and the model's embedding has 300 rows"):
        load_model(str(own_checkpoint))


def test_ids_that_the_model_does_not_have(own_checkpoint):
    change(
        own_checkpoint,
        lambda content: content["model"].update(vocab={word: 7 * number for word, number in content["model"]["vocab"].items()}),
    )
    encoder = load_model(str(own_checkpoint)).encoder
    with pytest.raises(InputError, match=r"gives token \d+, and the model's embedding has 300 rows"):
        encoder.encode("return self")


def test_a_limit_that_is_no_number(own_checkpoint):
    change(own_checkpoint, lambda content: content.update(model_max_length="x"), "tokenizer_config.json")
    with pytest.raises(InputError, match=r"tokenizer_config\.json cannot be used: model_max_length is 'x', no number"):
        load_model(str(own_checkpoint))


def test_a_bos_token_beyond_the_embedding_is_none(own_checkpoint):
    change(own_checkpoint, lambda content: content.update(bos_token="<new>"), "tokenizer_config.json")
    encoder = load_model(str(own_checkpoint)).encoder
    assert encoder.tokenizer.bos_token_id >= encoder.rows == 300
    assert encoder.bos_token_id == 0  # what the config says
