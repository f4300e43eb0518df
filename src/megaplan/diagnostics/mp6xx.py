"""MP6xx. megarun: what the runtime refuses, data files, checkpoints."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

RUNTIME: dict[str, CodeInfo] = {}
