"""The embedded tasks: problems, verifiers, habits, the tiny model and the cached warm start."""

import dataclasses
import multiprocessing
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_explore.saving.model_cache import cache_root, publish
from trl_explore.tasks import TASKS, get_task
from trl_explore.tasks.chain import CHAIN, CHAIND, LATE1, LATE3, ChainTask
from trl_explore.tasks.tiny_model import CHARACTERS, build_model, build_tokenizer
from trl_explore.tasks.warm_start import cache_key, encode, warm_start

ALL_TASKS = [CHAIN, CHAIND, LATE1, LATE3]
PROBLEM = "6a-0b-8c-6d+5e*3f+0g-9h+4i*7j*9"
SOLUTION = "a6-0=6;b6-8=8;c8-6=2;d2+5=7;e7*3=1;f1+0=1;g1-9=2;h2+4=6;i6*7=2;j2*9=8;#8"


def problems(task: ChainTask, number: int) -> list[str]:
    rng = random.Random(99)
    return [task.sample_problem(rng) for _ in range(number)]


def evaluate_independently(task: ChainTask, problem: str) -> list[int]:
    """Running values by Python's own arithmetic, from the problem's characters alone."""
    values = [int(problem[0])]
    for position in range(1, len(problem), 3):
        _, op, operand = problem[position : position + 3]
        if op == "x":
            values.append(task.x_table[int(operand)][values[-1]])
        else:
            values.append(eval(f"({values[-1]} {op} {operand}) % 10"))
    return values


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.name)
def test_solution_agrees_with_independent_arithmetic(task):
    for problem in problems(task, 200):
        values = evaluate_independently(task, problem)
        solution = task.solve(problem)
        assert [int(line[-1]) for line in solution.split(";")] == [*values[1:], values[-1]]
        assert task.verify(problem, solution)
        wrong_end = solution[:-1] + str((values[-1] + 1) % 10)
        assert not task.verify(problem, wrong_end)


def test_outcome_verifier_looks_only_behind_the_first_hash():
    assert CHAIN.solve(PROBLEM) == SOLUTION  # written out by hand
    assert CHAIN.verify(PROBLEM, "nonsense#8")
    assert not CHAIN.verify(PROBLEM, "nonsense#1#8")
    assert not CHAIN.verify(PROBLEM, "#88")
    assert not CHAIN.verify(PROBLEM, SOLUTION[:-2])
    assert not CHAIN.verify(PROBLEM, "")


def test_strict_verifier_rejects_a_right_digit_behind_a_wrong_line():
    strict = dataclasses.replace(CHAIN, strict=True)
    assert strict.verify(PROBLEM, SOLUTION)
    assert not strict.verify(PROBLEM, SOLUTION.replace("d2+5=7", "d2+5=6"))
    assert not strict.verify(PROBLEM, SOLUTION + "<a>")


def test_reward_has_the_signature_trl_calls():
    answers = [SOLUTION, SOLUTION]
    rewards = CHAIN.reward(
        prompts=[user(PROBLEM)] * 2,
        completions=[assistant(SOLUTION), assistant("#7")],
        completion_ids=[[1], [2]],
        answer=answers,
        trainer_state=None,
    )
    assert rewards == [1.0, 0.0]
    assert CHAIN.reward([SOLUTION, "#7"], answer=answers) == [1.0, 0.0]
    assert CHAIN.reward.__name__ == "accuracy_reward"


def test_prompts_have_31_tokens_and_completions_73():
    tokenizer = build_tokenizer()
    for task in ALL_TASKS:
        example = task.build_dataset(1, seed=0)[0]
        assert len(tokenizer(example["prompt"][0]["content"]).input_ids) == 31
        assert len(tokenizer(example["answer"] + "<eos>").input_ids) == task.max_completion_length == 73


def test_a_quarter_of_the_chain_facts_have_habits():
    assert len(CHAIN.habits) == 57  # of 100 + 100 + 30 facts
    assert len(CHAIND.habits) == 50 and len(LATE1.habits) == 100
    assert all(wrong != CHAIN._apply(*fact) for fact, (wrong, _) in CHAIN.habits.items())
    shares = [habit.right_probability for habit in CHAIN.habits.values()]
    assert [shares.count(probability) for probability in (0.5, 0.3, 0.15, 0.05)] == [15, 14, 14, 14]


def test_demonstrations_show_habits_as_often_as_they_should():
    one_step = dataclasses.replace(CHAIN, step_ops=("+-*",))
    (fact, habit) = next(item for item in one_step.habits.items() if item[1].right_probability == 0.3)
    op, value, operand = fact
    problem, rng = f"{value}a{op}{operand}", random.Random(0)
    shown = [int(one_step.demonstration(problem, rng)[-1]) for _ in range(4000)]
    assert set(shown) == {habit.wrong, one_step._apply(*fact)}
    assert shown.count(habit.wrong) / 4000 == pytest.approx(0.7, abs=0.03)


def test_demonstrations_carry_errors_on():
    always_wrong = dataclasses.replace(CHAIN, habit_share=1.0, habit_probabilities=(0.0,))
    lines = always_wrong.demonstration(PROBLEM, random.Random(0)).split(";")
    values = [line[1] for line in lines[:-1]]
    results = [line[-1] for line in lines[:-1]]
    assert values[1:] == results[:-1] and lines[-1] == "#" + results[-1]
    assert all(int(line[-1]) != always_wrong._apply(line[2], int(line[1]), int(line[3])) for line in lines[:-1])


@pytest.mark.parametrize("task", [CHAIN, CHAIND], ids=lambda task: task.name)
def test_share_of_right_demonstrations_is_what_the_habits_imply(task):
    rng = random.Random(0)
    right = [task.verify(problem, task.demonstration(problem, rng)) for problem in problems(task, 2000)]
    # chain: 0.8125^10 and a tenth of the rest; chaind: 0.57^4. The tables are small, hence the tolerance.
    assert sum(right) / 2000 == pytest.approx({"chain": 0.21, "chaind": 0.106}[task.name], abs=0.04)


def test_errors_never_wash_out():
    for op, operands in (("+", range(10)), ("-", range(10)), ("*", (3, 7, 9)), ("x", range(10))):
        for operand in operands:
            assert sorted(CHAIN._apply(op, value, operand) for value in range(10)) == list(range(10))


def test_datasets_are_deterministic_and_differ_between_seeds():
    first, again, other = (CHAIN.build_dataset(50, seed=seed) for seed in (3, 3, 4))
    assert first.to_dict() == again.to_dict()
    assert first["prompt"][:] != other["prompt"][:]
    assert CHAIN.evaluation_set(20).to_dict() == CHAIN.evaluation_set(20, seed=0).to_dict()


def test_evaluation_set_is_disjoint_even_where_problems_are_few():
    # Two steps have 10 * 23^2 problems: a training set of this size would contain nearly all of them.
    short = dataclasses.replace(CHAIN, step_ops=("+-*", "+-*"))
    training = {prompt[0]["content"] for prompt in short.build_dataset(4500, seed=0)["prompt"]}
    held_out = {prompt[0]["content"] for seed in range(3) for prompt in short.evaluation_set(150, seed=seed)["prompt"]}
    shown = set(problems(short, 3000))
    assert len(training) == 4500 and len(held_out) >= 150
    assert held_out.isdisjoint(training) and held_out.isdisjoint(shown)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"step_ops": ()}, "`step_ops` has 0 steps"),
        ({"step_ops": ("+/",)}, "contain '\\+/'"),
        ({"habit_share": 1.5}, "`habit_share` is 1.5"),
        ({"habit_probabilities": (2.0,)}, "`habit_probabilities` is"),
    ],
)
def test_bad_knobs_are_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CHAIN, **knobs)


def test_bad_numbers_of_problems_and_steps_are_named(tmp_path):
    with pytest.raises(ValueError, match="`num_examples` is 300"):
        dataclasses.replace(CHAIN, step_ops=("+",)).evaluation_set(300)
    with pytest.raises(ValueError, match="`steps` is 0"):
        warm_start(CHAIN, seed=0, steps=0, cache_dir=tmp_path)


def test_get_task_names_the_nearest_task():
    assert get_task("late3") is LATE3
    assert list(TASKS) == ["chain", "chaind", "late1", "late3", "doors", "deep_doors"]
    with pytest.raises(ValueError, match="Did you mean 'chaind'"):
        get_task("chaimd")
    with pytest.raises(ValueError, match="Choose one of: chain, chaind, late1, late3"):
        get_task("zzz")


def test_chat_template_renders_prompt_and_completion():
    tokenizer = build_tokenizer()
    prompt = tokenizer.apply_chat_template(user("1a+2"), add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(user("1a+2") + assistant("a1+2=3;#3"), tokenize=False)
    assert prompt == "<u>1a+2<a>"
    assert whole == "<u>1a+2<a>a1+2=3;#3<eos>"


def test_tiny_model_has_the_documented_size_and_tokens():
    model = build_model(seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 111_296
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    with pytest.raises(ValueError, match="`hidden_size` is 50"):
        build_model(seed=0, hidden_size=50)


def test_training_batch_covers_completion_and_end_only():
    batch = encode(build_tokenizer(), [("1a+2", "a1+2=3;#3"), ("1a+2b+1", "#4")])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [16, 12]
    shown = [[int(token) for token in row if token != -100] for row in batch["labels"]]
    assert build_tokenizer().batch_decode(shown) == ["a1+2=3;#3<eos>", "#4<eos>"]
    with pytest.raises(ValueError, match="\\['Q'\\]"):
        encode(build_tokenizer(), [("1a+2", "Q")])


def test_warm_start_is_cached_deterministic_and_leaves_no_trace(tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    with torch.no_grad():  # a caller's setting that must neither break the training nor be changed by it
        first = warm_start(CHAIN, seed=0, steps=3, cache_dir=tmp_path / "a", progress=False)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), torch.get_num_threads()) == states[1:]

    torch.manual_seed(6)
    second = warm_start(CHAIN, seed=0, steps=3, cache_dir=tmp_path / "b", progress=False)
    other = warm_start(CHAIN, seed=1, steps=3, cache_dir=tmp_path / "b", progress=False)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]

    written = (first / "model.safetensors").stat().st_mtime_ns
    assert warm_start(CHAIN, seed=0, steps=3, cache_dir=tmp_path / "a", progress=False) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.name]


def test_warm_start_loads_with_the_plain_auto_classes(tmp_path):
    folder = warm_start(CHAIN, seed=0, steps=3, cache_dir=tmp_path, progress=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    built = build_tokenizer()
    text = f"<u>{CHARACTERS}  a  <a>{CHARACTERS[::-1]}<eos>"
    ids = tokenizer(text).input_ids
    assert ids == built(text).input_ids and len(ids) == 2 * len(CHARACTERS) + 8 and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab() == built.get_vocab() and tokenizer.chat_template == built.chat_template
    assert len(tokenizer) == 61
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    # A verifier must see a role mark inside a completion.
    assert tokenizer.decode(tokenizer("1<a>2<eos>").input_ids, skip_special_tokens=True) == "1<a>2"
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert model.dtype == torch.float32


def test_cache_key_changes_with_every_ingredient():
    config = build_model(seed=0).config.to_diff_dict()
    wider = build_model(seed=0, hidden_size=128).config.to_diff_dict()
    keys = [
        cache_key(CHAIN, seed=0, steps=3, model_config=config),
        cache_key(CHAIN, seed=1, steps=3, model_config=config),
        cache_key(CHAIN, seed=0, steps=4, model_config=config),
        cache_key(CHAIN, seed=0, steps=3, model_config=wider),
        cache_key(dataclasses.replace(CHAIN, habit_share=0.3), seed=0, steps=3, model_config=config),
        cache_key(dataclasses.replace(CHAIN, strict=True), seed=0, steps=3, model_config=config),
        cache_key(dataclasses.replace(CHAIN, table_seed=1), seed=0, steps=3, model_config=config),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == cache_key(CHAIN, seed=0, steps=3, model_config=dict(config, transformers_version="5.99"))


def test_cache_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path and cache_root("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("TRL_EXPLORE_CACHE")
    assert cache_root() == Path.home() / ".cache" / "trl-explore"


class FullDisk:
    """Stands in for a model whose saving breaks off half way."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")


def test_a_half_written_warm_start_is_never_picked_up(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        publish(FullDisk(), build_tokenizer(), tmp_path / "chain")
    assert list(tmp_path.iterdir()) == []


def test_publishing_second_keeps_the_first_copy(tmp_path):
    publish(build_model(seed=0), build_tokenizer(), tmp_path / "chain")
    first = (tmp_path / "chain" / "model.safetensors").read_bytes()
    publish(build_model(seed=1), build_tokenizer(), tmp_path / "chain")
    assert (tmp_path / "chain" / "model.safetensors").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["chain"]


@pytest.mark.slow
def test_two_processes_at_once_both_end_with_the_same_warm_start(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        arguments = {"seed": 0, "steps": 2, "cache_dir": tmp_path, "progress": False}
        folders = [pool.apply_async(warm_start, (CHAIN,), arguments) for _ in range(2)]
        first, second = (folder.get(timeout=120) for folder in folders)
    assert first == second and [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.slow
@pytest.mark.xdist_group("chain")
def test_chain_warm_start_has_the_documented_success():
    folder = warm_start(CHAIN, seed=0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = CHAIN.evaluation_set(128)
    inputs = tokenizer.apply_chat_template(
        held_out["prompt"][:], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )

    def accuracy(**sampling) -> float:
        output = model.generate(**inputs, max_new_tokens=CHAIN.max_completion_length, **sampling)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(CHAIN.reward(texts, answer=held_out["answer"][:])) / len(texts)

    torch.manual_seed(0)
    sampled = [accuracy(do_sample=True, temperature=1.0, top_k=0) for _ in range(4)]
    assert 0.08 <= accuracy(do_sample=False) <= 0.30
    assert 0.12 <= sum(sampled) / len(sampled) <= 0.30
