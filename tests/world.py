"""The small world that the trainer tests share: a character tokenizer, a random Qwen2 model, sums as a task."""

import functools
import inspect
import os
import re
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from trl_explore.methods import METHODS
from trl_explore.sampling.sampler import Sampler
from trl_explore.tasks.tiny_model import build_model, build_tokenizer

CHARACTERS = "0123456789+-=;. abcdefgh"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] }}"
    "{% else %}<a>{{ m['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """What the tests over all methods need of one: options of a smallest run, options beside them under which it is
    GRPO, and a metric that is above 0 where it is at work."""

    options: dict
    neutral: dict
    metric: str


# A row of `METHODS` without one of these makes the tests over all methods fail.
TINY = {
    "deep_grpo": Tiny(
        dict(num_branches=3, segmentation="fixed", segment_length=2),
        dict(aux_loss_weight=0.0),
        "pivots/sampled_tokens",
    ),
    "tree_grpo": Tiny(
        dict(expansion_width=3, node_length=2),
        dict(expansion_width=4, max_tree_depth=1, node_length=8, epsilon_high=None),
        "tree/sampled_tokens",
    ),
    "sesa": Tiny(dict(max_sketch_length=4), dict(solve_template="{problem}"), "sketch/tokens"),
    "g2rl": Tiny({}, dict(novelty_weight=0.0, reward_mapping="none"), "geometry/mean_novelty"),
    "branpo": Tiny({}, dict(num_branches=0, num_branches_solved=0, redundancy_tries=0), "branch/sampled_tokens"),
    "evol_rl": Tiny(
        dict(embedding_model="ngrams", correctness="reward"),
        dict(novelty_band=0.0, correctness="reward"),
        "votes/right_fraction",
    ),
    "agent_tree_grpo": Tiny({}, dict(num_expansions=0), "branch/sampled_tokens"),
    "auto": Tiny(
        dict(
            explore_min_share=0.5,
            explorer_options=dict(
                tree=dict(expansion_width=3, node_length=2),
                pivots=dict(num_branches=3, segmentation="fixed", segment_length=2),
            ),
        ),
        dict(explorers=[]),
        "explore/contrast_per_token/plain",
    ),
    "gigpo": Tiny({}, dict(step_weight=0.0), "steps/mean_advantage"),
    "attn_rl": Tiny(
        dict(step_delimiters=[*CHARACTERS], influence_distance=1, min_fork_distance=0),
        dict(num_forks=0),
        "branch/sampled_tokens",
    ),
    "tree_rl": Tiny(dict(num_rounds=2), dict(num_rounds=0), "branch/sampled_tokens"),
}


def tiny_methods(methods=METHODS, **more):
    """Trainer, configuration and tiny options of each method but plain GRPO, over which come those of one test."""
    ours = [row for row in methods.values() if not row.plain]
    return {r.name: (r.trainer_class, r.config_class, {**TINY[r.name].options, **more.get(r.name, {})}) for r in ours}


def make_tokenizer():
    tokens = ["<pad>", "<eos>", "<unk>", "<u>", "<a>", *CHARACTERS]
    raw = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<u>", "<a>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed=0, **changes):
    config = dict(
        vocab_size=5 + len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**config, **changes}))


@functools.cache
def saved_model():
    """A folder with the small model, which trainers with a KL term load their reference from."""
    if "SMALL_WORLD_MODEL" in os.environ:  # processes of one run share what their parent saved
        return os.environ["SMALL_WORLD_MODEL"]
    folder = tempfile.mkdtemp(prefix="small-world-")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_dataset(conversational=False):
    pairs = [(i, j) for i in range(6) for j in range(6)]
    prompts = [f"{i}+{j}=" for i, j in pairs]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts, "answer": [str((i + j) % 10) for i, j in pairs]})


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def contains_answer(completions, answer, **kwargs):
    """1 where the answer's digit occurs anywhere: a random model gets about a quarter of the sums right."""
    return [1.0 if a in text_of(c) else 0.0 for c, a in zip(completions, answer, strict=True)]


def some_letter(completions, **kwargs):
    """Scores only completions that hold a digit."""
    return [float("a" in text_of(c)) if re.search(r"\d", text_of(c)) else None for c in completions]


def never(completions, **kwargs):
    return [0.0] * len(completions)


def always(completions, **kwargs):
    return [1.0] * len(completions)


def make_trainer(trainer_class=GRPOTrainer, config_class=GRPOConfig, output_dir=".", *, model=None, **options):
    """A trainer in the small world; options that are no trainer arguments become configuration fields."""
    arguments = {
        "reward_funcs": contains_answer,
        "train_dataset": make_dataset(options.pop("conversational", False)),
        "processing_class": make_tokenizer(),
    }
    for name in inspect.signature(GRPOTrainer.__init__).parameters.keys() & options.keys():
        arguments[name] = options.pop(name)
    config = dict(
        output_dir=str(output_dir),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    args = config_class(**{**config, **options})
    if "peft_config" in arguments:  # adapters are drawn by the constructor, where TRL below 1.15 sets no seed
        set_seed(args.seed)
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(saved_model()) if model is None else model, args=args, **arguments
    )


# What every trainer of a test is: on the CPU, silent, and without files but those that are asked for.
QUIET = dict(logging_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, seed=3)
BOARDS = ["S../.../..G", "S../..X/..G"]  # what agents play on


def make_agent(cls, config, folder, *, boards=BOARDS, plain_prompts=False, kinds=None, **options):
    """A tiny agent; options that are no trainer arguments become configuration fields."""
    prompts = boards if plain_prompts else [[{"role": "user", "content": board}] for board in boards]
    rows = {"prompt": prompts, "board": boards} | ({"environment": kinds} if kinds else {})
    names = inspect.signature(GRPOTrainer.__init__).parameters.keys() & options.keys()
    arguments = {name: options.pop(name) for name in names}
    defaults = dict(QUIET, output_dir=str(folder), max_steps=2, learning_rate=1e-2)
    return cls(
        **{
            "model": build_model(seed=0, hidden_size=16, num_layers=1),
            "train_dataset": Dataset.from_dict(rows),
            "eval_dataset": Dataset.from_dict(rows),
            "processing_class": build_tokenizer(tools=True),
            **arguments,
        },
        args=config(**{**defaults, **options}),
    )


def says(sample, patch=setattr):
    """Rows are what `sample` says in the place of TRL's generation; nothing is kept of a model that is not asked."""
    patch(GRPOTrainer, "_generate_single_turn", lambda *args, **options: sample(*args, **options))
    patch(Sampler, "rollout", lambda self: nullcontext())


def one_batch(trainer):
    """The scored rows of a first generation batch."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(*args, **options):
    """Train in the small world; returns the final parameters and the log history."""
    trainer = make_trainer(*args, **options)
    trainer.train()
    return parameters(trainer), trainer.state.log_history


def assert_same(first, second, *, tolerance=0.0):
    assert first.keys() == second.keys()
    for name, value in first.items():
        if tolerance:
            torch.testing.assert_close(value, second[name], rtol=0, atol=tolerance, msg=name)
        else:
            assert torch.equal(value, second[name]), name


def differ(first, second):
    return any(not torch.equal(value, second[name]) for name, value in first.items())
