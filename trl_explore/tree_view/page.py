"""The web page of a search tree: template, style and script in one module, so that every install has them."""

import base64
import hashlib
from typing import Any

import jinja2

SCRIPT = """
for (const button of document.querySelectorAll("button[data-open]")) {
  button.addEventListener("click", () => {
    const open = button.dataset.open === "true";
    // "details details": the root stays open, or nothing would be left to see
    for (const node of document.querySelectorAll(".tree details details")) node.open = open;
  });
}
document.documentElement.dataset.ready = "true";
"""

# The policy names the script by its hash: even text that slipped through the escaping could not run.
SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f5f6f8; --ink: #1b1f24; --soft: #5c6570; --line: #d6dae0; --neutral: #a9adb3;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --panel: #1e2228; --ink: #e4e7eb; --soft: #9aa4b0; --line: #363c45; --neutral: #6b727c; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 110rem; padding: 1.25rem 1.5rem 3rem; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0 0 .6rem; font-size: 1.25rem; font-weight: 650; }
h1 small { margin-left: .6rem; color: var(--soft); font-size: .95rem; font-weight: 400; }
.prompt {
  max-height: 14rem; overflow: auto; padding: .55rem .8rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); font-family: var(--mono); white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: plaintext;
}
.facts { display: flex; flex-wrap: wrap; gap: .5rem 1.6rem; margin: .9rem 0; }
.facts dt { color: var(--soft); font-size: .78rem; }
.facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.legend { margin: 0 0 .9rem; color: var(--soft); font-size: .82rem; }
.legend p { margin: .15rem 0; }
.legend b { color: var(--ink); font-weight: 600; }
.scale {
  display: inline-block; width: 9rem; height: .65rem; margin: 0 .35rem; border-radius: 3px; vertical-align: baseline;
  background: linear-gradient(90deg, rgb(var(--red)), var(--neutral), rgb(var(--green)));
}
.choices { display: flex; flex-wrap: wrap; align-items: center; gap: .4rem 1.1rem; margin-bottom: .6rem; }
.choices label { cursor: pointer; }
button {
  display: none; padding: .2rem .7rem; border: 1px solid var(--line); border-radius: 5px; background: var(--panel);
  color: inherit; font: inherit; cursor: pointer;
}
[data-ready] button { display: inline-block; }

.row {
  display: grid; align-items: baseline; gap: 0 .5rem; margin: 1px 0; padding: .2rem .5rem .2rem .65rem;
  grid-template-columns:
    minmax(8rem, 1fr) 2.2rem 3.2rem 2.4rem 3.6rem 3.4rem 3.4rem 2.8rem 6.8rem var(--reward-width) 4.4rem;
  border-radius: 0 4px 4px 0;
  background:
    linear-gradient(rgb(var(--tint) / var(--strength)) 0 0) 0 0 / 4px 100% no-repeat,
    linear-gradient(var(--neutral) 0 0) 0 0 / 4px 100% no-repeat,
    rgb(var(--tint) / calc(var(--strength) * .1));
}
.row > * { text-align: right; font-variant-numeric: tabular-nums; }
.row > .node { display: flex; align-items: baseline; gap: .5rem; min-width: 0; text-align: left; }
.head {
  position: sticky; top: 0; z-index: 1; border-bottom: 1px solid var(--line); border-radius: 0;
  background: var(--page); color: var(--soft); font-size: .82rem;
}
.node::before { content: ""; flex: none; width: .7rem; }
.head .node::before { display: none; }
summary { list-style: none; cursor: pointer; }
summary::-webkit-details-marker { display: none; }
summary .node::before { content: "\\25b8"; color: var(--soft); text-align: center; }
details[open] > summary .node::before { content: "\\25be"; }
summary:hover, .leaf > .row:hover { outline: 1px solid var(--line); }
summary:focus-visible { outline: 2px solid var(--ink); }
.children { margin-left: var(--indent); border-left: 1px solid var(--line); }
.number { flex: none; min-width: 2rem; color: var(--soft); font-size: .85rem; }
.text {
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 4; overflow: hidden; min-width: 0;
  font-family: var(--mono); font-size: .92em; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
  unicode-bidi: plaintext;
}
/* the root keeps its cut: the whole prompt stands above */
body:has(#whole:checked) .children .text { display: block; }
body:has(#trained:checked) .aside { display: none; }
.blank { color: var(--soft); font-style: italic; }
.value { border-radius: 3px; background: rgb(var(--tint) / calc(var(--strength) * .38)); font-weight: 600; }
.value, .pill { display: inline-block; padding: 0 .35rem; }
.pill { border: 1px solid var(--neutral); border-radius: 9px; font-size: .85rem; white-space: nowrap; }
.verdict.pill {
  border-color: rgb(var(--tint) / max(var(--strength), .4));
  background: rgb(var(--tint) / calc(var(--strength) * .25));
}
.result { font-weight: 700; }
.soft { color: var(--soft); font-size: .85rem; }

/* Too narrow for columns: the numbers follow the text, each with its name. */
@media (max-width: 62rem) {
  .row { display: flex; flex-wrap: wrap; gap: 0 .8rem; }
  .head { display: none; }
  .row > .node { flex: 1 0 100%; }
  .row > [data-label]:not(:empty)::before { content: attr(data-label) " "; color: var(--soft); font-size: .82rem; }
}
"""

TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{{ script_hash }}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Search tree: step {{ step }}, prompt {{ index }} of its batch</title>
<style>{{ style | safe }}
:root { --red: {{ red }}; --green: {{ green }}; --indent: {{ indent }}px; --reward-width: {{ reward_width }}rem; }
.row { --tint: var(--red); }
.row.good { --tint: var(--green); }
</style>
</head>
<body>
<h1>Search tree<small>step {{ step }}, prompt {{ index }} of its batch</small></h1>
<div class="prompt">{{ prompt }}</div>
<dl class="facts">
{% for name, fact in facts.items() %}
<div><dt>{{ name }}</dt><dd>{{ fact }}</dd></div>
{% endfor %}
</dl>
<div class="legend">
<p><b>Colour</b> -1<span class="scale"></span>+1: the outcome where a completion ends, tanh(V) elsewhere.
<b>It</b> iteration of the search that sampled the node. <b>N</b> visits. <b>V</b> sum of the outcomes backed up
through it. <b>Q</b> = V/N. <b>Credit</b> what its tokens get in training. <b>H</b> mean token entropy in nats.</p>
<p><b>Correct</b>, <b>wrong</b>, or <b>cut off</b> by a limit before it ended. <b>Open</b>: not expanded.
<b>Direct</b>: drawn from the prompt after the search. <b>Row</b>: used in training, as this row.</p>
</div>
<div class="choices">
<button type="button" data-open="true">Expand all</button>
<button type="button" data-open="false">Collapse all</button>
<label><input type="checkbox" id="whole"> whole texts</label>
<label><input type="checkbox" id="trained"> only what was trained on</label>
</div>
<main class="tree">
<div class="row head"><span class="node">Node</span><span>It</span><span>Tokens</span><span>N</span><span>V</span>\
<span>Q</span><span>Credit</span><span>H</span><span>Outcome</span><span>Reward</span><span>Row</span></div>
{% for row in rows %}
{% if row.is_inner %}<details open{% if not row.trained %} class="aside"{% endif %}><summary
{%- else %}<div class="leaf{% if not row.trained %} aside{% endif %}"><div{% endif %} \
class="row{% if row.is_good %} good{% endif %}" style="--strength: {{ row.strength }}">
<span class="node"><span class="number">#{{ row.number }}{% if row.direct %} direct{% endif %}</span>\
{% if row.text %}<span class="text">{{ row.text }}</span>{% endif %}\
{% if row.is_blank %}<span class="blank">{{ "(only whitespace)" if row.text else "(no text)" }}</span>{% endif %}\
</span>
<span data-label="it" class="soft">{{ row.iteration }}</span>
<span data-label="tokens">{{ row.tokens }}</span>
<span data-label="N">{{ row.visits }}</span>
<span data-label="V" class="value" style="--strength: {{ row.value_strength }}">{{ row.value }}</span>
<span data-label="Q">{{ row.q }}</span>
<span data-label="credit">{{ row.credit }}</span>
<span data-label="H">{{ row.entropy }}</span>
<span>\
{% if row.verdict %}<span class="pill verdict">{{ row.verdict }} {{ row.outcome }}</span>\
{% elif not row.is_inner %}<span class="soft">open</span>{% endif %}</span>
<span data-label="reward">{{ row.reward }}\
{% if row.rewards %} <span class="soft">({{ row.rewards }})</span>{% endif %}</span>
<span>{% if row.result is not none %}<span class="pill result">row {{ row.result }}</span>{% endif %}</span>
{% if row.is_inner %}</summary><div class="children">{% else %}</div></div>{% endif %}

{{ "" }}{% for _ in range(row.closes) %}</div></details>{% endfor %}

{% endfor %}
</main>
<script>{{ script | safe }}</script>
</body>
</html>
"""

_ENVIRONMENT = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)


def render_page(context: dict[str, Any]) -> str:
    """Fill the template of the page."""
    template = _ENVIRONMENT.from_string(TEMPLATE)
    return template.render(context, script=SCRIPT, script_hash=SCRIPT_HASH, style=STYLE)
