"""The main job: where the sinks of a model are, what they look like, and under which conditions they hold."""

from __future__ import annotations

from sinklab.audit.audit import AuditResult, audit
from sinklab.audit.measure import MeasureResult, measure

__all__ = ["AuditResult", "MeasureResult", "audit", "measure"]
