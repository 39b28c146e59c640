"""Changes to the HTML of each page that Markdown cannot express. mkdocs calls `on_page_content`."""

import re

CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.DOTALL)
ANY_CODE = re.compile(r"(<code.*?</code>)", re.DOTALL)
CODE = re.compile(r"(<code>)([^<]*)(</code>)")
# A long name may be cut after _, / and =. An entity such as &lt; stays whole.
BREAKS = re.compile(r"([_/=])(?=[^<\s])")
# A flag with or without a value. Only the flag itself must stay on one line.
FLAG = re.compile(r"<code>(--?[a-z][\w-]*)( [^<]*)?</code>")
INTERVAL = re.compile(r"\[([+-]?[\d.]+), ([+-]?[\d.]+)\]")  # such as [+0.6, +7.1]
PERCENT = re.compile(r"(\d) %(?!\w)")


def on_page_content(html, **kwargs):
    """
    Allow line breaks inside long names of tables, so that tables fit on a phone. Forbid them inside flags, inside
    intervals in brackets, and before a per cent sign. In tables, also forbid them around ±.
    """
    html = FLAG.sub(lambda code: f'<code><span class="flag">{code[1]}</span>{code[2] or ""}</code>', html)
    parts = ANY_CODE.split(html)
    # Even places are text. Odd places are code, which readers copy, so it stays unchanged.
    for place in range(0, len(parts), 2):
        parts[place] = PERCENT.sub(r"\1&nbsp;%", INTERVAL.sub(r"[\1,&nbsp;\2]", parts[place]))
    return CELL.sub(_with_breaks, "".join(parts))


def _with_breaks(cell):
    text = cell[0].replace(" ± ", "&nbsp;±&nbsp;")
    return CODE.sub(lambda code: code[1] + BREAKS.sub(r"\1<wbr>", code[2]) + code[3], text)
