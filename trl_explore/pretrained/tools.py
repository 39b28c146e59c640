"""A short chat template with tool calls, for ChatML tokenizers whose own template has none, such as SmolLM2's."""

import copy

from transformers import PreTrainedTokenizerBase

START, END = "<|im_start|>", "<|im_end|>"

# A call is `!name{"argument": "value"}`. Several calls in a message are on separate lines. JSON escapes line breaks,
# so a value cannot be mistaken for the next call.
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
# The grammar with which transformers parses a response. A call opens with `!name` at the beginning of a line, before a
# brace. It closes with the line break before the next call, or at the end of the message. All other text is content.
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
    Return a copy of a ChatML tokenizer with a chat template for tool calls, which `environment_factory` needs.

    A call is written `!act{"action": "[5]"}`. The answer of a tool is a message of the role `tool`. The template adds
    no system prompt and does not list the tools, which makes prompts shorter. So a model has to learn from
    demonstrations how to call the tools.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with the tokens `<|im_start|>` and `<|im_end|>`.

    Returns:
        [`~transformers.PreTrainedTokenizerBase`]: The copy. Its end-of-sequence token is `<|im_end|>`.

    Raises:
        ValueError: If the tokenizer lacks one of these tokens.
    """
    vocabulary = tokenizer.get_vocab()
    for token in (START, END):
        if token not in vocabulary:
            raise ValueError(
                f"`tokenizer` is a {type(tokenizer).__name__} without the token {token}; give the tokenizer of a "
                "ChatML model, such as SmolLM2-135M-Instruct."
            )
    copied = copy.deepcopy(tokenizer)
    copied.eos_token = END
    copied.chat_template = TOOL_CHAT_TEMPLATE
    copied.response_template = RESPONSE_TEMPLATE
    return copied
