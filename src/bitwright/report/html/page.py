"""Renders the data of a report as one HTML file without outside references.

The data is JSON in a script element that is not executed, with `<`, `>` and `&` escaped; the page
sets it as text, never as HTML. A content security policy allows only the page's own script and
style, by their hashes, and no request to any server.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
STYLES = ("base.css", "parts.css", "print.css")
SCRIPTS = ("base.js", "charts.js", "summary.js", "layout.js", "graph.js", "table.js", "sections.js")
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def render(found: Mapping[str, Any]) -> str:
    """The page for the JSON form of a report."""
    style = "\n".join(_asset(name) for name in STYLES)
    bodies = "\n".join(_asset(name) for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{bodies}\n}})();\n'
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(str(found["title"])),
        "style": style,
        "data": embed(found),
        "script": script,
    }
    text = _asset("page.html")
    pieces = text.split("%%")  # text, name, text, name, ...: one pass, so that data is not searched
    return "".join(parts[one] if at % 2 else one for at, one in enumerate(pieces))


def embed(found: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(found, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for symbol, escaped in _ESCAPES.items():
        text = text.replace(symbol, escaped)
    return text


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
