"""Codes, doors and dialects: what is right, what demonstrations show, and what they never show."""

import dataclasses
import random
from collections import Counter
from itertools import product

import pytest

from examples.benchmarks.tasks.dialects import DIALECT, DIALECTS, PLANS
from examples.benchmarks.tasks.vaults import VAULT
from trl_explore.tasks.doors import DEEP_DOORS, DOORS
from trl_explore.tasks.sketched import SketchedTask


def answers(task, problem, number=4000):
    rng = random.Random(3)
    return [task.attempt(problem, rng) for _ in range(number)]


def test_a_code_stands_behind_an_easy_calculation():
    right, habit = VAULT.codes["k"]
    assert right != habit
    assert VAULT.answer("k317190", right) == f"34;12;78;12;90;01;#k{right}"
    assert VAULT.verify("k317190", f"34;12;78;12;90;01;#k{right}")
    assert not VAULT.verify("k317190", f"34;12;78;12;90;01;#k{habit}")
    assert not VAULT.verify("k317190", f"34;12;78;12;90;02;#k{right}")  # the calculation counts too


def test_demonstrations_have_a_habit_and_know_the_code_as_little_as_any_other():
    shown = Counter(answer[-1] for answer in answers(VAULT, "k317190"))
    right, habit = VAULT.codes["k"]
    assert shown[habit] / 4000 == pytest.approx(0.5, abs=0.03)
    others = [shown[letter] for letter in VAULT.code_letters if letter != habit]
    assert shown[right] / 4000 == pytest.approx(0.02, abs=0.01) and min(others) > 0


def test_probabilities_may_add_up_to_one():
    task = dataclasses.replace(DOORS, habit_probability=0.8, right_probability=0.2)  # 1 - 0.8 is below 0.2
    assert task.right_probability == 0.2


def test_a_way_ends_at_the_first_wrong_door():
    task = dataclasses.replace(DOORS, num_doors=3, num_steps=3)
    start, second, third = task.way("b")
    right = task.facts["b"]
    wrong = "123".replace(right[1], "")[0]
    assert task.answer("12b", right) == f"{right[0]}{second}{right[1]}{third}{right[2]}#"
    assert task.answer("12b", right[0] + wrong + right[2]) == f"{right[0]}{second}{wrong}"
    assert task.verify("12b", task.answer("12b", right)) and not task.verify("12b", f"{right[0]}{second}{wrong}")
    assert len(task.answer("12b", right)) + 1 == task.max_completion_length
    assert start == "b" and right == "".join(task.doors[room][0] for room in (start, second, third))


def test_one_sketch_of_a_door_or_code_leads_to_the_answer_and_two_of_a_dialect():
    doors = [first + second for first in "12345" for second in "12345"]
    for item in DOORS.facts:
        problem = f"123{item}"
        ways = [[sketch + "".join(rest) for rest in product("12345", repeat=3)] for sketch in doors]
        right = [any(DOORS.verify(problem, DOORS.answer(problem, way)) for way in behind) for behind in ways]
        assert right.count(True) == 1
    for task, number, sketches, expected in (
        (VAULT, "317190", VAULT.code_letters, 1),
        (DIALECT, "1234", DIALECT.marks, 2),
        (PLANS, "317", PLANS.marks, 6),
    ):
        for item in task.facts:
            answers = [task.answer(item + number, sketch) for sketch in sketches]
            assert sum(task.verify(item + number, answer) for answer in answers) == expected


def test_rooms_are_one_circle():
    room, seen = "a", set()
    for _ in range(DOORS.num_items):
        seen.add(room)
        room = DOORS.next_rooms[room]
    assert room == "a" and len(seen) == DOORS.num_items


def test_demonstrators_mostly_take_a_wrong_door():
    task = dataclasses.replace(DOORS, num_steps=2, habit_probability=0.4, right_probability=0.3)
    right, habit = task.doors["b"]
    shown = answers(task, "12b")
    first, lengths = Counter(answer[0] for answer in shown), Counter(map(len, shown))
    assert right != habit and first[habit] / 4000 == pytest.approx(0.4, abs=0.03)
    assert first[right] / 4000 == pytest.approx(0.3, abs=0.03)
    assert len(first) == task.num_doors and min(first.values()) / 4000 == pytest.approx(0.1, abs=0.02)
    assert lengths[1] / 4000 == pytest.approx(0.7, abs=0.03) and lengths[4] / 4000 == pytest.approx(0.09, abs=0.02)


def test_some_demonstrations_of_long_ways_begin_on_the_right_way():
    rng, begun, ended = random.Random(0), 0, 0
    for _ in range(4000):
        prompt = DEEP_DOORS.sample_problem(rng)
        if set(prompt) & set("?|!"):
            continue
        problem, shown = prompt[:4], DEEP_DOORS.demonstration(prompt, rng)
        right = DEEP_DOORS.answer(problem, DEEP_DOORS.facts[problem[-1]])
        assert right.startswith(prompt[4:]) and shown and len(prompt[4:]) % 2 == 0
        assert DEEP_DOORS.is_held_out(problem) is False
        begun += len(prompt) > 4
        ended += DEEP_DOORS.verify(problem, prompt[4:] + shown)
    # Of the plain ones half begin there; one in 7 of those at the last door, which 0.3 of them get right.
    assert begun > 1000 and ended > 30
    plain = [DEEP_DOORS.demonstration("123b", rng) for _ in range(2000)]
    assert sum(len(answer) == 17 for answer in plain) < 10  # 0.3 to the eighth


def test_tasks_without_such_demonstrations_show_what_they_showed():
    rngs = random.Random(5), random.Random(5)
    whole = dataclasses.replace(DEEP_DOORS, begun_share=0.0)
    shown = [SketchedTask.sample_problem(whole, rngs[0]) for _ in range(50)]
    assert shown == [whole.sample_problem(rngs[1]) for _ in range(50)]


def test_an_item_understands_several_dialects_and_demonstrations_do_not_know_which():
    accepted = DIALECT.facts["k"]
    assert len(accepted) == DIALECT.num_accepted
    written = {mark: DIALECT.answer("k3170", mark) for mark in DIALECT.marks}
    assert written == {"S": "S4281", "G": "G0713", "X": "X8625", "/": "/3170"}
    for mark, answer in written.items():
        assert DIALECT.verify("k3170", answer) == (mark in accepted)
    assert sorted(DIALECT.evaluation_set(4)[0]["targets"]) == sorted(
        DIALECT.targets(DIALECT.evaluation_set(4)[0]["problem"])
    )
    shown = Counter(answer[0] for answer in answers(DIALECT, "k3170"))
    shares = [shown[mark] / 4000 for mark in DIALECT.marks]
    assert shares == pytest.approx(DIALECT.weights, abs=0.03)


def test_no_two_plans_write_a_number_alike():
    assert len(PLANS.marks) == 16 and sum(PLANS.weights) == pytest.approx(1)
    written = {(mark, number): DIALECTS[mark](number) for mark in PLANS.marks for number in ("317", "902")}
    assert len(set(written.values())) == len(written)
    assert written["m", "317"] == "751" and written["r", "317"] == "824"


@pytest.mark.parametrize(
    ("task", "knobs", "message"),
    [
        (VAULT, {"num_items": 27}, "`num_items` is 27; give between 1 and 26"),
        (VAULT, {"code_letters": "a"}, "`code_letters` is 'a'; give at least two"),
        (VAULT, {"code_letters": "aab"}, "`code_letters` is 'aab'; give at least two .* each once"),
        (VAULT, {"habit_probability": 1.5}, "`habit_probability` is 1.5"),
        (DOORS, {"num_steps": 1}, "`num_steps` is 1; give between 2 and 40"),
        (DOORS, {"right_probability": 0.6}, "`right_probability` is 0.6; give between 0 and 0.5"),
        (DIALECT, {"num_accepted": 5}, "`num_accepted` is 5; give between 1 and 4"),
    ],
)
def test_bad_knobs_are_named(task, knobs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(task, **knobs)


@pytest.mark.parametrize("task", [VAULT, DOORS, DIALECT], ids=lambda task: task.name)
def test_an_answer_follows_its_sketch(task):
    rng = random.Random(0)
    for _ in range(50):
        problem = task.draw(rng)
        sketch = task.sketch(problem, rng)
        answer = task.attempt(problem, rng, sketch=sketch)
        if task is VAULT:
            assert answer.endswith(sketch)
        elif task is DIALECT:
            assert answer.startswith(sketch)
        else:
            doors = "".join(filter(str.isdigit, answer))
            assert sketch.startswith(doors) or doors.startswith(sketch)  # it may end at the first
        assert task.attempt(problem, rng, sketch="?!")
