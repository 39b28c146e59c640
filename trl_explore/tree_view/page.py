"""The web page of a search tree: `page.html` is its template, with `page.css` and `page.js` written into it."""

import base64
import hashlib
from importlib import resources
from typing import Any

import jinja2

_ENVIRONMENT = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)


def _read(name: str) -> str:
    return resources.files("trl_explore.tree_view").joinpath(name).read_text(encoding="utf-8")


def render_page(context: dict[str, Any]) -> str:
    """Fill the template of the page."""
    script, style = ("\n" + _read(f"page.{kind}") for kind in ("js", "css"))
    # The policy names the script by its hash: even text that slipped through the escaping could not run.
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _ENVIRONMENT.from_string(_read("page.html"))
    return template.render(context, script=script, script_hash=script_hash, style=style)
