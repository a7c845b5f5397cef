"""Evidence: what was measured over texts and rotated controls, as intervals and one-sided p-values."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.results.intervals import Interval, means_over_items
from sinklab.studies.causes.effects import Effects

__all__ = ["Contrast", "Evidence", "benjamini_hochberg", "evidence_of", "least_texts"]


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A mean over texts in the unit of the loss with its 95 % bootstrap interval, and the p-value of what it is to show."""

    interval: Interval
    p: float

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**self.interval.to_dict(), "p": self.p}


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """One contrast of all heads in one domain: a claim that the mean over texts is above ``low`` and below ``high``.

    Attributes:
        values: float64 ``(heads, texts)``.
        low, high: infinite where the claim has no such side.
        rotated: float64 ``(K, heads, texts)``, the same by rotated copy, whose mean is ``values``, where these must lie
            above 0 beyond their spread for the claim to hold; or ``None``.
    """

    values: np.ndarray
    low: float
    high: float = np.inf
    rotated: np.ndarray | None = None

    @functools.cached_property
    def p(self) -> np.ndarray:
        """One-sided p-values of the claim, float64 ``(heads,)``."""
        return self.p_of_texts(self.values.shape[1])

    def contrasts(self) -> list[Contrast]:
        """One for every head."""
        return [Contrast(interval, float(p)) for interval, p in zip(means_over_items(self.values), self.p, strict=True)]

    def p_of_texts(self, texts: int) -> np.ndarray:
        """The p-values that so many texts would give, with the means and spreads observed, ``(heads,)``."""
        mean, spread = self.values.mean(1), self.values.std(1, ddof=1)
        p = _p_between(mean, spread, texts, self.low, self.high)
        if self.rotated is None:
            return p
        # The spread between copies is theirs, and in part one of texts that do not agree about them, which more texts reduce.
        number, measured = len(self.rotated), self.rotated.shape[2]
        between = self.rotated.mean(2).var(0, ddof=1)
        rest = self.rotated - self.rotated.mean(2, keepdims=True) - self.rotated.mean(0) + mean[:, None]
        of_texts = np.minimum((rest**2).sum((0, 2)) / ((number - 1) * (measured - 1)) / measured, between)
        spread = np.sqrt(between - of_texts * (1 - measured / texts))
        return np.maximum(p, _p_of_rotated(mean, spread, number))

    def of_head(self, number: int) -> Evidence:
        """That of one head alone."""
        head = slice(number, number + 1)
        rotated = None if self.rotated is None else self.rotated[:, head]
        return dataclasses.replace(self, values=self.values[head], rotated=rotated)


def evidence_of(effects: Effects, domain: int, minimal_effect: float) -> dict[str, Evidence]:
    """Every contrast of one domain, as far as its variants were measured, by name.

    - ``redirect``, ``hide``, ``zero``, ``zero_value``: the effect is above the minimal effect;
    - ``redirect is nothing``: it lies within the minimal effect of 0 on both sides (two one-sided tests; Schuirmann 1987);
    - ``zero_value costs nothing``: it is below the minimal effect; that a value does harm is no reason to need it;
    - ``rotated``: the head's output costs less than rotated copies of itself, which :attr:`Evidence.rotated` tests;
    - ``hide - control``: hiding the sink costs more than hiding another key, by the minimal effect;
    - ``redirect control - redirect``: resting on another key costs more than resting on the sink;
    - ``redirect - rotated``, ``zero_value - rotated``, ``zero - rotated``: the change costs more than changes of the same size
      in random directions. No label rests on these: at an optimum all directions cost the same.

    Raises:
        ConfigurationError: fewer than two texts have scored positions in the domain.
        MeasurementError: an effect that is not finite.
    """
    name = effects.domain_names[domain]
    texts = ~np.isnan(effects.clean_loss[:, domain])
    if texts.sum() < 2:
        raise ConfigurationError(f"domain {name!r}: {int(texts.sum())} texts have scored positions, and intervals need two")

    def of(variant: str) -> np.ndarray:
        return effects.of(variant)[:, texts, domain]

    def group(prefix: str) -> np.ndarray:
        members = [of(variant) for variant in effects.variants if variant.startswith(f"{prefix} ")]
        return np.stack(members) if members else np.zeros((0, *of(effects.variants[0]).shape))

    broken = np.argwhere(~np.isfinite(effects.loss[:, :, texts, domain]))
    if len(broken):
        variant, head = effects.variants[broken[0][0]], effects.heads[broken[0][1]]
        raise MeasurementError(
            f"domain {name!r}: the loss is not finite under {variant!r} on head {head} ({len(broken)} such effects in all); "
            "run the model in float32, or leave the head out"
        )
    contrasts: dict[str, Evidence] = {}
    for variant in ("redirect", "hide", "zero", "zero_value"):
        if variant in effects.variants:
            contrasts[variant] = Evidence(of(variant), minimal_effect)
            if variant == "redirect":
                contrasts["redirect is nothing"] = Evidence(of(variant), -minimal_effect, minimal_effect)
            if variant == "zero_value":
                contrasts["zero_value costs nothing"] = Evidence(of(variant), -np.inf, minimal_effect)
            rotated = group(f"{variant} rotated")
            if len(rotated) > 1:
                contrasts[f"{variant} - rotated"] = Evidence(of(variant) - rotated.mean(0), 0.0, rotated=of(variant) - rotated)
    rotated = group("rotated")
    if len(rotated) > 1:
        contrasts["rotated"] = Evidence(rotated.mean(0), 0.0, rotated=rotated)
    controls = group("hide control")
    if len(controls):
        contrasts["hide - control"] = Evidence(of("hide") - controls.mean(0), minimal_effect)
    controls = group("redirect control")
    if len(controls):
        contrasts["redirect control - redirect"] = Evidence(controls.mean(0) - of("redirect"), 0.0)
    return contrasts


# --- tests ------------------------------------------------------------------------------------------------------------------


def benjamini_hochberg(p: np.ndarray, level: float) -> tuple[np.ndarray, float]:
    """Which hypotheses are decided at a false discovery rate, and the largest p-value that one more could have.

    Benjamini and Hochberg 1995; the rate holds under independence and positive dependence, such as that of heads that are
    judged on the same texts. If all hypotheses are false, the chance of deciding for any of them is the level.

    Returns:
        Boolean array of the shape of ``p``; and ``level · k / m`` for the next that would be decided.
    """
    import scipy.stats

    decided = scipy.stats.false_discovery_control(p.ravel()).reshape(p.shape) <= level
    return decided, level * min(int(decided.sum()) + 1, p.size) / p.size


def least_texts(hypotheses: int, level: float) -> int:
    """Texts from which on one head alone can be decided: ``2^-n <= level / hypotheses``."""
    return max(2, int(np.ceil(np.log2(hypotheses / level))))


def _p_between(mean: np.ndarray, spread: np.ndarray, texts: int, low: float, high: float) -> np.ndarray:
    """p-values of a mean being above ``low`` and below ``high``: the larger one of two one-sided tests.

    Student's t, and never less than ``2^-texts``, which is what as many texts give that all lie above the margin, whatever
    their distribution (the sign test): no number of decimals makes a few texts say more.
    """
    error = spread / np.sqrt(texts)
    sides = [_p_of(mean - low, error, texts - 1)] if np.isfinite(low) else []
    if np.isfinite(high):
        sides.append(_p_of(high - mean, error, texts - 1))
    return np.maximum(np.maximum.reduce(sides), 2.0**-texts)


def _p_of_rotated(mean: np.ndarray, spread: np.ndarray, number: int) -> np.ndarray:
    """p-values of the effects of rotated copies lying above 0, the effect of not rotating.

    If directions mean nothing, then the loss of the head as it is and its K rotated losses are exchangeable: where the value
    map of a head, or the map that reads it, has no preferred direction, rotated outputs are what another draw would have
    given. The distance of the one from the mean of the others, over ``s · sqrt(1 + 1/K)`` with their spread s, is then
    Student's t of K - 1 degrees, as far as they are normal; linear functions of a random rotation nearly are (Diaconis and
    Shahshahani 1994). The random unit is the direction: more texts do not make up for few of them.
    """
    return _p_of(mean, spread * np.sqrt(1 + 1 / number), number - 1)


def _p_of(distance: np.ndarray, error: np.ndarray, degrees: int) -> np.ndarray:
    """Upper tail of Student's t of a distance; where nothing varies, 0 or 1 by its sign."""
    import scipy.stats

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        t = np.where(error > 0, distance / error, np.where(distance > 0, np.inf, -np.inf))
    return np.asarray(scipy.stats.t.sf(t, degrees))
