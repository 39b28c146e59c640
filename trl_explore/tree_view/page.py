"""Web page of a search tree, from the template `page.html`, with `page.css` and `page.js` inserted."""

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
    """Render the template of the page with the variables in `context`."""
    script, style = "\n" + _read("page.js"), "\n" + _read("page.css")
    # The page allows only the script with this hash. So a text that is not escaped still cannot run a script.
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _ENVIRONMENT.from_string(_read("page.html"))
    return template.render(context, script=script, script_hash=script_hash, style=style)
