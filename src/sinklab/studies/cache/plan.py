"""What is compared: every registered policy at equal size, with sizes that suit the model, on long texts of a corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from sinklab.attention.maps import token_text
from sinklab.corpora.base import PASSAGES_IN_VAIN, Corpus, Encoder, TextCorpus
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError, calling
from sinklab.models.loading import LoadedModel
from sinklab.models.positions import trained_length
from sinklab.policies.base import Policy
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.registry import policies as policy_registry
from sinklab.results.requirements import require_memory
from sinklab.sinks import Sinks, find_sinks
from sinklab.streaming.limits import most_slots
from sinklab.studies.cache.found import LeftOut

__all__ = [
    "checked_budgets",
    "checked_names",
    "default_length",
    "each_once",
    "label",
    "long_texts",
    "plain",
    "plan_policies",
    "require_one_name",
    "scored_from",
    "sinks_of_texts",
    "sized_policy",
]

LARGEST_WINDOW, LONGEST = 1024, 8192
"""Tokens held, and tokens of a document, that are not exceeded unless asked for."""

AT_EVERY_SIZE = ("window", "sink_window", "recompute", "pinned")
"""Policies that a recommendation rests on."""

LEAST_SIZE = 32
"""A setting of a policy is a size, not a number of sinks or a stride, if it is this by default or more."""

_FOREVER = 2**31


def checked_names(names: Sequence[str] | None) -> list[str]:
    """Names, with settings where some were given, without repetition; by default all registered ones that need none.

    Raises:
        UnknownNameError: no such policy.
        ConfigurationError: a setting that a policy does not have, or a value it refuses.
    """
    for name in names or ():
        policy_registry.make(name)
    return list(dict.fromkeys(names or policy_registry))


def checked_budgets(loaded: LoadedModel, windows: Sequence[int] | None, sinks: Sequence[int]) -> list[int]:
    """Tokens that bounded policies hold before the query, ascending.

    By default a quarter and half of the trained length, or half and all of what the narrowest layer sees, where every
    layer has a sliding window and that is less: what it does not see cannot be kept for it.

    Raises:
        ConfigurationError: no room for the sinks.
    """
    if not sinks or min(sinks) < 0:
        raise ConfigurationError(f"`sinks` {list(sinks)} must be numbers of tokens, 0 or more")
    if windows is None:
        half = min((trained_length(loaded.model) or 2 * LARGEST_WINDOW) // 2, LARGEST_WINDOW)
        most = most_slots(loaded.model)
        half = half if most is None else min(half, most - 1)  # one slot is the query's own
        windows = [half // 2, half] if half // 2 > max(sinks) else [half]
    if not windows or min(windows) <= max(sinks):
        raise ConfigurationError(
            f"a window of {min(windows, default=0):,} tokens has no room for {max(sinks)} sinks and one recent token: the "
            "sinks are part of it, so that policies of one size are compared; choose a larger `windows` or fewer `sinks`"
        )
    return sorted(set(windows))


def default_length(loaded: LoadedModel, budgets: Sequence[int]) -> int:
    """Tokens of a text: four times what is held, and past the trained length where that is short."""
    return max(4 * max(budgets), min(4 * (trained_length(loaded.model) or LARGEST_WINDOW), LONGEST))


def scored_from(loaded: LoadedModel, length: int, held: int) -> int:
    """Position of the first token that is scored in texts of ``length`` tokens, of which policies hold ``held``.

    Every policy has long evicted there and, if the text is long enough, dense attention is past its training. The query that
    predicts a token stands before it, so the first one of which a policy has evicted something predicts token ``held + 2``.
    """
    return max(held + 2, min(max(2 * held, trained_length(loaded.model) or 0), length // 2))


def plan_policies(
    loaded: LoadedModel,
    rows: Tensor,
    names: Sequence[str],
    budgets: Sequence[int],
    sinks: Sequence[int],
    found: Sinks | None,
    left_out: list[LeftOut],
    *,
    briefly: bool = False,
) -> Iterator[tuple[Policy, int | None]]:
    """Policies with their budget, ``None`` for those that hold everything.

    Args:
        names: as :func:`checked_names` gives them.
        budgets: tokens held before the query, sinks included.
        sinks: numbers of first tokens that ``sink_window`` keeps.
        found: where the sinks are, if that is known; looked for at the beginning of ``rows`` if ``None``.
        left_out: called with what cannot be built, and why.
        briefly: take policies other than :data:`AT_EVERY_SIZE` at the largest size only.
    """
    numbers = sorted(set(sinks))
    configured = [spec for spec in names if ":" in spec]
    for spec in configured:
        yield from _of_spec(spec, budgets, left_out)
    names = [name for name in names if name not in configured]
    for name in names:
        if not policy_registry[name].bounded:
            yield policy_registry[name](), None
    bounded = [name for name in names if policy_registry[name].bounded]
    pinned: list[int] = []
    if "pinned" in bounded:
        pinned, reason = _positions_to_pin(loaded, rows, found)
        if reason:
            left_out.append(LeftOut("pinned", "pinned", reason))
            bounded.remove("pinned")
    # The two ends first: what it would be with the window computed anew, and without anything but a window.
    bounded.sort(key=lambda name: (name != "recompute", name != "window", name != "sink_window", name))
    for budget in budgets:
        for name in bounded:
            if briefly and budget < max(budgets) and name not in AT_EVERY_SIZE:
                continue
            for settings in _settings(name, budget, numbers, pinned, "window" in names):
                try:
                    yield policy_registry[name](**settings) if settings else _sized(policy_registry[name](), budget), budget
                except ConfigurationError as error:
                    left_out.append(LeftOut(name, name, str(error)))


def _of_spec(spec: str, budgets: Sequence[int], left_out: list[LeftOut]) -> Iterator[tuple[Policy, int | None]]:
    """A policy that was given settings, which hold, with its budget: what they leave open makes the size."""
    settings = policy_registry.read(spec)
    policy: Policy = policy_registry.make(spec)
    if not policy.bounded:
        yield policy, None
        return
    if not _sizes(policy, settings.keys()):
        # Its size is given: it is compared at that one, if others are.
        held = _held(policy)
        if held not in budgets:
            reason = (
                f"{spec} holds {held:,} tokens before the query, and policies are compared at equal sizes, which are "
                f"{' and '.join(map(str, budgets))}; give {held} among `windows`, or leave its size open"
            )
            left_out.append(LeftOut(policy.name, policy.name, reason))
            return
        budgets = [held]
    for budget in budgets:
        try:
            yield _sized(policy, budget, settings.keys()), budget
        except ConfigurationError as error:
            left_out.append(LeftOut(policy.name, policy.name, str(error)))


def _positions_to_pin(loaded: LoadedModel, rows: Tensor, sinks: Sinks | None) -> tuple[list[int], str]:
    """Positions of the sinks in a text, and why nothing is gained by pinning them; empty where something may be."""
    try:
        sinks = sinks_of_texts(loaded, rows) if sinks is None else sinks
    except UnsupportedModelError as error:  # its attention cannot be seen, which no other policy needs
        return [], str(error)
    positions = sinks.positions_in_text
    if positions != list(range(len(positions))):
        return positions, ""
    if positions:
        return positions, "sinks were found at the first tokens alone, which sink_window keeps just as well"
    if sinks.main is None:
        return positions, "no sink was found, so there is nothing to pin"
    kept = "which every policy keeps" if sinks.positions else "which has no position of its own that could be pinned"
    return positions, f"the sink is {sinks.main.name}, {kept}"


def _settings(
    name: str, budget: int, numbers: Sequence[int], positions: Sequence[int], has_window: bool
) -> Iterator[dict[str, object]]:
    """Settings of a policy that holds ``budget`` tokens and the query; none for one that is sized by its window alone."""
    if name == "sink_window":
        for number in numbers:
            if number or not has_window:  # without sinks it is the policy "window"
                yield {"num_sinks": number, "window": budget - number}
    elif name == "pinned":
        yield {"pinned": tuple(positions), "window": budget - len(positions)}
    else:
        yield policy_registry[name].of_size(budget, _usual(numbers))


def _usual(numbers: Sequence[int]) -> int:
    """Of the numbers of first tokens that are compared, the one that other policies take."""
    return 1 if 1 in numbers else max(numbers, default=0)


def _held(policy: Policy) -> int:
    """Tokens before the query that a bounded policy holds."""
    return policy.max_held(_FOREVER) - 1


def _sized(policy: Policy, budget: int, chosen: Collection[str] = ()) -> Policy:
    """The policy that holds ``budget`` tokens and the query: its sizes in the proportions that they have.

    Settings that were ``chosen`` stay, and so do all others that are no sizes (:func:`_sizes`).

    Raises:
        ConfigurationError: it has no such settings, or they cannot be made to add up.
    """
    held, sizes = _held(policy), _sizes(policy, chosen)
    if not sizes and held == budget:
        return policy
    if not sizes:
        raise ConfigurationError(
            f"policy {policy.name!r} has no settings by which it could be given the size of the others, {budget:,} tokens "
            f"before the query; it holds {held}"
        )
    try:  # by how much it holds less when sizes are one less: a size may be that of several blocks
        less = dataclasses.replace(policy, **{name: size - 1 for name, size in sizes.items()})  # type: ignore[arg-type]
        each = max(1, (held - _held(less)) // len(sizes))
    except ConfigurationError:  # its sizes are multiples of something
        each = 1
    scale = (budget - held + each * sum(sizes.values())) / (each * sum(sizes.values()))
    sizes = {name: max(1, int(value * scale)) for name, value in sizes.items()}
    for _ in range(2):
        try:
            sized = dataclasses.replace(policy, **sizes)  # type: ignore[arg-type]
        except ConfigurationError as error:
            raise ConfigurationError(
                f"policy {policy.name!r} cannot be made to hold {budget:,} tokens and the query: {error}; give its other sizes "
                "too"
            ) from error
        over = _held(sized) - budget
        if not over:
            return sized
        sizes[list(sizes)[-1]] -= over // each  # what rounding has left
    raise ConfigurationError(f"policy {policy.name!r} cannot be made to hold {budget:,} tokens and the query; {sizes} does not")


def sized_policy(spec: str, budget: int, numbers: Sequence[int]) -> Policy:
    """The policy of a name with settings, which hold; sizes that are left open make it hold ``budget`` tokens and the query.

    Args:
        numbers: of first tokens that others keep; a policy that makes its settings of a size takes one of them.

    Raises:
        UnknownNameError: no such policy.
        ConfigurationError: a setting that it refuses, or sizes that cannot be made to add up.
    """
    settings = policy_registry.read(spec)
    policy: Policy = policy_registry.make(settings)
    if not policy.bounded or not _sizes(policy, settings.keys()):
        return policy
    own = policy.of_size(budget, _usual(numbers)) if settings.keys() == {"name"} else {}
    return policy_registry[policy.name](**own) if own else _sized(policy, budget, settings.keys())


def _sizes(policy: Policy, chosen: Collection[str] = ()) -> dict[str, int]:
    """Settings that are sizes: whole numbers of :data:`LEAST_SIZE` or more, besides those that were ``chosen``."""
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name not in chosen}
    return {name: value for name, value in values.items() if type(value) is int and value >= LEAST_SIZE}


def plain(policy: Policy) -> Policy:
    """One policy for all ways to write a window without sinks, whose two kinds of positions are the same."""
    if isinstance(policy, Window) or (isinstance(policy, SinkWindow) and not policy.num_sinks):
        return Window(window=policy.window)
    return policy


def each_once(plan: Iterable[tuple[Policy, int | None]]) -> list[tuple[Policy, int | None]]:
    """Policies with their budgets, the first of those that read alike.

    Raises:
        ConfigurationError: two that do not read alike are called alike.
    """
    unique: dict[tuple[Policy, int | None], tuple[Policy, int | None]] = {}
    named: dict[str, Policy] = {}
    for policy, budget in plan:
        if unique.setdefault((plain(policy), budget), (policy, budget))[0] is policy:
            require_one_name(policy, named.setdefault(label(policy), policy))
    return list(unique.values())


def require_one_name(policy: Policy, first: Policy) -> None:
    """Refuse a policy that is called as another one is.

    Raises:
        ConfigurationError: it is.
    """
    if first != policy:
        raise ConfigurationError(
            f"two policies are both called {policy.describe()!r}, and what is measured of them could not be told apart: "
            f"{first} and {policy}. Leave out the second, or measure it by itself"
        )


def sinks_of_texts(loaded: LoadedModel, rows: Tensor) -> Sinks:
    """Where the sinks of a model are in the first 64 tokens of some texts: at these places a policy would keep them."""
    read, tokenizer = rows[:, :64].to(loaded.device), loaded.tokenizer
    return find_sinks(loaded.model, read, decode=lambda token: token_text(tokenizer, token))


def label(policy: Policy) -> str:
    """Name and sizes of a policy."""
    described = policy.describe()
    return described if described.startswith(policy.name) else f"{policy.name} {described}"


def long_texts(text: Corpus, encoder: Encoder, *, tokens: int, documents: int, seed: int, bos: bool) -> Tensor:
    """The beginnings of up to ``documents`` texts, int64 ``(documents, tokens)``; no two share a token.

    A text file is cut into consecutive pieces; of a corpus with documents those of its held-out part are taken, in their order,
    which have enough tokens; other corpora are drawn from.

    Args:
        bos: put the beginning-of-sequence token at position 0; a text then gives ``tokens - 1`` of its own.

    Raises:
        InputError: no text is long enough.
        ConfigurationError: fewer than 2 tokens or 1 document.
    """
    if tokens < 2 or documents < 1:
        raise ConfigurationError(f"`tokens` must be at least 2 and `documents` at least 1, got {tokens} and {documents}")
    require_memory(16 * tokens, f"`tokens` {tokens}")
    if type(text).documents is Corpus.documents:
        with calling(seq_len="tokens", samples="documents"):
            return text.sample(encoder, seq_len=tokens, samples=documents, seed=seed, bos=bos)
    own = tokens - bos
    if isinstance(text, TextFile):
        ids = encoder.encode(text.text)
        rows = [ids[start : start + own] for start in range(0, len(ids) - own + 1, own)][:documents]
        longest = len(ids)
    else:
        rows, longest = _beginnings(text, encoder, own, documents)
    if not rows:
        raise InputError(
            f"corpus {text.name!r} ({text.identity.source}) is too short: its longest text has {longest:,} tokens and {own:,} "
            "are wanted; lower `tokens`, or " + text.more
        )
    result = torch.tensor(rows, dtype=torch.int64)
    return torch.nn.functional.pad(result, (1, 0), value=encoder.bos_token_id) if bos else result


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
