"""Repair of `generate` for adapters that learn a prompt, where PEFT and transformers name the cache differently."""

from functools import update_wrapper
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from peft import PeftModel

# Transformers 5.24 asks for this version of PEFT. Older versions look for the cache under its old name only.
FIRST_PEFT_WITH_NEW_NAME = "0.22"


def keep_learned_prompt(model: Any) -> None:
    """
    Let `generate` use the prompt that the active adapter of `model` has learned.

    Transformers 5.24 renames the model argument `past_key_values` to `cache`; PEFT 0.21 does not know the new name.
    With prompt tuning, P-tuning and prefix tuning, `generate` then samples from another distribution than the one
    that is trained, without an error. Models still take the old name, so PEFT gets the cache under that name. Other
    models, other adapters and newer versions of PEFT are left as they are.
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
    """Prepares the inputs of a forward pass in `generate`, with the cache under the name that PEFT knows."""

    def __init__(self, prepare: Any) -> None:
        self.prepare = prepare
        update_wrapper(self, prepare)  # transformers reads the parameters

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self.prepare(*args, **kwargs)
        if "cache" in inputs:  # not before transformers 5.24
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs
