"""Changes to the HTML of each page that Markdown cannot express. mkdocs calls `on_page_content`."""

import re

CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"(<code>)([^<]*)(</code>)")
# A long name may be cut after _, / and =. An entity such as &lt; stays whole.
BREAKS = re.compile(r"([_/=])(?=[^<\s])")
FLAG = re.compile(r"<code>(--?[a-z][\w-]*)</code>")


def on_page_content(html, **kwargs):
    """
    Allow line breaks inside long names of tables, so that tables fit on a phone. Forbid them inside flags, and between
    a number and its interval.
    """
    html = FLAG.sub(r'<code class="flag">\1</code>', html)
    return CELL.sub(_with_breaks, html)


def _with_breaks(cell):
    text = cell[0].replace(" ± ", "&nbsp;±&nbsp;")
    return CODE.sub(lambda code: code[1] + BREAKS.sub(r"\1<wbr>", code[2]) + code[3], text)
