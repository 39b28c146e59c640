"""Changes to the HTML of the site: where lines may break."""

from importlib.util import module_from_spec, spec_from_file_location

from commands import ROOT


def test_tables_break_inside_names_and_not_inside_flags_and_intervals():
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = "<p><code>max_steps</code> +1 ± 2 <code>--max_steps</code></p><td><code>max_steps&lt;3</code> +1 ± 2</td>"
    assert hooks.on_page_content(page) == (
        '<p><code>max_steps</code> +1 ± 2 <code class="flag">--max_steps</code></p>'
        "<td><code>max_<wbr>steps&lt;3</code> +1&nbsp;±&nbsp;2</td>"
    )
