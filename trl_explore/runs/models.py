"""Model of a command: the base model, its adapter if it has one, and the tokenizer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_explore.errors import UsageError
from trl_explore.runs.inputs import check_model, looks_like_path, missing_path

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_CONFIG = "adapter_config.json"


class ModelSource(NamedTuple):
    """Names or folders of a model's parts: the `base` model, its `adapter` or None, and the `tokenizer`."""

    base: str
    adapter: str | None
    tokenizer: str


def find_model(
    name: str | None, adapter: str | None = None, *, revision: str | None, trust_remote_code: bool = False
) -> ModelSource:
    """
    Find a model, its adapter if it has one, and the tokenizer.

    Args:
        name (`str`, *optional*):
            Hub name or folder of a model. Without `adapter`, it may also be the folder of an adapter, whose
            configuration names the base model.
        adapter (`str`, *optional*):
            Hub name or folder of an adapter for the model `name`.
        revision (`str`, *optional*):
            Revision of the base model on the Hub.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            If `True`, allow models with code of their own.

    Returns:
        [`ModelSource`]: The parts. If the folder of the adapter has a tokenizer, it replaces the base model's.

    Raises:
        UsageError: If the model or the adapter cannot be found.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    folder = Path(name or "").expanduser()
    if adapter is None and (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        adapter = str(folder)
        base_name = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        try:
            base = check_model(base_name, **options)
        except UsageError as error:
            raise UsageError(
                f"{adapter} is an adapter without its base: {str(error).rstrip('.')}. Name it: --model_name_or_path "
                f"BASE --adapter_name_or_path {adapter}"
            ) from error
    else:
        base = check_model(name, **options)
    if adapter is None:
        return ModelSource(base, None, base)
    folder = Path(adapter).expanduser()
    if looks_like_path(adapter) and not folder.is_dir():
        raise missing_path("adapter_name_or_path", folder)
    if folder.is_dir():
        adapter = str(folder)
        if not (folder / ADAPTER_CONFIG).is_file():
            raise UsageError(f"adapter_name_or_path={adapter!r} is no adapter: it has no {ADAPTER_CONFIG}")
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return ModelSource(base, adapter, adapter if has_tokenizer else base)


def load_model(
    source: ModelSource, *, dtype: str, revision: str | None, trust_remote_code: bool = False
) -> "PreTrainedModel | PeftModel":
    """Load a model on the CPU, with its adapter if it has one."""
    from transformers import AutoModelForCausalLM

    name = source.base
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        if source.adapter is not None:
            from peft import PeftModel

            name = source.adapter
            model = PeftModel.from_pretrained(model, name)
    except (OSError, ValueError, RuntimeError) as error:  # PEFT raises a RuntimeError if shapes differ
        raise UsageError(f"{name!r} cannot be loaded: {error}") from error
    return model


def load_tokenizer(
    source: ModelSource, *, revision: str | None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer

    if source.tokenizer != source.base:
        revision = None  # the revision belongs to the base model, not to the adapter
    try:
        return AutoTokenizer.from_pretrained(source.tokenizer, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(f"the tokenizer of {source.tokenizer!r} cannot be loaded: {error}") from error
