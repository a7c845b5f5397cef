"""Refusals: models that a bounded cache cannot serve, each with the reason, before the first token."""

from __future__ import annotations

from transformers import PreTrainedModel

from sinklab.attention.forward_arguments import takes_cache
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.layer_kinds import EMPTY_KINDS, HYBRID, RECURRENT_KINDS
from sinklab.models.wrappers import transformers_model, unwrapped
from sinklab.policies.base import BoundedPolicy, Policy, SlotPolicy
from sinklab.policies.window import Window
from sinklab.streaming.in_front import tokens_in_front, tokens_of_prefix
from sinklab.streaming.ordered import has_ordered_bias

__all__ = [
    "extent",
    "inside",
    "most_slots",
    "narrow_window",
    "narrowest",
    "require_decoder",
    "require_integers",
    "require_positions",
    "slides",
]


def inside(model: object) -> PreTrainedModel:
    """The model of transformers itself, whose forwards a cache plans.

    Raises:
        InputError: no model of transformers, and none inside that is known.
        UnsupportedModelError: one with a learned prompt of PEFT in front, which is no part of the model inside.
    """
    if hasattr(model, "active_peft_config") and unwrapped(model) is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} puts a learned prompt in front of every text, which caches and streams do not follow: use "
            "a cache of transformers"
        )
    return transformers_model(model)


def require_decoder(model: PreTrainedModel, policy: BoundedPolicy) -> None:
    """Refuse what is not a causal decoder whose every layer can see all that the policy holds."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        if has_ordered_bias(model):
            return
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, and its decoder has other positions than the buckets of distances of T5: learned "
            "or sinusoidal ones cannot be moved once they are in the cache, and rotary ones are served in decoders alone"
        )
    if looks_ahead(model):
        raise UnsupportedModelError(
            f"{name} sees later tokens, as encoders do: keys that are held would have to change with every token that comes, "
            "so that no cache gives what the model computes on a whole text"
        )
    if not takes_cache(model):
        raise UnsupportedModelError(
            f"{name} takes no cache of keys and values, so it does not read a text token by token; a bounded cache is "
            "for decoders"
        )
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds and kinds <= RECURRENT_KINDS | EMPTY_KINDS:
        raise UnsupportedModelError(
            f"{name} has no layer of attention: its states have one size for any text, so there is nothing to bound"
        )
    strange = sorted(kinds - {"full_attention", "sliding_attention", HYBRID, *RECURRENT_KINDS, *EMPTY_KINDS})
    if strange:
        raise UnsupportedModelError(f"{name} has layers of the kind {', '.join(strange)}; a policy needs full attention")
    front = tokens_in_front(model)
    if not isinstance(policy, SlotPolicy) and (front or tokens_of_prefix(model)):
        what = "puts learned tokens in front of every text" if front else "has a prefix of tokens that see each other both ways"
        raise UnsupportedModelError(
            f"{name} {what}; policy {policy.name!r}, under which heads hold tokens of their own, is not there for it. One with "
            "the same for all heads is, such as sink_window"
        )
    most = most_slots(model, policy)
    if most is not None and most < policy.num_slots:
        raise UnsupportedModelError(
            f"{name} has layers that see {most + front:,} tokens; the policy holds {policy.num_slots + front:,}, and its sinks "
            f"would be hidden from them. Choose sizes that add up to {most + front} or less, the token at hand included"
        )


def narrowest(model: PreTrainedModel) -> int | None:
    """How many tokens every layer can see, the token at hand included; ``None`` where no layer has a sliding window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    sliding = getattr(config, "sliding_window", None) or getattr(config, "window", None)
    any_slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    return sliding - tokens_in_front(model) if sliding and any_slides else None


def most_slots(model: PreTrainedModel, policy: BoundedPolicy | None = None) -> int | None:
    """Most tokens that a policy can hold in ``model``, the token at hand included; ``None`` where there is no end.

    Under a policy of slots (the default) layers with a narrower window keep it, as long as others see the whole text.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    apart = kinds == {"full_attention", "sliding_attention"} and not tokens_in_front(model) and not tokens_of_prefix(model)
    return None if apart and (policy is None or isinstance(policy, SlotPolicy)) else narrowest(model)


def narrow_window(model: PreTrainedModel, policy: BoundedPolicy) -> Window | None:
    """What layers with a sliding window hold where it is narrower than what the policy holds; ``None`` where none is."""
    seen = narrowest(model)
    return Window(window=seen - 1) if seen is not None and seen < policy.num_slots else None


def slides(model: PreTrainedModel, index: int) -> bool:
    """Whether a layer of a model with layers of both kinds has a sliding window."""
    return bool(model.config.get_text_config().layer_types[index] == "sliding_attention")


def require_positions(policy: BoundedPolicy, limit: int | None, name: str) -> None:
    """Refuse a policy that spans more positions than the model ``name`` tells apart."""
    if limit is not None and policy.reach >= limit:
        raise UnsupportedModelError(
            f"{name} keeps its frequencies up to position {limit}, and the policy holds {extent(policy)}; choose fewer"
        )


def require_integers(policy: Policy) -> None:
    """Refuse a policy whose tokens cannot be kept as integers: groups of them are rounded at once, when they are complete.

    Raises:
        ConfigurationError: tokens that leave their slots, or slots that are not written one after the other.
    """
    if not isinstance(policy, SlotPolicy):
        raise ConfigurationError(
            f"`quantized` is for policies whose tokens stay in their slots; {policy.name!r} is none, sink_window and pinned are"
        )
    if not policy.is_one_ring:
        raise ConfigurationError(
            f"`quantized` rounds tokens in groups of slots that are written one after the other, and {policy.name!r} writes "
            "several rings in turn: each token would be rounded again and again. sink_window and pinned have one"
        )


def extent(policy: BoundedPolicy) -> str:
    """How much a policy holds, in words."""
    return f"{policy.num_slots:,} tokens" + ("" if policy.reach == policy.num_slots else f" over {policy.reach:,} positions")
