"""Ask what heads do with the sink by changing them: two heads of a language model, and an image classifier from its own inputs.

python examples/find_causes.py
"""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

from sinklab import find_causes
from sinklab.studies.causes.readout import ClassLogits
from sinklab.studies.causes.samples import Samples


def main() -> None:
    found = find_causes("embedded:softmax", heads=[(1, 1), (5, 0)], texts=32, seq_len=64)
    for head in found.summary["heads"]:
        effects = {
            name: head["effects"][name]["python_source"] for name in ("redirect", "hide", "resample", "hide - zero_value")
        }
        print(f"{head['layer']}.{head['head']} {head['label']}, weight on the sink {head['sink_weight']:.2f}")
        for name, effect in effects.items():
            print(f"   {name}: {effect['mean']:+.3f} [{effect['low']:+.3f}, {effect['high']:+.3f}] nats")
    found.show()

    # Anything that runs on tensors: inputs, the positions that are scored, targets, and what is read off the outputs. These
    # weights are random, so that nothing should be found.
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = ViTForImageClassification(config)
    images, classes = torch.randn(16, 3, 16, 16), torch.arange(16) % 2
    samples = Samples({"pixel_values": images}, torch.zeros(16, 1, dtype=torch.int64), classes, ("images",))
    found = find_causes(model, samples=samples, readout=ClassLogits(), sink=0)  # position 0 is [CLS]
    print(found.summary["counts"])


if __name__ == "__main__":
    main()
