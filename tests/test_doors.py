"""Where the package names privates of TRL's classes and of transformers' trainer, and what imports in circles."""

import ast
import inspect
import textwrap
from pathlib import Path

from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for folder in ("trl_explore", "trainers")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
}
# What the package derives from, and what that does.
THEIRS = [cls for root in (GRPOTrainer, VLLMClient, VLLMGeneration) for cls in root.__mro__[:-1]]
# The only files that are to name a private of these.
DOORS = {
    "trainers/base.py",
    "trainers/saving.py",
    "trainers/tool_loop.py",
    "trainers/trl_state.py",
    "trl_explore/serving/backend.py",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def privates():
    """Methods and attributes of those classes whose names begin with one underscore."""
    found = set()
    for cls in THEIRS:
        found |= {name for name, value in vars(cls).items() if callable(value) or isinstance(value, property)}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def name_of(node):
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def derived_classes():
    """Names of those classes, and of the package's that derive from them."""
    bases = {
        node.name: {name_of(base) for base in node.bases}
        for tree in FILES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    derived = {cls.__name__ for cls in THEIRS}
    while more := {name for name, of in bases.items() if of & derived} - derived:
        derived |= more
    return derived


def attributes(node, names, derived, inside=False):
    """Lines with one of `names` on another object, and in a class that derives from theirs on `self` or as its own."""
    if isinstance(node, ast.ClassDef):
        inside = node.name in derived
        methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
        yield from ((inner.lineno, inner.name) for inner in methods if inside and inner.name in names)
    if isinstance(node, ast.Attribute) and node.attr in names and (inside or not is_self(node.value)):
        yield node.lineno, node.attr
    for inner in ast.iter_child_nodes(node):
        yield from attributes(inner, names, derived, inside)


def imports(tree):
    """Lines that take something private out of the modules of TRL or transformers."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            taken = {alias.name: alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            taken = {f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names}
        else:
            continue
        taken = {path: name for path, name in taken.items() if is_theirs(path)}
        yield from ((node.lineno, path) for path in taken if any(map(is_private, path.split("."))))
        modules |= set(taken.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and first_name(node) in modules:
            yield node.lineno, ast.unparse(node)


def first_name(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return name_of(node)


def is_theirs(path):
    return path.split(".")[0] in {"trl", "transformers"}


def test_only_five_files_are_to_name_privates_of_trl():
    names, derived = privates(), derived_classes()
    uses = {file: sorted({*attributes(tree, names, derived), *imports(tree)}) for file, tree in FILES.items()}
    new = [f"{file}:{line} {name}" for file, found in uses.items() if file not in DOORS for line, name in found]
    assert not new, f"privates outside the doors: {', '.join(new)}"


def test_privates_are_found_on_other_objects_in_trainers_and_in_imports():
    tree = ast.parse(
        """
from trl.trainer.utils import _one, two
import transformers.trainer as theirs
class Part:
    def _log_metric(self): return self._step
    def ask(self): return self.trainer._metrics, self._own
class DeepGRPOTrainer(ExplorationTrainer):
    def _generate(self, prompts): return super()._generate(prompts), self._own
theirs._three
"""
    )
    found = [*attributes(tree, privates(), derived_classes()), *imports(tree)]
    names = ["_generate", "_generate", "_metrics", "theirs._three", "trl.trainer.utils._one"]
    assert sorted(name for _, name in found) == names


def module_of(file):
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("trl_explore") else f"trl_explore.{name}"


def import_graph():
    """Return the modules of the package that each module imports, also inside functions. Imports that only type
    checkers see do not count."""
    modules = {module_of(file) for file in FILES}
    graph = {module: set() for module in modules}
    for file, tree in FILES.items():
        module = module_of(file)
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for node in runtime_nodes(tree):
            if isinstance(node, ast.Import):
                found = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                start = ".".join(filter(None, [above, node.module]))
                inner = [f"{start}.{name.name}" for name in node.names]
                found = [path if path in modules else start for path in inner]
            else:
                continue
            # The package itself is there before all that is in it.
            graph[module] |= modules & set(found) - {module, "trl_explore"}
    return graph


def circles(graph):
    """Groups of modules each of which is reached from the others."""
    reached = {}
    for module in graph:
        reached[module], ahead = set(), list(graph[module])
        while ahead:
            if (other := ahead.pop()) not in reached[module]:
                reached[module].add(other)
                ahead += graph[other]
    return {frozenset(o for o in reached[m] if m in reached[o]) for m in graph if m in reached[m]}


def test_no_modules_import_in_circles():
    assert circles(import_graph()) == set()


def folder_of(module):
    return module.split(".")[1] if "." in module else ""


def folder_graph():
    """Which folder of the package imports modules of which others."""
    folders = {Path(file).parent.name for file in FILES if Path(file).parent.name != "trl_explore"}
    graph = {folder: set() for folder in folders}
    for module, imported in import_graph().items():
        if (folder := folder_of(module)) in folders:
            graph[folder] |= {folder_of(other) for other in imported} & folders - {folder}
    return graph


def runtime_nodes(tree):
    """All nodes of a module but those under `if TYPE_CHECKING`."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        if not (isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"):
            ahead += ast.iter_child_nodes(node)


def test_no_folders_import_in_circles():
    assert circles(folder_graph()) == set()


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"a"}}
    assert circles(graph) == {frozenset("abc")}
