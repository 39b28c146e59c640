"""FrozenLake and Sokoban: rules, solvers, environments inside TRL's trainer, single-turn tasks and their sketches."""

import collections
import copy
import dataclasses
import inspect
import itertools
import random

import pytest
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling
from world import QUIET

from examples.benchmarks.tasks import find_task
from examples.benchmarks.tasks.frozen_lake import FROZEN_LAKE, FrozenLake, FrozenLakeEnvironment
from examples.benchmarks.tasks.grid_worlds import ACTIONS, State
from examples.benchmarks.tasks.sokoban import SOKOBAN, Sokoban, SokobanEnvironment
from trl_explore.tasks.tiny_model import CHARACTERS, build_tokenizer
from trl_explore.tasks.warm_start import warm_start

LAKE, RULES = FrozenLake(), Sokoban()
TASKS = [FROZEN_LAKE, SOKOBAN]


def boards(task, number, seed=7):
    rng = random.Random(seed)
    return [task.draw(rng) for _ in range(number)]


def play(world, state, plan):
    """Rewards of a plan's moves and whether the last one ended the game."""
    rewards, done = [], False
    for action in plan:
        state, reward, done = world.step(state, action)
        rewards.append(reward)
    return state, rewards, done


def breadth_first(world, state):
    """Length of a shortest plan by the rules alone; `None` without one."""
    seen, frontier, length = {state}, [state], 0
    while frontier:
        if any(world.outcome(position) == "goal" for position in frontier):
            return length
        following = {world.step(position, action)[0] for position in frontier for action in ACTIONS}
        frontier, length = list(following - seen), length + 1
        seen |= following
    return None


def lake_transitions(rows, success_rate=1.0):
    """gymnasium's table: `table[cell][action]` is a list of (probability, cell, reward, done)."""
    gymnasium = pytest.importorskip("gymnasium")
    description = ["".join({".": "F", "X": "H", "G": "G"}[tile] for tile in row) for row in rows]
    description[0] = "S" + description[0][1:]
    slippery = {"is_slippery": success_rate < 1, "success_rate": success_rate}
    return gymnasium.make("FrozenLake-v1", desc=description, **slippery).unwrapped.P


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_ice_has_gymnasiums_rules_in_every_cell(size):
    task = dataclasses.replace(FROZEN_LAKE, size=size, min_moves=4, max_moves=20)
    for board in boards(task, 4):
        rows = LAKE.parse(board).rows
        table = lake_transitions(rows)
        for cell, (index, action) in itertools.product(range(size**2), enumerate(ACTIONS)):
            state, reward, done = LAKE.step(State(rows, divmod(cell, size)), action)
            assert [(1.0, state.player[0] * size + state.player[1], reward, done)] == table[cell][index]


@pytest.mark.parametrize("success_rate", [1 / 3, 0.8])
def test_slippery_ice_has_gymnasiums_outcomes_and_probabilities(success_rate):
    lake, rng = FrozenLake(success_rate), random.Random(0)
    state = LAKE.parse("S.X/.../X.G")
    table = lake_transitions(state.rows, success_rate)
    for cell, (index, action) in itertools.product((0, 1, 4, 7), enumerate(ACTIONS)):
        start = State(state.rows, divmod(cell, 3))
        outcomes = [lake.step(start, action, rng) for _ in range(1500)]
        seen = collections.Counter((s.player[0] * 3 + s.player[1], reward, done) for s, reward, done in outcomes)
        expected = collections.Counter()
        for probability, *outcome in table[cell][index]:
            expected[tuple(outcome)] += probability
        assert seen.keys() == expected.keys()
        assert all(seen[outcome] / 1500 == pytest.approx(expected[outcome], abs=0.06) for outcome in expected)


def test_slippery_ice_is_firm_without_a_source_of_chance():
    state = LAKE.parse("S../.../..G")
    assert {FrozenLake(0.1).step(state, "r") for _ in range(20)} == {LAKE.step(state, "r")}


def test_holes_and_goals_end_the_game_for_good():
    for plan, end, reward in (("r", ".x/.G", 0.0), ("dr", ".X/.+", 1.0)):
        state, rewards, done = play(LAKE, LAKE.parse("SX/.G"), plan)
        assert LAKE.render(state) == end and rewards[-1] == reward and done
        assert all(LAKE.step(state, action) == (state, 0.0, True) for action in ACTIONS)
        assert LAKE.legal_actions(state) == []


@pytest.mark.parametrize(
    ("before", "action", "after"),
    [
        ("So.G", "r", ".SoG"),  # a push
        ("S*.oG", "r", ".+ooG"),  # off a goal
        (".SoG", "r", "..S*"),  # onto a goal
        ("SooG", "r", "SooG"),  # two boxes
        ("So#G", "r", "So#G"),  # a wall behind the box
        ("GSo", "r", "GSo"),  # the edge behind the box
        ("S#oG", "r", "S#oG"),  # a wall
        ("SoG", "l", "SoG"),  # the edge
        ("S/o/G", "d", "./S/*"),
        ("GoS", "l", "*S."),
    ],
)
def test_sokoban_moves_by_hand(before, action, after):
    state, reward, done = RULES.step(RULES.parse(before), action)
    assert RULES.render(state) == after
    assert (reward, done) == (float("o" not in after), "o" not in after)
    assert (action in RULES.legal_actions(RULES.parse(before))) == (before != after)


def test_a_room_is_solved_only_with_all_boxes_on_goals():
    state, rewards, done = play(RULES, RULES.parse("So.G/.o.G"), "rrdl")
    assert rewards == [0.0] * 4 and not done
    state, rewards, done = play(RULES, state, "lrrl")
    assert not done
    state, rewards, done = play(RULES, RULES.parse("SoG/.oG"), "rlddr")
    assert RULES.render(state) == "..*/.S*" and rewards[-1] == 1.0 and done


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_boards_survive_a_game_as_text_in_the_tiny_alphabet(task):
    rng, world = random.Random(0), task.world
    for board in boards(task, 50):
        state = world.parse(board)
        assert world.render(state) == board and set(board) <= set(CHARACTERS)
        for _ in range(12):
            state = world.step(state, rng.choice(list(ACTIONS)))[0]
            assert world.parse(world.render(state)) == state


@pytest.mark.parametrize("board", ["", "...", "S.S", "S./.", "S.Q", "S#"])
def test_a_broken_board_is_named(board):
    with pytest.raises(ValueError, match="`board` is"):
        LAKE.parse(board)
    with pytest.raises(ValueError, match="as many boxes as goals"):
        RULES.distances(RULES.parse("So./..."))


@pytest.mark.parametrize(
    "task",
    [
        *TASKS,
        dataclasses.replace(FROZEN_LAKE, size=6, hole_share=0.4, min_moves=12, max_moves=14),
        dataclasses.replace(SOKOBAN, size=5, num_boxes=2, num_walls=5, num_rooms=8, min_moves=6, max_moves=20),
    ],
    ids=lambda task: f"{task.name}-{task.size}",
)
def test_drawn_boards_can_be_solved_in_as_many_moves_as_the_knobs_say(task):
    lengths = set()
    for board in boards(task, 60):
        state = task.world.parse(board)
        plan = task.world.solve(state)
        assert task.verify(board, plan) and len(plan) == breadth_first(task.world, state)
        assert task.world.outcome(play(task.world, state, plan)[0]) == "goal"
        lengths.add(len(plan))
    assert task.min_moves <= min(lengths) < max(lengths) <= task.max_moves


@pytest.mark.parametrize(("world", "board"), [(LAKE, "SX./X../..G"), (RULES, "S../..G/..o"), (RULES, "So.#G/.....")])
def test_hopeless_boards_have_no_plan(world, board):
    assert world.solve(world.parse(board)) is breadth_first(world, world.parse(board)) is None


def test_random_plans_are_shortest_and_differ():
    state, rng = LAKE.parse("S.../..../..../...G"), random.Random(0)
    plans = {LAKE.solve(state, rng) for _ in range(200)}
    assert len(plans) == 20 and {len(plan) for plan in plans} == {6}
    assert LAKE.solve(state) == LAKE.solve(state) == "dddrrr"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_hostile_completions_are_worth_nothing_and_raise_nothing(task):
    board = boards(task, 1)[0]
    plan = task.world.solve(task.world.parse(board))
    hostile = ["", " ", "L", "left", "?", "|", "<a>", "\0", "l" * 10_000, "ü", board]
    hostile += [plan + " ", plan[:-1], plan + "r"]
    assert task.reward(hostile, problem=[board] * len(hostile)) == [0.0] * len(hostile)
    assert task.reward([plan, [{"role": "assistant", "content": plan}]], problem=[board] * 2) == [1.0, 1.0]
    assert task.reward.__name__ == "accuracy_reward" and find_task(task.name) is task
    # A move against a wall is allowed, as in gymnasium, if there are moves to spare.
    blocked = next((a for a in ACTIONS if a not in task.world.legal_actions(task.world.parse(board))), "")
    assert task.verify(board, blocked + plan) == (len(blocked + plan) <= task.max_moves)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_data_sets_are_deterministic_distinct_and_disjoint(task):
    first, again, other = (task.build_dataset(200, seed=seed) for seed in (3, 3, 4))
    assert first.to_dict() == again.to_dict() and first["problem"][:] != other["problem"][:]
    assert len(set(first["problem"])) == 200
    assert first["prompt"][0] == [{"role": "user", "content": first["problem"][0]}]
    held_out = {board for seed in range(2) for board in task.evaluation_set(100, seed=seed)["problem"]}
    rng = random.Random(0)
    shown = {task.sample_problem(rng).partition("?")[0].partition("|")[0] for _ in range(500)}
    for problems in (first["problem"], other["problem"], shown):
        assert held_out.isdisjoint(problems)


@pytest.mark.parametrize(
    ("task", "knobs", "message"),
    [
        (FROZEN_LAKE, {"size": 2}, "`size` is 2"),
        (FROZEN_LAKE, {"sketch_moves": 0}, "`sketch_moves` is 0"),
        (FROZEN_LAKE, {"min_moves": 11}, "`min_moves` 11"),
        (FROZEN_LAKE, {"blind_share": 1.5}, "`blind_share`"),
        (FROZEN_LAKE, {"overlook_probabilities": (2.0,)}, "`overlook_probabilities`"),
        (FROZEN_LAKE, {"overlook_probabilities": ()}, "`overlook_probabilities`"),
        (FROZEN_LAKE, {"hole_share": 1.0}, "`hole_share` is 1.0"),
        (FROZEN_LAKE, {"size": 7}, "`max_moves` is 10"),
        (SOKOBAN, {"num_boxes": 0}, "`num_boxes` is 0"),
        (SOKOBAN, {"num_walls": 14}, "`num_walls` 14"),
    ],
)
def test_bad_knobs_are_named(task, knobs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(task, **knobs)


def test_knobs_that_leave_no_board_are_named():
    with pytest.raises(ValueError, match="`num_examples` is 20,"):  # more boards than exist
        dataclasses.replace(FROZEN_LAKE, size=3, min_moves=4, max_moves=6).evaluation_set(20)
    with pytest.raises(ValueError, match="`hole_share` is 0.95"):
        dataclasses.replace(FROZEN_LAKE, hole_share=0.95).draw(random.Random(0))
    with pytest.raises(ValueError, match="`min_moves` is 60"):
        dataclasses.replace(SOKOBAN, num_rooms=3, min_moves=60, max_moves=70).draw(random.Random(0))
    with pytest.raises(ValueError, match="`success_rate` is 2"):
        FrozenLake(2)
    with pytest.raises(ValueError, match="`max_steps` is 0"):
        SokobanEnvironment(max_steps=0)


@pytest.mark.parametrize(("task", "right"), [(FROZEN_LAKE, 0.44), (SOKOBAN, 0.83)], ids=["frozen_lake", "sokoban"])
def test_demonstrations_are_wrong_only_because_of_blind_spots(task, right):
    problems, rng = boards(task, 500), random.Random(0)
    verdicts = [task.verify(board, task.demonstration(board, rng)) for board in problems]
    assert sum(verdicts) / 500 == pytest.approx(right, abs=0.06)
    seeing = dataclasses.replace(task, blind_share=0.0)
    assert all(task.verify(board, seeing.demonstration(board, rng)) for board in problems)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sketches_begin_plans_and_differ_from_those_before(task):
    seeing, options, rng = dataclasses.replace(task, blind_share=0.0), task.sesa_options, random.Random(0)
    most = 0
    for board in boards(task, 20):
        sketches = []
        for _ in range(4):
            template = options["next_sketch_template" if sketches else "sketch_template"]
            told = options["sketch_separator"].join(sketches)
            sketches.append(seeing.demonstration(template.format(problem=board, sketches=told), rng))
            assert len(sketches[-1]) == task.sketch_moves <= options["max_sketch_length"] - 1
            plan = seeing.demonstration(options["solve_template"].format(problem=board, sketch=sketches[-1]), rng)
            assert plan.startswith(sketches[-1]) and task.verify(board, plan)
        most = max(most, len(set(sketches)))
    assert most >= 3


@pytest.mark.parametrize("sketch", ["", "zzz", "<a>", "uuuuuuuuuuuuuuu", "|", "?", ",", "l d"])
def test_a_hopeless_sketch_is_not_carried_out(sketch):
    seeing = dataclasses.replace(FROZEN_LAKE, blind_share=0.0)
    for board in boards(seeing, 4):
        assert seeing.verify(board, seeing.demonstration(f"{board}|{sketch}", random.Random(0)))
        assert set(seeing.demonstration(f"{board}?{sketch}", random.Random(0))) <= set(ACTIONS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_training_problems_mix_plain_ones_and_both_kinds_of_sketches(task):
    rng = random.Random(0)
    problems = [task.sample_problem(rng) for _ in range(1000)]
    kinds = collections.Counter("?" if "?" in p else "|" if "|" in p else "" for p in problems)
    assert [kinds[kind] / 1000 for kind in ("", "?", "|")] == pytest.approx([0.5, 0.2, 0.3], abs=0.04)
    shown = [(problem, task.demonstration(problem, rng)) for problem in problems[:200]]
    assert {character for pair in shown for text in pair for character in text} <= set(CHARACTERS)
    assert max(len(plan) for _, plan in shown) < task.max_completion_length


@pytest.fixture(params=["frozen_lake", "sokoban"])
def environment(request):
    """An environment with a game of two moves, `rr`."""
    environment = {"frozen_lake": FrozenLakeEnvironment, "sokoban": SokobanEnvironment}[request.param](max_steps=6)
    environment.reset({"frozen_lake": "S.G/...", "sokoban": "So.G/...."}[request.param])
    return environment


def test_a_game_through_the_tool(environment):
    board = environment.world.render(environment.episode.state)
    assert environment.move("left") == f"{board} blocked"
    assert environment.move("r") == environment.world.render(environment.episode.state) != board
    assert (environment.get_reward(), environment.done) == (0.0, False)
    assert environment.move(" Right ").endswith(" goal")
    assert (environment.get_reward(), environment.done, environment.episode.steps) == (1.0, True, 3)
    assert environment.move("left").endswith("the game is over") and environment.episode.steps == 3


@pytest.mark.parametrize("direction", ["", "x", "rr", "north", None, 7, ["r"], {"a": 1}, "r" * 9999, "\0"])
def test_unknown_moves_are_answered_and_cost_a_step(environment, direction):
    before = environment.snapshot()
    answer = environment.move(direction)
    assert answer.endswith("no such move, there are left down right up")
    assert set(answer) <= set(CHARACTERS)
    assert environment.snapshot() == before._replace(steps=1)


def test_games_end_at_the_step_limit(environment):
    answers = [environment.move("nowhere") for _ in range(8)]
    assert ["over" in answer for answer in answers] == [False] * 6 + [True] * 2
    assert environment.done and environment.get_reward() == 0.0


def test_reset_shows_the_board_unless_the_prompt_does(environment):
    board = "S../..G" if isinstance(environment, FrozenLakeEnvironment) else "So./..G"
    assert environment.reset(board=board, prompt=[{"role": "user", "content": "play: "}], answer=3) == board
    assert environment.reset(board=board, prompt=[{"role": "user", "content": f"play: {board}"}]) is None
    assert environment.episode.steps == 0


def test_copies_and_snapshots_are_independent(environment):
    environment.move("r")
    saved, twin = environment.snapshot(), copy.deepcopy(environment)
    environment.move("r")
    assert (environment.get_reward(), twin.get_reward(), twin.snapshot()) == (1.0, 0.0, saved)
    twin.move("l")
    other = type(environment)(max_steps=6)
    other.restore(saved)
    assert other.get_reward() == 0.0 and other.move("r").endswith("goal")
    environment.restore(saved)
    assert environment.episode == saved and environment.episode.steps == 1
    assert environment.world.legal_actions(saved.state)


def test_slippery_games_repeat_from_their_seed():
    def game(seed):
        environment = FrozenLakeEnvironment(success_rate=1 / 3)
        environment.reset("S..../...../...../...../....G", seed=seed)
        return [environment.move(move) for move in "rdrdrdrd"]

    assert game(1) == game(1)
    assert len({tuple(game(seed)) for seed in range(10)}) > 5


def test_move_is_the_only_tool_and_has_a_schema(environment):
    # As TRL looks for tools: functions of the class without an underscore, `reset` and `get_reward` apart.
    members = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    assert [name for name in members if not name.startswith("_")] == ["get_reward", "move", "reset"]
    function = get_json_schema(environment.move)["function"]
    assert function["name"] == "move" and function["parameters"]["required"] == ["direction"]
    assert function["parameters"]["properties"]["direction"]["enum"] == list(ACTIONS.values())


def test_tool_calls_fit_into_the_tiny_alphabet():
    tokenizer = build_tokenizer(tools=True)
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    prefix = tokenizer("<u>S.G<a>").input_ids
    for text, name in (("!move:direction=l<eos>", "move"), ("go!other<eos>", "other"), ("rrd<eos>", None)):
        calls = parse_response(tokenizer, tokenizer(text).input_ids, prefix=prefix).get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == [name] * (name is not None)


def test_grpo_trains_on_the_single_turn_task(tmp_path):
    folder = warm_start(SOKOBAN, seed=0, steps=3, cache_dir=tmp_path, progress=False)
    sizes = dict(per_device_train_batch_size=4, num_generations=4, max_steps=1)
    config = GRPOConfig(str(tmp_path / "out"), max_completion_length=SOKOBAN.max_completion_length, **sizes, **QUIET)
    dataset = SOKOBAN.build_dataset(16, seed=0)
    trainer = GRPOTrainer(model=str(folder), reward_funcs=SOKOBAN.reward, args=config, train_dataset=dataset)
    trainer.train()
    assert "rewards/accuracy_reward/mean" in trainer.state.log_history[0]
