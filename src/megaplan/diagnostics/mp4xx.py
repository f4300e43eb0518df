"""MP4xx. Plan files: reading, digests, versions, drift."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

PLANS: dict[str, CodeInfo] = {}
