"""Completions of a dataset's prompts, saved in a file from which an interrupted evaluation continues."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from trl.chat_template_utils import parse_response

from trl_explore.evaluation.samplers import PromptSampler, Sampling
from trl_explore.saving.fingerprints import digest
from trl_explore.saving.records import check_same, read_records, write_records
from trl_explore.saving.whole_files import append_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPLETIONS = "trl-explore completions"
# Settings that the file saves as hashes. The error message names the inputs of each hash instead of its value.
HASHED = {"weights": "the model", "prompts": "data, limit, system prompt, chat template"}

Record = dict[str, Any]


def encode_prompts(prompts: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", **template: Any) -> list[list[int]]:
    """
    Encode plain prompts or conversations as training does.

    Without a chat template, the messages of a conversation are joined by empty lines, and the text ends with a line
    break.

    Args:
        prompts (`Sequence`):
            Plain prompts or conversations, `[P]`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        **template:
            Options of `apply_chat_template`, for example `chat_template`. If there are any, conversations need no chat
            template in the tokenizer.

    Returns:
        `list[list[int]]`: Token ids, `[P][P_i]`.
    """
    encoded: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoding: Any = tokenizer(text=prompt)
        elif template or tokenizer.chat_template is not None:
            options = {"add_generation_prompt": True, "return_dict": True, **template}
            encoding = tokenizer.apply_chat_template(prompt, **options)
        else:
            encoding = tokenizer(text="\n\n".join(message["content"] for message in prompt) + "\n")
        encoded.append(list(encoding["input_ids"]))
    return encoded


def completions_for_rewards(
    prompts: Sequence[Any],
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    texts: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
) -> list[Any]:
    """
    Return completions in the form that reward functions receive in training.

    Args:
        prompts (`Sequence`):
            Plain prompts or conversations, `[B]`.
        prompt_ids (`Sequence[list[int]]`):
            Tokens of the prompts, `[B][P_i]`. TRL's parser needs them, because a prompt may open a thought.
        completion_ids (`Sequence[list[int]]`):
            Tokens of the completions, `[B][T_i]`.
        texts (`Sequence[str]`):
            Texts of the completions without special tokens, `[B]`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.

    Returns:
        `list`: A text for each plain prompt, and a list of messages for each conversation.
    """
    has_template = getattr(tokenizer, "response_template", None) is not None
    has_schema = getattr(tokenizer, "response_schema", None) is not None
    completions: list[Any] = []
    for prompt, prefix, ids, text in zip(prompts, prompt_ids, completion_ids, texts, strict=True):
        if isinstance(prompt, str):
            completions.append(text)
        elif has_template or has_schema:
            completions.append([parse_response(tokenizer, ids, prefix=prefix)])
        else:
            completions.append([{"role": "assistant", "content": text}])
    return completions


def collect_completions(
    sampler: PromptSampler,
    prompts: Sequence[Any],
    tokenizer: "PreTrainedTokenizerBase",
    sampling: Sampling,
    *,
    source: dict[str, Any],
    path: Path | None = None,
    progress: bool = True,
) -> list[Record]:
    """
    Sample the completions of every prompt. Skip completions that the file at `path` already has.

    Args:
        sampler ([`~trl_explore.evaluation.samplers.PromptSampler`]):
            Samples the completions.
        prompts (`Sequence`):
            Plain prompts or conversations, `[P]`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        sampling ([`~trl_explore.evaluation.samplers.Sampling`]):
            Sampling options.
        source (`dict`):
            Other settings that the completions depend on, as JSON values. An example is a hash of the model's weights.
        path (`Path`, *optional*):
            File with one line of JSON for the settings, and one for the record of each prompt. A record is appended as
            soon as its prompt is sampled. `None` writes no file.
        progress (`bool`, *optional*, defaults to `True`):
            If `True`, show a progress bar.

    Returns:
        `list[Record]`: One record per prompt, `[P]`: `index`, `completions` (texts), `completion_ids`, `truncated` and
        `seconds` (time since the previous record).

    Raises:
        `FileRefusedError`: If the file at `path` was written with other settings.
    """
    prompt_ids = encode_prompts(prompts, tokenizer)
    prompts_digest = digest(json.dumps(ids).encode() for ids in prompt_ids)
    settings = {**source, "num_prompts": len(prompts), "prompts": prompts_digest, **asdict(sampling)}
    records: dict[int, Record] = {}
    title = "Sampling"
    if path is not None:
        records = _continue(path, settings)
        title = path.parent.name
    missing = {index: ids for index, ids in enumerate(prompt_ids) if index not in records}
    if missing:
        with tqdm(total=len(prompts), initial=len(records), unit="prompt", disable=not progress) as bar:
            bar.set_description(title)
            last = time.perf_counter()
            for index, samples in sampler(missing, sampling):
                ids = [sample.token_ids for sample in samples]
                records[index] = {
                    "index": index,
                    "completions": tokenizer.batch_decode(ids, skip_special_tokens=True),
                    "completion_ids": ids,
                    "truncated": [not sample.finished for sample in samples],
                    "seconds": round(time.perf_counter() - last, 3),
                }
                last = time.perf_counter()
                if path is not None:
                    append_lines(path, [records[index]])
                bar.update()
    return [records[index] for index in range(len(prompts))]


def read_completions(path: Path) -> tuple[dict[str, Any], dict[int, Record]]:
    """Read a file of [`collect_completions`]. Return its settings, and its records by the index of their prompt."""
    header, records = read_records(path, COMPLETIONS, is_valid=_is_record)
    return header, {record["index"]: record for record in records}


def _is_record(record: Record) -> bool:
    has_lists = all(isinstance(record.get(name), list) for name in ("completions", "completion_ids", "truncated"))
    return has_lists and type(record.get("index")) is int


def _continue(path: Path, settings: dict[str, Any]) -> dict[int, Record]:
    """Return the records of the file at `path`, after a check of its settings. If there is no record, write a new file
    with only the settings."""
    header: dict[str, Any] = {}
    records: dict[int, Record] = {}
    if path.is_file():
        header, records = read_completions(path)
    if not records:
        write_records(path, COMPLETIONS, settings)
        return {}
    remedy = "Delete its folder, or name another output_dir."
    check_same(path, "completions", header, settings, remedy, HASHED)
    return records
