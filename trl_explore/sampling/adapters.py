"""Repair of `generate` for prompt-learning adapters: PEFT and transformers have different names for the cache."""

from functools import update_wrapper
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from peft import PeftModel

# Transformers 5.24 requires this version of PEFT. Older versions of PEFT know only the old name of the cache.
FIRST_PEFT_WITH_NEW_NAME = "0.22"


def keep_learned_prompt(model: Any) -> None:
    """
    Let `generate` use the prompt that the active adapter of `model` has learned.

    Transformers 5.24 renames the model argument `past_key_values` to `cache`; PEFT 0.21 does not know the new name.
    With prompt tuning, P-tuning and prefix tuning, `generate` then samples without the learned prompt and raises no
    error. Models still accept the old name, so this function passes the cache to PEFT under the old name. It changes
    nothing for other models, other adapters and newer versions of PEFT.

    Args:
        model (`Any`):
            Model on which `generate` is called, with its adapters.
    """
    if not isinstance(model, PeftModel) or not model.active_peft_config.is_prompt_learning:
        return
    if Version(version("peft")) >= Version(FIRST_PEFT_WITH_NEW_NAME):
        return
    adapted: Any = model
    prepare = adapted.base_model_prepare_inputs_for_generation
    if not isinstance(prepare, _CacheUnderOldName):
        adapted.base_model_prepare_inputs_for_generation = _CacheUnderOldName(prepare)


class _CacheUnderOldName:
    """Prepares the inputs of a forward pass in `generate`, and passes the cache under the name that PEFT knows."""

    def __init__(self, prepare: Any) -> None:
        self.prepare = prepare
        update_wrapper(self, prepare)  # transformers reads the parameters of the wrapped function

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self.prepare(*args, **kwargs)
        if "cache" in inputs:  # transformers 5.24 or newer
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs
