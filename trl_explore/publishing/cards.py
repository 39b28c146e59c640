"""Model cards, rendered from `model_cards/<method>.md` and the facts of a run.

The templates escape all text that comes from a user or a model, so that it is never read as Markdown or HTML.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.methods import METHODS
from trl_explore.names import looks_like_path, shown
from trl_explore.publishing.card_metrics import (
    evaluation_results,
    format_duration,
    format_number,
    metric_rows,
    training_seconds,
)
from trl_explore.visible_text import visible_text

if TYPE_CHECKING:
    from huggingface_hub import ModelCard
    from trl import GRPOConfig

CURVE_FILE = "training_curve.png"
TASK_MARK = "task "  # prefix for the data of a task; its space distinguishes it from names on the Hub
LIBRARIES = ("trl-explore", "trl", "transformers", "torch", "datasets", "peft")

# Beginnings of the names of TRL's fields for logging, saving, evaluation and hardware, which do not change training.
_NOT_LEARNING = re.compile(
    r"(output_dir|logging|log_|save_|hub_|push_|report_to|run_name|project|trackio|disable_tqdm|eval_|do_|ddp_|fsdp|"
    r"deepspeed|dataloader|accelerator_config|parallelism_config|model_init_kwargs|resume_from|local_rank|use_cpu|debug|"
    r"num_completions_to_print|vllm_server|vllm_group|restore_callback|ignore_data_skip|"
    r"skip_memory|remove_unused|include_for|metric_for_best|load_best|greater_is|per_device_eval|liger_kernel_config)"
)
# Parts of the names of fields of any configuration that hold paths or secrets, or do not change training.
_NOT_ON_CARD = re.compile(
    r"token$|_file$|_dir$|_folder$|^dump_|secret|password|api_key|^(push_method_state|push_dry_run|sampling_batch_size|"
    r"vllm_weight_sync)$"
)


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """
    Facts of a run that its card shows.

    Args:
        method (`str`):
            Name of the method, a key of `trl_explore.methods.METHODS`.
        model_name (`str`):
            Title of the card.
        trainer (`str`):
            Name of the trainer's class.
        repo_id (`str`, *optional*):
            Repository on the Hub, `owner/name`.
        revision (`str`, *optional*):
            Branch of the repository. `None` for `main`.
        base_model (`str`, *optional*, defaults to `""`):
            Hub name or folder of the base model. Empty for a model made in memory.
        datasets (`Sequence[str]`, *optional*, defaults to `()`):
            Hub names, files, folders, or names from [`data_of_task`]. Empty if no name is known.
        local_data (`bool`, *optional*, defaults to `True`):
            If `True` and `datasets` is empty, the card says that the data are local. If `False`, it says that they
            were not named.
        rewards (`Sequence[tuple[str, float]]`, *optional*, defaults to `()`):
            Name and weight of each reward function.
        adapter (`str`, *optional*):
            Kind of adapter, such as `"LORA"`. `None` for a whole model.
        chat (`bool`, *optional*, defaults to `True`):
            If `True`, the tokenizer has a chat template.
        paper (`Mapping[str, str]`):
            arXiv `id` and BibTeX `citation` of the method. Empty if there is no paper.
        tags (`Sequence[str]`, *optional*, defaults to `()`):
            Tags of the model on the Hub.
        hyperparameters (`Mapping[str, Any]`):
            Result of [`shown_hyperparameters`].
        history (`Sequence[Mapping[str, Any]]`, *optional*, defaults to `()`):
            The trainer's `state.log_history`.
        curve (`str`, *optional*):
            File name of the training curves, in the same folder as the card.
        needs_plots (`bool`, *optional*, defaults to `False`):
            If `True`, the picture is missing because matplotlib is not installed.
    """

    method: str
    model_name: str
    trainer: str
    repo_id: str | None = None
    revision: str | None = None
    base_model: str = ""
    datasets: Sequence[str] = ()
    local_data: bool = True
    rewards: Sequence[tuple[str, float]] = ()
    adapter: str | None = None
    chat: bool = True
    paper: Mapping[str, str]
    tags: Sequence[str] = ()
    hyperparameters: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    curve: str | None = None
    needs_plots: bool = False


def model_card(facts: TrainingFacts) -> "ModelCard":
    """
    Render a model card with its metadata: base model and datasets on the Hub, tags, paper, and evaluation results.

    Args:
        facts (`TrainingFacts`):
            Facts of the run.

    Returns:
        [`~huggingface_hub.ModelCard`]: The card.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    base_id, base_text = describe_model(facts.base_model)
    data_ids, data_text = describe_datasets(facts.datasets, local=facts.local_data)
    results, results_step = evaluation_results(facts.history)
    library, relation, tags = "transformers", "finetune", list(facts.tags)
    if facts.adapter:
        library, relation = "peft", "adapter"
    if facts.paper:
        tags.append(f"arxiv:{facts.paper['id']}")
    eval_results = []
    for name, value in results.items():
        eval_results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type="evaluation-prompts",
                dataset_name="Evaluation prompts of the run",
                metric_type=name.replace(" ", "_"),
                metric_name=name,
                metric_value=float(format_number(value)),
            )
        )
    data = ModelCardData(
        base_model=base_id,
        base_model_relation=relation if base_id else None,
        datasets=data_ids or None,
        library_name=library,
        model_name=facts.model_name,
        pipeline_tag="text-generation",
        tags=tags,
        eval_results=eval_results or None,
    )
    steps = [int(entry["step"]) for entry in facts.history if "reward" in entry]
    seconds = training_seconds(facts.history)
    row = METHODS[facts.method]
    method_trainer = row.trainer.rpartition(":")[2]
    text = _template(row.card).render(
        model_name=facts.model_name,
        trainer=facts.trainer,
        parent=method_trainer if facts.trainer != method_trainer else None,
        repo_id=visible_text(facts.repo_id or "path/to/this/folder"),
        revision=f", revision={json.dumps(facts.revision)}" if facts.revision else "",
        base_model=base_text,
        base_model_id=base_id,
        data=data_text,
        rewards=describe_rewards(facts.rewards),
        duration=format_duration(seconds) if seconds else None,
        adapter=facts.adapter,
        chat=facts.chat,
        hyperparameters=facts.hyperparameters,
        metrics=metric_rows(facts.method, facts.history),
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        curve=facts.curve,
        needs_plots=facts.needs_plots,
        results={name: format_number(value) for name, value in results.items()},
        results_step=results_step,
        citation=facts.paper.get("citation"),
        versions=[f"{name} {metadata.version(name)}" for name in LIBRARIES],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def citation(card: str) -> str:
    """Return the BibTeX entry in a template's block `citation`, or an empty text if it has no such block."""
    template = _template(card)
    block = template.blocks.get("citation")
    if not block:
        return ""
    return "".join(block(template.new_context())).strip()


def _template(card: str) -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = resources.files("trl_explore.model_cards")
    environment = Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": escape_markdown, "code": code_span}
    return environment.get_template(f"{card}.md")


def escape_markdown(text: object) -> str:
    """Escape text, so that one line of Markdown shows it literally. Control characters become visible."""
    line = html.escape(visible_text(" ".join(str(text).split())), quote=False)
    # Also escape colons and the dot after "www", because GitHub's Markdown would turn addresses into links.
    return re.sub(r"[\\`*_\[\]#|~!:]|(?<=www)\.", r"\\\g<0>", line)


def code_span(value: object, *, longest: int = 200) -> str:
    """
    Format a value as a Markdown code span of one line, which a table can contain.

    Args:
        value (`object`):
            A text, shown without quotes if it is a single word, or another value, shown by its `repr`.
        longest (`int`, *optional*, defaults to `200`):
            Number of characters after which the text is cut off.

    Returns:
        `str`: Markdown.
    """
    text = repr(value)
    if isinstance(value, str) and re.fullmatch(r"[\w./:@%-]+", value):
        text = value
    if len(text) > longest:
        text = text[:longest] + " ..."
    if "`" in text:
        text = f" {text} "  # Markdown removes one space at each end
    # The fence must be longer than the longest run of backticks in the text.
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}".replace("|", r"\|")


def describe_model(name: str) -> tuple[str | None, str]:
    """
    Describe a base model without a path of this machine.

    Args:
        name (`str`):
            Hub name, folder, or an empty text for a model made in memory.

    Returns:
        `tuple[str | None, str]`: Name on the Hub, or `None` for a local model; and a description in Markdown.
    """
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots", name)  # a snapshot in the cache of the Hub
    if cached:
        name = "/".join(cached.groups())
    if not name:
        return None, "a model that was made in the training script"
    if not cached and _is_local(name):
        return None, f"a local model, {code_span(Path(name).resolve().name)}"
    return name, f"[{escape_markdown(name)}](https://huggingface.co/{name})"


def data_of_task(task: str) -> str:
    """Return the name under which [`TrainingFacts`] lists the data of a task."""
    return TASK_MARK + task


def describe_datasets(names: Iterable[str], *, local: bool = True) -> tuple[list[str], str]:
    """
    Describe datasets without a path of this machine.

    Args:
        names (`Iterable[str]`):
            Hub names, files, folders, or names from [`data_of_task`].
        local (`bool`, *optional*, defaults to `True`):
            If `True` and `names` is empty, describe the data as local. If `False`, describe them as not named.

    Returns:
        `tuple[list[str], str]`: The names on the Hub, and a description of all datasets in Markdown.
    """
    names = list(dict.fromkeys(names))
    tasks = [name.removeprefix(TASK_MARK) for name in names if name.startswith(TASK_MARK)]
    # The name of a task's data has a space, so it is no name on the Hub, and `_is_local` returns True for it.
    ids = [name for name in names if not _is_local(name)]
    num_local = len(names) - len(ids) - len(tasks)
    parts = [f"[{escape_markdown(name)}](https://huggingface.co/datasets/{name})" for name in ids]
    parts += [f"problems of the task {code_span(name)}" for name in tasks]
    if num_local > 1:
        parts.append("local data sets")
    elif num_local == 1 or (not names and local):
        parts.append("a local data set")
    elif not names:
        parts.append("a data set that was not named")
    return ids, " and ".join(parts)


def describe_rewards(rewards: Sequence[tuple[str, float]]) -> str:
    """Describe reward functions, given by name and weight, in Markdown. Weights appear unless all are 1."""
    has_weights = any(weight != 1 for _, weight in rewards)
    parts = []
    for name, weight in rewards:
        part = code_span(name)
        if has_weights:
            part += f" (weight {format_number(weight)})"
        parts.append(part)
    return " and ".join(parts)


def _is_local(name: str) -> bool:
    """Return whether a name is a path, exists as a file or folder, or cannot be a name on the Hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if looks_like_path(name) or Path(name).exists():
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def shown_hyperparameters(config: "GRPOConfig", base: type) -> dict[str, Any]:
    """
    Return the hyperparameters that a card shows, without paths, hosts, tokens and fields that do not change learning.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration of the run.
        base (`type`):
            Configuration class of TRL, [`~trl.GRPOConfig`].

    Returns:
        `dict[str, Any]`: By name, the fields that `base` does not have, then the fields that differ from their default
        in `base`. Fields of `base` that are empty lists or dictionaries are left out.
    """
    defaults = {spec.name: spec.default for spec in fields(base)}
    own: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    for spec in fields(config):
        name, value = spec.name, shown(getattr(config, spec.name))
        if isinstance(value, Enum):
            value = value.value
        if _NOT_ON_CARD.search(name) or not isinstance(value, bool | int | float | str | list | dict | None):
            continue
        if name not in defaults:
            own[name] = value
        elif not _NOT_LEARNING.match(name) and value not in (defaults[name], {}, []):
            changed[name] = value
    return own | changed
