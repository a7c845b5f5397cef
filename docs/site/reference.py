"""Pages that are made from the code and the results: the library, the commands, the metrics, and claims by paper."""

from __future__ import annotations

import importlib
import inspect
import re

from docs.site.sources import ROOT

import sinklab
from sinklab.cli.app import make_app
from sinklab.cli.commands import find_commands
from sinklab.registry import KINDS
from sinklab.registry import claims as registered
from sinklab.results.blocks import markdown
from sinklab.results.metric import metrics_of
from sinklab_claims.reproduce.claims import claims, stated

__all__ = ["commands", "library", "metrics", "papers"]

TYPES = (
    "sinklab.attention.call.AttentionCall",
    "sinklab.attention.call.Statistics",
    "sinklab.attention.intervention.Intervention",
    "sinklab.attention.operation.Operation",
    "sinklab.attention.probe.Probe",
    "sinklab.attention.returned.ReturnedSession",
    "sinklab.attention.session.Session",
    "sinklab.corpora.base.Corpus",
    "sinklab.corpora.base.Encoder",
    "sinklab.models.language_model.SinkLM",
    "sinklab.models.block.SinkLMConfig",
    "sinklab.models.loading.LoadedModel",
    "sinklab.policies.base.Policy",
    "sinklab.results.metric.Metric",
    "sinklab.results.run.Result",
    "sinklab.find_sinks",
    "sinklab.streaming.base.Reader",
    "sinklab.streaming.stream.StreamedToken",
)
"""What the public names take and return, and what plug-ins are made of; documented beside them, imported from where it is."""


def library() -> str:
    """The public names of the package, and the types that these take or return, set by autodoc."""
    homes = [f"{module}.{name}" for name, module in sinklab._HOMES.items()]
    return "# The library\n\n" + "\n".join(map(_entry, [*homes, *TYPES]))


def _entry(home: str) -> str:
    module, _, name = home.rpartition(".")
    is_class = inspect.isclass(getattr(importlib.import_module(module), name))
    directive = f".. autoclass:: {home}\n   :members:\n" if is_class else f".. autofunction:: {home}\n"
    line = f"from sinklab import {name}" if name in sinklab._HOMES else f"from {module} import {name}"
    return f"## {name}\n\n```python\n{line}\n```\n\n```{{eval-rst}}\n{directive}```\n"


def papers() -> dict[str, str]:
    """For every paper its published numbers, what was found of them here, and the verdicts, as ``sinklab claims --paper``."""
    pages = {}
    for paper in sorted({stated(name).source for name in registered}):
        listing = claims(paper=paper, results=ROOT / "results")
        pages[paper] = f"# {paper}\n\n{markdown(listing.display(listing.record))}".replace(f"{ROOT}/", "")
    return pages


def commands() -> str:
    """Every command with its arguments and options."""
    parts = ["# Commands\n"]
    for name in find_commands():
        body = make_app([name])[0][name].generate_docs(output_format="markdown").partition("\n")[2]
        body = re.sub(rf"```console\n{name}\b", f"```bash\nsinklab {name}", body)
        body = re.sub(r"^\*\*(Arguments|Options|Parameters|Commands)\*\*:$", r"**\1**", body, flags=re.MULTILINE)
        parts.append(f"## sinklab {name}\n{body}\n")
    return "\n".join(parts)


def metrics() -> str:
    """Every number of every probe, with its definition and its paper."""
    parts = ["# Metrics\n"]
    for name in KINDS["probes"]:
        rows = [
            f"| `{metric.name}` | {metric.text.replace('|', chr(92) + '|')} | {metric.unit} | {metric.paper or 'ours'} |"
            for metric in metrics_of("probes", name)
        ]
        head = ["| metric | definition | unit | paper |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {name}", "", KINDS["probes"].summary(name), "", *head, *rows, ""]))
    return "\n".join(parts)
