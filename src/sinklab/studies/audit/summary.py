"""From what was measured under every condition to what an audit found."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from sinklab.attention.anatomy import attending_layers, layers_without_attention, over_depth
from sinklab.attention.call import Part
from sinklab.corpora._reading import Reading
from sinklab.corpora.samples import Samples
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import HIDDEN_SHARE, LossKind, guess_warning, loss_kind
from sinklab.models.positions import length_warnings
from sinklab.results.blocks import counted, front_warning, head_numbering
from sinklab.results.intervals import mean_interval
from sinklab.results.sections import from_json
from sinklab.sinks import Sinks
from sinklab.sinks.finder import enough_documents
from sinklab.studies.audit.found import AuditFound, Condition, FrontWorth, Grouped, Places, SinksFound, finding, worth_words

SUMMARY_VERSION = 1

LONGEST_FINDING = 160


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """One corpus with or without BOS, and what was measured under it; of an encoder–decoder by part, else of part "".

    Attributes:
        losses: mean loss of each sample, float64 ``(samples,)``; ``None`` where none is taken.
        candidates: of each attention module the positions up to the last one that half of the queries see.
        windowed: attention modules in which fewer than half of the queries see the first position, and all of them.
        longest: tokens of the longest sample in which half of the queries see it in each of these; ``None`` without any.
    """

    corpus: str
    bos: bool
    loss: float | None
    losses: Tensor | None
    table: pd.DataFrame
    token_sha256: str
    samples: int
    sinks: Mapping[Part, Sinks]
    candidates: Mapping[Part, Mapping[str, int]]
    windowed: Mapping[Part, tuple[int, int]]
    longest: Mapping[Part, int | None]


def summarize(
    loaded: LoadedModel,
    conditions: Sequence[Measured],
    samples: Samples,
    *,
    threshold: float,
    reading: Reading | None,
    normalized: bool,
    off_seam: list[str],
    seed: int,
    tier: str | None = None,
    missing: Mapping[str, str] | None = None,
) -> AuditFound:
    """What an audit found; the first condition is the main one, which the samples are of.

    ``tier`` says where the weights come from, if not from the attention interface; ``missing`` are probes that it does not
    serve.
    """
    main, kind = conditions[0], loss_kind(loaded.model)
    parts = [_found(part, conditions, threshold, _query_group(loaded)) for part in main.sinks]
    first = {field.name: getattr(parts[0], field.name) for field in dataclasses.fields(SinksFound)}
    if parts[0].part:
        first |= {"part": "", "finding": " ".join(part.finding for part in parts)}
    # A hidden token is guessed from both sides, and a target from its source: neither is a code of the text.
    bits = reading.bits_per_byte(main.loss) if reading and main.loss is not None and kind == "next token" else None
    warnings = (
        "" if reading is None else reading.warning,
        *length_warnings(loaded.model, samples, threshold),
        guess_warning(loaded.model, main.loss),
        front_warning(loaded.operation, next(iter(main.sinks.values())).front),
        f"{type(loaded.model).__name__} predicts hidden tokens, and its tokenizer has no mask token to hide them with: no loss."
        if kind == "masked token" and main.loss is None
        else "",
    )
    found = AuditFound(
        **first, summary_version=SUMMARY_VERSION, model=loaded.name, revision=loaded.revision, operation=loaded.operation,
        loss=main.loss, loss_kind=kind, loss_definition=_loss_definition(loaded, kind, seed), bits_per_byte=bits,
        front_worth=_front_worth(conditions), warnings=[warning for warning in warnings if warning],
        samples_definition=samples.definition, normalized=normalized, corpus=main.corpus, bos=int(main.bos),
        bos_name=loaded.encoder.bos_name or "", kind=samples.kind, samples=len(samples), threshold=threshold,
        seq_len=next(iter(main.sinks.values())).seq_len if samples.tokens is None else samples.tokens.shape[1],
        off_seam_modules=off_seam, layers_without_attention=layers_without_attention(loaded.model.config),
        tier=tier, not_measured=dict(missing or {}), parts=parts if parts[0].part else [],
        notes=list(_notes(loaded, normalized, tier)),
    )  # fmt: skip
    both = f"{found.finding} {worth_words(found)}"
    return dataclasses.replace(found, finding=both) if worth_words(found) and len(both) <= LONGEST_FINDING else found


def _found(part: Part, conditions: Sequence[Measured], threshold: float, group_size: int) -> SinksFound:
    """What was found of a part of an encoder–decoder, or of all self-attention."""
    main, sinks = conditions[0], conditions[0].sinks[part]
    table, strongest = _of_part(main.table, part), sinks.main
    windowed, modules = main.windowed[part]
    found = SinksFound(
        part=part, sink_layers=_layers(sinks), grouped=_grouped(sinks, group_size, main.samples),
        sinks=from_json(Places, sinks.to_dict(), "sinks"), sink_rate_gu2024=float(_rates(table)[0]),
        candidate_positions=max(main.candidates[part].values(), default=0),
        candidates_by_module=dict(main.candidates[part]), windowed_modules=windowed, num_modules=modules,
        longest_sample=main.longest[part], sink_heads=(strongest.sinking or 0) if strongest else 0,
        sink_role="null score" if strongest is not None and strongest.kind == "null" else sinks.describe(),
        sink_heads_by_weight=sinks.heads_by_weight, num_heads=len(sinks.heads),
        first_token_mean_weight=_mean(table, "attention_received", "mean_weight", 0),
        null_mass=_mean(table, "null_mass", "null_mass"), definitions=_definitions(table),
        conditions=[_condition(condition, part) for condition in conditions],
    )  # fmt: skip
    return dataclasses.replace(found, finding=finding(found, threshold))


def _of_part(table: pd.DataFrame, part: Part) -> pd.DataFrame:
    return table[table["part"] == part] if part else table


def _loss_definition(loaded: LoadedModel, kind: LossKind | None, seed: int) -> str | None:
    """What the loss is taken of, in words; ``None`` for a model without one."""
    mask = getattr(loaded.tokenizer, "mask_token", None)
    definitions: dict[LossKind, str] = {
        "next token": "cross-entropy of the next token",
        "masked token": f"masked-LM loss, cross-entropy of {100 * HIDDEN_SHARE:g} % of the tokens of each sample, all hidden "
        f"by {mask}, seed {seed}; attention is measured on the samples as they are",
        "target token": "cross-entropy of the tokens of the target, given those before them and the source",
        "class": "cross-entropy of the class",
    }
    return None if kind is None else definitions[kind]


def _notes(loaded: LoadedModel, normalized: bool, tier: str | None) -> Iterator[str]:
    """What one must know to read the numbers."""
    if not normalized:
        yield f"Rows of {loaded.operation} do not sum to one: rates are taken on rows divided by their sum."
    if tier:
        yield (
            "Its attention does not go through the attention interface of transformers. Proved: unchanged outputs, a tensor of "
            "weights for every attention module, rows that sum to one, causality; not that these weights made the outputs. In "
            "place of scores, maps show the logarithm of the weights."
        )
    if depth := over_depth(loaded.model):
        yield (
            f"Attention over earlier blocks, whose keys are no tokens, is a part of its own, depth, with its own rates "
            f"(depth_weight, depth_rate): {counted(len(depth), 'module')}."
        )
    if others := layers_without_attention(loaded.model.config):
        kinds = ", ".join(f"{count} of kind {kind}" for kind, count in others.items())
        yield f"Without attention weights: {counted(sum(others.values()), 'layer')} ({kinds})."
        if numbering := head_numbering(*attending_layers(loaded.model.config)):
            yield numbering


def _front_worth(conditions: Sequence[Measured]) -> FrontWorth | None:
    """What the loss gains from what stands in front, on the texts that were read both with it and without."""
    main = conditions[0]
    other = next((one for one in conditions[1:] if one.corpus == main.corpus and one.bos != main.bos), None)
    if other is None or main.losses is None or other.losses is None:
        return None
    number = min(len(main.losses), len(other.losses))
    gain = (other.losses[:number] - main.losses[:number]) * (1 if main.bos else -1)
    return FrontWorth(*mean_interval(gain.tolist()), number) if number > 1 else None


def _layers(sinks: Sinks) -> list[int]:
    """Layers in which heads sink at the main sink at least half as often as where most do."""
    if sinks.main is None or sinks.main.anywhere:
        return []
    rates, sizes = defaultdict[int, float](float), Counter(head.layer for head in sinks.heads)
    for head, rate in sinks.main.heads:
        rates[head.layer] += rate
    means = {layer: rates[layer] / sizes[layer] for layer in sizes}
    return sorted(layer for layer, mean in means.items() if mean and mean >= max(means.values()) / 2)


def _query_group(loaded: LoadedModel) -> int:
    """Heads that share a key and a value; 1 where each has its own, or layers differ."""
    config = loaded.model.config.get_text_config()
    heads, own = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads // own if isinstance(heads, int) and isinstance(own, int) and own else 1


def _grouped(sinks: Sinks, size: int, samples: int) -> Grouped | None:
    """In how many groups of heads with one key and value all sink at the main sink, none, or some."""
    if sinks.main is None or size < 2:
        return None
    enough = enough_documents(np.array([samples]))[0]
    sinking = {(head.module, head.head) for head, rate in sinks.main.heads if rate * samples / 100 >= enough - 1e-6}
    groups = Counter((head.module, head.head // size) for head in sinks.heads)
    counts = [sum((module, group * size + index) in sinking for index in range(size)) for module, group in groups]
    return Grouped(size, counts.count(size), counts.count(0), sum(0 < count < size for count in counts))


def _rates(table: pd.DataFrame) -> pd.Series:
    """The whole model's sink rate of Gu et al. by key position."""
    rows = table[(table["probe"] == "sink_rate") & (table["metric"] == "gu2024") & table["layer"].isna()]
    return rows.set_index("key_position")["value"]


def _mean(table: pd.DataFrame, probe: str, metric: str, position: int | None = None) -> float | None:
    """Mean over all observations; means of heads are weighted by their counts."""
    rows = table[(table["probe"] == probe) & (table["metric"] == metric) & table["layer"].notna()]
    rows = rows if position is None else rows[rows["key_position"] == position]
    return float((rows["value"] * rows["count"]).sum() / rows["count"].sum()) if len(rows) else None


def _definitions(table: pd.DataFrame) -> dict[str, float]:
    rows = table[(table["probe"] == "sink_rate") & table["layer"].isna()]
    rows = rows[rows["key_position"].isna() | (rows["key_position"] == 0)]
    return {str(row.metric): float(row.value) for row in rows.itertuples()}


def _condition(condition: Measured, part: Part) -> Condition:
    table, sinks = _of_part(condition.table, part), condition.sinks[part]
    rates = _rates(table)
    # Under a window that is short for the samples no position is seen by half of the queries.
    seen = rates[rates.index < max(condition.candidates[part].values(), default=0)]
    return Condition(
        corpus=condition.corpus, bos=int(condition.bos), samples=condition.samples, loss=condition.loss,
        sink=sinks.describe(), sink_rate=sinks.main.rate if sinks.main else None, sink_rate_gu2024=float(rates[0]),
        top_position=None if seen.empty else int(seen.idxmax()), top_rate=None if seen.empty else float(seen.max()),
    )  # fmt: skip
