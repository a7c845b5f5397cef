"""Theory: bounds and exact results that studies and claims check; tensors in, tensors out."""

from sinklab.results.sections import Section

SECTION = Section(
    name="certificate",
    title="Whether the sink is forced",
    lead="How little could a head write, with any weights on the keys it sees, and how little without the sink? Its values "
    "alone set both, whatever its queries and keys are.",
    help="Certify on a few samples which heads could not be silent without their sink (docs/theory.md).",
    found="sinklab.studies.theory.found:Certificate",
    show="sinklab.studies.theory.found:show",
    measure="sinklab.studies.theory.no_op_certificate:certified",
    text_only="it is made for samples of a text",
)
