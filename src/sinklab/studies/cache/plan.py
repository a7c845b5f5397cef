"""What is compared: every registered policy at equal size, with sizes that suit the model, on long texts of a corpus."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.corpora.base import PASSAGES_IN_VAIN, Corpus, Encoder, TextCorpus
from sinklab.corpora.text_file import TextFile
from sinklab.corpora.text_folder import TextFolder
from sinklab.errors import ConfigurationError, InputError, calling
from sinklab.models.loading import LoadedModel
from sinklab.models.positions import trained_length
from sinklab.policies.base import Policy
from sinklab.registry import policies as policy_registry
from sinklab.results.environment import require_memory
from sinklab.streaming.limits import most_slots
from sinklab.studies.cache.found import LeftOut

LONG_CONTEXT, HELD = 1024, 256
"""Of a model that was trained on longer texts than the first, so many tokens are held: what is evicted is what matters, and a
text needs to be longer than the cache for that, not than the context."""

TEXTS, WORK = 8, 6e11
"""Texts, and parameters times tokens of all texts, that are not exceeded unless asked for: of SmolLM2-135M 4,096 tokens, which
a core reads in ten seconds."""

AT_EVERY_SIZE = ("window", "sink_window", "recompute")
"""Policies that a recommendation rests on."""

_FOREVER = 2**31


def checked_names(names: Sequence[str] | None) -> list[str]:
    """Names, with settings where some were given, without repetition; by default all that need none. Others are refused."""
    for name in names or ():
        policy_registry.make(name)
    return list(dict.fromkeys(names or (name for name in policy_registry if name != "pinned")))


def checked_budgets(loaded: LoadedModel, windows: Sequence[int] | None, sinks: Sequence[int]) -> list[int]:
    """Tokens that bounded policies hold before the query, ascending.

    By default a quarter and half of the trained length, or of what the narrowest layer sees where that is less: what it
    does not
    see cannot be kept for it. Of a long context, :data:`HELD`.
    """
    if not sinks or min(sinks) < 0:
        raise ConfigurationError(f"`sinks` {list(sinks)} must be numbers of tokens, 0 or more")
    if windows is None:
        trained, most = trained_length(loaded.model), most_slots(loaded.model)
        short = trained is not None and trained <= LONG_CONTEXT
        half = trained // 2 if trained is not None and short else HELD
        half = half if most is None else min(half, most - 1)  # one slot is the query's own
        windows = [half // 2, half] if short and half // 2 > max(sinks) else [half]
    if not windows or min(windows) <= max(sinks):
        raise ConfigurationError(
            f"a window of {min(windows, default=0):,} tokens has no room for {max(sinks)} sinks and one recent token: the "
            "sinks are part of it, so that policies of one size are compared; choose a larger `windows` or fewer `sinks`"
        )
    return sorted(set(windows))


def default_length(loaded: LoadedModel, budgets: Sequence[int]) -> int:
    """Tokens of a text: four times what is held, and past the trained length where that is short."""
    trained = trained_length(loaded.model) or LONG_CONTEXT + 1
    return max(4 * max(budgets), 4 * trained if trained <= LONG_CONTEXT else 0)


def affordable(model: PreTrainedModel, tokens: int, share: float = 1.0) -> int:
    """How many times a model can read so many tokens within :data:`WORK`, or a share of it."""
    return int(share * WORK / (sum(parameter.numel() for parameter in model.parameters()) * tokens))


def scored_from(loaded: LoadedModel, length: int, held: int) -> int:
    """Position of the first token that is scored in texts of ``length`` tokens, of which policies hold ``held``.

    Every policy has long evicted there and, if the text is long enough, dense attention is past its training. The query that
    predicts a token stands before it, so the first one of which a policy has evicted something predicts token ``held + 2``.
    """
    return max(held + 2, min(max(2 * held, trained_length(loaded.model) or 0), length // 2))


def plan_policies(
    names: Sequence[str], budgets: Sequence[int], sinks: Sequence[int], left_out: list[LeftOut], *, briefly: bool = False
) -> Iterator[tuple[Policy, int | None]]:
    """Policies with their budget, ``None`` for those that hold everything."""
    numbers = sorted(set(sinks))
    configured = [spec for spec in names if ":" in spec]
    unbounded = [name for name in names if name not in configured and not policy_registry[name].bounded]
    for spec in (*configured, *unbounded):
        yield from _of_spec(spec, budgets, numbers, left_out)
    bounded = [name for name in names if name not in (*configured, *unbounded)]
    # The two ends first: what it would be with the window computed anew, and without anything but a window.
    bounded.sort(key=lambda name: (name != "recompute", name != "window", name != "sink_window", name))
    for budget in budgets:
        for name in bounded:
            if briefly and budget < max(budgets) and name not in AT_EVERY_SIZE:
                continue
            specs: list[dict[str, object]] = [{"name": name}]
            if name == "sink_window":  # without sinks it is the policy "window"
                specs = [{"name": name, "num_sinks": number} for number in numbers if number or "window" not in names]
            for named in specs:
                yield from _of_spec(named, [budget], numbers, left_out)


def _of_spec(
    spec: str | Mapping[str, object], budgets: Sequence[int], numbers: Sequence[int], left_out: list[LeftOut]
) -> Iterator[tuple[Policy, int | None]]:
    """A policy, by its name and settings, at each of the sizes that it can have, with its budget."""
    name, held = str(policy_registry.read(spec)["name"]), 0
    try:
        for budget in budgets:
            policy = sized_policy(spec, budget, numbers)
            if not policy.bounded:
                yield policy, None
                return
            held = _held(policy)
            if held == budget:
                yield policy, budget
    except ConfigurationError as error:
        left_out.append(LeftOut(name, name, str(error)))
        return
    if held not in budgets:
        reason = (
            f"{spec if isinstance(spec, str) else name} holds {held:,} tokens before the query, and policies are compared at "
            f"equal sizes, which are {' and '.join(map(str, budgets))}; give {held} among `windows`, or leave its size open"
        )
        left_out.append(LeftOut(name, name, reason))


def _held(policy: Policy) -> int:
    """Tokens before the query that a bounded policy holds."""
    return policy.max_held(_FOREVER) - 1


def sized_policy(spec: str | Mapping[str, object], budget: int, numbers: Sequence[int]) -> Policy:
    """The policy of a name with settings, which hold; what they leave open makes it hold ``budget`` tokens and the query.

    That is what the policy makes of a size (:meth:`~sinklab.policies.base.Policy.of_size`), where no more is given than how
    many first tokens it keeps, and otherwise its window. One that leaves neither open has the size that it has.
    """
    settings = policy_registry.read(spec)
    policy: Policy = policy_registry.make(settings)
    if policy.bounded and settings.keys() <= {"name", "num_sinks"}:
        own = policy.of_size(budget, settings.get("num_sinks", 1 if 1 in numbers else max(numbers, default=0)))
        if own:
            return policy_registry[policy.name](**own)
    window = getattr(policy, "window", None)
    if not policy.bounded or window is None or "window" in settings:
        return policy
    try:
        return dataclasses.replace(policy, window=window + budget - _held(policy))  # type: ignore[call-arg]
    except ConfigurationError as error:
        raise ConfigurationError(
            f"policy {policy.name!r} cannot be made to hold {budget:,} tokens and the query: {error}"
        ) from error


def each_once(plan: Iterable[tuple[Policy, int | None]]) -> list[tuple[Policy, int | None]]:
    """Policies with their budgets, each once."""
    unique, named = list(dict.fromkeys(plan)), dict[str, Policy]()
    for policy, _ in unique:
        if (first := named.setdefault(label(policy), policy)) != policy:
            raise ConfigurationError(
                f"two policies are both called {policy.describe()!r}, and what is measured of them could not be told apart: "
                f"{first} and {policy}. Leave out the second, or measure it by itself"
            )
    return unique


def label(policy: Policy) -> str:
    """Name and sizes of a policy."""
    described = policy.describe()
    return described if described.startswith(policy.name) else f"{policy.name} {described}"


def long_texts(text: Corpus, encoder: Encoder, *, tokens: int, documents: int, seed: int, bos: bool) -> Tensor:
    """The beginnings of up to ``documents`` texts, int64 ``(documents, tokens)``, BOS included; no two share a token.

    Text files are cut into consecutive pieces, taken from the files of a folder in turn; of another corpus with documents those
    of its held-out part are taken, in their order, which have enough tokens; other corpora are drawn from.
    """
    if tokens < 2 or documents < 1:
        raise ConfigurationError(f"`tokens` must be at least 2 and `documents` at least 1, got {tokens} and {documents}")
    require_memory(16 * tokens, f"`tokens` {tokens}")
    if type(text).documents is Corpus.documents:
        with calling(seq_len="tokens", samples="documents"):
            return text.sample(encoder, seq_len=tokens, samples=documents, seed=seed, bos=bos)
    own = tokens - bos
    if isinstance(text, TextFile | TextFolder):
        rows, longest = _in_turn([text.body] if isinstance(text, TextFile) else text.bodies(), encoder, own, documents)
    else:
        rows, longest = _beginnings(text, encoder, own, documents)
    if not rows:
        raise InputError(
            f"corpus {text.name!r} ({text.identity.source}) is too short: its longest text has {longest:,} tokens and {own:,} "
            "are wanted; lower `tokens`, or " + text.more
        )
    result = torch.tensor(rows, dtype=torch.int64)
    return torch.nn.functional.pad(result, (1, 0), value=encoder.bos_token_id) if bos else result


def _in_turn(texts: Iterable[str], encoder: Encoder, length: int, number: int) -> tuple[list[list[int]], int]:
    """First pieces of some texts, then second ones, and so on; and the tokens of the longest text that was read."""
    rows: list[list[int]] = []
    cut: list[list[list[int]]] = []
    longest = 0
    for text in texts:
        ids = encoder.encode(text)
        longest = max(longest, len(ids))
        pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        rows += pieces[:1]
        cut.append(pieces[1 : number + 1])
        if len(rows) == number:
            return rows, longest
    for turn in itertools.zip_longest(*cut):
        rows += [piece for piece in turn if piece is not None]
    return rows[:number], longest


def _beginnings(text: Corpus, encoder: Encoder, length: int, number: int) -> tuple[list[list[int]], int]:
    rows: list[list[int]] = []
    longest = in_vain = 0
    patience = text.patience if isinstance(text, TextCorpus) else PASSAGES_IN_VAIN
    for document in text.documents("held_out"):
        ids = _first_ids(encoder, document, length)
        longest = max(longest, len(ids))
        if len(ids) == length:
            rows.append(ids)
            in_vain = 0
        else:
            in_vain += 1
        if len(rows) == number or in_vain >= patience:
            break
    return rows, longest


def _first_ids(encoder: Encoder, document: str, length: int) -> list[int]:
    """Up to ``length`` first ids; no more of the text is encoded than is likely to be needed."""
    part = document[: 8 * length]
    ids = encoder.encode(part)
    if len(ids) <= length and len(part) < len(document):
        ids = encoder.encode(document)
    return ids[:length]
