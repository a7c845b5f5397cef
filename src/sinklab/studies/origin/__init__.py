"""sinklab origin: where a sink is born: block, sublayer, channels, neurons, weights; and what goes when these are silenced."""

from sinklab.results.sections import Section

SECTION = Section(
    name="origin",
    title="Where the sink is born",
    lead="Which block and sublayer makes the place stand out, which neurons or heads write it, and what goes when these are "
    "silenced. A spike in the hidden state and a sink in the attention are two things; they may have one origin or two.",
    help="Find out where the sinks are born, and what depends on that (docs/explain.md).",
    found="sinklab.studies.origin.found:Origins",
    show="sinklab.studies.origin.found:show",
    measure="sinklab.studies.origin.measurement:origin_section",
)
