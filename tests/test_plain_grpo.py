"""By itself, the base class takes what GRPO takes: tools, environments, `rollout_func`, images."""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from PIL import Image
from test_branpo import LETTERS, Voice
from test_branpo import make as make_lake_agent
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from trl import GRPOConfig, GRPOTrainer
from world import CHARACTERS, QUIET, assert_same, differ, make_agent, make_trainer, parameters

from trl_explore.methods import METHODS
from trl_explore.trainers import (
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    G2RLConfig,
    G2RLTrainer,
)

PLAIN = {"theirs": (GRPOTrainer, GRPOConfig), "ours": (ExplorationTrainer, ExplorationConfig)}
ROWS = [METHODS[name] for name in ("deep_grpo", "tree_grpo", "sesa", "branpo")]
SAMPLING = [(row.trainer_class, row.config_class) for row in ROWS]
IMAGE = "<image>"
VISION_TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}"
    "{% endfor %}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def assert_trains_the_same(make):
    """Two trainers end with the same parameters, which training changed, and log the same."""
    theirs, ours = make(*PLAIN["theirs"]), make(*PLAIN["ours"])
    before = parameters(theirs)
    for trainer in (theirs, ours):
        torch.manual_seed(0)
        trainer.train()
    assert differ(before, parameters(theirs))
    assert_same(parameters(ours), parameters(theirs))
    for got, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        same = [key for key in expected if "time" not in key and "second" not in key]
        assert {key: got[key] for key in same} == {key: expected[key] for key in same}


@pytest.fixture
def voice(monkeypatch):
    speaker = Voice(stops=0.3)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda *args, **kw: speaker(*args, **kw))


def move(direction: str) -> str:
    """
    Moves.

    Args:
        direction: Where to.

    Returns:
        The number of the direction.
    """
    return str(LETTERS.index(direction))


def long_ones(completion_ids, **columns):
    return [float(len(ids) % 2) for ids in completion_ids]


def test_tools_are_those_of_grpo_bit_for_bit(tmp_path, voice):
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=200, max_steps=3)
    options = dict(sizes, tools=[move], reward_funcs=long_ones, max_tool_calling_iterations=3)
    assert_trains_the_same(lambda cls, config: make_agent(cls, config, tmp_path, **options))


def test_environments_are_those_of_grpo_bit_for_bit(tmp_path, voice):
    assert_trains_the_same(lambda cls, config: make_lake_agent(cls, config, tmp_path, max_steps=3))


def dice(prompts, trainer):
    """Completions that the model did not sample, with a token that no loss is for."""
    prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    completion_ids = [torch.randint(5, 20, (6,)).tolist() + [1] for _ in prompts]
    masks = [[1, 1, 0, 1, 1, 1, 1] for _ in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "env_mask": masks}


@pytest.mark.parametrize("options", [dict(num_iterations=2, beta=0.1), dict(steps_per_generation=2)], ids=str)
def test_a_rollout_func_is_that_of_grpo_bit_for_bit(tmp_path, options):
    assert_trains_the_same(lambda cls, config: make_trainer(cls, config, tmp_path, rollout_func=dice, **options))


def make_processor():
    tokens = ["<pad>", "<eos>", "<unk>", *CHARACTERS, IMAGE]
    raw = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[IMAGE],
        chat_template=VISION_TEMPLATE,
    )
    tokenizer.image_token = IMAGE
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=VISION_TEMPLATE,
    )


def make_seeing_trainer(cls, config, folder, *, model=None, **options):
    """A tiny LLaVA: a picture of four patches before two letters."""
    size = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2)
    language = dict(vocab_size=4 + len(CHARACTERS), num_hidden_layers=1, num_key_value_heads=2, initializer_range=0.3)
    torch.manual_seed(0)
    model = model or LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=Qwen2Config(**size, **language, max_position_embeddings=64, eos_token_id=1, pad_token_id=0),
            vision_config=CLIPVisionConfig(**size, num_hidden_layers=2, image_size=8, patch_size=4),
            image_token_index=3 + len(CHARACTERS),
            image_seq_length=4,
        )
    )
    pictures = [Image.new("RGB", (8, 8), (31 * i, 255 - 31 * i, 90)) for i in range(8)]
    rows = {"prompt": [[{"role": "user", "content": "ab"}]] * len(pictures), "image": pictures}
    settings = dict(QUIET, per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=4)
    settings["generation_kwargs"] = {"suppress_tokens": [model.config.image_token_id]}  # as TRL does from 1.16 on
    return cls(
        model=model,
        args=config(str(folder), **{**settings, "learning_rate": 1e-2, **options}),
        reward_funcs=lambda completions, **columns: [float("a" in said[0]["content"]) for said in completions],
        train_dataset=Dataset.from_dict(rows),
        processing_class=make_processor(),
    )


def test_images_are_those_of_grpo_bit_for_bit(tmp_path):
    assert_trains_the_same(lambda cls, config: make_seeing_trainer(cls, config, tmp_path, log_completions=True))


def test_a_model_that_sees_resumes_in_the_middle_of_a_generation(tmp_path):
    options = dict(num_iterations=2, save_strategy="steps", save_steps=1)
    whole = make_seeing_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    whole.train()
    # transformers does not find the weights of a LLaVA under the names that it saves them by, but loads them so.
    checkpoint = tmp_path / "checkpoint-3"
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint)
    resumed = make_seeing_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, model=model, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("trainer_class,config_class", [*SAMPLING, (G2RLTrainer, G2RLConfig)])
def test_methods_refuse_models_that_see(tmp_path, trainer_class, config_class):
    with pytest.raises(ValueError, match=f"{trainer_class.__name__} does not support vision-language models"):
        make_seeing_trainer(trainer_class, config_class, tmp_path)


class Rolled(ExplorationTrainer):
    def rollout(self, prompt_ids, plain):
        return plain(prompt_ids)


class Streaming(ExplorationTrainer):
    def extra_streams(self, output, examples, rewards):
        return {}


@dataclass
class CombinedConfig(G2RLConfig, DeepGRPOConfig):
    pass


class Combined(G2RLTrainer, DeepGRPOTrainer):
    config_class = CombinedConfig


OWN = [*SAMPLING, (Rolled, ExplorationConfig), (Streaming, ExplorationConfig), (Combined, CombinedConfig)]


@pytest.mark.parametrize("trainer_class,config_class", OWN)
def test_what_samples_rows_itself_refuses_a_rollout_func(tmp_path, trainer_class, config_class):
    with pytest.raises(ValueError, match="`rollout_func` cannot be combined with"):
        make_trainer(trainer_class, config_class, tmp_path, rollout_func=dice)


@pytest.mark.parametrize("trainer_class,config_class", [pair for pair in OWN if not pair[0].requires.tools])
@pytest.mark.parametrize("field", ["tools", "environment_factory"])
def test_what_samples_rows_itself_refuses_tools_unless_it_says_otherwise(tmp_path, trainer_class, config_class, field):
    given = {"tools": [move], "environment_factory": dict}[field]
    with pytest.raises(ValueError, match=f"does not support `{field}`"):
        make_trainer(trainer_class, config_class, tmp_path, **{field: given})


@pytest.mark.parametrize("trainer_class", [ExplorationTrainer, G2RLTrainer, *(pair[0] for pair in SAMPLING)])
def test_objects_made_without_init_generate_as_grpo(trainer_class):
    def generated(cls, training):
        trainer = object.__new__(cls)
        trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True, gather=lambda t: t)
        trainer.args = SimpleNamespace(report_to=[])
        trainer.model = SimpleNamespace(training=training)
        trainer.state = SimpleNamespace(global_step=2, num_input_tokens_seen=0)
        trainer.processing_class = SimpleNamespace(batch_decode=lambda ids, **options: [str(row) for row in ids])
        trainer._tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
        trainer.use_vllm = trainer.use_transformers_continuous_batching = False
        trainer.tools, trainer.eos_token_ids = None, [2]
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        trainer.rollout_func = lambda prompts, trainer: {
            "prompt_ids": [[5]],
            "completion_ids": [[6, 2]],
            "logprobs": [[-0.1, -0.2]],
            "env_mask": [[1, 0]],
        }
        return trainer._generate(["a"])

    for training in (True, False):
        assert generated(trainer_class, training) == generated(GRPOTrainer, training)
