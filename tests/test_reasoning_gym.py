"""Tasks of reasoning-gym: rows, scores, hostile answers, short forms, and training on them."""

import inspect
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from datasets import concatenate_datasets
from world import make_model, make_trainer

from trl_explore.environments import ReasoningGymSpec, load_spec

reasoning_gym = pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS, create_dataset  # noqa: E402

from trl_explore.environments import gym_worker  # noqa: E402
from trl_explore.environments.forms import FORMS  # noqa: E402
from trl_explore.environments.gym_worker import Worker, decode, encode, safe_answer, worker  # noqa: E402
from trl_explore.environments.reasoning_gym import REFUSED, entry_of, find_answer, list_names  # noqa: E402
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer  # noqa: E402

ROOT = Path(__file__).parents[1]


def columns(row):
    return {column: [value] for column, value in row.items() if column != "prompt"}


def score(spec, text, row):
    return spec.reward_funcs([text], **columns(row))[0]


# --- rows ---


def test_rows_are_the_packages_own():
    spec = ReasoningGymSpec("countdown", size=5, seed=3, min_numbers=3, max_numbers=3)
    original = create_dataset("countdown", size=5, seed=3, min_numbers=3, max_numbers=3)
    assert spec.name == "reasoning_gym:countdown" and spec.environment_factory is None
    assert spec.train_dataset.column_names == ["prompt", "question", "answer", "metadata", "dataset"]
    for index, row in enumerate(spec.train_dataset):
        assert entry_of(row) == original[index]
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"].startswith(original[index]["question"].rstrip())
        assert message["content"].endswith("\n\nWrite your final answer between <answer> and </answer>.")


def test_prompt_names_the_position_of_the_answer():
    spec = ReasoningGymSpec("gcd", size=1, answer_in="boxed", system_prompt="Be brief.")
    system, user = spec.train_dataset[0]["prompt"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"].endswith(r"Write your final answer in \boxed{}.")


def test_answers_may_be_missing():
    spec = ReasoningGymSpec("graph_color", size=2)
    assert spec.train_dataset["answer"][:] == [None, None]
    assert score(spec, "<answer>{}</answer>", spec.train_dataset[0]) == 0.01  # JSON, but no solution
    with pytest.raises(ValueError, match="graph_color has no demonstrations.*countdown"):
        spec.demonstration(spec.train_dataset[0], random.Random(0))


def test_evaluation_rows_are_held_out():
    spec = ReasoningGymSpec("gcd", size=150, eval_size=40, min_value=1, max_value=20)
    training, held_out = spec.train_dataset["question"][:], spec.eval_dataset["question"][:]
    assert len(held_out) == len(set(held_out)) == 40
    assert not set(held_out) & set(training)
    plain = create_dataset("gcd", size=40, seed=1_000_000, min_value=1, max_value=20)
    assert {entry["question"] for entry in plain} & set(training)  # some had to be replaced


def test_same_seed_for_evaluation_still_holds_out():
    spec = ReasoningGymSpec("chain_sum", size=20, seed=4, eval_seed=4, eval_size=20)
    assert not set(spec.eval_dataset["question"]) & set(spec.train_dataset["question"])


def test_steps_hold_out_problems_in_another_order():
    spec = ReasoningGymSpec("countdown", form="steps", size=300, eval_size=50, max_value=6, min_target=10)
    seen = {FORMS["countdown"].key(entry_of(row)) for row in spec.train_dataset}
    assert not seen & {FORMS["countdown"].key(entry_of(row)) for row in spec.eval_dataset}


def test_too_few_questions_are_one_error():
    spec = ReasoningGymSpec("tower_of_hanoi", size=50, eval_size=10, min_disks=2, max_disks=2, min_pegs=3, max_pegs=3)
    with pytest.raises(ValueError, match=r"only 0 questions.*50 training rows.*Lower `size` or `eval_size`"):
        _ = spec.eval_dataset


@pytest.mark.slow
def test_rows_do_not_depend_on_the_hash_seed(monkeypatch):
    rows = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        worker = Worker()
        rows.append(worker.rows("isomorphic_strings", {}, seed=0, size=10))
        worker.close()
    assert rows[0] == rows[1]


def test_rows_leave_the_random_state_alone():
    random.seed(5)
    before = random.getstate()
    spec = ReasoningGymSpec("codeio", size=2)
    score(spec, "<answer>5</answer>", spec.train_dataset[0])
    assert random.getstate() == before


def test_load_spec():
    spec = load_spec("reasoning_gym:gcd", {"size": 3}, seed=9)
    assert spec.train_dataset["question"][:] == ReasoningGymSpec("gcd", size=3, seed=9).train_dataset["question"][:]


# --- errors ---


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("countdwn", {}, "did you mean 'countdown'"),
        ("countdown", dict(min_number=3), "countdown: unknown field 'min_number'; did you mean 'min_numbers'"),
        ("countdown", dict(min_numbers="3"), "`min_numbers` is '3'; its type must be int"),
        ("countdown", dict(shuffle=1), "`shuffle` is 1; its type must be bool"),
        ("countdown", dict(min_numbers=1), "countdown refuses its fields: min_numbers must be greater than 1."),
        ("countdown", dict(operators=["^"]), "refuses its fields: invalid operator specified."),
        ("countdown", dict(size=0), "`size` is 0; write a whole number from 1"),
        ("countdown", dict(eval_size=0), "`eval_size` is 0"),
        ("countdown", dict(seed=-1), "`seed` is -1"),
        ("countdown", dict(answer_in="tag"), "unknown value of `answer_in` 'tag'; did you mean 'tags'"),
        ("countdown", dict(form="step"), "unknown value of `form` 'step'; did you mean 'steps'"),
        ("countdown", dict(form="steps", answer_in="boxed"), "reads the whole completion; leave it out"),
        ("countdown", dict(system_prompt=3), "`system_prompt` is 3"),
        ("maze", dict(form="steps"), 'no form="steps".*chain_sum, countdown, jugs, shortest_path, word_ladder'),
        ("composite", {}, "composite cannot be used: it mixes other data sets"),
        ("game_of_life_halting", {}, "scores every answer that is not empty with 1.0"),
        ("time_intervals", dict(min_date="today"), "refuses its fields: Invalid isoformat string: 'today'."),
    ],
)
def test_bad_arguments_are_one_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGymSpec(name, **options)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install \"trl-explore\[reasoning-gym\]\""):
        ReasoningGymSpec("countdown")


def test_import_is_light():
    code = "import sys, trl_explore.environments.reasoning_gym; print('reasoning_gym' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_refused_data_sets_still_deserve_it():
    assert list_names() == sorted(DATASETS.keys() - REFUSED.keys())
    halting = create_dataset("game_of_life_halting", size=3, seed=0)
    assert all(halting.score_answer("nonsense", entry) == 1.0 for entry in halting)


@pytest.mark.parametrize(
    ("text", "answer_in", "answer"),
    [
        ("<answer>1</answer> or <answer> 2\n</answer>.", "tags", "2"),
        ("<answer> a <answer>b</answer>", "tags", "b"),
        ("<answer>1</answer> <answer>2", "tags", "1"),
        ("1</answer>", "tags", None),
        ("<answer>1", "tags", None),
        ("<answer></answer>", "tags", ""),
        (r"\boxed{1} \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", "boxed", "1"),
        (r"\boxed{" + "1 " * 400 + "}", "boxed", ("1 " * 400).strip()),
        ("#### 1", "boxed", None),
        ("a\n 2 \n\n", "last_line", "2"),
        (" a\n2 ", "completion", "a\n2"),
        ("  ", "completion", None),
    ],
)
def test_find_answer(text, answer_in, answer):
    assert find_answer(text, answer_in) == answer


def test_long_texts_are_read_fast():
    start = time.perf_counter()
    for answer_in in ("tags", "boxed", "last_line", "completion"):
        for text in ("<answer>" * 50_000, r"\boxed{" * 50_000, "\n" * 400_000):
            find_answer(text, answer_in)
    assert time.perf_counter() - start < 5


# --- scores ---


def test_plain_conversational_and_agents_completions():
    spec = ReasoningGymSpec("gcd", size=2)
    rows = spec.train_dataset
    right = f"So <answer>{rows[0]['answer']}</answer>"
    says = {"role": "assistant", "content": right}
    called = [{"role": "assistant", "content": "wait"}, {"role": "tool", "content": "5"}, says]
    table = {column: [rows[0][column]] * 4 for column in rows.column_names}
    prompts = table.pop("prompt")
    scores = spec.reward_funcs([right, [says], called, "no mark"], prompts=prompts, trainer_state=None, **table)
    assert scores == [1.0, 1.0, 1.0, 0.0]
    assert spec.reward_funcs.__name__ == "reasoning_gym_gcd"


def test_no_mark_gets_the_packages_score_for_no_answer():
    spec = ReasoningGymSpec("countdown", size=1)
    row = spec.train_dataset[0]
    assert score(spec, "no mark", row) == 0.01
    assert score(spec, f"<answer>{row['answer']} + 1</answer>", row) == 0.05
    assert score(spec, f"<answer>{row['answer']}</answer>", row) == 1.0


def test_graded_scores_depend_on_the_configuration():
    specs = [
        ReasoningGymSpec("time_intervals", size=1, task_types=["date"], max_date_difference_days=days)
        for days in (20, 10)
    ]
    row = specs[0].train_dataset[0]
    one_more = int(row["answer"].split()[0]) + 1
    assert [score(spec, f"<answer>{one_more} days</answer>", row) for spec in specs] == [0.95, 0.9]


def test_rows_of_several_specs_can_be_mixed():
    first, second = ReasoningGymSpec("gcd", size=2), ReasoningGymSpec("lcm", size=2)
    rows = concatenate_datasets([first.train_dataset, second.train_dataset])
    texts = [f"<answer>{row['answer']}</answer>" for row in rows]
    table = {column: rows[column][:] for column in rows.column_names if column != "prompt"}
    assert first.reward_funcs(texts, **table) == [1.0, 1.0, None, None]
    assert second.reward_funcs(texts, **table) == [None, None, 1.0, 1.0]


def test_missing_column_is_one_error():
    spec = ReasoningGymSpec("gcd", size=1)
    table = columns(spec.train_dataset[0])
    del table["metadata"]
    with pytest.raises(ValueError, match="reasoning_gym_gcd reads the column `metadata`"):
        spec.reward_funcs(["1"], **table)


@pytest.mark.parametrize("name", ["knights_knaves", "rush_hour"])
def test_saved_rows_score_in_another_process(name, tmp_path):
    spec = ReasoningGymSpec(name, size=3)
    spec.train_dataset.save_to_disk(tmp_path / "disk")
    spec.train_dataset.to_json(tmp_path / "rows.jsonl")
    spec.train_dataset.to_parquet(tmp_path / "rows.parquet")
    texts = [f"<answer>{answer}</answer>" for answer in spec.train_dataset["answer"]]
    table = {column: spec.train_dataset[column][:] for column in spec.train_dataset.column_names}
    (tmp_path / "reward.pickle").write_bytes(pickle.dumps((spec.reward_funcs, texts)))
    code = """
import pickle, json, sys
from datasets import Dataset, load_from_disk
folder = sys.argv[1]
reward, texts = pickle.load(open(f"{folder}/reward.pickle", "rb"))
cache = f"{folder}/cache"
tables = [load_from_disk(f"{folder}/disk"), Dataset.from_json(f"{folder}/rows.jsonl", cache_dir=cache)]
tables.append(Dataset.from_parquet(f"{folder}/rows.parquet", cache_dir=cache))
print(json.dumps([reward(texts, **{c: t[c][:] for c in t.column_names}) for t in tables]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    scores = spec.reward_funcs(texts, **table)
    assert json.loads(done.stdout) == [scores] * 3
    assert name == "rush_hour" or scores == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_scores_of_all_data_sets_are_the_packages_own():
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(ROOT / "tests" / "reasoning_gym_scores.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "0 data sets with mistakes" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, [2.5, None, True]), "b": {}},
        {1: "a", (2, 3): {4: set()}},
        {"$tuple": [1]},
        {frozenset({1}), frozenset()},
        [Fraction(1, 3), 1 + 2j, "é\ud800"],
    ],
)
def test_values_survive_as_text(value):
    copy = decode(encode(value))
    assert copy == value and repr(copy) == repr(value)


def test_numpys_scalars_keep_their_types():
    np = pytest.importorskip("numpy")
    copy = decode(encode([np.float64(0.1), np.str_("a"), np.int32(3)]))
    assert [type(value) for value in copy] == [np.float64, np.str_, np.int32] and copy == [0.1, "a", 3]


def test_other_values_are_refused():
    with pytest.raises(TypeError, match="metadata of type builtins.object"):
        encode({"a": object()})


# --- hostile answers ---

ENDLESS = {
    "countdown": ["9**9**9", "factorial(factorial(99))", "pow(9, pow(9, 9))", "(" * 50_000, "1+" * 40_000 + "1"],
    "polynomial_multiplication": ["(x+1)**(9**9)", "exit()", "quit()"],
    "simple_integration": ["x**9**9**9", "x.__class__", "1" * 1_000_000],
    "rubiks_cube": ["R99999999999"],
    "prime_factorization": ["two"],
    "game_of_life": ["[" * 90_000],
    "boxnet": ["[1]"],
    "spiral_matrix": ["9**9**9", "[x for x in ().__class__.__base__.__subclasses__()]", "exit()"],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_hostile_answers_end_soon(name):
    spec = ReasoningGymSpec(name, size=1)
    row = spec.train_dataset[0]
    for answer in ENDLESS[name]:
        start = time.perf_counter()
        assert score(spec, f"<answer>{answer}</answer>", row) <= 0.05
        assert time.perf_counter() - start < 20, answer
    if row["answer"] is not None:
        assert score(spec, f"<answer>{row['answer']}</answer>", row) == 1.0  # and the next answer is scored


def test_time_limit_works_in_a_thread(monkeypatch):
    # coin_flip reads this as a fraction with a billion digits, inside one call of C code.
    spec = ReasoningGymSpec("coin_flip", size=1)
    row = spec.train_dataset[0]
    scores = []
    thread = threading.Thread(target=lambda: scores.append(score(spec, "<answer>1e1000000000</answer>", row)))
    start = time.perf_counter()
    thread.start()
    thread.join(60)
    assert scores == [0.0] and time.perf_counter() - start < 60
    assert score(spec, f"<answer>{row['answer']}</answer>", row) == 1.0


@pytest.mark.parametrize("name", sorted(gym_worker.EVALUATED | gym_worker.FORMULAS))
def test_answers_run_no_code(name, tmp_path):
    spec = ReasoningGymSpec(name, size=1)
    mark = tmp_path / "mark"
    path = "+".join(f"chr({ord(character)})" for character in str(mark))
    for answer in (
        f"open('{mark}', 'w')",
        f"open({path}, chr(119))",
        f"__import__('os').mkdir('{mark}')",
        f"[open('{mark}', 'w')]",
        f"(lambda: open('{mark}', 'w'))()",
        f"max([1], key=lambda _: open('{mark}', 'w'))",
        f"eval({path})",
        f'sympify(\'open("{mark}", "w")\')',
    ):
        score(spec, f"<answer>{answer}</answer>", spec.train_dataset[0])
        assert not mark.exists(), answer


def test_harmless_answers_reach_the_package():
    for answer in ("3*(4 + 5) - 2", "2**2**3", "x**3/3 + C", "exp(2*x)*sin(x) + log(x)", "1/2 + 0.5", "-3!", "2x"):
        assert safe_answer("countdown", answer) == answer
    for answer in ("[[1, 2], [3, -4]]", "['a', 'b']", "ABC", "1 2 3", "_ Q\nQ _"):
        assert safe_answer("n_queens", answer) == answer
    assert safe_answer("gcd", "exit()") == "exit()"  # compared as text only


def test_all_data_sets_that_evaluate_answers_are_known():
    """If a new version of the package evaluates answers in more data sets, these need `safe_answer`, too."""
    evaluating = set()
    for name, (data_set, _) in DATASETS.items():
        source = inspect.getsource(data_set.score_answer)
        if any(call in source for call in ("eval(answer", "parse_expr(", "sympify(", "exec(")):
            evaluating.add(name)
    assert evaluating == gym_worker.EVALUATED | gym_worker.FORMULAS


def test_worker_starts_again_after_its_death():
    spec = ReasoningGymSpec("gcd", size=1)
    row = spec.train_dataset[0]
    worker()._process.kill()
    worker()._process.wait()
    text = f"<answer>{row['answer']}</answer>"
    assert score(spec, text, row) == 1.0


# --- demonstrations ---


def test_demonstrations_of_the_packages_form():
    spec = ReasoningGymSpec("gcd", size=50, answer_in="boxed")
    rng = random.Random(0)
    scores = []
    for row in spec.train_dataset:
        (message,) = spec.demonstration(row, rng)["completion"]
        assert message["role"] == "assistant"
        scores.append(score(spec, message["content"], row))
    assert 15 < scores.count(1.0) < 40


def test_lines_are_the_steps_of_short_answers():
    spec = ReasoningGymSpec("countdown", form="steps", size=1)
    assert spec.step_delimiters == ["\n"] and ReasoningGymSpec("countdown", size=1).step_delimiters is None
    # DEEP-GRPO cuts there by default.
    assert set(spec.step_delimiters) <= set(DeepGRPOConfig("out", use_cpu=True, bf16=False).segment_delimiters)


HARDER = {
    "countdown": dict(min_numbers=4, max_numbers=4),
    "chain_sum": dict(allow_negation=True, min_terms=2, max_terms=6, min_digits=1, max_digits=3),
    "jugs": dict(difficulty=6, size=60, eval_size=10),
    "shortest_path": dict(max_rows=6, max_cols=5, p_blocked=0.5),
    "word_ladder": dict(min_word_length=4, max_word_length=4, max_chain_length=6),
}


@pytest.mark.parametrize("harder", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_demonstrations_keep_to_the_form(name, harder):
    spec = ReasoningGymSpec(name, form="steps", **{"size": 120, **(HARDER[name] if harder else {})})
    rng = random.Random(0)
    right = 0
    for row in spec.train_dataset:
        entry = entry_of(row)
        assert row["prompt"][0]["content"] == FORMS[name].question(entry)
        (message,) = spec.demonstration(row, rng)["completion"]
        text = message["content"]
        given = FORMS[name].answer(text, entry)
        assert given is not None, text
        found = score(spec, text, row)
        assert found == float(worker().score(name, spec.reward_funcs.config, given, row) == 1.0)
        right += found == 1.0
        solution = FORMS[name].right_demonstration(entry, rng)
        assert solution is not None and score(spec, solution, row) == 1.0
        wrong = FORMS[name].wrong_demonstration(entry, rng)
        assert wrong is None or score(spec, wrong, row) == 0.0
    assert 0.38 < right / len(spec.train_dataset) < 0.65


# The problem of each form, its question, the answers of some completions, and completions that are refused.
COMPLETIONS = {
    "countdown": (
        {"numbers": [11, 4, 17], "target": 24},
        "Use 11, 4, 17 to make 24.",
        {
            "11 - 4 = 7\n7 + 17 = 24": "((11 - 4) + 17)",
            "11 - 4 = 7\n17 + 7 = 24": "(17 + (11 - 4))",
            "  11 - 4 = 7\n7 + 17 = 24\n": "((11 - 4) + 17)",
        },
        [
            "11 - 4 = 8\n8 + 17 = 25",  # wrong sum
            "11 - 4 = 7\n7 + 16 = 23",  # no such number
            "11 - 4 = 7\n11 + 7 = 18",  # used twice
            "11 - 4 = 7",  # a number is left
            "11 / 4 = 2\n2 + 17 = 19",  # no whole number
            "11 - 4 = 7\n\n7 + 17 = 24",
            "11-4=7\n7+17=24",
            "1١ - 4 = 7\n7 + 17 = 24",  # a digit of another script
        ],
    ),
    "jugs": (
        {"puzzle": {"jug_capacities": [3, 5, 8], "target": 2, "min_moves": 2}},
        "Jugs 358, get 2.",
        {"050\n320": '["fill B", "pour B->A"]'},
        ["020", "050\n050", "050\n230", "05\n320", "050\n3200", "090"],
    ),
    "shortest_path": (
        {"matrix": [["*", "X", "O"], ["O", "O", "#"]]},
        "2 to 3:\n210\n003",
        {"21\n22\n23": "down right right", "none": "infeasible"},
        ["12\n13\n23", "21\n23", "11", "31", "none\n21", "21\n\n22\n23", "01"],
    ),
    "word_ladder": (
        {"start_word": "CAT", "end_word": "DOG"},
        "Change cat to dog.",
        {"cot\ncog\ndog": "CAT,COT,COG,DOG"},
        ["cat\ncot", "dog", "cot cog dog", "COT", "coot"],  # not one letter a line
    ),
    "chain_sum": (  # the chain is checked, but not the sums
        {"expression": "45 + -17 - 9"},
        None,
        {"45 + -17 = 28\n28 - 9 = 19": "19", "45 + -17 = 30\n30 - 9 = 21": "21"},
        ["45 + -17 = 28\n27 - 9 = 18", "45 + -17 = 28", "19", "45 + -17 = 28\n28 + 9 = 37"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_checks_every_line(name):
    metadata, question, accepted, refused = COMPLETIONS[name]
    form, entry = FORMS[name], {"metadata": metadata}
    assert question is None or form.question(entry) == question
    for text, answer in accepted.items():
        assert form.answer(text, entry) == answer
        for at in range(len(text)):  # every character counts
            assert form.answer(f"{text[:at]}?{text[at + 1 :]}", entry) is None
        refused = [*refused, f"{text}\nso it is done", f"{text} ."]
    for text in [*refused, "", "x" * 5000]:
        assert form.answer(text, entry) is None, text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("countdown", dict(min_numbers=5, max_numbers=5, form="steps"), "takes 2 to 4 numbers; this problem has 5"),
        ("jugs", dict(difficulty=12, form="steps"), "at most 9 litres"),
        ("shortest_path", dict(min_rows=10, max_rows=10, form="steps"), "at most 9 rows"),
        ("chain_sum", dict(min_terms=1, max_terms=1, form="steps"), "at least two terms"),
        (
            "countdown",
            dict(max_value=2, min_numbers=2, max_numbers=2),
            "countdown cannot make its rows: ValueError: Failed to generate",
        ),
    ],
)
def test_problems_that_cannot_be_made_or_are_too_large_for_a_form_are_one_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        _ = ReasoningGymSpec(name, size=2, **options).train_dataset


def test_training(tmp_path):
    # The right digit anywhere in the completion gets a part of the score, so that a random model gets rewards.
    spec = ReasoningGymSpec("gcd", answer_in="completion", size=16, eval_size=8, max_value=9)
    options = {**spec.options, "max_completion_length": 8, "max_steps": 2, "reward_funcs": spec.reward_funcs}
    options |= dict(num_branches=3, segmentation="fixed", segment_length=2)
    trainer = make_trainer(
        DeepGRPOTrainer,
        DeepGRPOConfig,
        tmp_path,
        model=make_model(max_position_embeddings=512),
        train_dataset=spec.train_dataset,
        eval_dataset=spec.eval_dataset,
        **options,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "rewards/reasoning_gym_gcd/mean" in log]
    assert len(logs) == 2 and max(log["rewards/reasoning_gym_gcd/mean"] for log in logs) > 0
    evaluated = trainer.evaluate()
    assert 0 <= evaluated["eval_rewards/reasoning_gym_gcd/mean"] <= 1
