"""sinklab causes: what every head does with its sink, by editing it."""

from sinklab.results.sections import Section

__all__ = ["SECTION"]

SECTION = Section(
    name="causes",
    title="What the sink is for",
    lead="Each head was edited alone and the loss measured again: with all of its attention on the sink, with the sink hidden, "
    "with an output of zero, and with its output on another text. The change of the loss shows what the head does.",
    help="Find out what every head does with the sink, by interventions (docs/explain.md); takes a minute or more.",
    found="sinklab.studies.causes.found:Causes",
    show="sinklab.studies.causes.show:show",
    measure="sinklab.studies.causes.measurement:causes_section",
    text_only="it is made for models with a loss of tokens",
)
