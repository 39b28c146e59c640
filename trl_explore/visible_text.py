"""Text of models, users and files on its way to a terminal or a card."""

import unicodedata

# Invisible characters that writing systems need: they join and separate letters. They cannot reorder or hide any.
_JOINERS = "\u200c\u200d"


def visible_text(text: str) -> str:
    """
    Untrusted text with nothing in it that acts instead of being seen.

    Args:
        text (`str`):
            Any text.

    Returns:
        `str`: The text with control characters (all but newlines and tabs), lone surrogates, and characters that are
        invisible or reorder others as Python escapes, such as `\\x1b`.
    """
    if (
        text.replace("\n", "").replace("\t", "").isprintable()
    ):  # nearly all text; the rest takes a hundred times as long
        return text
    return "".join(c.encode("unicode_escape").decode() if _is_active(c) else c for c in text)


def _is_active(character: str) -> bool:
    if character in "\n\t" or character in _JOINERS:
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
