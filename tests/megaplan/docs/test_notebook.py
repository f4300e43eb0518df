"""The notebook of the docs: its cells run, and its stored outputs match."""

import json
import os

import pytest
from doc_commands import ROOT
from notebook import outputs_of

PATH = ROOT / "docs" / "guides" / "notebook.ipynb"


def test_stored_outputs_are_those_of_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    document = json.loads(PATH.read_text(encoding="utf-8"))
    found = outputs_of(document)
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    if os.environ.get("MEGAPLAN_UPDATE_GOLDEN"):
        for number, (cell, outputs) in enumerate(zip(cells, found, strict=True), 1):
            cell["execution_count"], cell["outputs"] = number, outputs
        PATH.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [cell["outputs"] for cell in cells] == found
    assert any("text/html" in output.get("data", {}) for outputs in found for output in outputs)
