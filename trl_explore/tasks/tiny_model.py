"""Character tokenizer and small, randomly initialized Qwen2 model, which need no download."""

import torch
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS, UNK, USER, ASSISTANT = "<pad>", "<eos>", "<unk>", "<u>", "<a>"
CHARACTERS = "0123456789" + "+-*=;#?!|.,:<>^" + " " + "abcdefghijklmnopqrstuvwxyz" + "SGX/"
VOCABULARY = (PAD, EOS, UNK, USER, ASSISTANT, *CHARACTERS)
VOCAB_SIZE = 64  # of the model: the 61 tokens, rounded up
MAX_LENGTH = 256  # largest number of tokens of a prompt with its completion
HEAD_SIZE = 16
BYTE_LEVEL_SPACE = "\u0120"  # a space in byte-level vocabularies

# The tasks have no system messages, so every message that is not the assistant's is rendered as the user's.
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
# Chat template of agents. `!move:direction=left<eos>` is a turn with one tool call. Results of tools are rendered as
# the user's messages.
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
# Converts the tokens of an agent's turn to a message, with `parse_response`: the inverse of `TOOL_CHAT_TEMPLATE`.
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
    """
    Build a character tokenizer with 61 tokens and padding on the left. It drops unknown characters.

    Args:
        tools (`bool`, *optional*, defaults to `False`):
            If `True`, conversations may contain tool calls, which are rendered as `!name:parameter=value`.
    """
    # A byte-level BPE without merges is a character tokenizer. Its class must be `Qwen2Tokenizer`, because
    # `AutoTokenizer` loads this class from a folder with a Qwen2 model, whichever class was saved.
    tokens = [BYTE_LEVEL_SPACE if token == " " else token for token in VOCABULARY]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
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
    # The two role marks are not special tokens. Otherwise `skip_special_tokens` would hide marks in a completion from
    # the verifier.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (USER, ASSISTANT)])
    return tokenizer


def build_model(*, seed: int, hidden_size: int = 64, num_layers: int = 2) -> Qwen2ForCausalLM:
    """
    Build a randomly initialized Qwen2 model in float32 on the CPU, without changing the caller's random state.

    Args:
        seed (`int`):
            Seed of the weights.
        hidden_size (`int`, *optional*, defaults to `64`):
            Width of the model, a multiple of 16. The default model has 111,296 parameters.
        num_layers (`int`, *optional*, defaults to `2`):
            Number of layers. A model needs two layers to use a value from an earlier step of its answer.

    Raises:
        ValueError: If `hidden_size` is not a multiple of 16.
    """
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
        # `torch.manual_seed` would reseed the caller's CUDA generators too.
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)
