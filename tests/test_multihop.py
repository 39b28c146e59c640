"""Multi-hop questions: worlds with one answer per question, and search agents that end badly in known proportions."""

import copy
import dataclasses
import random
import re
from collections import Counter, defaultdict

import pytest
import torch
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response
from world import QUIET

from examples.benchmarks.tasks.multihop import LATE_HOP
from trl_explore.agents.environments import guarded
from trl_explore.tasks.multihop import FAULTS, MULTI_HOP, final_answer, without_search
from trl_explore.tasks.multihop_world import (
    LAST_RELATIONS,
    RELATIONS,
    EnglishWorld,
    build_world,
    puzzle,
    retrieve,
    split_question,
)
from trl_explore.tasks.tiny_model import CHARACTERS, MAX_LENGTH, build_tokenizer
from trl_explore.tasks.warm_start import IGNORED, encode, warm_start

CALL = re.compile(r"!find:q=(\w+)")
ENGLISH = EnglishWorld(7)


def ends_of_walks(facts, start, path):
    """All places where `path` can lead, found by going through a plain list of facts at every step."""
    triples = [(key[0], key[1], value) for key, value in facts.items()]
    places = {start}
    for relation in path:
        places = {value for subject, r, value in triples if subject in places and r == relation}
    return places


def questions(number, seed=0):
    rng = random.Random(seed)
    return [(MULTI_HOP.sample_problem(rng), rng.getrandbits(32)) for _ in range(number)]


def demonstrations(number, task=MULTI_HOP):
    rng = random.Random(1)
    return [(question, seed, task.demonstrate(question, seed, rng)) for question, seed in questions(number)]


def searches_and_answer(text):
    *turns, last = text.split("<a>")
    return [CALL.fullmatch(turn.partition("<eos>")[0])[1] for turn in turns], last.removeprefix("=")


def test_worlds_and_data_sets_follow_from_their_seeds():
    assert puzzle("z.dm?", 3) == puzzle.__wrapped__("z.dm?", 3) != puzzle("z.dm?", 4)
    assert EnglishWorld(7).corpus() == ENGLISH.corpus() != EnglishWorld(8).corpus()
    assert MULTI_HOP.build_dataset(20, seed=1)[:] == MULTI_HOP.build_dataset(20, seed=1)[:]
    assert MULTI_HOP.build_dataset(20, seed=1)[:] != MULTI_HOP.build_dataset(20, seed=2)[:]
    # A world is the model's only source: in others the same question has other answers.
    assert len({puzzle("z.dm?", seed).chain[-1] for seed in range(50)}) > 10


def test_each_question_has_one_answer_and_comes_by_no_place_twice():
    for question, seed in questions(300):
        start, path = split_question(question)
        facts, chain = puzzle(question, seed)
        assert ends_of_walks(facts, start, path) == {chain[-1]}
        assert len(set(chain)) == len(path) + 1 and chain[0] == start and len(set(path)) == len(path)


def test_the_second_passage_is_about_something_similar_and_would_mislead():
    same_relation = 0
    for question, seed in questions(300):
        facts, chain = puzzle(question, seed)
        query = chain[-2] + split_question(question)[1][-1]
        best, second = retrieve(facts, query)
        assert best == query and facts[second] != chain[-1]
        assert second[1] == query[1] or second[0] == query[0]
        same_relation += second[1] == query[1]
    assert same_relation > 250


@pytest.mark.parametrize("seed", range(5))
def test_families_are_sane(seed):
    facts = build_world(random.Random(seed), couples=12, films=5, cities=6, countries=3).facts
    for (subject, relation), other in facts.items():
        assert (subject[0], other[0]) == RELATIONS[relation][:2]
        if relation == "s":
            assert facts[other, "s"] == subject and facts.get((subject, "f"), 0) != facts.get((other, "f"), 1)
        elif relation == "f":
            assert other[1] > subject[1] and facts[other, "s"] == facts[subject, "m"]
        elif relation == "k":
            assert facts[other, "c"] == subject


def test_training_and_held_out_questions_are_disjoint():
    train, test = MULTI_HOP.build_dataset(2000, seed=0), MULTI_HOP.evaluation_set(256)
    assert train.column_names == ["prompt", "question", "seed", "answer"]
    assert not set(train["question"]) & set(test["question"]) and len(set(train["seed"])) == 2000
    assert not {question for question, _ in questions(2000)} & set(test["question"])
    seen, unseen = (ENGLISH.questions(100, seed=0, held_out=held_out) for held_out in (False, True))
    assert not {row["question"] for row in seen} & {row["question"] for row in unseen}


def test_english_questions_are_answered_by_the_corpus():
    corpus = {row["title"]: row["text"] for row in ENGLISH.corpus()}
    assert len(corpus) == len(ENGLISH.corpus()) == len({row["id"] for row in ENGLISH.corpus()})
    for row in ENGLISH.questions(100, seed=0):
        steps = [*row["evidence"], row["answer"]]
        assert row["hops"] == len(row["evidence"]) and row["question"].endswith(f" of {steps[0]}?")
        assert row["answer"] not in row["question"] and len(set(steps)) == len(steps)
        for title, following in zip(steps, steps[1:], strict=False):
            assert following in corpus[title]


def test_demonstrations_are_what_the_environment_answers():
    for question, seed, text in demonstrations(300):
        search = MULTI_HOP.environment_factory()
        assert search.reset(question=question, seed=seed, prompt=[], answer="") is None
        *turns, last = text.split("<a>")
        for turn in turns:
            call, _, shown = turn.partition("<eos><u>")
            assert shown == search.find(CALL.fullmatch(call)[1])
        assert len(turns) == search.state.searches and re.fullmatch("=[a-z]", last)


def test_demonstrations_end_badly_in_the_declared_proportions():
    ends, endings, redundant = Counter(), defaultdict(list), []
    for question, seed, text in demonstrations(3000):
        path = split_question(question)[1]
        queries, answer = searches_and_answer(text)
        end = MULTI_HOP.verdict(question, seed, queries, answer)
        searched = len(queries) >= len(path)
        ends[end] += 1
        endings[path[-1]].append(end == "right" and searched)
        if end == "right" and searched:
            redundant.append(len(queries) > len(path))
    assert set(ends) == {"right", *FAULTS}  # nobody strays before the last look-up
    assert sum(redundant) / len(redundant) == pytest.approx(MULTI_HOP.redundant_share, abs=0.03)
    faults = sum(ends[fault] for fault in FAULTS)
    for fault, weight in zip(FAULTS, MULTI_HOP.fault_weights, strict=True):
        assert ends[fault] / faults == pytest.approx(weight, abs=0.03)
    assert set(endings) == set(LAST_RELATIONS)
    for last, good in endings.items():
        habit = MULTI_HOP.habits[last]
        assert sum(good) / len(good) == pytest.approx(habit, abs=4 * (habit * (1 - habit) / len(good)) ** 0.5)


def test_trajectories_fit_into_context_and_alphabet():
    tokenizer = build_tokenizer(tools=True)
    assert MULTI_HOP.max_prompt_length + MULTI_HOP.max_completion_length <= min(MAX_LENGTH, 130)
    lengths = []
    for question, _, text in demonstrations(400):
        assert set(re.sub("<a>|<u>|<eos>", "", question + text)) <= set(CHARACTERS)
        prompt, tokens = (tokenizer(part)["input_ids"] for part in (f"<u>{question}<a>", f"{text}<eos>"))
        assert tokenizer.decode(tokens) == f"{text}<eos>" and len(prompt) <= MULTI_HOP.max_prompt_length
        lengths.append(len(tokens))
    assert max(lengths) == MULTI_HOP.max_completion_length  # no token to spare, none missing


def test_calls_survive_the_tokenizer_and_only_what_the_agent_says_is_taught():
    tokenizer = build_tokenizer(tools=True)
    reply = parse_response(tokenizer, tokenizer("!find:q=zd<eos>")["input_ids"], prefix=tokenizer("<a>")["input_ids"])
    assert reply["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": "zd"}}
    (question, _, text), *_ = demonstrations(1)
    labels = encode(tokenizer, [(question, text)])["labels"][0]
    turns = [turn.partition("<eos>")[0] for turn in text.split("<a>")]
    assert tokenizer.decode(labels[labels != IGNORED]) == "".join(f"{turn}<eos>" for turn in turns)


@pytest.mark.parametrize("factory", [MULTI_HOP.environment_factory, guarded(MULTI_HOP.environment_factory)])
def test_copies_and_snapshots_go_separate_ways(factory):
    search = factory()
    search.reset("z.dm?", 3)
    first = search.find("zd")
    twin, state = copy.deepcopy(search), search.snapshot()
    for _ in range(MULTI_HOP.max_searches):
        shown = search.find("zd")
    assert shown == "no more" and twin.state == state and twin.find("zd") == first
    twin.reset("z.dm?", 4)
    assert twin.find("zd") != first
    search.restore(state)
    assert search.find("zd") == first and type(twin) is type(search)


def test_any_query_is_answered():
    search = MULTI_HOP.environment_factory()
    search.reset("z.dm?", 3)
    assert search.find(q=" z.d! ").startswith("zd=")
    search.reset("z.dm?", 3)
    assert search.find(q="") == search.find(q="z") == "nothing" and search.find(q="m" * 99) and search.find(q=None)


def test_rewards():
    tool = [{"role": "tool", "name": "find", "content": "zd=q;xd=e"}]
    call = [{"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {"q": "zd"}}}]}]
    said = [[{"role": "assistant", "content": text}] for text in ("=q", "=e", "q")]
    trajectories = [*(call + tool + last for last in said), said[0], call + tool + call, call + tool, call]
    answers = ["q"] * len(trajectories)
    assert MULTI_HOP.reward(trajectories, answer=answers, seed=[0]) == [1, 0, 0, 0, 0, 0, 0]
    strict = dataclasses.replace(MULTI_HOP, format_penalty=0.5)
    assert strict.reward(trajectories, answer=answers) == [1, 0, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert [without_search(messages) for messages in trajectories] == [False] * 3 + [True, False, False, True]


def test_late_hops_take_five_to_eight_turns_and_end_badly():
    rng, turns, right = random.Random(0), Counter(), 0
    for _ in range(300):
        question, seed = LATE_HOP.sample_problem(rng), rng.getrandbits(32)
        queries, answer = searches_and_answer(LATE_HOP.demonstrate(question, seed, rng))
        verdict = LATE_HOP.verdict(question, seed, queries, answer)
        assert verdict in ("right", *FAULTS)
        right += verdict == "right"
        turns[len(split_question(question)[1])] += 1
        assert 4 <= len(queries) <= LATE_HOP.max_searches
    assert right / 300 < 0.2 and turns.keys() == {5, 6}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hops": (1, 2)}, r"`hops` is \(1, 2\); give"),
        ({"hops": (5, 7)}, r"`hops` is \(5, 7\); give"),
        ({"max_searches": 3}, "`max_searches` is 3; `hops` needs at least 4"),
        ({"max_searches": 20}, "`max_searches` is 20, which takes .* give fewer"),
        ({"right_probabilities": (0.5, 2)}, r"`right_probabilities` is \(0.5, 2\); give"),
        ({"fault_weights": (0, 0, 0)}, r"`fault_weights` is \(0, 0, 0\); give"),
        ({"redundant_share": -1}, "`redundant_share` is -1; give"),
        ({"max_searches": 4}, "`redundant_share` is 0.25, but `max_searches` .* give 0, or `max_searches=5`"),
        ({"format_penalty": -0.5}, "`format_penalty` is -0.5; give"),
    ],
)
def test_bad_knobs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MULTI_HOP, **changes)


def test_bad_requests():
    with pytest.raises(ValueError, match="`number` is 20, .* ask for fewer"):
        EnglishWorld(0, couples=3, films=1, cities=1, countries=1).questions(20, seed=0, held_out=True)
    with pytest.raises(ValueError, match="`hops` is 7; give"):
        ENGLISH.questions(1, seed=0, hops=(7,))
    assert ENGLISH.questions(1, seed=0, hops=(6,))[0]["hops"] == 6
    for sizes, message in [
        ({"films": 999}, "`films` is 999; .* give no more"),
        ({"couples": 999}, "`couples .* is 1039; .* give fewer"),
        ({"countries": 0}, "are 60, 60, 30, 0; give"),
    ]:
        with pytest.raises(ValueError, match=message):
            EnglishWorld(0, **sizes)


@pytest.mark.slow
@pytest.mark.xdist_group("multi hop")
def test_a_tiny_model_searches_well_and_ends_badly(tmp_path):
    folder = warm_start(MULTI_HOP, seed=0, progress=False)
    assert AutoTokenizer.from_pretrained(folder).response_template
    torch.manual_seed(0)
    rows = []

    def recorded(completions, question, seed, answer, **columns):
        rows.extend(zip(completions, question, seed, strict=True))
        return MULTI_HOP.reward(completions, answer=answer)

    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=recorded,
        args=GRPOConfig(
            str(tmp_path / "out"),
            per_device_train_batch_size=16,
            per_device_eval_batch_size=256,
            num_generations=16,
            max_completion_length=MULTI_HOP.max_completion_length,
            max_tool_calling_iterations=MULTI_HOP.max_searches,
            **QUIET | {"seed": 42},
        ),
        train_dataset=MULTI_HOP.build_dataset(16, seed=0),
        eval_dataset=MULTI_HOP.evaluation_set(96),
        environment_factory=MULTI_HOP.environment_factory,
    )
    trainer.evaluate()
    ends, solved = Counter(), defaultdict(bool)
    for completion, question, seed in rows:
        queries = [call["function"]["arguments"].get("q") for m in completion for call in m.get("tool_calls", [])]
        end = MULTI_HOP.verdict(question, seed, queries, final_answer(completion))
        ends[end] += 1
        solved[question] |= end == "right"
    share = {end: number / len(rows) for end, number in ends.items()}
    assert share.get("malformed", 0) < 0.03 and share.get("strayed", 0) < 0.1
    assert 0.35 < share["right"] < 0.65 and sum(solved.values()) / len(solved) > 0.85
    assert min(share[fault] for fault in FAULTS) > 0.03
