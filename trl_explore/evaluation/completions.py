"""Completions of a data set's prompts, in a file that an interrupted evaluation continues."""

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
# Settings that are kept as hashes, and what decides them.
HASHED = {"weights": "the model", "prompts": "data, limit, system prompt, chat template"}

Record = dict[str, Any]


def encode_prompts(prompts: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", **template: Any) -> list[list[int]]:
    """Tokens `[P][P_i]` of plain prompts or conversations, as training encodes them; without a chat template, messages
    are joined by empty lines."""
    encoded: list[list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str) and (template or tokenizer.chat_template is not None):
            options = {"add_generation_prompt": True, "return_dict": True, **template}
            encoding: Any = tokenizer.apply_chat_template(prompt, **options)
        else:
            text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt) + "\n"
            encoding = tokenizer(text=text)
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
            Tokens of the prompts, `[B][P_i]`. TRL parses a response with its prompt, which may begin a thought.
        completion_ids (`Sequence[list[int]]`):
            Tokens of the completions, `[B][T_i]`.
        texts (`Sequence[str]`):
            Texts of the completions without special tokens, `[B]`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.

    Returns:
        `list`: A text for a plain prompt, and messages for a conversation.
    """
    parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    completions: list[Any] = []
    for prompt, before, ids, text in zip(prompts, prompt_ids, completion_ids, texts, strict=True):
        if isinstance(prompt, str):
            completions.append(text)
        elif parses:
            completions.append([parse_response(tokenizer, ids, prefix=before)])
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
    """Completions of every prompt, continued from the file at `path`; a `FileRefusedError` if it is of other settings.
    `source` is what else they depend on, as JSON values: the model's weights."""
    prompt_ids = encode_prompts(prompts, tokenizer)
    tokens = digest(json.dumps(ids).encode() for ids in prompt_ids)
    settings = {**source, "num_prompts": len(prompts), "prompts": tokens, **asdict(sampling)}
    records = {} if path is None else _continue(path, settings)
    missing = {index: ids for index, ids in enumerate(prompt_ids) if index not in records}
    if missing:
        with tqdm(total=len(prompts), initial=len(records), unit="prompt", disable=not progress) as bar:
            bar.set_description(path.parent.name if path is not None else "Sampling")
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
    """Settings of a file of [`collect_completions`], and its records by their index."""
    header, records = read_records(path, COMPLETIONS, is_valid=_is_record)
    return header, {record["index"]: record for record in records}


def _is_record(record: Record) -> bool:
    lists = [record.get(name) for name in ("completions", "completion_ids", "truncated")]
    return type(record.get("index")) is int and all(isinstance(values, list) for values in lists)


def _continue(path: Path, settings: dict[str, Any]) -> dict[int, Record]:
    """Records that the file has; it is begun where there is none, and must be of the same settings where it is."""
    header, records = read_completions(path) if path.is_file() else ({}, {})
    if not records:
        write_records(path, COMPLETIONS, settings)
        return {}
    remedy = "Delete its folder, or name another output_dir."
    check_same(path, "completions", header, settings, remedy, HASHED)
    return records
