"""The method of a run by name: one of `METHODS`, or a trainer of the user's own by its import path."""

import inspect
from dataclasses import replace

from trl_explore.errors import UsageError
from trl_explore.methods import METHODS, Method
from trl_explore.names import is_import_path, unknown_name
from trl_explore.runs.inputs import user_object


def find_method(name: str, field: str = "method") -> Method:
    """
    The row of a method; `field` is what names it.

    Args:
        name (`str`):
            One of `METHODS`, or the import path of a trainer of one's own, which gets its parent's row under that name
            and the title of its class.
        field (`str`, *optional*, defaults to `"method"`):
            What messages call the place where the name stands.
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
    # getattr: a subclass of TRL's own trainer may have none
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
    """The flag that names a method, or a trainer of one's own."""
    return f"--trainer {name}" if is_import_path(name) else f"--method {name}"
