"""The page on cache policies: its example runs, and its table names every policy."""

import re
from pathlib import Path

import sinklab
from sinklab.registry import policies

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(program, names)
    tokens = sinklab.load_model("embedded:softmax").tokenizer("import os\n", return_tensors="pt")["input_ids"]
    made = names["model"].generate(tokens, past_key_values=names["cache"], max_new_tokens=3, do_sample=False)
    assert made.shape[1] == tokens.shape[1] + 3
    assert names["reader"].read(tokens).shape[:2] == tokens.shape
    assert names["reader"].telemetry().policy == "4+4×30"


def test_every_policy_has_a_row():
    table = PAGE.split("## What goes with what")[1].split("## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", table)) >= set(policies)
