"""A second Python process that makes rows of reasoning-gym and scores answers.

Reasons for a second process:

- Some answers break the process that scores them. reasoning-gym parses answers with `eval` and sympy: `9**9**9` never
  ends, and `exit()` ends the process. The Rubik's cube move `R99999999999` fills the memory. The training run must
  survive such answers.
- Some data sets print to the standard output.
- Some data sets iterate over sets. The order of a set depends on Python's hash seed, which differs between processes.
  So two processes of one run would get different questions. The second process runs with a fixed hash seed.
- The time limit of a second process also stops computations in C code. It works in whichever thread of the training
  run an answer is scored.

The second process runs this file as its program. The file does not import other modules of trl_explore, so that the
process starts fast.
"""

import ast
import atexit
import builtins
import dataclasses
import datetime
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

CPU_SECONDS = 3.0  # per answer; the slowest reasonable answer needs less than one second
# Per answer. This limit is for systems that cannot limit CPU time, and for code that waits without using the CPU.
WALL_SECONDS = 60.0
MEMORY_BYTES = 8 * 2**30  # limit of the process's address space
# A longer answer scores 0. No data set has right answers of this length.
MAX_ANSWER_LENGTH = 100_000

# Data sets that pass the answer to Python's `eval`.
EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Data sets that pass the answer to sympy's `parse_expr`, which ends in `eval`.
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
# Text that no data set can parse. It replaces answers that must not be evaluated.
UNREADABLE = ")"
NUMBERS: dict[str, Any] = {"Decimal": Decimal, "Fraction": Fraction, "complex": complex}  # types stored as text
# Functions that a formula may call. Integral is among them because the package's own answers use it.
FUNCTIONS = frozenset(
    "Abs Add E Float Function I Integer Integral Max Min Mul Pow Rational Symbol abs acos acosh acot acsc asec asin "
    "asinh atan atan2 atanh cbrt cos cosh cot coth csc csch erf exp factorial log ln max min pi pow root round sec "
    "sech sign sin sinh sqrt tan tanh".split()
)
MAX_BITS = 100_000  # of the largest number in a formula


# ---------------------------------------------------------------------------------------------------------------------
# Metadata as text
# ---------------------------------------------------------------------------------------------------------------------


def encode(value: Any) -> str:
    """
    Return `value` as JSON text from which [`decode`] makes an equal value of the same types.

    Args:
        value (`Any`):
            Lists, tuples, sets, dictionaries, numbers, strings and `None`, nested in any way. Numbers can also be
            fractions, decimals, complex numbers and numpy's scalars.

    Returns:
        `str`: The text.

    Raises:
        TypeError: If `value` contains an object of another type.
    """
    return json.dumps(_to_plain(value))


def decode(text: str) -> Any:
    """
    Return the value that [`encode`] wrote.

    Args:
        text (`str`):
            The text.

    Returns:
        `Any`: The value.
    """
    return _from_plain(json.loads(text))


def _to_plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_to_plain(item) for item in value]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _to_plain(item) for key, item in value.items()}
        return {"$dict": [[_to_plain(key), _to_plain(item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {f"${kind.__name__}": [_to_plain(item) for item in value]}
    if kind in NUMBERS.values():
        return {f"${kind.__name__}": str(value)}
    if kind.__module__ == "numpy" and hasattr(value, "item") and value.ndim == 0:
        return {"$numpy": [kind.__name__, value.item()]}
    raise TypeError(f"metadata of type {kind.__module__}.{kind.__qualname__} cannot be written as JSON")


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$dict":
            return {_from_plain(key): _from_plain(item) for key, item in content}
        if tag in ("$tuple", "$set", "$frozenset"):
            kind = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag]
            return kind(_from_plain(item) for item in content)
        if tag[1:] in NUMBERS and isinstance(content, str):
            return NUMBERS[tag[1:]](content)
        if tag == "$numpy":
            import numpy as np

            return getattr(np, content[0])(content[1])
    return {key: _from_plain(item) for key, item in value.items()}


def field_value(value: Any, default: Any) -> Any:
    """
    Convert a JSON value to the type of a configuration field.

    Args:
        value (`Any`):
            The JSON value.
        default (`Any`):
            Default of the field. It shows the type of the field.

    Returns:
        `Any`: A tuple, date, time or data class if the default is one. Any other value is returned unchanged.
    """
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, (datetime.date, datetime.time)) and isinstance(value, str):
        return type(default).fromisoformat(value)
    if dataclasses.is_dataclass(default) and not isinstance(default, type) and isinstance(value, dict):
        return type(default)(**value)
    return value


def field_defaults(config_class: type) -> dict[str, Any]:
    """Return the fields of a data set's configuration with their defaults, without `seed` and `size`."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.name in ("seed", "size"):
            continue
        defaults[field.name] = None
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return defaults


def make_data_set(name: str, config: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """
    Create a data set of reasoning-gym.

    Args:
        name (`str`):
            Name of the data set.
        config (`Mapping`):
            Fields of its configuration, as JSON values.
        seed (`int`):
            Seed of the data set.
        size (`int`):
            Number of rows.

    Returns:
        `ProceduralDataset`: The data set.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    defaults = field_defaults(DATASETS[name][1])
    values = {field: field_value(value, defaults.get(field)) for field, value in config.items()}
    return create_dataset(name, seed=seed, size=size, **values)


# ---------------------------------------------------------------------------------------------------------------------
# Answers that are safe to evaluate
# ---------------------------------------------------------------------------------------------------------------------


def safe_answer(name: str, answer: str) -> str:
    """
    Return `answer` if it is safe to score, or else [`UNREADABLE`]. An answer is unsafe if scoring it would run code
    that the model wrote, or compute a huge number.

    Args:
        name (`str`):
            Name of the data set.
        answer (`str`):
            Answer of a model.

    Returns:
        `str`: Text for `score_answer`.
    """
    if name in EVALUATED and not _is_literal(answer):
        return UNREADABLE
    if name in FORMULAS and not _is_formula(answer):
        return UNREADABLE
    return answer


def _is_literal(answer: str) -> bool:
    """Return whether `eval(answer)` is safe: it raises a syntax error, or builds a value from constants and names
    without a call."""
    try:
        tree = ast.parse(answer.lstrip(" \t"), mode="eval")  # `eval` ignores these leading characters, too
    except Exception:
        return True  # `eval` fails in the same way, so it runs no code
    allowed = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load)
    signs = (ast.UnaryOp, ast.USub, ast.UAdd)
    return all(isinstance(node, (*allowed, *signs)) for node in ast.walk(tree))


def _is_formula(answer: str) -> bool:
    """Return whether parsing `answer` with sympy is safe: sympy cannot parse it, or reads a formula of elementary
    functions with small numbers."""
    from sympy.parsing.sympy_parser import standard_transformations, stringify_expr

    names: dict[str, Any] = dict(builtins.__dict__)  # parse_expr can also call these functions
    exec("from sympy import *", names)
    try:
        code = stringify_expr(answer, {}, names, standard_transformations)
        tree = ast.parse(code.lstrip(" \t"), mode="eval")
    except Exception:
        return True  # parse_expr fails in the same way, so it runs no code
    return all(_is_harmless(node) for node in ast.walk(tree)) and _bits(tree.body) <= MAX_BITS


def _is_harmless(node: ast.AST) -> bool:
    """Return whether `node` is safe. A call is safe if it calls a function of [`FUNCTIONS`]. Any other node is safe
    unless its type is in the list below, because such a node can reach or run other code."""
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Call):  # Function('f')(x)
            called = called.func
        return isinstance(called, ast.Name) and called.id in FUNCTIONS
    return not isinstance(
        node,
        (ast.Attribute, ast.Subscript, ast.Lambda, ast.comprehension, ast.Await, ast.NamedExpr, ast.JoinedStr),
    )


def _bits(node: ast.AST) -> float:
    """Return an upper bound for the bits of the largest number that occurs when `node` is evaluated."""
    if isinstance(node, ast.Constant):
        return _bits_of_constant(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _bits(node.left), _bits(node.right)
        if isinstance(node.op, ast.Pow):
            return _bits_of_power(left, right)
        return left + right + 1
    if isinstance(node, ast.Call):
        name = ""
        if isinstance(node.func, ast.Name):
            name = node.func.id
        parts = [_bits(part) for part in node.args]
        if name in ("Pow", "pow") and len(parts) > 1:
            return _bits_of_power(parts[0], parts[1])
        if name == "factorial" and parts:  # n! is at most n to the power of n
            return _bits_of_power(parts[0], parts[0])
        if name in ("Float", "Integer", "Rational", "Symbol"):
            return sum(parts)
        return sum(parts) + 1
    return sum((_bits(part) for part in ast.iter_child_nodes(node)), 1.0)


def _bits_of_constant(value: Any) -> float:
    if isinstance(value, str):  # a number, as in sympy's Float('1e9'), or the name of a symbol
        try:
            value = float(value)
        except ValueError:
            return 1.0
    if isinstance(value, int) and value.bit_length() > 1000:  # too large for a float
        return float(value.bit_length())
    if isinstance(value, (int, float)) and math.isfinite(value):
        return math.log2(abs(value) + 1)
    return 1.0


def _bits_of_power(base_bits: float, exponent_bits: float) -> float:
    if exponent_bits >= 64:
        return math.inf
    return base_bits * 2**exponent_bits


# ---------------------------------------------------------------------------------------------------------------------
# In the training process
# ---------------------------------------------------------------------------------------------------------------------


class Worker:
    """Connection to a worker process. The first request starts the process, and a request restarts it if it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._opened: set[tuple[str, str]] = set()
        self._owner = os.getpid()
        atexit.register(self.close)

    def rows(
        self, name: str, config: Mapping[str, Any], *, seed: int, size: int, start: int = 0, count: int | None = None
    ) -> list[dict[str, Any]]:
        """
        Make rows of a data set.

        Args:
            name (`str`):
                Name of the data set.
            config (`Mapping`):
                Configuration of the data set, without `seed` and `size`.
            seed (`int`):
                Seed of the data set.
            size (`int`):
                Size of the data set.
            start (`int`, *optional*, defaults to `0`):
                Index of the first row.
            count (`int`, *optional*):
                Number of rows. `None` for all rows from `start`.

        Returns:
            `list[dict]`: Rows with `question`, `answer` and `metadata`. [`encode`] wrote the metadata.

        Raises:
            ValueError: If the package cannot make the rows.
        """
        if count is None:
            count = size - start
        message = dict(op="rows", name=name, config=dict(config), seed=seed, size=size, start=start, count=count)
        reply = self._request(message, None)
        if reply is None:
            raise ValueError(f"reasoning_gym:{name} ended the process that makes its rows.")
        if "error" in reply:
            raise ValueError(f"reasoning_gym:{name} cannot make its rows: {reply['error']}")
        return reply["rows"]

    def score(self, name: str, config: Mapping[str, Any], answer: str | None, row: Mapping[str, Any]) -> float:
        """
        Score one answer with the package's own `score_answer`.

        Args:
            name (`str`):
                Name of the data set.
            config (`Mapping`):
                Configuration of the data set, without `seed` and `size`.
            answer (`str` or `None`):
                The answer. `None` if the completion has no answer.
            row (`Mapping`):
                `question`, `answer` and `metadata` of the row.

        Returns:
            `float`: The package's score, in most data sets 0 to 1. It is 0.0 if `score_answer` raises, if it runs out
            of time or memory, or if the answer has more than 100,000 characters.

        Raises:
            ValueError: If the package cannot make the data set.
        """
        if answer is not None and len(answer) > MAX_ANSWER_LENGTH:
            return 0.0
        message = dict(op="score", name=name, config=dict(config), given=answer)
        message.update({column: row[column] for column in ("question", "answer", "metadata")})
        key = (name, json.dumps(config, sort_keys=True))
        if key not in self._opened:  # load the data set before the time limit of the answer starts
            opened = self._request(dict(op="open", name=name, config=dict(config)), None)
            if opened is None:
                opened = {"error": "its process ended"}
            if "error" in opened:
                raise ValueError(f"reasoning_gym:{name} cannot be made: {opened['error']}")
            self._opened.add(key)
        reply = self._request(message, WALL_SECONDS)
        if reply is None or "error" in reply:
            return 0.0
        return reply["score"]

    def close(self) -> None:
        """End the worker process."""
        process, self._process = self._process, None
        self._opened.clear()
        if process is None or os.getpid() != self._owner:  # a fork must not end its parent's worker
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # `close` writes the buffered text first, and a dead process cannot read it
                    pass
        process.wait()

    def _request(self, message: Mapping[str, Any], seconds: float | None) -> dict[str, Any] | None:
        """Send `message` and return the reply, or `None` if the process died or took longer than `seconds`."""
        with self._lock:
            try:
                process = self._started()
                reply = self._exchange(process, json.dumps(message), seconds)
            except BaseException:
                # The process may still reply to this request, and the next request would read that reply.
                self.close()
                raise
            if reply is None:
                self.close()
            return reply

    @staticmethod
    def _exchange(process: "subprocess.Popen[str]", text: str, seconds: float | None) -> dict[str, Any] | None:
        assert process.stdin is not None and process.stdout is not None
        timer = None
        if seconds is not None:
            timer = threading.Timer(seconds, process.kill)
            timer.daemon = True
            timer.start()
        try:
            process.stdin.write(text + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            if timer is not None:
                timer.cancel()
        if not line.endswith("\n"):  # the process died
            return None
        return json.loads(line)

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # -P keeps the folder of this file out of the module path, because the folder has a module `reasoning_gym`.
        self._process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            encoding="ascii",
            start_new_session=True,  # so that Ctrl-C interrupts the training run only
        )
        ready = self._exchange(self._process, json.dumps({"op": "ready", "path": sys.path}), None)
        if ready is None:
            ready = {"error": "it ended at once"}
        if "error" in ready:
            raise RuntimeError(f"The process that scores answers of reasoning-gym did not start: {ready['error']}")
        return self._process


_workers: dict[int, Worker] = {}


def worker() -> Worker:
    """Return the worker of this process. A forked process gets its own worker."""
    process = os.getpid()
    if process not in _workers:
        _workers[process] = Worker()
    return _workers[process]


# ---------------------------------------------------------------------------------------------------------------------
# In the worker process
# ---------------------------------------------------------------------------------------------------------------------


class _Server:
    """Answers the requests of the training process."""

    def __init__(self) -> None:
        self._data_sets: dict[tuple[str, str], Any] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        operation = message["op"]
        if operation == "ready":
            sys.path[:] = message["path"]
            import reasoning_gym  # noqa: F401

            return {}
        if operation == "rows":
            return {"rows": self._rows(message)}
        data_set = self._data_set(message)
        if operation == "open":
            return {}
        return {"score": self._score(data_set, message)}

    def _data_set(self, message: dict[str, Any]) -> Any:
        key = (message["name"], json.dumps(message["config"], sort_keys=True))
        if key not in self._data_sets:
            self._data_sets[key] = make_data_set(message["name"], message["config"], seed=0, size=1)
        return self._data_sets[key]

    @staticmethod
    def _rows(message: dict[str, Any]) -> list[dict[str, Any]]:
        data_set = make_data_set(message["name"], message["config"], seed=message["seed"], size=message["size"])
        rows = []
        for index in range(message["start"], message["start"] + message["count"]):
            _seed_global(message["seed"] + index)
            entry = data_set[index]
            text = encode(entry["metadata"])
            # Compare the texts too, because NaN is not equal to itself.
            if repr(decode(text)) != repr(entry["metadata"]) and decode(text) != entry["metadata"]:
                raise TypeError(f"the metadata of row {index} change when they are written as JSON")
            rows.append({"question": entry["question"], "answer": entry["answer"], "metadata": text})
        return rows

    @staticmethod
    def _score(data_set: Any, message: dict[str, Any]) -> float:
        entry = {
            "question": message["question"],
            "answer": message["answer"],
            "metadata": decode(message["metadata"]),
        }
        given = message["given"]
        _limit_cpu(CPU_SECONDS)
        if given is not None:
            given = safe_answer(message["name"], given)
        score = float(data_set.score_answer(given, entry))
        _limit_cpu(0.0)
        return score


def _seed_global(seed: int) -> None:
    """Seed the global random generators, because programs in the rows of codeio use them."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)


def _limit_cpu(seconds: float) -> None:
    """End this process after `seconds` of CPU time. 0 removes the limit. The default action of the signal ends the
    process even in C code."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _serve() -> None:
    # Some data sets print. Redirect the standard output, so that their text does not mix with the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    _limit_memory()
    server = _Server()
    for line in sys.stdin:
        try:
            reply = server.answer(json.loads(line))
        except BaseException as error:  # includes SystemExit, which an evaluated answer may raise
            _limit_cpu(0.0)
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
