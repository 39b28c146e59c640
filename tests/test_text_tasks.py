"""Path Exploration, Countdown, Sudoku and facts: verifiers, solvers, and demonstrations in SESA's prompt formats."""

import dataclasses
import itertools
import random
import re
import string
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.benchmarks.tasks import find_task, paper_places
from examples.benchmarks.tasks.countdown import COUNTDOWN, read_answer
from examples.benchmarks.tasks.dialects import DIALECT, PLANS
from examples.benchmarks.tasks.path_exploration import PAPER_PLACES, PATHS, PROBLEM, normalize_place
from examples.benchmarks.tasks.sudoku import CELLS, SUDOKU, all_boards, fill, follows_rules
from examples.benchmarks.tasks.vaults import VAULT
from trl_explore.sketches.drafts import fill_template, split_candidates
from trl_explore.tasks import SketchedTask
from trl_explore.tasks.doors import DEEP_DOORS, DOORS
from trl_explore.tasks.sketched import LIST_MARK, SKETCH_MARK, SOLVE_MARK, distinct
from trl_explore.tasks.tiny_model import CHARACTERS, MAX_LENGTH
from trl_explore.tasks.warm_start import warm_start
from trl_explore.trainers import SESAConfig

FACTS = [VAULT, DOORS, DEEP_DOORS, DIALECT, PLANS]
TASKS = [PATHS, COUNTDOWN, SUDOKU, *FACTS]
MANY_PROBLEMS = [COUNTDOWN, SUDOKU, *FACTS]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
each_with_many_problems = pytest.mark.parametrize("task", MANY_PROBLEMS, ids=lambda task: task.name)

# Lists too, which the two-stage tasks are not taught by default.
ALL_FORMATS = (0.25, 0.25, 0.25, 0.25)
COUNTDOWN_PROBLEM = "2,3,5,7=24"
PUZZLE = "1b34e4g2ij4l4321"  # with a single solution
EXAMPLES = {  # a problem of each task, and a right answer
    "paths": (PROBLEM, PATHS.targets[0]),
    "countdown": (COUNTDOWN_PROBLEM, "5*3=15,7+2=9,15+9=24"),
    "sudoku": (PUZZLE, "b2e3g1i2j1l3"),
    "vault": ("k317190", VAULT.answer("k317190", VAULT.facts["k"])),
    "doors": ("317b", DOORS.answer("317b", DOORS.facts["b"])),
    "deep_doors": ("317b", DEEP_DOORS.answer("317b", DEEP_DOORS.facts["b"])),
    "plans": ("k317", PLANS.targets("k317")[0]),
    "dialects": ("k3171", DIALECT.targets("k3171")[0]),
}
HOSTILE = [
    "",
    "__import__('os').system('true')",
    "1/0",
    "2/(3-3)+5+7",
    "(" * 100_000 + "2" + ")" * 100_000,
    "(" * 100 + "5*3+7+2",
    "()" * 100,
    "9" * 10_000 + "*" + "9" * 10_000,
    "9**9**9**9",
    "\u0665*\u0663+\u0667+\u0662",  # Arabic digits
    "\uff15*\uff13+\uff17+\uff12",  # full-width digits
    "5\u00b2-1",
    "b\u0662e3g1i2j1l3",
    "\x00\n\t",
    "24",
    "nan",
    "b2" * 50_000,
    "k-a-m\n",
]


def problems(task: SketchedTask, number: int) -> list[str]:
    rng = random.Random(7)
    return [task.draw(rng) for _ in range(number)]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# ------------------------------------------------------------------------------------------------------- all the tasks


@each_task
def test_data_sets_and_demonstrations_are_deterministic(task):
    first, again, other = (task.build_dataset(40, seed=seed) for seed in (3, 3, 4))
    assert first.to_dict() == again.to_dict() and len(first) == 40
    assert task.evaluation_set(20).to_dict() == task.evaluation_set(20, seed=0).to_dict()
    if task is not PATHS:
        assert first["problem"][:] != other["problem"][:]
    assert [prompt[0]["content"] for prompt in first["prompt"]] == first["problem"][:]

    def draws(seed):
        rng = random.Random(seed)
        return [task.demonstration(task.sample_problem(rng), rng) for _ in range(30)]

    assert draws(1) == draws(1) != draws(2)


@each_with_many_problems
def test_held_out_problems_are_in_no_training_set_and_no_demonstration(task):
    training = set(task.build_dataset(500, seed=0)["problem"])
    held_out = {problem for seed in range(2) for problem in task.evaluation_set(200, seed=seed)["problem"]}
    rng = random.Random(0)
    shown = {re.split(r"[?|!]", task.sample_problem(rng))[0] for _ in range(500)}
    assert len(training) == 500 and len(held_out) > 200
    assert held_out.isdisjoint(training) and held_out.isdisjoint(shown)


@each_task
def test_demonstrations_of_all_formats_stay_within_alphabet_context_and_budgets(task):
    everything, rng = dataclasses.replace(task, format_weights=ALL_FORMATS), random.Random(0)
    seen = Counter()
    for _ in range(800):
        prompt = everything.sample_problem(rng)
        answer = everything.demonstration(prompt, rng)
        assert set(prompt + answer) <= set(CHARACTERS) and answer
        marks = [mark for mark in (SKETCH_MARK, SOLVE_MARK, LIST_MARK) if mark in prompt]
        seen[marks[0] if marks else ""] += 1
        if marks == [SKETCH_MARK]:
            assert len(answer) < task.max_sketch_length
        elif marks == [LIST_MARK]:
            assert len(answer) < task.num_candidates * task.max_completion_length
        else:
            assert len(answer) < task.max_completion_length
        # Role marks and the end of the sequence are one token each.
        assert len(prompt) + len(answer) + 3 <= MAX_LENGTH
    assert len(seen) == 4 and min(seen.values()) > 130


@each_task
def test_templates_make_the_prompts_that_demonstrations_answer(task, tmp_path):
    options, rng, problem = task.sesa_options, random.Random(0), task.draw(random.Random(1))
    sketches: list[str] = []
    for _ in range(4):
        template = options["next_sketch_template" if sketches else "sketch_template"]
        told = options["sketch_separator"].join(sketches)
        sketch = task.demonstration(fill_template(template, {"problem": problem, "sketches": told}), rng)
        assert sketch not in sketches and len(sketch) < options["max_sketch_length"]
        sketches.append(sketch)
    for sketch in sketches:
        prompt = fill_template(options["solve_template"], {"problem": problem, "sketch": sketch})
        answer = task.demonstration(prompt, rng)
        assert answer.startswith(sketch) or task in FACTS  # theirs: see test_fact_tasks.py
    answer = task.demonstration(fill_template(options["candidate_template"], {"problem": problem}), rng)
    candidates = [text for _, text in split_candidates(answer, separator=options["candidate_separator"])]
    assert len(candidates) == len(set(candidates)) <= task.num_candidates or task is VAULT  # whose answers have `;`
    assert SESAConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options).mode == task.mode


@each_task
def test_hostile_completions_are_wrong_and_harmless(task):
    problem = EXAMPLES[task.name][0]
    for text in HOSTILE:
        assert task.reward([text, assistant(text)], problem=[problem] * 2, prompts=None) == [0.0, 0.0], text[:99]


@each_task
def test_reward_has_the_signature_trl_calls(task):
    problem, right = EXAMPLES[task.name]
    rewards = task.reward(
        prompts=[[{"role": "user", "content": problem}]] * 2,
        completions=[assistant(right), assistant("nonsense")],
        completion_ids=[[1], [2]],
        problem=[problem] * 2,
        trainer_state=None,
    )
    assert rewards == [1.0, 0.0]
    assert task.reward.__name__ == "accuracy_reward" and find_task(task.name) is task


@pytest.mark.parametrize(
    ("task", "knobs", "message"),
    [
        (PATHS, {"num_cities": 0}, "`num_cities` is 0"),
        (PATHS, {"num_provinces": 27}, "`num_provinces` is 27; give between 1 and 26"),
        (PATHS, {"num_hidden": 201}, "`num_hidden` is 201; give between 1 and 200"),
        (COUNTDOWN, {"num_numbers": 1}, "`num_numbers` is 1"),
        (COUNTDOWN, {"operators": "+%"}, "`operators` is '\\+%'"),
        (COUNTDOWN, {"max_number": 31}, "`max_number` is 31"),
        (COUNTDOWN, {"min_target": 0}, "`min_target` is 0"),
        (COUNTDOWN, {"carelessness": 2.0}, "`carelessness` is 2.0"),
        (SUDOKU, {"min_blanks": 9}, "`min_blanks` is 9 and `max_blanks` 8"),
    ],
)
def test_bad_knobs_are_named(task, knobs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(task, **knobs)


def test_lists_end_early_and_data_sets_are_refused_where_there_are_not_enough():
    rng = random.Random(0)
    assert sorted(distinct(lambda: rng.choice("abc"), 5, ["a"])) == ["b", "c"]
    few = dataclasses.replace(COUNTDOWN, num_numbers=2, max_number=3, min_target=1)
    with pytest.raises(ValueError, match="`num_examples` is 50"):
        few.build_dataset(50, seed=0)


def test_warm_start_runs_and_its_cache_sees_the_knobs(tmp_path):
    variants = (PLANS, PLANS, dataclasses.replace(PLANS, num_candidates=5))
    folders = {warm_start(task, seed=0, steps=1, cache_dir=tmp_path, progress=False) for task in variants}
    assert len(folders) == 2


# ---------------------------------------------------------------------------------------------------- Path Exploration


def test_exactly_the_hidden_places_are_rewarded():
    assert len(set(PATHS.places)) == 200 and len(set(PATHS.targets)) == 20
    conceivable = map("-".join, itertools.product(string.ascii_lowercase, repeat=3))
    assert {place for place in conceivable if PATHS.verify(PROBLEM, place)} == set(PATHS.targets) < set(PATHS.places)
    target = PATHS.targets[0]
    for text in (target.upper(), f" {target}", f"{target} ", target[:-1], target.replace("-", " "), target * 2):
        assert not PATHS.verify(PROBLEM, text)


def test_places_depend_on_the_seed_alone():
    again, other = dataclasses.replace(PATHS, skew=2.0), dataclasses.replace(PATHS, place_seed=1)
    assert again.places == PATHS.places and again.targets == PATHS.targets
    assert set(other.targets) != set(PATHS.targets)


def test_plain_demonstrations_follow_the_zipf_law():
    rng = random.Random(0)
    shown = Counter(PATHS.demonstration(PROBLEM, rng) for _ in range(20_000))
    norm = sum(1 / rank for rank in range(1, 201))
    for rank in (1, 2, 10):
        assert shown[PATHS.places[rank - 1]] / 20_000 == pytest.approx(1 / rank / norm, rel=0.15)
    right = sum(shown[target] for target in PATHS.targets) / 20_000
    assert 0.05 < right < 0.2  # a policy that imitates them is rewarded now and then


def test_lists_of_places_are_full_and_reach_further_than_as_many_plain_answers():
    rng = random.Random(0)
    lists = [PATHS.demonstration(f"{PROBLEM}{LIST_MARK}", rng).split(";") for _ in range(100)]
    assert all(len(set(places)) == len(places) == 24 for places in lists)
    plain = [[PATHS.demonstration(PROBLEM, rng) for _ in range(24)] for _ in range(100)]
    assert sum(map(PATHS.coverage, lists)) > sum(map(PATHS.coverage, plain))


def test_data_sets_carry_the_targets_for_coverage():
    row = PATHS.evaluation_set(2)[1]
    assert row["targets"] == list(PATHS.targets)
    assert PATHS.coverage([*PATHS.targets[:5], PATHS.targets[0], assistant(PATHS.targets[5]), "x"]) == 6 / 20
    assert PATHS.coverage([]) == 0.0


def test_the_papers_list_has_19_places_that_match_however_they_are_written(tmp_path):
    task = paper_places()
    assert len({normalize_place(place) for place in PAPER_PLACES}) == len(task.targets) == 19
    variants = [
        "Henan Province \u2013 Luoyang City \u2013 Luolong District",
        "henan province - luoyang city - luolong district.",
        " HENAN PROVINCE\u2014Luoyang  City\u2014Luolong District\n",
        "Guangdong Province\u2013Shenzhen City\u2013Shenzhen High tech Zone",
    ]
    others = ["Luolong District", "Henan Province \u2013 Luoyang City", "Guangdong - Shenzhen - Nanshan", "x" * 10_000]
    assert task.reward([*variants, *map(assistant, others)]) == [1.0] * 4 + [0.0] * 4
    assert task.coverage([*variants, *others]) == pytest.approx(2 / 19)
    assert task.coverage(list(PAPER_PLACES)) == 1.0
    row = task.build_dataset(3, seed=0)[2]
    assert "alien spaceship" in row["prompt"][0]["content"] and row["targets"] == list(PAPER_PLACES)
    assert task.evaluation_set(2).to_dict() == task.build_dataset(2, seed=9).to_dict()
    assert task.reward.__name__ == "accuracy_reward"
    SESAConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **task.sesa_options)


# ----------------------------------------------------------------------------------------------------------- Countdown


@pytest.mark.parametrize(
    "answer",
    [
        "5*3=15,7+2=9,15+9=24",
        "7+2=9,5*3=15,15+9=24",
        "3*5=15,2+7=9,9+15",
        "2+7+5*3=24",
        " 5 * 3 + ( 7 + 2 ) = 24 ",
        "5*3=15, 15+7+2",
    ],
)
def test_right_answers_in_all_spellings(answer):
    assert COUNTDOWN.verify(COUNTDOWN_PROBLEM, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "5*3=15,7+2=9,15+9=25",  # wrong sum
        "5*3=15,7+2=9,15+9=24,",
        "5*3=15,7+2=9",  # stops early
        "5*3+7",  # without the 2
        "5*3+7+2+2-2",  # the 2 three times
        "5*3=15,15+9=24",  # a 9 from nowhere
        "5*3=15,5*3=15,7+2=9,15+9=24",
        "5*3,7+2,15+9",  # only the last right side may be missing
        "24=24",
        "5*3=015,7+2=9,15+9=24",
        "05*3+7+2",
        "5 3*7+2",
        "53+7/2",
        "+5*3+7+2",
        "5*3+7+2;",
        "5*3+7+2\n",
        "5*3=15,7+2=9,15+9=24<a>",
    ],
)
def test_wrong_answers(answer):
    assert not COUNTDOWN.verify(COUNTDOWN_PROBLEM, answer)


def test_fractions_are_exact():
    assert COUNTDOWN.verify("3,3,8,8=24", "8/(3-8/3)")
    assert not COUNTDOWN.verify("3,3,8,8=24", "8/(3-8/3)+0")
    assert not COUNTDOWN.verify("1,3,3=1", "1/3*3*1")
    assert COUNTDOWN.verify("1,3,3=1", "1/3*3")


def expressions(numbers: list[int]) -> st.SearchStrategy[str]:
    """Expressions over all the numbers, each once, with brackets that may be needed, superfluous or missing."""

    def grow(leaves: list[str]) -> st.SearchStrategy[str]:
        if len(leaves) == 1:
            return st.sampled_from([leaves[0], f"({leaves[0]})"])
        return st.integers(1, len(leaves) - 1).flatmap(
            lambda cut: st.tuples(grow(leaves[:cut]), st.sampled_from("+-*/"), grow(leaves[cut:]), st.booleans()).map(
                lambda parts: f"({''.join(parts[:3])})" if parts[3] else "".join(parts[:3])
            )
        )

    return st.permutations([str(number) for number in numbers]).flatmap(grow)


@given(data=st.data(), numbers=st.lists(st.integers(0, 9), min_size=2, max_size=5))
@settings(deadline=None)
def test_verifier_agrees_with_pythons_arithmetic(data, numbers):
    expression = data.draw(expressions(numbers))
    try:
        value = eval(re.sub(r"\d", r"Fraction(\g<0>)", expression))
    except ZeroDivisionError:
        value = Fraction(1, 2)
    target = data.draw(st.sampled_from([int(value), int(value) + 1]))
    assert COUNTDOWN.verify(f"{','.join(map(str, numbers))}={target}", expression) == (value == target)


def test_solver_agrees_with_a_search_over_expressions():
    task = dataclasses.replace(COUNTDOWN, num_numbers=3, operators="+-*/", max_value=99, min_target=1)
    for problem in problems(task, 25):
        numbers, target = problem.split("=")
        texts = [
            text
            for a, b, c in itertools.permutations(numbers.split(","))
            for op, po in itertools.product("+-*/", repeat=2)
            for text in (f"({a}{op}{b}){po}{c}", f"{a}{op}({b}{po}{c})")
        ]
        right = {read_answer(problem, text) for text in texts if task.verify(problem, text)}
        steps = {solution: [Fraction(line.split("=")[1]) for line in solution] for solution in right}
        simple = {key for key, values in steps.items() if all(v in range(1, 100) for v in values)}
        assert task.solutions(problem) == simple and int(target) in range(1, 100)


@pytest.mark.parametrize("num_numbers", [2, 3, 4])
def test_every_solution_of_the_solver_is_right_and_together_they_cover(num_numbers):
    task = dataclasses.replace(COUNTDOWN, num_numbers=num_numbers, min_target=1)
    for problem in problems(task, 10):
        solutions = sorted(task.solutions(problem))
        # Sorted equations may come before what they use: write each solution as its last equations' expression.
        texts = [order for lines in solutions for order in itertools.permutations(lines)]
        answers = [text for text in map(",".join, texts) if task.verify(problem, text)]
        assert task.coverage(problem, answers) == 1.0 and task.num_solutions(problem) == len(solutions) >= 1
        assert task.coverage(problem, answers[:1] * 3) == pytest.approx(1 / len(solutions))
        assert task.coverage(problem, ["1+1"]) == 0.0


def test_demonstrations_compute_rightly_but_often_miss_the_target():
    rng, right = random.Random(0), 0
    for problem in problems(COUNTDOWN, 800):
        answer = COUNTDOWN.attempt(problem, rng)
        numbers, reached = problem.partition("=")[0], answer.rpartition("=")[2]
        if answer.count(",") == 2:
            assert COUNTDOWN.verify(f"{numbers}={reached}", answer)
        right += COUNTDOWN.verify(problem, answer)
    careful = dataclasses.replace(COUNTDOWN, carelessness=0.0)
    assert 0.75 < right / 800 < 0.95
    assert all(careful.verify(problem, careful.attempt(problem, rng)) for problem in problems(careful, 200))


def test_an_answer_follows_its_sketch_and_ignores_one_that_is_impossible():
    rng = random.Random(0)
    for problem in problems(COUNTDOWN, 50):
        sketch = COUNTDOWN.sketch(problem, rng)
        assert COUNTDOWN.attempt(problem, rng, sketch=sketch).startswith(f"{sketch}=")
        assert COUNTDOWN.attempt(problem, rng, sketch="99*99").count(",") <= 2


# -------------------------------------------------------------------------------------------------------------- Sudoku


def test_the_288_boards_are_those_that_a_plain_search_finds():
    rows = ["".join(row) for row in itertools.permutations("1234")]
    found = set()
    for board in itertools.product(rows, repeat=4):
        columns = zip(*board, strict=True)
        boxes = [board[r][c : c + 2] + board[r + 1][c : c + 2] for r in (0, 2) for c in (0, 2)]
        if all(len(set(unit)) == 4 for unit in (*columns, *boxes)):
            found.add("".join(board))
    assert set(all_boards()) == found and len(all_boards()) == 288
    assert all(map(follows_rules, all_boards()))


def test_solutions_are_what_trying_all_digits_finds():
    few = dataclasses.replace(SUDOKU, min_blanks=4, max_blanks=6)
    for problem in problems(few, 10):
        blanks = [cell for cell in CELLS if cell in problem]
        answers = [
            "".join(map("".join, zip(blanks, digits, strict=True)))
            for digits in itertools.product("1234", repeat=len(blanks))
        ]
        right = [answer for answer in answers if SUDOKU.verify(problem, answer)]
        assert [fill(problem, answer) for answer in right] == SUDOKU.solutions(problem)
        assert SUDOKU.num_solutions(problem) == len(right) >= 1
        assert SUDOKU.coverage(problem, right) == 1.0 and SUDOKU.coverage(problem, answers[:1]) <= 1 / len(right)


def test_blanks_may_be_filled_in_any_order():
    assert fill(PUZZLE, "b2e3g1i2j1l3") == "1234341221434321"
    for order in itertools.permutations(["b2", "e3", "g1", "i2", "j1", "l3"]):
        assert SUDOKU.verify(PUZZLE, "".join(order))


@pytest.mark.parametrize(
    "answer",
    [
        "b2e3g1i2j1",  # a blank is left
        "b2e3g1i2j1l3b2",  # one is filled twice
        "b2b2g1i2j1l3",
        "a1b2e3g1i2j1l3",  # a given cell
        "b2e3g1i2j1l4",  # against the rules
        "b2e3g1i2j1l5",
        "b2,e3,g1,i2,j1,l3",
        "b2e3g1i2j1l3.",
        "1234341221434321",
        "112233445566",
    ],
)
def test_wrong_boards(answer):
    assert not SUDOKU.verify(PUZZLE, answer)


def test_demonstrated_boards_are_right_and_start_with_the_sketch():
    rng, starts = random.Random(0), Counter()
    for problem in problems(SUDOKU, 200):
        sketch = SUDOKU.sketch(problem, rng)
        answer = SUDOKU.attempt(problem, rng, sketch=sketch)
        assert SUDOKU.verify(problem, answer) and answer.startswith(sketch)
        plain = SUDOKU.attempt(problem, rng)
        starts[sorted(plain[::2]).index(plain[0])] += 1
    assert max(starts.values()) < 80  # plain answers start anywhere, too


def test_a_sketch_is_repeated_only_when_every_cell_is_named():
    problem, rng = problems(SUDOKU, 1)[0], random.Random(0)
    blanks = [cell for cell in CELLS if cell in problem]
    assert SUDOKU.demonstration(f"{problem}?{';'.join(blanks[1:])}", rng) == blanks[0]
    assert SUDOKU.demonstration(f"{problem}?{';'.join(blanks)}", rng) in blanks


@pytest.mark.slow
def test_the_warm_start_of_plans_follows_sketches_to_the_end(tmp_path):
    # Sixteen ways to write a number: with fewer demonstrations the right mark came with wrong digits.
    folder, rng = warm_start(PLANS, seed=0, cache_dir=tmp_path, progress=False), random.Random(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    problems = PLANS.evaluation_set(64)["problem"][:]
    sketches = [PLANS.sketch(problem, rng) for problem in problems]
    asked = [[{"role": "user", "content": f"{p}|{s}"}] for p, s in zip(problems, sketches, strict=True)]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(0)
    options = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=PLANS.max_completion_length)
    output = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    assert sum(text == PLANS.answer(p, s) for p, s, text in zip(problems, sketches, texts, strict=True)) >= 52
