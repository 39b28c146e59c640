"""
Supported versions of TRL, and a table of the internals of TRL and transformers that this package relies on.

A seam is one such internal: a method or function that this package calls, overrides or reads. Importing the package
only checks the version of TRL. The first trainer then compares all seams with the installed libraries. A version that
was never tested works if its seams are unchanged. If a seam has changed, the trainer raises an error.
"""

import inspect
import logging
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from types import CodeType
from typing import Any

from packaging.version import Version

MIN_TRL, MAX_TRL = "1.14.2", "2"
# The versions with which the tests run: the last patch release of each minor version.
KNOWN_TRL = ("1.14.2", "1.15.0", "1.16.0")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seam:
    """
    An object of TRL or transformers on which this package relies, and its expected properties.

    Several names in one text are separated by spaces. They are looked up in the compiled code, so the layout of the
    source does not matter.
    """

    path: str  # import path of the object
    door: str  # the only file of this package that uses the object
    takes: tuple[str, ...] = ()  # allowed lists of parameters, without `self`; empty: not checked
    uses: str = ""  # names that its code must read, write or call
    order: str = ""  # names that its code must use in this order
    keys: str = ""  # texts that its code must contain, such as keys of dictionaries
    needed_by: str = ""  # option that needs the object; empty: every run needs it
    since: str = MIN_TRL  # first version of TRL with the object


BASE, SAVING, BACKEND = "trainers/base.py", "trainers/saving.py", "serving/backend.py"
GRPO, TRAINER = "trl.GRPOTrainer", "transformers.Trainer"
VLLM_CLIENT = "trl.generation.vllm_client.VLLMClient"
VLLM_BACKEND = "trl.generation.vllm_generation.VLLMGeneration"
PREFIXES, VLLM = "shared_prefix_training", "use_vllm"

SEAMS = (
    # Arguments and attributes of a trainer.
    Seam(
        f"{GRPO}.__init__",
        BASE,
        takes=(
            "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks "
            "optimizers quantization_config peft_config tools rollout_func environment_factory",
        ),
        uses="_metrics _logs _pending_extra_logs _pending_metrics _step _buffered_inputs _tokenizer _is_vlm "
        "_entropy_bonus_enabled aux_loss_enabled eos_token_ids ref_model generation_config generation_kwargs beta "
        "num_generations num_iterations max_completion_length temperature loss_type rollout_func reward_funcs "
        "reward_func_names reward_weights use_vllm log_completions tools environments environment_factories "
        "_environment_pool _multi_environment _env_tools async_loop max_tool_calling_iterations",
        keys="train eval prompt completion rewards advantages extra images",
    ),
    Seam(f"{GRPO}._name", BASE),
    Seam(f"{GRPO}._tag_names", BASE),
    Seam(f"{GRPO}._paper", BASE),
    # The methods of a training step, in the order in which TRL calls them.
    Seam(
        f"{GRPO}._prepare_inputs",
        BASE,
        takes=("generation_batch",),
        order="_generate_and_score_completions shuffle_sequence_dict split_tensor_dict",
        uses="_buffered_inputs _step steps_per_generation num_iterations",
    ),
    Seam(
        f"{GRPO}._generate_and_score_completions",
        BASE,
        takes=("inputs",),
        order="environment_factories _generate steps_per_generation num_iterations gradient_accumulation_steps "
        "_get_per_token_logps_and_entropies _calculate_rewards",
        uses="_environment_pool _batch_environments _multi_environment _sync_tool_dicts _async_tool_dicts "
        "num_generations reward_weights _metrics _logs _pending_extra_logs _pending_metrics",
        keys="prompt_ids prompt_mask completion_ids completion_mask advantages num_items_in_batch "
        "old_per_token_logps ref_per_token_logps tool_mask importance_sampling_ratio",
    ),
    Seam(
        f"{GRPO}._generate",
        BASE,
        takes=("prompts",),
        order="copy deepcopy rollout_func _tokenize_prompts _generate_single_turn _tool_call_loop",
        uses="tools num_input_tokens_seen",
        keys="prompt_ids completion_ids logprobs env_mask num_tokens",
    ),
    Seam(f"{GRPO}._tokenize_prompts", BASE, takes=("prompts",)),
    Seam(
        f"{GRPO}._generate_single_turn",
        BASE,
        takes=("prompt_ids images multimodal_fields num_generations has_tool_images",),
        uses="use_vllm generation_config unwrap_model_for_generation",
    ),
    Seam(
        f"{GRPO}._tool_call_loop",
        BASE,
        takes=("prompts prompt_ids completion_ids completions logprobs images multimodal_fields",),
        uses="_sync_tool_dicts _async_tool_dicts max_tool_calling_iterations async_loop _get_tool_suffix_ids "
        "_generate_single_turn",
    ),
    Seam(f"{GRPO}._get_tool_suffix_ids", BASE, takes=("tool_messages",)),
    Seam(
        f"{GRPO}._get_per_token_logps_and_entropies",
        BASE,
        takes=(
            "model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
            "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
            "mm_token_type_ids image_position_ids",
            "model args batch_size compute_aux_loss kwargs",  # 1.14
        ),
    ),
    Seam(
        f"{GRPO}._calculate_rewards",
        BASE,
        takes=("inputs prompts completions completion_ids_list",),
        uses="reward_funcs environments",
        keys="environments",
    ),
    Seam(
        f"{GRPO}.compute_loss", BASE, takes=("model inputs return_outputs num_items_in_batch",), uses="_compute_loss"
    ),
    Seam(
        f"{GRPO}._compute_loss",
        BASE,
        takes=("model inputs",),
        uses="_get_per_token_logps_and_entropies beta epsilon_low epsilon_high _entropy_bonus_enabled "
        "aux_loss_enabled current_gradient_accumulation_steps",
        keys="advantages completion_mask tool_mask num_items_in_batch old_per_token_logps ref_per_token_logps",
    ),
    Seam(
        f"{GRPO}.log",
        BASE,
        takes=("logs start_time",),
        uses="_metrics _logs log_completions",
        keys="prompt completion rewards advantages extra",
    ),
    Seam(
        "trl.trainer.grpo_trainer.print_prompt_completions_sample",
        "rows/table.py",
        takes=("prompts completions rewards advantages step num_samples extra",),
    ),
    Seam(
        "trl.models.unwrap_model_for_generation",
        "sampling/generation.py",
        takes=(
            "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs",
            "model accelerator gather_deepspeed3_params generation_kwargs",  # before 1.16
        ),
    ),
    Seam(
        "trl.chat_template_utils.parse_response",
        "agents/turns.py",
        takes=("tokenizer ids prefix tools", "tokenizer ids prefix"),  # the second before 1.16
    ),
    # The training loop of transformers.
    Seam(f"{TRAINER}.train", BASE, takes=("resume_from_checkpoint trial ignore_keys_for_eval",)),
    Seam(
        f"{TRAINER}._inner_training_loop",
        BASE,
        order="get_train_dataloader _init_training_state _prepare_for_training _tr_loss _globalstep_last_logged "
        "_run_epoch",
        uses="_total_loss_scalar",
    ),
    Seam(f"{GRPO}._get_train_sampler", BASE, takes=("dataset",)),
    Seam(f"{TRAINER}._remove_unused_columns", BASE, takes=("dataset description",)),
    Seam(
        f"{TRAINER}._init_training_state",
        BASE,
        takes=("max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",),
    ),
    Seam(
        f"{TRAINER}._run_epoch",
        BASE,
        takes=(
            "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
            "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
        ),
        uses="skip_first_batches on_epoch_end _maybe_log_save_evaluate _load_rng_state "
        "current_gradient_accumulation_steps",
    ),
    Seam(
        f"{TRAINER}._maybe_log_save_evaluate",
        SAVING,
        takes=("tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",),
        uses="_total_loss_scalar _globalstep_last_logged",
    ),
    # Checkpoints. Transformers must write the state of the trainer last, because we take it as the sign of a complete
    # checkpoint.
    Seam(
        f"{TRAINER}._save_checkpoint",
        BASE,
        takes=("model trial",),
        order="_save_optimizer_and_scheduler _save_rng_state save_to_json",
        uses="_get_output_dir",
    ),
    Seam(f"{TRAINER}._save_optimizer_and_scheduler", BASE, takes=("output_dir",)),
    Seam(f"{TRAINER}._save_rng_state", BASE, takes=("output_dir",)),
    Seam(f"{TRAINER}._load_optimizer_and_scheduler", BASE, takes=("checkpoint",)),
    Seam(f"{TRAINER}._load_rng_state", SAVING, takes=("checkpoint",)),
    Seam(f"{TRAINER}._get_output_dir", SAVING, takes=("trial",)),
    Seam(f"{TRAINER}._save", BASE, takes=("output_dir state_dict",)),
    # The Hub.
    Seam(f"{TRAINER}._push_from_checkpoint", BASE, takes=("checkpoint_folder",)),
    Seam(f"{TRAINER}._finish_current_push", BASE, takes=("",)),
    Seam(f"{TRAINER}.init_hf_repo", BASE, takes=("token private", "token")),
    Seam(
        f"{TRAINER}.push_to_hub",
        BASE,
        takes=(
            "commit_message blocking token revision private kwargs",
            "commit_message blocking token revision kwargs",
        ),
    ),
    Seam(f"{GRPO}.create_model_card", BASE, takes=("model_name dataset_name tags",)),
    # Packed rows, whose log-probabilities TRL's fused head computes.
    Seam("trl.trainer.utils.split_tensor_dict", "packing/forward.py", takes=("tensor_dict num_chunks",)),
    Seam("trl.trainer.utils.add_fused_lm_head", "packing/forward.py", since="1.15.0", needed_by=PREFIXES),
    # vLLM. TRL must create its backend through a global name, which we replace, and use a client over HTTP.
    Seam(f"{GRPO}.__init__", BACKEND, order="VLLMGeneration vllm_generation _last_loaded_step", needed_by=VLLM),
    Seam(f"{GRPO}._generate_single_turn", BASE, order="_last_loaded_step vllm_generation", needed_by=VLLM),
    Seam(f"{VLLM_BACKEND}._init_vllm", BACKEND, takes=("",), uses="vllm_client mode llm", needed_by=VLLM),
    Seam(
        f"{VLLM_BACKEND}._iter_named_params",
        BACKEND,
        takes=("",),
        uses="merge_adapter unmerge_adapter",
        needed_by=VLLM,
    ),
    Seam(
        f"{VLLM_BACKEND}.sync_weights",
        BACKEND,
        takes=("",),
        uses="update_named_params _iter_named_params mode",
        needed_by=VLLM,
    ),
    Seam(
        f"{VLLM_BACKEND}.generate",
        BACKEND,
        takes=("prompts images num_generations profiler",),
        uses="_llm_weights_sleeping enable_sleep_mode structured_outputs_regex generation_kwargs temperature top_p "
        "top_k min_p repetition_penalty max_completion_length",
        needed_by=VLLM,
    ),
    Seam("trl.generation.vllm_generation.extract_logprobs", BACKEND, takes=("all_outputs",), needed_by=VLLM),
    Seam(f"{VLLM_CLIENT}.__init__", BACKEND, uses="session mount base_url", needed_by=VLLM),
    Seam(f"{VLLM_CLIENT}._post", BACKEND, takes=("url kwargs",), needed_by=VLLM),
    Seam(f"{VLLM_CLIENT}.init_communicator", BACKEND, takes=("device",), needed_by=VLLM),
    Seam(f"{VLLM_CLIENT}.update_named_params", BACKEND, takes=("metadata named_params",), needed_by=VLLM),
    Seam(f"{VLLM_CLIENT}._start_weight_update", BACKEND, takes=("",), uses="_post", needed_by=VLLM),
    Seam(f"{VLLM_CLIENT}._finish_weight_update", BACKEND, takes=("",), uses="_post", needed_by=VLLM),
)


def check_trl_version(installed: str) -> None:
    """
    Check the version of TRL. Further checks follow when a trainer is created.

    Args:
        installed (`str`):
            The installed version.

    Raises:
        ImportError: If TRL is older than `MIN_TRL` or has another major version.
    """
    if not Version(MIN_TRL) <= Version(installed) < Version(MAX_TRL):
        raise ImportError(
            f"trl-explore needs trl>={MIN_TRL},<{MAX_TRL}, but trl {installed} is installed. "
            f"Run `pip install 'trl>={MIN_TRL},<{MAX_TRL}'`, or install a trl-explore made for that version."
        )


def difference(seam: Seam) -> str | None:
    """
    Describe how the installed object differs from the expected properties.

    Args:
        seam ([`Seam`]):
            The object and its expected properties.

    Returns:
        `str` or `None`: End of a sentence that begins with the path of the object, such as "is not there". None if the
        object has all expected properties.
    """
    try:
        found: Any = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError):
        return "is not there"
    has_expectations = any((seam.takes, seam.uses, seam.order, seam.keys))
    if not has_expectations or not _is_original(found, seam.path):
        return None
    if seam.takes:
        parameters = " ".join(name for name in inspect.signature(found).parameters if name != "self")
        if parameters not in seam.takes:
            return f"takes ({', '.join(parameters.split())})"
    code = inspect.unwrap(found).__code__
    if missing := {*seam.uses.split(), *seam.order.split()} - {*_names(code)}:
        return f"does not use {', '.join(sorted(missing))}"
    if missing := {*seam.keys.split()} - {*_strings(code.co_consts)}:
        return f"does not contain {', '.join(sorted(missing))}"
    # Python lists the names of a function in the order of their first use, but not the names of inner functions. So
    # the order of those is not checked.
    places = [code.co_names.index(name) for name in seam.order.split() if name in code.co_names]
    if places != sorted(places):
        return f"uses {seam.order} in another order"
    return None


def _is_original(found: Any, path: str) -> bool:
    """Return whether the library itself defines the object. If users have replaced it, they are responsible for it."""
    return inspect.unwrap(found).__module__.split(".")[0] == path.split(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    """Yield all names that a function and its inner functions use."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    """Yield all texts in the constants of a function, also in tuples and inner functions."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant.co_consts)
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(constant)


@cache
def moved(needed_by: str = "", seams: tuple[Seam, ...] = SEAMS) -> str | None:
    """
    Describe the seams that differ in the installed libraries.

    Args:
        needed_by (`str`, *optional*, defaults to `""`):
            Option whose seams are compared, such as `"use_vllm"`. By default, the seams that every run needs.
        seams (`tuple[Seam, ...]`, *optional*):
            Table of seams.

    Returns:
        `str` or `None`: One sentence, or None if no seam differs.
    """
    changed: dict[Seam, str] = {}
    for seam in seams:
        if seam.needed_by == needed_by:
            text = difference(seam)
            if text is not None:
                changed[seam] = text
    installed = version("trl")
    if not changed:
        # Every run checks the seams without an option, so warn only then.
        if not needed_by and Version(installed) > Version(KNOWN_TRL[-1]):
            logger.warning(
                "trl %s is newer than %s, the newest tested version; the parts that the trainers use are unchanged",
                installed,
                KNOWN_TRL[-1],
            )
        return None
    differences = "; ".join(f"`{seam.path}` {text}" for seam, text in changed.items())
    all_exist_since = max(Version(seam.since) for seam in changed)
    known = [name for name in KNOWN_TRL if Version(name) >= all_exist_since]
    return (
        f"trl {installed} with transformers {version('transformers')} is not what trl-explore relies on: "
        f"{differences}. Known to work: trl {', '.join(known)}"
    )


def check_seams(needed_by: str = "", seams: tuple[Seam, ...] = SEAMS) -> None:
    """
    Raise an error if seams differ in the installed libraries.

    Args:
        needed_by (`str`, *optional*, defaults to `""`):
            Option whose seams are compared, such as `"use_vllm"`. By default, the seams that every run needs.
        seams (`tuple[Seam, ...]`, *optional*):
            Table of seams.

    Raises:
        ImportError: If a seam differs. The message has the seams, their differences, and versions that are known to
            work.
    """
    if found := moved(needed_by, seams):
        raise ImportError(f"{found}: run `pip install 'trl=={KNOWN_TRL[-1]}'`.")
