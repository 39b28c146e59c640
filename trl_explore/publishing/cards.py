"""Model cards from `model_cards/<method>.md` and what is known about a run. Whatever comes from a user or a model is
text to the templates, never Markdown or HTML."""

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
from trl_explore.names import looks_like_path
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

CURVE_FILE = "training_curve.png"
TASK_MARK = "task "  # begins the name of data that a task makes; no Hub name has a space
LIBRARIES = ("trl-explore", "trl", "transformers", "torch", "datasets", "peft")

# TRL's fields that say where and how a run was watched, not how it learned.
_WATCHING = re.compile(
    r"(output_dir|logging|log_|save_|hub_|push_|report_to|run_name|project|trackio|disable_tqdm|eval_|do_|ddp_|fsdp|"
    r"deepspeed|dataloader|accelerator_config|parallelism_config|model_init_kwargs|resume_from|local_rank|use_cpu|debug|"
    r"num_completions_to_print|vllm_server|vllm_group|restore_callback|ignore_data_skip|"
    r"skip_memory|remove_unused|include_for|metric_for_best|load_best|greater_is|per_device_eval|liger_kernel_config)"
)
# Fields of any configuration that hold paths or secrets, or change nothing.
_UNTOLD = re.compile(
    r"token$|_file$|_dir$|_folder$|^dump_|secret|password|api_key|^(push_method_state|push_dry_run|sampling_batch_size|"
    r"vllm_weight_sync)$"
)


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What a card tells."""

    method: str  # a name of `trl_explore.methods.METHODS`
    model_name: str
    trainer: str  # name of the class
    repo_id: str | None = None  # where it is published, "owner/name"
    revision: str | None = None  # branch it is published on, where that is not "main"
    base_model: str = ""  # a Hub name, a folder, or "" for a model made in memory
    datasets: Sequence[str] = ()  # Hub names, files, folders, or [`data_of_task`]; empty where there is no name
    local_data: bool = True  # whether data without a name are known to be local
    rewards: Sequence[tuple[str, float]] = ()  # name and weight of each function
    adapter: str | None = None  # its kind, "LORA"; None for a whole model
    chat: bool = True  # whether the model has a chat template
    paper: Mapping[str, str]  # arXiv `id` and BibTeX `citation` of the method
    tags: Sequence[str] = ()
    hyperparameters: Mapping[str, Any]  # see told_hyperparameters
    history: Sequence[Mapping[str, Any]] = ()  # the trainer's state.log_history
    curve: str | None = None  # file of the training curves, beside the card
    needs_plots: bool = False  # whether there is no picture because matplotlib is missing


def model_card(facts: TrainingFacts) -> "ModelCard":
    """The card and its metadata: base model and data on the Hub, tags, paper, the last evaluation's results."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    base_id, base_text = describe_model(facts.base_model)
    data_ids, data_text = describe_datasets(facts.datasets, local=facts.local_data)
    results, results_step = evaluation_results(facts.history)
    data = ModelCardData(
        base_model=base_id,
        base_model_relation=("adapter" if facts.adapter else "finetune") if base_id else None,
        datasets=data_ids or None,
        library_name="peft" if facts.adapter else "transformers",
        model_name=facts.model_name,
        pipeline_tag="text-generation",
        tags=[*facts.tags, *([f"arxiv:{facts.paper['id']}"] if facts.paper else [])],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="evaluation-prompts",
                dataset_name="Evaluation prompts of the run",
                metric_type=name.replace(" ", "_"),
                metric_name=name,
                metric_value=float(format_number(value)),
            )
            for name, value in results.items()
        ]
        or None,
    )
    steps = [int(entry["step"]) for entry in facts.history if "reward" in entry]
    row = METHODS[facts.method]
    known = row.trainer.rpartition(":")[2]
    text = _template(row.card).render(
        model_name=facts.model_name,
        trainer=facts.trainer,
        parent=known if facts.trainer != known else None,
        repo_id=visible_text(facts.repo_id or "path/to/this/folder"),
        revision=f", revision={json.dumps(facts.revision)}" if facts.revision else "",
        base_model=base_text,
        base_model_id=base_id,
        data=data_text,
        rewards=describe_rewards(facts.rewards),
        duration=format_duration(seconds) if (seconds := training_seconds(facts.history)) else None,
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
    """A template's block `citation`, its BibTeX entry; empty where it has none."""
    template = _template(card)
    block = template.blocks.get("citation")
    return "".join(block(template.new_context())).strip() if block else ""


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
    """Text as one line of Markdown that shows it as it is; control characters are seen and do nothing."""
    line = html.escape(visible_text(" ".join(str(text).split())), quote=False)
    return re.sub(r"[\\`*_\[\]#|~!:]|(?<=www)\.", r"\\\g<0>", line)


def code_span(value: object, *, longest: int = 200) -> str:
    """A value as a Markdown code span of one line, also inside a table."""
    text = value if isinstance(value, str) and re.fullmatch(r"[\w./:@%-]+", value) else repr(value)
    if len(text) > longest:
        text = text[:longest] + " ..."
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", r"\|")


def describe_model(name: str) -> tuple[str | None, str]:
    """A base model's name on the Hub, if it is there, and Markdown for it without a path of this machine."""
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots", name)  # a snapshot that was downloaded before
    if cached:
        name = "/".join(cached.groups())
    if not name:
        return None, "a model that was made in the training script"
    if not cached and _is_local(name):
        return None, f"a local model, {code_span(Path(name).resolve().name)}"
    return name, f"[{escape_markdown(name)}](https://huggingface.co/{name})"


def data_of_task(task: str) -> str:
    """Return what a card's facts call the data that a task makes."""
    return TASK_MARK + task


def describe_datasets(names: Iterable[str], *, local: bool = True) -> tuple[list[str], str]:
    """Names of the data sets that are on the Hub, and Markdown for all, tasks too, without a path of this machine."""
    names = list(dict.fromkeys(names))
    tasks = [name.removeprefix(TASK_MARK) for name in names if name.startswith(TASK_MARK)]
    ids = [name for name in names if not _is_local(name)]
    num_local = len(names) - len(ids) - len(tasks)
    parts = [f"[{escape_markdown(name)}](https://huggingface.co/datasets/{name})" for name in ids]
    parts += [f"problems of the task {code_span(name)}" for name in tasks]
    if not names:
        parts = ["a local data set" if local else "a data set that was not named"]
    elif num_local:
        parts.append("a local data set" if num_local == 1 else "local data sets")
    return ids, " and ".join(parts)


def describe_rewards(rewards: Sequence[tuple[str, float]]) -> str:
    """Markdown of what completions were rewarded by, with weights where they are not all 1."""
    plain = all(weight == 1 for _, weight in rewards)
    return " and ".join(
        code_span(name) if plain else f"{code_span(name)} (weight {format_number(weight)})" for name, weight in rewards
    )


def _is_local(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if looks_like_path(name) or Path(name).exists():
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def told_hyperparameters(config: Any, base: type) -> dict[str, Any]:
    """The method's own fields, then what differs from GRPO's defaults, by name; no paths, hosts or tokens."""
    theirs = {spec.name: spec.default for spec in fields(base)}
    own: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    for spec in fields(config):
        value = vars(config)[spec.name]
        value = value.value if isinstance(value, Enum) else value
        watching = spec.name in theirs and _WATCHING.match(spec.name)
        if (
            watching
            or _UNTOLD.search(spec.name)
            or not isinstance(value, bool | int | float | str | list | dict | None)
        ):
            continue
        if spec.name not in theirs:
            own[spec.name] = value
        elif value not in (theirs[spec.name], None, {}, []):
            changed[spec.name] = value
    return own | changed
