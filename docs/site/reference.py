"""Pages of the reference that are made from the code: one for each public name, one for each command."""

from __future__ import annotations

import importlib
import inspect
import re

import sinklab
from sinklab.cli.app import make_app
from sinklab.cli.commands import find_commands

__all__ = ["TYPES", "commands_pages", "library_pages"]

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
    "sinklab.models.model_config.SinkLMConfig",
    "sinklab.models.loading.LoadedModel",
    "sinklab.policies.base.Policy",
    "sinklab.results.metric.Metric",
    "sinklab.results.run.Result",
    "sinklab.sinks.find_sinks",
    "sinklab.streaming.base.Reader",
    "sinklab.streaming.stream.StreamedToken",
)
"""What the public names take and return, and what plug-ins are made of; documented beside them, imported from where it is."""


def library_pages() -> dict[str, str]:
    """A page for each public name of the package, and for each type that these take or return, set by autodoc."""
    pages = {}
    for name, module in sinklab._HOMES.items():
        pages[name] = _page(name, f"{module}.{name}", f"from sinklab import {name}")
    for home in TYPES:
        module, _, name = home.rpartition(".")
        pages[name] = _page(name, home, f"from {module} import {name}")
    return pages


def _page(name: str, home: str, line: str) -> str:
    module, _, attribute = home.rpartition(".")
    is_class = inspect.isclass(getattr(importlib.import_module(module), attribute))
    directive = f".. autoclass:: {home}\n   :members:\n" if is_class else f".. autofunction:: {home}\n"
    return f"# {name}\n\n```python\n{line}\n```\n\n```{{eval-rst}}\n{directive}```\n"


def commands_pages() -> dict[str, str]:
    """A page for each command, with its arguments and options."""
    pages = {}
    for name in find_commands():
        app = make_app([name])[0][name]
        text = app.generate_docs(output_format="markdown")
        body = text.partition("\n")[2]
        body = body.replace(f"```console\n{name} ", f"```bash\nsinklab {name} ").replace(
            f"```console\n{name}\n", f"```bash\nsinklab {name}\n"
        )
        body = re.sub(r"^\*\*(Arguments|Options|Parameters|Commands)\*\*:$", r"## \1", body, flags=re.MULTILINE)
        pages[name] = f"# sinklab {name}\n{body}\n"
    return pages
