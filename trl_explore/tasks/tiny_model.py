"""A character tokenizer and a small Qwen2 model, built from nothing: no download, one character per token."""

import torch
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS, UNK, USER, ASSISTANT = "<pad>", "<eos>", "<unk>", "<u>", "<a>"
CHARACTERS = "0123456789" + "+-*=;#?!|.,:<>^" + " " + "abcdefghijklmnopqrstuvwxyz" + "SGX/"
VOCABULARY = (PAD, EOS, UNK, USER, ASSISTANT, *CHARACTERS)
VOCAB_SIZE = 64  # of the model: the 61 tokens, rounded up
MAX_LENGTH = 256
HEAD_SIZE = 16
BYTE_LEVEL_SPACE = "\u0120"  # how byte-level vocabularies write a space

# Whatever is not the assistant's is the user's: the tasks have no other role.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<a>' + message['content'] + '<eos>' }}"
    "{% else %}"
    "{{ '<u>' + message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
# The same for agents. `!move:direction=left<eos>` is a turn with one tool call; what the tool answers is the user's.
TOOL_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<a>' + message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ '!' + call['function']['name'] }}"
    "{% for name, value in call['function']['arguments'].items() %}{{ ':' + name + '=' + value }}{% endfor %}"
    "{% endfor %}{{ '<eos>' }}"
    "{% else %}{{ '<u>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"!(?P<name>\w+)",
            "close_pattern": r"(?=!|<eos>)|$",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r":(?P<key>\w+)=(?P<value>[^:!<]*)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": EOS, "content": "text"},
    },
}


def build_tokenizer(*, tools: bool = False) -> PreTrainedTokenizerFast:
    """Character tokenizer with 61 tokens, padding on the left; any other character is dropped. With `tools`,
    conversations may have tool calls, `!name:parameter=value`."""
    # A byte-level BPE without merges is a character tokenizer. It must be this class: for a folder with a Qwen2 model,
    # `AutoTokenizer` ignores the saved class and rebuilds splitting and decoding the way Qwen2 has them.
    tokenizer = Qwen2Tokenizer(
        vocab={BYTE_LEVEL_SPACE if token == " " else token: i for i, token in enumerate(VOCABULARY)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
    )
    if tools:
        tokenizer.response_template = RESPONSE_TEMPLATE
    # The two role marks are no special tokens: `skip_special_tokens` must not hide from a verifier that a completion
    # contains one.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (USER, ASSISTANT)])
    return tokenizer


def build_model(*, seed: int, hidden_size: int = 64, num_layers: int = 2) -> Qwen2ForCausalLM:
    """Random Qwen2 in float32 on the CPU, 111,296 parameters by default. `hidden_size` is a multiple of 16; carrying a
    value from step to step needs two layers. The caller's random state is left alone."""
    if hidden_size < HEAD_SIZE or hidden_size % HEAD_SIZE:
        raise ValueError(f"`hidden_size` is {hidden_size}; give a multiple of {HEAD_SIZE}.")
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_SIZE,
        num_key_value_heads=hidden_size // HEAD_SIZE,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`, which would reseed the caller's CUDA generators as well.
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)
