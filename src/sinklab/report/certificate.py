"""The no-op certificate in words, a table and a scatter plot: a section of the page."""

from __future__ import annotations

from typing import TypeGuard

from sinklab.report.words import number
from sinklab.results.summaries.certificate import LEAST_QUERIES, Certificate, CertifiedHead, queries_words

__all__ = ["certificate_plot", "certificate_rows", "certificate_section"]

_HEADINGS = [
    "Head", "Weight on the sink", "Needed for {delta}", "Least output", "Without the sink", "Gap", "Measured output",
    "Queries", "Forced",
]  # fmt: skip


def certificate_section(certificate: object) -> dict[str, object] | None:
    """What the template needs; ``None`` for an audit that was made without a certificate.

    Args:
        certificate: the entry ``certificate`` of ``summary.json``.
    """
    if certificate is None:
        return None
    if not _is_certificate(certificate):
        refused = certificate.get("refused") if isinstance(certificate, dict) else None
        return {"missing": f"Not certified in this audit: {refused or 'no reason is recorded'}"}
    delta, threshold = f"{certificate['delta']:g}", f"{certificate['threshold']:g}"
    return {
        "missing": None,
        "text": str(certificate["text"]),
        "headings": [heading.format(delta=delta) for heading in _HEADINGS],
        "rows": certificate_rows(certificate),
        "made": (
            f"{_samples(certificate['samples'])} of the main condition; means over queries. Norms are in units of the "
            "longest projected value that the query sees. Least output: the least that any weights on the visible keys "
            "could make the head write. Without the sink: the same without that key. Gap: how much less the sink makes "
            f"possible. Needed: the least weight on the sink with which some weights write as little as {delta}, over the "
            "queries where any do, whose number is under Queries. A head is forced to have its sink if it gives it more than "
            f"{threshold} and needs more than that, which must be known at half of its queries, and {LEAST_QUERIES} at least. "
            "Needing less does not say that its queries and keys could do without. A gate behind a head is left out."
        ),
    }


def _is_certificate(section: object) -> TypeGuard[Certificate]:
    """Whether the entry of an audit is a certificate, and not the reason why there is none."""
    return isinstance(section, dict) and "heads" in section


def certificate_rows(certificate: Certificate) -> list[list[str]]:
    """One row a head, the largest gap first."""
    heads = sorted(certificate["heads"], key=lambda head: -head["gap"])
    names = _names(certificate)
    return [
        [
            names[head["module"], head["head"]],
            *(
                number(head[key])
                for key in ("sink_weight", "needed_sink_weight", "least_output", "least_output_without_sink", "gap", "output")
            ),
            _known(head),
            number(head["forced"]),
        ]
        for head in heads
    ]  # fmt: skip


def _known(head: CertifiedHead) -> str:
    """At how many queries the need of a head is known; audits of other versions may not say it."""
    return queries_words(head) if "queries" in head and "needed_queries" in head else "–"


def certificate_plot(certificate: object) -> dict[str, object] | None:
    """Gap against measured weight on the sink, a dot a head; ``None`` where there is nothing to draw."""
    if not _is_certificate(certificate) or not certificate["heads"]:
        return None
    names = _names(certificate)
    return {
        "title": "What the sink makes possible, against the weight it gets",
        "axis": "gap: least output without the sink minus with it, in units of the longest value",
        "across": "measured weight on the sink",
        "threshold": certificate["threshold"],
        "caption": (
            "Each dot is one head, written layer.head. A large gap: without the sink the head cannot be as silent; 1 would be "
            "the whole of its longest value, and the axis ends near the largest gap. Heads that are forced are the larger "
            "dots. Names that would cover another are left out; point at a dot to read it."
        ),
        "points": [
            {
                "name": names[head["module"], head["head"]],
                "x": float(f"{head['sink_weight']:.5g}"),
                "y": float(f"{head['gap']:.5g}"),
                "kind": "sink" if head["forced"] else "rest",
                "note": (
                    f"needed weight {number(head['needed_sink_weight'])} at {_known(head)} queries"
                    f"{', forced' if head['forced'] else ''}"
                ),
            }
            for head in certificate["heads"]
        ],
    }


def _names(certificate: Certificate) -> dict[tuple[str, int], str]:
    """Heads as layer.head; with the module's name where modules share a layer number."""
    modules = {head["module"]: head["layer"] for head in certificate["heads"]}
    layers = list(modules.values())
    return {
        (
            head["module"],
            head["head"],
        ): f"{head['layer'] if layers.count(head['layer']) == 1 else head['module']}.{head['head']}"
        for head in certificate["heads"]
    }


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"The first {number(count)} samples"
