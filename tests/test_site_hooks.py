"""Changes to the HTML of the site: where lines may break."""

from importlib.util import module_from_spec, spec_from_file_location

from commands import ROOT


def test_lines_do_not_break_in_flags_intervals_and_before_per_cent_and_code_stays_as_it_is():
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = "<p><code>max_steps</code> +1 ± 2 <code>--max_steps 3</code>, 5 % [+1, -2] <code>[1, 2] 5 %</code></p>"
    cell = "<td><code>max_steps&lt;3</code> +1 ± 2</td>"
    assert hooks.on_page_content(page + cell) == (
        '<p><code>max_steps</code> +1 ± 2 <code><span class="flag">--max_steps</span> 3</code>, '
        "5&nbsp;% [+1,&nbsp;-2] <code>[1, 2] 5 %</code></p>"
        "<td><code>max_<wbr>steps&lt;3</code> +1&nbsp;±&nbsp;2</td>"
    )
