"""Try every causal language model of the installed transformers at toy size: measured, bounded, refused.

``make sweep`` writes the table of docs/architectures.md; ``python tools/families.py llama jamba`` prints what becomes of some,
and ``all`` of all (``make test-versions`` on a release that is newer than the tested one).
Measured: attention of every module, proved against its own head outputs, and equal to the weights that the model returns.
Bounded: logits of a text of 40 tokens in a cache of 2 sinks and 9 tokens are those of the published rule, computed slowly, and
before anything is evicted those without a cache. Needs the repository: the slow rule is that of the tests.
"""

from __future__ import annotations

import collections
import inspect
import json
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import transformers  # noqa: E402
from tests.streaming import decoders  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from sinklab.attention.anatomy import over_depth  # noqa: E402
from sinklab.attention.probe import Probe  # noqa: E402
from sinklab.attention.returned import attend_returned  # noqa: E402
from sinklab.attention.session import attend  # noqa: E402
from sinklab.errors import SinklabError  # noqa: E402
from sinklab.results.blocks import counted  # noqa: E402
from sinklab.results.table import write_text  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
LARGEST = 20_000_000
"""Parameters of a toy: a family with more has sizes that are not named here."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), decoders.VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size", "decoder_ffn_dim", "dim_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "intermediate_size_mlp", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"), 256),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "dim_head", "index_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_shared_experts"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads", "num_kv_shared_layers"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "mamba_d_conv", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **{"qk_rope_head_dim": 4, "v_head_dim": 8, "mamba_expand": 2, "mamba_d_ssm": 64, "index_topk": 3, "laurel_rank": 4},
    **{"rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "is_decoder": True},
    **{"attention_chunk_size": 16, "rnn_hidden_size": 32, "lru_width": 32, "expert_ffn_hidden_size": 16, "emb_dim": 32},
    **{"image_size": 32, "crop_size": 28, "num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
    **{"depthwise_separable_out_channel": 32, "hidden_size_global": 32, "encoder_hash_byte_group_vocab": 48},
    "sliding_window": decoders.SINKS + decoders.WINDOW + 1,
}  # fmt: skip
"""Fields of configs, wherever a family has them."""

TURNS = ["linear_attention", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {
    "jamba": decoders.RECURRENT["Jamba"][1],
    "bamba": {"attn_layer_indices": [1, 3]},
    "zamba2": decoders.RECURRENT["Zamba2"][1],
    "granitemoehybrid": decoders.RECURRENT["GraniteMoeHybrid"][1],
    "lfm2": decoders.RECURRENT["Lfm2"][1],
    "olmo_hybrid": decoders.RECURRENT["OlmoHybrid"][1],
    "lfm2_moe": decoders.RECURRENT["Lfm2"][1],
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "dots3_note_text": {
        **{"num_key_value_heads": 4, "head_dim": 12, "shared_experts_intermediate_size": 16},
        **{"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "moshi": {"audio_vocab_size": decoders.VOCAB},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding", "full")},
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "roc_bert": {"shape_vocab_size": 48, "pronunciation_vocab_size": 48, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "attention_head_size": 8, "feed_forward_size": 48},
    "kimi_linear": {"layer_types": TURNS},
    "bailing_hybrid": {"layer_types": TURNS},
    "qwen4_exp_text": {
        **{"layer_types": TURNS, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2},
    },
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 1},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
}
"""Of families to which the sizes above do not suffice."""

DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Families that cannot be tried alone: they draft for another model, and attend to its keys."""


def families() -> dict[str, str]:
    """Model type to class, each class once, of those that transformers calls causal language models."""
    named = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if "Conditional" not in name}
    first: dict[str, str] = {}
    for kind, name in named.items():
        if name not in first or getattr(transformers, name).config_class is CONFIG_MAPPING[kind]:
            first[name] = kind
    return {kind: name for name, kind in first.items() if kind not in DRAFTS}


def sized(config_class: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a config is made with, those within it included; ``own`` of a family comes before :data:`SIZES`."""
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map.values()}
    known |= {field for base in config_class.__mro__ for field in getattr(base, "__annotations__", {})}
    sizes = {field: size for field, size in SIZES.items() if field in known}
    if "kv_lora_rank" in sizes:  # latent attention, which has a key of each head
        sizes = {field: size for field, size in sizes.items() if field != "head_dim"} | {"num_key_value_heads": 4}
    for field, inner in config_class.sub_configs.items():
        part = own.get(field, {})
        inner = CONFIG_MAPPING[part["model_type"]] if "model_type" in part else inner
        if hasattr(inner, "attribute_map"):  # AutoConfig says nothing
            sizes[field] = {**sized(inner, part), **part}
    return {**sizes, **{field: value for field, value in own.items() if field not in config_class.sub_configs}}


def build(kind: str, name: str) -> Any:
    """A seeded toy model in evaluation mode, on eager attention, with weights large enough that attention is not even."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**sized(model_class.config_class, OWN.get(kind, {})))
    with torch.device("meta"):
        outline = model_class._from_config(config, attn_implementation="eager")
    size = sum(parameter.numel() for parameter in outline.parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for field, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in field and "conv1d" not in field:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
            elif field.endswith(".temp"):  # a scale of keys (Zaya), 0 at first
                parameter.fill_(1.0)
    return model


class Received(Probe):
    """Mean weights by module, as the model itself returns them, to compare."""

    name, needs, metrics = "received", frozenset({"columns"}), ()

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self.sinks = False

    def update(self, call: Any, statistics: Any) -> None:
        self.sums.append(statistics.column_sum)
        self.sinks |= call.sink_scores is not None

    def rows(self) -> Iterator[Any]:
        return iter(())


def measured(model: Any) -> str:
    """How its attention is seen: in full, from returned weights, or why not."""
    ids, probe = decoders.text(32), Received()
    try:
        with torch.no_grad(), attend(model, [probe]) as session:
            model(input_ids=ids, use_cache=False)
    except SinklabError as error:
        try:
            with torch.no_grad(), attend_returned(model, [Received()]) as session:
                model(input_ids=ids, use_cache=False)
        except SinklabError:
            return f"refused: {reason(error)}"
        return "second tier"
    with torch.no_grad():
        weights = getattr(model(input_ids=ids, use_cache=False, output_attentions=True), "attentions", None) or ()
    returned = [one.sum(2) for one in weights if isinstance(one, torch.Tensor) and one.ndim == 4]
    if len(returned) == len(probe.sums) and all(a.shape == b.shape for a, b in zip(returned, probe.sums, strict=True)):
        worst = max(float((a - b).abs().max() / ids.shape[1]) for a, b in zip(returned, probe.sums, strict=True))
        # Granite SWA returns the weights in front of its sink logit; they are proved by the head outputs.
        if worst > 1e-5 and not probe.sinks:
            return f"WRONG: weights differ from the model's by {worst:.1e}"
    notes = [f"{counted(len(session.off_seam), 'module')} off the interface"] if session.off_seam else []
    notes += ["depth apart"] if over_depth(model) else []
    return "in full" + "".join(f", {note}" for note in notes)


def bounded(model: Any) -> str:
    """Whether a bounded cache gives the logits of the published rule, or why it refuses the model."""
    tokens, begin = decoders.text(40), decoders.text(decoders.SINKS + decoders.WINDOW + 1)
    try:
        dense = decoders.gap(decoders.read(model, begin), model(input_ids=begin, use_cache=False).logits)
        pieces = decoders.gap(decoders.read(model, tokens, pieces=(19, 1, 1, 7, 12)), decoders.one_by_one(model, tokens))
    except SinklabError as error:
        return f"no: {reason(error)}"
    worst, against = max(dense, pieces), "itself"
    try:
        worst = max(worst, decoders.gap(decoders.one_by_one(model, tokens), decoders.slow_logits(model, tokens, 2, 9)))
        against = "the rule"
    except Exception as error:  # the slow rule of the tests knows fewer caches
        print(f"    not compared with the slow rule: {type(error).__name__}: {str(error)[:150]}")
    scale = float(model(input_ids=tokens, use_cache=False).logits.std())
    return "yes" if worst < 1e-3 * max(scale, 1.0) else f"WRONG: {worst:.1e} from {against}, logits of {scale:.2g}"


REASONS = (
    (r"learned or sinusoidal embeddings", "positions in hidden states"),
    (r"bias that counts", "a bias that counts keys"),
    (r"encoder-decoder", "encoder–decoder"),
    (r"sees later tokens", "sees later tokens"),
    (r"takes no cache", "takes no cache"),
    (r"takes no position_ids", "takes no position ids"),
    (r"does not rotate its keys by", "keys that positions do not rotate alone"),
    (r"does not run one token", "does not run with a cache of transformers"),
    (r"no layer of attention|no attention that could", "no attention"),
    (r"layers of the kind ([\w, ]+);", r"\1"),
    (r"a cache of its own|makes its own cache", "a cache of its own"),
    (r"own code|no attention call was seen|ran without calling the attention interface", "attention in its own code"),
    (r"write no keys to the cache", "layers that write no keys"),
    (r"sees no key at all", "queries without a key"),
    (r"several decoders", "several decoders in one"),
)


def reason(error: Exception) -> str:
    """A refusal in a few words."""
    text = " ".join(str(error).split())
    for pattern, words in REASONS:
        if match := re.search(pattern, text):
            return match.expand(words)
    return re.sub(r"^\w+(ForCausalLM|Model|Head) ", "", text)[:110]


def tried(kind: str, name: str) -> dict[str, str]:
    """What becomes of one family."""
    try:
        with torch.no_grad():
            model = build(kind, name)
            model(input_ids=decoders.text(8), use_cache=False)
    except Exception as error:
        return {"built": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    found = {}
    for question in (measured, bounded):
        try:
            with torch.no_grad():
                found[question.__name__] = question(model)
        except Exception as error:
            found[question.__name__] = f"ERROR: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return found


def listed(names: Iterable[str]) -> str:
    """Names as the page has them."""
    return ", ".join(f"`{one}`" for one in names)


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Families with one outcome in one row, the largest first."""
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for kind, outcome in found.items():
        if "built" not in outcome:
            groups[outcome["measured"], outcome["bounded"]].append(kind)
    lines = ["| families | measured | bounded cache |", "|---|---|---|"]
    for (seen, cache), names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        lines.append(f"| {len(names)}: {listed(names)} | {seen} | {cache} |")
    lines += ["", f"Not tried: {listed(DRAFTS)}, which draft for another model and attend to its keys."]
    if left := [kind for kind, outcome in found.items() if "built" in outcome]:
        lines[-1] += f" Not built at toy size: {listed(left)}."
    return "\n".join(lines)


def main(wanted: list[str]) -> int:
    """Try families, all by default, and write the page; the number of those with a wrong number or an error."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for kind, name in families().items():
        if wanted not in ([], ["all"]) and kind not in wanted:
            continue
        begin = time.process_time()
        found[kind] = tried(kind, name)
        seconds = time.process_time() - begin
        print(f"{kind}: {json.dumps(found[kind], ensure_ascii=False)} {seconds:.1f} s", flush=True)
    bad = [kind for kind, outcome in found.items() if any(re.match("WRONG|ERROR", words) for words in outcome.values())]
    if not wanted:
        text = PAGE.read_text(encoding="utf-8")
        head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
        write_text(f"{head}{BEGIN}\n\n{table(found)}\n\n{END}{tail}", PAGE)
    print(f"{len(found)} families with transformers {transformers.__version__}; wrong or failed: {', '.join(bad) or 'none'}")
    return len(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
