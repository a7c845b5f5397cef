"""One convention: whatever takes a model takes its name, its directory, itself and what load_model gives, said alike."""

import inspect
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import sinklab
from sinklab.errors import ELSEWHERE, InputError
from sinklab.models.loading import OPTIONS

TEXT = "import os\n\n\ndef read(path):\n    return open(path).read()\n"
FEW = {"samples": 4, "seq_len": 16}
IDS = torch.arange(2, 34).view(2, 16)

TAKES = {
    "audit": lambda model, **how: sinklab.audit(model, quick=True, **FEW, **how).summary["sinks"],
    "measure": lambda model, **how: sinklab.measure(model, probes=["entropy"], **FEW, **how).table["value"].tolist(),
    "find_origin": lambda model, **how: sinklab.find_origin(model, **FEW, **how),
    "quantize": lambda model, **how: sinklab.quantize(model, schemes=["w8a16"], calibration=2, **FEW, **how),
    "show": lambda model, **how: sinklab.show(model, TEXT, **how),
    "Stream": lambda model, **how: [token.id for token in sinklab.Stream(model, **how).feed(TEXT).generate(3)],
    "stream": lambda model, **how: [token.text for token in sinklab.stream(model, TEXT, max_new_tokens=3, **how)],
    "Chat": lambda model, **how: [token.id for token in sinklab.Chat(model, **how).say("Read a file.").generate(3)],
}
"""Public functions that run a model by themselves."""

HELD = {
    "SinkCache": lambda model: sinklab.SinkCache(model, window=8).policy,
    "PolicyCache": lambda model: sinklab.PolicyCache(sinklab.SinkCache().policy, model).policy,
    "open_reader": lambda model: sinklab.open_reader(model, "sink_window").read(IDS).sum(),
    "find_sinks": lambda model: sinklab.find_sinks(model, [TEXT, TEXT[:20]]),
    "attend": lambda model: sinklab.attend(model).__enter__(),
    "attend_returned": lambda model: sinklab.attend_returned(model),
}
"""Those that look at, or serve, a model that somebody else runs: named ones are refused, unless nobody else need run it."""

OTHERS = {"PretrainingConfig", "attach", "find_causes", "fold_sinks", "load_state", "save_model", "wrap_model"}
"""They change, write or load a model, or have the mark of a command, which :func:`test_commands_say_it_alike` looks at."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A directory with a model of random weights and the tokenizer of the embedded one."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = sinklab.load_model("embedded:softmax").tokenizer
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, max_position_embeddings=512, **shape)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def test_every_public_name_that_takes_a_model_is_here():
    takes = {name for name in sinklab.__all__ if callable(one := getattr(sinklab, name)) and not name.startswith("_")
             and "model" in inspect.signature(one).parameters}  # fmt: skip
    assert takes == TAKES.keys() | HELD.keys() | OTHERS
    assert takes >= {"audit", "show", "attend", "SinkCache"}


LONG = {"quantize", "find_origin", "stream"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in LONG)) for name in TAKES])
def test_a_model_is_taken_in_every_form(name, small):
    call, theirs = TAKES[name], AutoModelForCausalLM.from_pretrained(small)
    loose = LlamaForCausalLM(theirs.config)  # as one that was made in memory: nothing says where its tokenizer is
    loose.load_state_dict(theirs.state_dict())
    loose.name_or_path = loose.config.name_or_path = ""
    results = [call(os.fspath(small)), call(Path(small)), call(sinklab.load_model(small)), call(theirs)]
    results += [call(loose, tokenizer=AutoTokenizer.from_pretrained(small)), call(loose, tokenizer=os.fspath(small))]
    results += [call(os.fspath(small.parent), subfolder="model", local_files_only=True, dtype=torch.float32, device="cpu")]
    if isinstance(results[0], (list, str, dict)):
        assert all(result == results[0] for result in results)
    call(os.fspath(small), dtype="bf16")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'torch_dtype'; here that is `dtype`"):
        call(small, torch_dtype=torch.float32)


@pytest.mark.parametrize("name", HELD)
def test_what_load_model_gives_is_taken_where_a_model_is_held(name, small):
    HELD[name](sinklab.load_model(small, attn_implementation="eager"))
    if name != "open_reader":
        with pytest.raises(InputError, match="is the name of a model; load it first"), HELD[name](os.fspath(small)):
            pass


def test_commands_say_it_alike():
    for name in ("audit", "find_causes", "find_origin", "fold_sinks", "measure", "quantize"):
        assert inspect.signature(getattr(sinklab, name)).parameters.keys() >= OPTIONS | {"tokenizer"}, name


@pytest.mark.parametrize(("theirs", "ours"), [("window_length", "window"), ("num_sink_tokens", "num_sinks")])
def test_names_of_other_libraries_are_answered_with_ours(theirs, ours):
    assert ELSEWHERE[theirs] == ours
    with pytest.raises(TypeError, match=rf"SinkCache\(\) got an unexpected keyword argument '{theirs}'; here that is `{ours}`"):
        sinklab.SinkCache(**{theirs: 4})
