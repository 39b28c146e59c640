"""
Write, read and compare files of pins: what must not change for users, in a form that people can read.

A file has sections, `== one process`. A section of a run has parts (a step, an evaluation), and each part has facts, a
label with a text. A section of entries (metrics, files, keys of a state) has a value for each name; names are grouped
by their beginning. Long lines go on at a deeper indentation.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator

Facts = dict[str, str]
Section = list[tuple[str, Facts]]  # parts by title; a section of entries has one part without a title
SEPARATORS = {"metrics": "/", "files": "/", "state": "."}  # sections of entries, with what ends a name's beginning
ABSENT = "absent"
ALONE = "-"  # the label of names that stand in full
FEW = 2  # most names with a beginning that stand in full
INDENT = 12
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)")
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def separator_of(section: str) -> str | None:
    """Return what ends the beginning of names in a section of entries; None for a section of a run."""
    return SEPARATORS.get(section.split(", ")[-1].split(" of ")[0])


def text_of(sections: dict[str, Section]) -> str:
    """Return the text of a file."""
    lines: list[str] = []
    for name, section in sections.items():
        lines += _lines(name, section)
    return "".join(f"{line}\n" for line in lines)


def _lines(name: str, section: Section) -> Iterator[str]:
    yield f"== {name}"
    separator = separator_of(name)
    for title, facts in section:
        shown = dict(facts) if separator is None else _grouped(facts, separator)
        if title:
            random = shown.pop("random", None)
            yield title if random is None else f"{title} ({random})"
        for label, text in shown.items():
            # A label that is longer than its column still needs a space behind it.
            line = f"  {label:<{INDENT - 3}} {text}"
            yield from textwrap.wrap(
                line, 118, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False
            )


def _grouped(entries: Facts, separator: str) -> Facts:
    """Return one text for all names that begin alike, and one for the names whose beginning is rare."""
    beginnings = Counter(name.partition(separator)[0] for name in entries)
    groups: dict[str, list[str]] = {ALONE: []}
    for name in sorted(entries):
        beginning, _, rest = name.partition(separator)
        is_rare = beginnings[beginning] <= FEW or not rest
        label, shown = (ALONE, name) if is_rare else (beginning, rest)
        groups.setdefault(label, []).append(f"{shown}={entries[name]}".rstrip("="))
    return {label: " ".join(shown) for label, shown in groups.items() if shown}


def read(text: str) -> dict[str, Section]:
    """Return what [`text_of`] was given."""
    sections: dict[str, Section] = {}
    for line in _whole_lines(text):
        if line.startswith("== "):
            name = line.removeprefix("== ")
            section = sections.setdefault(name, [])
            separator = separator_of(name)
            if separator is not None:
                section.append(("", {}))
        elif not line.startswith(" "):
            title, _, random = line.removesuffix(")").partition(" (")
            section.append((title, {"random": random} if random else {}))
        else:
            label, _, content = line.strip().partition(" ")
            facts = section[-1][1]
            if separator is None:
                facts[label] = content.strip()
                continue
            for entry in content.split():
                rest, _, value = entry.partition("=")
                facts[rest if label == ALONE else f"{label}{separator}{rest}"] = value
    return sections


def _whole_lines(text: str) -> list[str]:
    """Return lines without comments, each with the lines that go on with it."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * INDENT):
            lines[-1] += " " + line.strip()
        elif line and not line.startswith("#"):
            lines.append(line)
    return lines


def same(written: str, found: str) -> bool:
    """Return whether two texts are equal but for the last digits of decimal numbers."""
    if NUMBER.split(written) != NUMBER.split(found):
        return False
    for a, b in zip(NUMBER.findall(written), NUMBER.findall(found), strict=True):
        is_decimal = "." in a or "." in b
        if a != b and not (is_decimal and abs(float(a) - float(b)) <= ABSOLUTE + RELATIVE * abs(float(a))):
            return False
    return True


def beside(entries: Facts, known: Facts) -> Facts:
    """Return the entries that are not known, or have another value; known ones that are missing are `absent`."""
    others = {name: value for name, value in entries.items() if name not in known or not same(known[name], value)}
    return {**others, **dict.fromkeys(known.keys() - entries.keys(), ABSENT)}


def joined(first: Section, second: Section) -> Section:
    """Return the parts of two processes as one. A text in which they differ has both, with a slash between."""
    parts = []
    for (title, facts), (other_title, others) in zip(first, second, strict=True):
        assert title == other_title
        texts = {}
        for label in {**facts, **others}:
            a, b = facts.get(label, "nothing"), others.get(label, "nothing")
            texts[label] = a if a == b else f"{a} / {b}"
        parts.append((title, texts))
    return parts


def differences(written: dict[str, Section], found: dict[str, Section]) -> list[str]:
    """Return lines that say where two files differ, in the order of the written one."""
    before, after = _by_address(written), _by_address(found)
    lines = []
    for address in {**before, **after}:
        a, b = before.get(address, "nothing"), after.get(address, "nothing")
        if not same(a, b):
            lines += [", ".join(filter(None, address)), f"    written  {a or 'here'}", f"    found    {b or 'here'}"]
    return lines


def _by_address(sections: dict[str, Section]) -> dict[tuple[str, ...], str]:
    """Return each fact by its section, its part and its label; a section without parts and a part without
    facts are facts themselves."""
    found: dict[tuple[str, ...], str] = {}
    for name, section in sections.items():
        if not section:
            found[(name,)] = "here"
        for title, facts in section:
            # Random generators come last, because samples say more about where a run went another way.
            for label in sorted(facts, key="random".__eq__):
                found[(name, title, label)] = facts[label]
            if not facts:
                found[(name, title)] = "here"
    return found
