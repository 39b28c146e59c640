"""What others wrote is seen on a terminal and does nothing there."""

from hypothesis import given
from hypothesis import strategies as st

from trl_explore.cli import main
from trl_explore.visible_text import visible_text


def test_what_would_act_is_written_as_python_writes_it():
    assert visible_text("\x1b[31m\x07\x9b\r\u202e\u200b\u2028\ud800") == r"\x1b[31m\x07\x9b\r\u202e\u200b\u2028\ud800"


def test_ordinary_text_stays_as_it_is():
    for text in (
        "a\n\tb",
        "caf\u00e9 \u4f60\u597d",
        "non\u00a0breaking",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "",
    ):
        assert visible_text(text) == text


@given(st.text(alphabet=st.characters()))
def test_nothing_active_is_left_and_nothing_is_changed_twice(text):
    shown = visible_text(text)
    assert not any(ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 for c in shown)
    assert visible_text(shown) == shown
    assert all(c in shown for c in text if c.isalnum())


def test_errors_of_the_command_line_do_nothing_to_the_terminal(tmp_path, capsys):
    (tmp_path / "trees_\x1b[31m.jsonl").touch()
    assert main(["tree", str(tmp_path)]) == 2
    assert r"pass a file in it: trees_\x1b[31m.jsonl" in capsys.readouterr().err
