"""The table of tests of which the default suite runs some cases."""

import ast
from pathlib import Path

from few_cases import ONE_OF


def test_every_test_of_the_table_exists_and_has_cases():
    # If a test is renamed, all its cases would run again in the default suite without a word.
    for name, number in ONE_OF.items():
        file, function = name.split("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert found and found[0].decorator_list and number > 1, name
