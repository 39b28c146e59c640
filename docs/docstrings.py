"""TRL's docstring format, as griffe reads it: types and defaults come from the signatures, references become names."""

import re

import griffe

ENTRY = re.compile(r"^(\s+\*{0,2}\w+) \(.*\):$", re.MULTILINE)  # name (`int`, *optional*, defaults to `8`):
RETURNED = re.compile(r"^(\s*Returns:\n\s+)\[?`[^`]*`\]?: ", re.MULTILINE)  # `dict`: what is in it
RAISED = re.compile(r"^( +)`(\w+Error)`: ", re.MULTILINE)  # `ValueError`: when it is raised
REFERENCE = re.compile(r"\[`~?([\w.]+)`\]")  # [`~trl.GRPOTrainer`]


class TrlDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **options) -> None:
        if obj.docstring is not None:
            text = RETURNED.sub(r"\1", ENTRY.sub(r"\1:", obj.docstring.value))
            text = RAISED.sub(r"\1\2: ", text)
            obj.docstring.value = REFERENCE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", text)
