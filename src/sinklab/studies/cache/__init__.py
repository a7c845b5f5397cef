"""sinklab cache: loss, speed and memory under cache policies, and which one to use."""

from sinklab.results.sections import Section

SECTION = Section(
    name="cache",
    title="Which cache policy",
    lead="Long texts read under policies that hold the same number of tokens: what a window loses without the sinks, and with "
    "them, against one computed anew for every token and against keeping everything.",
    help="Also read a few long texts under cache policies: what a window loses without the sinks, and with them.",
    found="sinklab.studies.cache.found:Comparison",
    show="sinklab.studies.cache.found:show",
    measure="sinklab.studies.cache.comparison:policies_section",
    cost=1.3,
    text_only="a cache holds what a decoder has read of a text",
    default=True,
)
