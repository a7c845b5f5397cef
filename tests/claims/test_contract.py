"""What holds for every claim, without running any; and that each of these checks can fail."""

from __future__ import annotations

import dataclasses
from importlib import resources

import pytest

from sinklab.errors import ContractError
from sinklab.registry import claims
from sinklab_claims.contract.claim import BASELINE, Claim, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Trend, Value
from sinklab_claims.reproduce.claims import STATEMENTS, write_statements
from sinklab_claims.testing import check_claim


@pytest.mark.parametrize("name", claims.names())
def test_contract(name):
    check_claim(claims[name])


def test_what_is_listed_without_importing_is_what_the_claims_say(tmp_path):
    write_statements(tmp_path / STATEMENTS)
    kept = (resources.files("sinklab_claims") / STATEMENTS).read_text(encoding="utf-8")
    assert (tmp_path / STATEMENTS).read_text() == kept, "python -m sinklab_claims.reproduce.claims writes it anew"


def claim(**changed) -> Claim:
    kept = {
        "statement": "There is a sink.",
        "source": "gu2024",
        "reference": "Gu et al. 2024 (arXiv 2410.10781)",
        "published": "Yes.",
        "parts": (Part("there is", Value("sink_rate", BASELINE), more_than=5),),
        "variants": (Variant(BASELINE),),
        "read_outs": ("sinks",),
    }
    return Claim(**{**kept, **changed})


class Careless(Value):
    """Takes 0 for what is missing."""

    def __call__(self, numbers):
        return numbers.get(self.of, {}).get(self.metric, 0.0)


class Backwards(Difference):
    """The wrong way round."""

    def __call__(self, numbers):
        found = super().__call__(numbers)
        return None if found is None else -found


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"statement": "no full stop"}, "check 'statement': expected a sentence"),
        ({"source": "Gu et al."}, "check 'source': expected a name such as gu2024"),
        ({"costs": {"tiny": "cheap"}}, "check 'costs'"),
        ({"evidence": {"huge": "It is."}}, "check 'evidence'"),
        (
            {"read_outs": ()},
            "check 'metrics': expected 'there is' to need one of diverged, held_out_loss, steps, got sink_rate",
        ),
        ({"read_outs": ("sink",)}, "check 'read_outs'"),
        ({"checkpoint": OnCheckpoint(label="other")}, "check 'checkpoint': expected a label of baseline"),
        (
            {"checkpoint": OnCheckpoint(parts=(Part("there is", Careless("sink_rate", BASELINE), more_than=5),))},
            "check 'needs'",
        ),
        (
            {"checkpoint": OnCheckpoint(parts=(Part("there is", Value("lost", BASELINE), more_than=5),))},
            "check 'checkpoint': expected 'there is' to need numbers of its read-outs, got lost of baseline",
        ),
        ({"variants": (Variant("other"),)}, "check 'variants': expected 'there is' to speak of other, got baseline"),
        (
            {"variants": (Variant(BASELINE, {"optimizer.learning_rat": 1.0}),)},
            "check 'variants': expected valid configurations at scale tiny",
        ),
        ({"parts": (Part("there is", Careless("sink_rate", BASELINE), more_than=5),)}, "check 'needs'"),
        (
            {
                "variants": (Variant(BASELINE), Variant("b")),
                "parts": (Part("there is", Backwards("sink_rate", BASELINE, "b"), more_than=5),),
            },
            "check 'verdict': expected 'there is' reproduced by an effect inside of more than 5",
        ),
        (
            {
                "variants": tuple(Variant(label) for label in "abc"),
                "parts": (Part("no trend", Trend("sink_rate", ("a", "b", "c")), more_than=-2),),
            },
            "check 'verdict': expected 'no trend' to allow a correlation outside of more than -2, got none from -1 to 1",
        ),
    ],
)
def test_every_check_can_fail(changed, complaint):
    with pytest.raises(ContractError) as caught:
        check_claim(claim(**changed))
    assert complaint in str(caught.value)


def test_a_function_that_returns_something_else_is_refused():
    def broken():
        return dataclasses.asdict(claim())["statement"]

    with pytest.raises(ContractError, match="claim 'broken' breaks its contract, check 'type': expected a Claim, got str"):
        check_claim(broken)
