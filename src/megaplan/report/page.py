"""The page: data, style and scripts in one HTML file that loads nothing."""

import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

from megaplan.diagnostics import refuse

MAX_BYTES = 1_000_000
SCRIPTS = (
    "dom",
    "format",
    "labels",
    "dialog",
    "table",
    "run",
    "post_training",
    "traffic",
    "header",
    "bars",
    "timeline_data",
    "plot",
    "memory",
    "timeline",
    "layers",
    "time",
    "search",
    "comparison",
    "main",
)
"""Files of `page/`, in the order in which they run."""
_UNSAFE = {code: f"\\u{code:04x}" for code in (*map(ord, "<>&\u2028\u2029"), *range(0xD800, 0xE000))}
"""Characters that could end the script's element, and surrogate halves, which UTF-8 cannot encode; they become JSON escapes."""


def escaped_json(value: Any) -> str:
    """JSON as the text of a `<script>` element: the only way by which text of a spec, plan or file enters a page.

    Characters that could end the element or begin a comment are written as JSON escapes. The scripts put such text into the page
    as text nodes only.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def report_html(document: Mapping[str, Any]) -> str:
    """The HTML file.

    Args:
        document: Data of the page, from `report_document`, `search_report` or `comparison_report`.

    Raises:
        MegaplanError: MP490, the file would be larger than a page may be.
    """
    style = _read("vendor/uplot/uPlot.min.css") + _read("page/report.css")
    script = _read("vendor/uplot/uPlot.iife.min.js") + "\n(() => {\n'use strict';\n" + "".join(map(_script, SCRIPTS)) + "})();\n"
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    licence = _read("vendor/uplot/LICENSE").strip().replace("--", "- -")
    parts = {"POLICY": policy, "STYLE": style, "LICENCE": licence, "DATA": escaped_json(document), "SCRIPT": script}
    html = _read("page/page.html")
    pieces = html.split("@@")  # text, name, text, name, … text: inserted text is not scanned again
    page = "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))
    if (size := len(page.encode())) > MAX_BYTES:
        raise refuse(
            "MP490",
            f"the page of {_subject(document)} has {size:,} bytes, and a page has at most {MAX_BYTES:,}",
            "megaplan estimate --json has all numbers",
        )
    return page


def _subject(document: Mapping[str, Any]) -> str:
    if document["kind"] == "comparison":
        return f"{len(document['diff']['ranks']):,} changes of ranks"
    if document["kind"] == "search":
        return f"{len(document['search']['best']):,} rows"
    return f"{len(document['layers']):,} layers and {len(document['estimate']['ranks']):,} distinct ranks"


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _script(name: str) -> str:
    return _read(f"page/{name}.js")


def _read(name: str) -> str:
    return files("megaplan.report").joinpath(*name.split("/")).read_text(encoding="utf-8")
