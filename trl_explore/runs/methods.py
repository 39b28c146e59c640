"""Method of a run, by name: one of `METHODS`, or the import path of the user's own trainer."""

import inspect
from dataclasses import replace

from trl_explore.errors import UsageError
from trl_explore.methods import METHODS, Method
from trl_explore.names import is_import_path, unknown_name
from trl_explore.runs.inputs import user_object


def find_method(name: str, field: str = "method") -> Method:
    """
    Return the entry of a method.

    Args:
        name (`str`):
            One of `METHODS`, or the import path of the user's own trainer. Such a trainer gets the entry of its parent
            class, with the import path as its name and the class name as its title.
        field (`str`, *optional*, defaults to `"method"`):
            Field or flag that contains `name`, for error messages.

    Raises:
        UsageError: If there is no such method or trainer.
    """
    if name in METHODS:
        return METHODS[name]
    if not is_import_path(name):
        example = "A trainer of your own is named by its import path, my_module.MyTrainer."
        raise UsageError(f"{field}: {unknown_name('method', name, METHODS)} {example}")

    from trl import GRPOConfig, GRPOTrainer

    from trl_explore.trainers import ExplorationTrainer

    path, cls = user_object(field, name, "class", inspect.isclass)
    if not inspect.isclass(cls) or not issubclass(cls, GRPOTrainer):
        raise UsageError(f"{field}: {name!r} is no subclass of ExplorationTrainer, nor of TRL's GRPOTrainer")
    method = cls.method if issubclass(cls, ExplorationTrainer) else "grpo"
    if method not in METHODS:
        raise UsageError(
            f"{field}: {name!r} has method={method!r}, which is no method of trl-explore: leave that line out of the "
            "class, so that it has its parent's"
        )
    # A subclass of TRL's own trainer has no `config_class`, unless it defines one.
    config = getattr(cls, "config_class", GRPOConfig)
    return replace(
        METHODS[method],
        name=name,
        title=cls.__name__,
        trainer=path,
        config=f"{config.__module__}:{config.__qualname__}",
        plain=False,
        style=None,
    )


def flag_of(name: str) -> str:
    """Return the flag that names a method, or the user's own trainer."""
    if is_import_path(name):
        return f"--trainer {name}"
    return f"--method {name}"
