"""MP5xx. Budget: what does not fit, low headroom, devices."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

BUDGET: dict[str, CodeInfo] = {}
