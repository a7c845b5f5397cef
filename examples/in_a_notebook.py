"""In a notebook: every head on one text, an audit, its numbers as a table, and weights that transformers has returned.

The cells run in VS Code and Jupyter (jupytext) as they stand, and as a script: python examples/in_a_notebook.py [MODEL]
"""

# %% What loads the model: a name, a directory or a hub id; its tokenizer comes along.
import sys

import sinklab

MODEL = sys.argv[1] if len(sys.argv) > 1 else "embedded:softmax"
TEXT = "import os\n\n\ndef join(folder, name):\n    return os.path.join(folder, name)\n"
loaded = sinklab.load_model(MODEL)

# %% Every head on this text; as the last expression of a cell it draws itself.
view = sinklab.show(loaded, TEXT)
print(view)

# %% How often the heads do it: the sink, where it holds, and a page.
result = sinklab.audit(loaded, quick=True)
for sink in result.summary["sinks"]["sinks"]:
    print(f"{sink['name']}, mostly {sink['text']!r}: {sink['rate']:.1f} % of samples and heads")

# %% The rate of every head on the first key, layer × head, out of the long table.
table = result.table.query("metric == 'gu2024' and key_position == 0 and layer.notna()")
table = table[(table["corpus"] == result.summary["corpus"]) & (table["bos"] == result.summary["bos"])]
print(table.pivot_table(index="layer", columns="head", values="value").round(1))

# %% Weights that generate() has returned, of any library.
eager = sinklab.load_model(MODEL, attn_implementation="eager")
batch = eager.tokenizer(TEXT, return_tensors="pt").to(eager.device)
output = eager.model.generate(**batch, max_new_tokens=8, do_sample=False, output_attentions=True, return_dict_in_generate=True)
print(sinklab.from_weights(output.attentions))
