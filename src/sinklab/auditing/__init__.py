"""The main job: where the sinks of a model are, what they look like, and under which conditions they hold."""

from __future__ import annotations

from sinklab.auditing.audit import AuditResult, audit
from sinklab.auditing.measure import MeasureResult, measure

__all__ = ["AuditResult", "MeasureResult", "audit", "measure"]
