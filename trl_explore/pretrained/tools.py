"""Tool calls for ChatML tokenizers that know none, such as SmolLM2's, in as few tokens as possible."""

import copy

from transformers import PreTrainedTokenizerBase

START, END = "<|im_start|>", "<|im_end|>"

# A call is `!name{"argument": "value"}`, and further calls of a turn are on lines of their own. JSON escapes line
# breaks, so a value cannot be taken for the next call.
TOOL_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ '!' + call['function']['name'] }}"
    "{{ arguments if arguments is string else arguments | tojson }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endgeneration %}"
    "{{ '\n' }}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": START + "assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?<![^\n])!(?P<name>\w+)(?=\{)",
            "close_pattern": r"\n(?=!)|(?=<\|im_end\|>)|$",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def with_tools(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """
    Return a copy of a ChatML tokenizer whose conversations may have tool calls, as `environment_factory` needs.

    A call is written `!act{"action": "[5]"}`; an answer is a turn of the role `tool`. The template adds no system
    prompt, and does not list the tools either: a small model learns from demonstrations how it calls them, and each
    prompt is shorter by their description.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with the marks `<|im_start|>` and `<|im_end|>`.

    Returns:
        [`~transformers.PreTrainedTokenizerBase`]: The copy. Its end of sequence is `<|im_end|>`.

    Raises:
        ValueError: If one of the marks is not a token of the tokenizer.
    """
    vocabulary = tokenizer.get_vocab()
    for mark in (START, END):
        if mark not in vocabulary:
            raise ValueError(
                f"`tokenizer` is a {type(tokenizer).__name__} without the token {mark}; give the tokenizer of a "
                "ChatML model, such as SmolLM2-135M-Instruct."
            )
    twin = copy.deepcopy(tokenizer)
    twin.eos_token = END
    twin.chat_template = TOOL_CHAT_TEMPLATE
    twin.response_template = RESPONSE_TEMPLATE
    return twin
