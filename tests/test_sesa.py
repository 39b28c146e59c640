"""SESA: reductions to GRPO, what the sampler is shown, what is trained, and its errors."""

import json
from functools import partial

import pytest
import torch
from commands import TINY_RUN, as_flags, run_example
from peft import LoraConfig
from tokenizers import AddedToken
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    parameters,
    saved_model,
    trained,
)

from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.streams import row_tokens
from trl_explore.trainers import SESAConfig, SESATrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
SHORT = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    sketch_separator=";",
    solve_template="{sketch} {problem}",
    candidate_template="{problem}c",
    candidate_separator="+",
)
NEUTRAL = {**SHORT, "solve_template": "{problem}"}
SETTINGS = {
    "beta 0": {},
    "grpo loss": dict(loss_type="grpo"),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "lora, beta, two iterations": dict(peft_config=LORA, beta=0.1, num_iterations=2, max_steps=4),
    "conversational": dict(conversational=True),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize(
    "neutral",
    [dict(num_sketches=0), {**SHORT, "max_trajectories": 0}, NEUTRAL],
    ids=["no sketches", "nobody explores", "hidden sketches"],
)
def test_without_visible_sketches_it_is_grpo_bit_for_bit(tmp_path, options, neutral):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(SESATrainer, SESAConfig, tmp_path, **neutral, **options)
    assert_same(got, expected)
    assert any("sketch/tokens" in entry for entry in log) == (neutral is NEUTRAL)


def sesa_trainer(folder, **options):
    return make_trainer(SESATrainer, SESAConfig, folder, **{**SHORT, **options})


def first_batch(trainer):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


class Noting(SESATrainer):
    """Drafts are sampled by the method `noted`."""

    def setup(self):
        super().setup()
        self.mode.sample = partial(self.noted)
        self.mode.sample.rollout, self.mode.sample.paths = self.sample.rollout, None  # rows come from `plain`
        self.mode.sample.policy, self.mode.sample.token_logprobs = self, self.sample.token_logprobs


class Watched(Noting):
    """Notes every text that the model was asked to continue, and what it answered."""

    def noted(self, prefixes, num_samples, max_new_tokens, **options):
        sampled = self.sample(prefixes, num_samples, max_new_tokens, **options)
        self.asked.append([self._tokenizer.decode(ids) for ids in prefixes])
        self.answered.append([[self.mode.text(c.token_ids) for c in group] for group in sampled])
        return sampled

    def rollout(self, prompt_ids, plain):
        self.asked, self.answered = [], []

        def watched(ids):
            self.solved = [self._tokenizer.decode(row) for row in ids]
            return plain(ids)

        return super().rollout(prompt_ids, watched)


def watched(folder, **options):
    """A trainer after its first batch, what that trains, and its two problems."""
    trainer = make_trainer(Watched, SESAConfig, folder, **{**SHORT, **options})
    inputs = first_batch(trainer)
    return trainer, inputs, [example["prompt"] for example in trainer.main_examples[::4]]


def assert_trained_under_the_problem_alone(inputs, problems):
    prompts = {tuple(ids) for ids in row_tokens(inputs)[0]}
    assert prompts == {tuple(make_tokenizer()(problem)["input_ids"]) for problem in problems}


@pytest.mark.parametrize("chains, num_sketches", [(1, 4), (3, 4), (4, 4), (2, 3)])
def test_every_sketch_is_shown_those_before_it_in_its_chain_and_every_solution_its_own(tmp_path, chains, num_sketches):
    options = dict(num_sketches=num_sketches, parallel_sketches=chains)
    trainer, inputs, problems = watched(tmp_path, **options)
    # One call per step for all prompts.
    steps = [range(first, min(first + chains, num_sketches)) for first in range(0, num_sketches, chains)]
    assert [len(asked) for asked in trainer.asked] == [2 * len(places) for places in steps]
    drafts = [{}, {}]
    for places, asked, answered in zip(steps, trainer.asked, trainer.answered, strict=True):
        rows = iter(zip(asked, answered, strict=True))
        for g in range(2):
            for place in places:
                prompt, (answer,) = next(rows)
                told = ";".join(drafts[g][j] for j in range(place) if j % chains == place % chains and drafts[g][j])
                assert prompt == (f"{problems[g]}b{told}" if told else f"{problems[g]}a")
                drafts[g][place] = answer
    shown = trainer.completion_columns()["sketch"]
    assert shown == [drafts[i // 4][i % num_sketches] for i in range(8)]
    of_rows = zip(shown, [problems[i // 4] for i in range(8)], strict=True)
    assert trainer.solved == [f"{sketch} {problem}" if sketch else problem for sketch, problem in of_rows]
    assert_trained_under_the_problem_alone(inputs, problems)


def test_rows_without_a_sketch_do_not_count_when_sketches_are_dealt_out(tmp_path):
    trainer, _, _ = watched(tmp_path, num_sketches=2, max_trajectories=3)
    drafts = [[answered[g][0] for answered in trainer.answered] for g in range(2)]
    shown = trainer.completion_columns()["sketch"]
    assert shown[:4] == [drafts[0][0], drafts[0][1], drafts[0][0], ""]
    assert shown[4:] == [drafts[1][1], drafts[1][0], drafts[1][1], ""]


@pytest.mark.parametrize("size", [8, 24])
def test_shuffled_sketches_are_those_of_another_prompt(tmp_path, size):
    options = dict(per_device_train_batch_size=size, num_sketches=3)
    trainer, inputs, problems = watched(tmp_path, **options, sketch_assignment="shuffled")
    drafts = [[answered[g][0] for answered in trainer.answered] for g in range(size // 4)]

    def solved_behind(g, source):
        rows = slice(4 * g, 4 * g + 4)
        shown = [drafts[source][i % 3] for i in range(4 * g, 4 * g + 4)]
        expected = [f"{sketch} {problems[g]}" if sketch else problems[g] for sketch in shown]
        return trainer.solved[rows] == expected and trainer.completion_columns()["sketch"][rows] == shown

    sources = [[s for s in range(size // 4) if solved_behind(g, s)] for g in range(size // 4)]
    assert all(len(found) == 1 for found in sources)  # no two prompts were given the same sketches by chance
    assert sorted(s for (s,) in sources) == list(range(size // 4)) and all(s != g for g, (s,) in enumerate(sources))
    # Drafting and training are those of the method.
    own, _, _ = watched(tmp_path, **options)
    assert (own.asked, own.answered) == (trainer.asked, trainer.answered)
    assert_trained_under_the_problem_alone(inputs, problems)


def test_rows_beyond_max_trajectories_see_the_plain_prompt_and_their_success_is_counted_apart(tmp_path):
    trainer, _, problems = watched(tmp_path, max_trajectories=3)
    assert len(trainer.asked) == 3  # a sketch for each row that is solved behind one
    shown = trainer.completion_columns()["sketch"]
    for g, problem in enumerate(problems):
        drafts = [answered[g][0] for answered in trainer.answered]
        rows = slice(4 * g, 4 * g + 4)
        assert shown[rows][3] == "" and trainer.solved[rows][3] == problem
        assert sorted(shown[rows][:3]) == sorted(drafts)
    right = [reward >= 1 for reward in trainer.ranks.local(trainer.scorer.totals()).flatten().tolist()]
    metrics = trainer._metrics["train"]
    for name, side in (("sketch/success", True), ("sketch/plain_success", False)):
        own = [ok for text, ok in zip(shown, right, strict=True) if bool(text) == side]
        assert metrics[name] == [pytest.approx(sum(own) / len(own))]
    assert metrics["sketch/success"] != metrics["sketch/plain_success"]


def test_groups_with_a_right_row_behind_a_sketch_are_counted(tmp_path):
    def second_row(prompts, **kwargs):  # right in every group, and the plain row of the second too
        return [float(row in (1, 7)) for row in range(len(prompts))]

    def plain_row(prompts, **kwargs):
        return [float(row in (1, 7)) * (row > 3) for row in range(len(prompts))]

    for reward, groups, rows in ((second_row, 1 / 2, 1 / 6), (plain_row, 0.0, 0.0), (always, 1.0, 1.0)):
        trainer, _, _ = watched(tmp_path, max_trajectories=3, reward_funcs=reward)
        assert [bool(text) for text in trainer.completion_columns()["sketch"]] == [True, True, True, False] * 2
        metrics = trainer._metrics["train"]
        assert (metrics["sketch/group_success"], metrics["sketch/success"]) == ([groups], [pytest.approx(rows)])


PLAIN = ["plain rows", "hidden sketches", "no room"]


class Served(SESATrainer):
    """Samples as if with log-probabilities, and notes what of them is left."""

    def rollout(self, prompt_ids, plain):
        def scored(ids):
            completion_ids = plain(ids).completion_ids
            return Rollout(completion_ids, [[-0.5] * len(row) for row in completion_ids])

        rollout = super().rollout(prompt_ids, scored)
        self.known = rollout.logprobs
        return Rollout(rollout.completion_ids)


@pytest.mark.parametrize("options", [dict(max_trajectories=3), NEUTRAL, dict(context_length=13)], ids=PLAIN)
def test_rows_that_are_trained_as_they_were_sampled_keep_their_log_probabilities(tmp_path, options):
    trainer = make_trainer(Served, SESAConfig, tmp_path, **{**SHORT, **options}, path_cache_tokens=0)
    first_batch(trainer)
    own = [not text or options is NEUTRAL for text in trainer.completion_columns()["sketch"]]
    assert [row == [-0.5] * len(row) for row in trainer.known] == own and any(own)
    assert [row == [None] * len(row) for row in trainer.known] == [not kept for kept in own]


def test_the_oldest_sketches_go_where_the_context_ends(tmp_path):
    # Four tokens of problem, one of template, then sketches of up to four with a separator.
    trainer, _, _ = watched(tmp_path, context_length=18)
    assert all(len(text) + 4 <= 18 for call in trainer.asked for text in call)
    (dropped,) = trainer._metrics["train"]["sketch/dropped"]
    assert dropped > 0
    newest = [trainer.answered[2][g][0] for g in range(2)]
    assert all(text.endswith(sketch) for text, sketch in zip(trainer.asked[3], newest, strict=True) if sketch)


@pytest.mark.parametrize(
    "context, most, options",
    [
        (13, 8, {}),
        # Problem, space and sketch have up to 9 tokens. With solutions of 8 tokens, all would fit.
        (17, 12, dict(generation_kwargs={"max_new_tokens": 12})),
    ],
)
def test_a_solution_prompt_without_room_for_the_limit_is_the_problem(tmp_path, context, most, options):
    trainer, _, _ = watched(tmp_path, context_length=context, **options)
    assert trainer._metrics["train"]["sketch/too_long"][0] > 0
    assert all(len(text) + most <= context for text in trainer.solved)


# ---------------------------------------------------------------------------------------------------- sequential


class Listing(Noting):
    """Lists what the test says, round by round, cut off at `|`, and notes what is asked and what else is sampled."""

    def noted(self, prefixes, num_samples, max_new_tokens, **options):
        sampled = self.sample(prefixes, num_samples, max_new_tokens, **options)
        if num_samples == 1:
            self.asked = [*getattr(self, "asked", []), [self._tokenizer.decode(ids) for ids in prefixes]]
            for group, text in zip(sampled, self.lists[len(self.asked) - 1] if prefixes else [], strict=True):
                ids = self._tokenizer(text.removesuffix("|"))["input_ids"]
                object.__setattr__(group[0], "token_ids", ids)
                object.__setattr__(group[0], "finished", not text.endswith("|"))
        else:
            self.filled = [num_samples] * len(prefixes)
        return sampled


def listing(folder, lists, **options):
    trainer = make_trainer(Listing, SESAConfig, folder, mode="sequential", **{**SHORT, **options})
    trainer.lists = lists
    inputs = first_batch(trainer)
    assert len(inputs["advantages"]) == 8
    return trainer, [trainer.mode.text(ids) for ids in trainer.main_completion_ids]


def test_candidates_of_a_list_become_rows(tmp_path):
    trainer, texts = listing(tmp_path, [["1+2+1+3+4+5", "12+34+5|"]], max_lists=1)
    assert texts[:4] == ["1", "2", "3", "4"] and texts[4:6] == ["12", "34"]
    # The last one of a list that was cut off does not count; what is missing repeats what is there.
    assert texts[6:] == ["12", "34"] and trainer.filled == []
    assert all(ids[-1] == 1 for ids in trainer.main_completion_ids)
    metrics = trainer._metrics["train"]
    assert metrics["sketch/repeats"] == [2.0] and metrics["sketch/distinct"] == [pytest.approx((5 / 6 + 1) / 2)]


def test_a_list_cut_off_at_a_line_keeps_the_line(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(AddedToken("\n", normalized=False))
    options = dict(candidate_separator="\n", processing_class=tokenizer, model=make_model(vocab_size=len(tokenizer)))
    _, texts = listing(tmp_path, [["1\n2\n|", "5\n6\n7|"]], max_lists=1, **options)
    assert texts == ["1", "2", "1", "2", "5", "6", "5", "6"]


def test_candidates_alone_do_not_see_each_other(tmp_path):
    """The control of lists: every row begins a list of its own; equal rows stay."""
    lists = [["1+2", "1|", "3+|", "1", "5+6", "5", "7+8|", ""]]
    options = dict(candidate_context="alone", off_policy_correction=True)
    trainer, texts = listing(tmp_path, lists, **options)
    assert texts == ["1", "3", "1", "1", "5", "5", "7", "5"] and trainer.filled == [] and len(trainer.asked) == 1
    first, second = trainer.asked[0][0], trainer.asked[0][4]
    assert trainer.asked[0] == [first] * 4 + [second] * 4 and first != second
    assert [trainer._tokenizer.decode(drawn.context) for (drawn,) in trainer.mode.drawn] == trainer.asked[0]
    metrics = trainer._metrics["train"]
    assert metrics["sketch/repeats"] == [2.0] and metrics["sketch/distinct"] == [pytest.approx((2 / 3 + 2 / 3) / 2)]


def thinking(special):
    """A tokenizer that has tags for thoughts, and a model for it."""
    tokenizer = make_tokenizer()
    tags = [AddedToken(tag, normalized=False, special=special) for tag in ("<think>", "</think>")]
    tokenizer.add_tokens([*tags, AddedToken("\n", normalized=False)])
    return dict(processing_class=tokenizer, model=make_model(vocab_size=len(tokenizer)))


@pytest.mark.parametrize("special", [False, True], ids=["plain tags", "special tags"])
def test_thoughts_do_not_become_rows(tmp_path, special):
    lists = [["<think>a+b</think>1+2|", "<think>1+2+3+4"], ["3+<think>1+b</think>4"], ["4"]]
    trainer, texts = listing(tmp_path, lists, off_policy_correction=True, **thinking(special))
    assert texts[:4] == ["1", "3", "4", "1"] and trainer.filled == [4]  # a thought without an end is no list
    first = trainer.asked[0][0]
    assert trainer.asked[1] == [f"{first}<think>a+b</think>1+"]
    (drawn,) = trainer.mode.drawn[1]
    assert trainer._tokenizer.decode(drawn.context) == f"{first}<think>a+b</think>1+"


@pytest.mark.parametrize("special", [False, True], ids=["plain tags", "special tags"])
def test_answers_to_prompts_that_begin_a_thought_stand_behind_its_end(tmp_path, special):
    data = make_dataset()
    data = data.map(lambda row: {"prompt": f"{row['prompt']}<think>"})
    options = dict(train_dataset=data, candidate_template="c{problem}", off_policy_correction=True)
    lists = [["a+b</think>1+2", "1+2+3+4"], ["3+4"]]
    trainer, texts = listing(tmp_path, lists, **options, **thinking(special))
    own = [trainer._tokenizer.decode(ids) for ids in trainer.main_completion_ids]
    assert own[:4] == [f"\n</think>\n\n{digit}<eos>" for digit in "1234"]
    assert trainer.filled == [4]
    (drawn,) = trainer.mode.drawn[1]
    assert own[1] == f"\n</think>\n\n{trainer._tokenizer.decode(drawn.token_ids)}<eos>" and drawn.start == 4
    assert trainer._tokenizer.decode(drawn.context) == f"{trainer.asked[0][0]}a+b</think>1+"


def test_numbers_and_bullets_of_a_list_are_scored_as_context(tmp_path):
    lists = [["1. 5+2. 5+- 67+ 8", "1+2"], ["4. 9", "2. 1+2. 3"]]
    trainer, texts = listing(tmp_path, lists, off_policy_correction=True, max_lists=2)
    assert texts == ["5", "67", "8", "9", "1", "2", "3", "1"]
    decode = trainer._tokenizer.decode
    first, second = trainer.asked[0]
    assert [(decode(drawn.context), decode(drawn.token_ids)) for (drawn,) in trainer.mode.drawn] == [
        (f"{first}1. ", "5"),
        (f"{first}1. 5+2. 5+- ", "67"),
        (f"{first}1. 5+2. 5+- 67+ ", "8"),
        (f"{first}5+67+8+4. ", "9"),
        (second, "1"),
        (f"{second}1+", "2"),
        (f"{second}1+2+2. 1+2. ", "3"),
        (second, "1"),
    ]


def test_only_tokens_that_the_list_has_too_are_scored(tmp_path):
    """A row begins with the token `1`. After a number, the list has the token ` 1`, as usual tokenizers have."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(AddedToken(" 1", normalized=False))
    model = make_model(vocab_size=len(tokenizer))
    options = dict(processing_class=tokenizer, model=model, off_policy_correction=True, max_lists=1)
    trainer, texts = listing(tmp_path, [["1. 123+2. 1+3. 4", "1+2+3+4"]], **options)
    assert texts[:3] == ["123", "1", "4"]
    (drawn,), nothing, (last,) = trainer.mode.drawn[:3]
    assert (drawn.start, tokenizer.decode(drawn.token_ids)) == (1, "23") and nothing == [] and last.start == 0
    assert tokenizer.decode(drawn.context) == f"{trainer.asked[0][0]}1. 1"


def test_a_short_list_is_continued_behind_its_distinct_candidates(tmp_path):
    lists = [["1+2+1", "5+6+7+8"], ["2+9"], ["4+0"]]
    trainer, texts = listing(tmp_path, lists)
    assert texts == ["1", "2", "9", "4", "5", "6", "7", "8"] and trainer.filled == []
    first = trainer.asked[0][0]
    assert trainer.asked[1:] == [[f"{first}1+2+"], [f"{first}1+2+9+"], []]
    metrics = trainer._metrics["train"]
    assert metrics["sketch/tokens"] == [5 + 7 + 3 + 3] and metrics["sketch/repeats"] == [0.0]


def test_a_list_without_candidates_is_replaced_by_plain_completions(tmp_path):
    trainer, texts = listing(tmp_path, [["", "5+6"], ["7+8"]])
    assert texts[4:] == ["5", "6", "7", "8"] and trainer.filled == [4]
    assert [len(asked) for asked in trainer.asked] == [2, 1, 0, 0]  # what adds nothing is not asked again
    metrics = trainer._metrics["train"]
    assert metrics["sketch/fillers"] == [4.0] and metrics["sketch/repeats"] == [0.0]


def test_long_candidates_are_cut_to_a_completion(tmp_path):
    trainer, _ = listing(tmp_path, [["1234567890+2+3+4", "1+2+3+4"]])
    assert [len(ids) for ids in trainer.main_completion_ids] == [8, 2, 2, 2] + [2] * 4


# -------------------------------------------------------------------------------------------- likelihoods and metrics


@pytest.mark.parametrize("mode", ["two_stage", "sequential"])
@pytest.mark.parametrize("scope", ["all", "negative"])
def test_the_correction_weights_tokens_by_the_likelihood_ratio(tmp_path, mode, scope):
    options = dict(off_policy_correction=True, off_policy_cap=1.5, off_policy_scope=scope, steps_per_generation=1)
    trainer = sesa_trainer(tmp_path, mode=mode, **options)
    trainer.model.train()
    output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    advantages, ids_of_rows = output["advantages"], trainer.main_completion_ids
    assert advantages.shape == output["completion_ids"].shape and advantages.abs().sum() > 0

    def logprobs(context, tokens):
        with torch.no_grad():
            logits = trainer.model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    weighted = 0
    for i, (prompt, ids) in enumerate(zip(row_tokens(output)[0], ids_of_rows, strict=True)):
        ratio = torch.ones(len(ids))
        for drawn in trainer.mode.drawn[i]:
            part = slice(drawn.start, drawn.start + len(drawn.token_ids))
            assert drawn.token_ids == ids[part] and (mode == "sequential" or drawn.token_ids == ids)
            log_ratio = logprobs(prompt, ids)[part] - logprobs(drawn.context, drawn.token_ids)
            ratio[part] = log_ratio.exp().clamp(max=1.5)
        got = advantages[i, : len(ids)]
        if scope == "negative" and got[0] > 0:
            ratio = torch.ones(len(ids))
        scale = got[0] / ratio[0]
        torch.testing.assert_close(got, ratio * scale, rtol=1e-3, atol=1e-5)
        weighted += (ratio != 1).any().item()
    assert weighted > 0 and trainer._metrics["train"]["sketch/ratio_capped_fraction"][0] > 0


def test_metrics(tmp_path):
    dataset = make_dataset()
    dataset = dataset.add_column("targets", [["1", "2"]] * len(dataset))
    options = dict(train_dataset=dataset, max_steps=1, reward_funcs=contains_answer, coverage_column="targets")
    trainer = sesa_trainer(tmp_path, **options)
    trainer.train()
    log = trainer.state.log_history[0]
    assert 0 < log["sketch/distinct"] <= 1 and 0 <= log["sketch/similarity"] < 1 and log["sketch/coverage"] == 0
    assert log["sketch/drafting_seconds"] > 0 and log["sketch/solving_seconds"] > 0
    main = log["completions/mean_length"] * 8
    assert log["sketch/sampled_tokens"] == pytest.approx(log["sketch/tokens"] + main)
    assert log["sketch/token_ratio"] == pytest.approx(log["sketch/tokens"] / log["sketch/sampled_tokens"])
    assert 1 <= log["sketch/pass_ratio"] <= 4 and log["sketch/collapse_alarm"] in (0, 1)


COLUMNS = {
    "numbers": [7] * 36,
    "number lists": [[1, 2]] * 36,
    "nested": [[["1"], ["2"]]] * 36,
    "text": ["12"] * 36,
}


@pytest.mark.parametrize("mode", ["two_stage", "sequential"])
def test_a_column_called_targets_is_not_read_unless_it_is_named(tmp_path, mode):
    dataset = make_dataset().add_column("targets", COLUMNS["nested"])
    trainer = sesa_trainer(tmp_path, train_dataset=dataset, mode=mode, max_steps=1)
    trainer.train()
    assert "sketch/coverage" not in trainer.state.log_history[0]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_coverage_column_of_another_form_is_refused(tmp_path, name):
    dataset = make_dataset().add_column("right", COLUMNS[name])
    with pytest.raises(ValueError, match="`coverage_column='right'` must hold a list of texts .* one row has"):
        sesa_trainer(tmp_path, train_dataset=dataset, coverage_column="right")


def test_a_coverage_column_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`coverage_column='right'` is no column of the data, which has prompt, answ"):
        sesa_trainer(tmp_path, coverage_column="right")
    with pytest.raises(ValueError, match="='answer'` cannot be read with `remove_unused_columns=True`"):
        sesa_trainer(tmp_path, coverage_column="answer", remove_unused_columns=True)


def test_prompts_without_targets_do_not_count_for_coverage(tmp_path):
    dataset = make_dataset().add_column("right", [None, [], ["no such answer"]] * 12)
    trainer = sesa_trainer(tmp_path, train_dataset=dataset, coverage_column="right", max_steps=3)
    trainer.train()
    assert {log.get("sketch/coverage") for log in trainer.state.log_history} <= {None, 0.0}


def test_the_alarm_is_for_groups_that_fail_and_succeed_together(tmp_path):
    def by_prompt(prompts, **kwargs):
        return [float(prompt == prompts[0]) for prompt in prompts]

    for reward, alarm in ((by_prompt, 1.0), (always, 0.0)):
        trainer = sesa_trainer(tmp_path, reward_funcs=reward)
        first_batch(trainer)
        assert trainer._metrics["train"]["sketch/pass_ratio"] == [1.0]
        assert trainer._metrics["train"]["sketch/collapse_alarm"] == [alarm]


def test_evaluation_is_plain_grpo(tmp_path):
    options = dict(eval_dataset=make_dataset().select(range(8)), num_generations_eval=2, max_steps=2)
    results = []
    for trainer in (make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options), sesa_trainer(tmp_path, **options)):
        torch.manual_seed(5)
        results.append(trainer.evaluate())
    expected, got = results
    same = [key for key in expected if "time" not in key and "second" not in key]
    assert {k: got[k] for k in same} == {k: expected[k] for k in same}


@pytest.mark.parametrize("own", [{}, dict(sketch_assignment="shuffled"), dict(mode="sequential")], ids=str)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, own):
    options = dict(SHORT, **own, steps_per_generation=4, max_steps=5, off_policy_correction=True)
    whole = make_trainer(SESATrainer, SESAConfig, tmp_path, save_strategy="steps", save_steps=2, **options)
    whole.train()
    again = make_trainer(SESATrainer, SESAConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))


ERRORS = {
    "mode.*unknown value 'two-stage'; did you mean 'two_stage'": dict(mode="two-stage"),
    "sketch_assignment.*unknown value 'shufled'; did you mean 'shuffled'": dict(sketch_assignment="shufled"),
    "'shuffled'` has no meaning with `mode='sequential'": dict(sketch_assignment="shuffled", mode="sequential"),
    "'alone'` has no meaning with `mode='two_stage'`, which writes no lists": dict(candidate_context="alone"),
    "only one per generation batch": dict(sketch_assignment="shuffled", per_device_train_batch_size=4),
    "sketch_template='think'` must contain {problem}": dict(sketch_template="think"),
    "next_sketch_template='{problem}'` must contain {sketches}": dict(next_sketch_template="{problem}"),
    "next_sketch_template='{sketches}'` must contain {problem}": dict(next_sketch_template="{sketches}"),
    "solve_template='{sketch}'` must contain {problem}": dict(solve_template="{sketch}"),
    "candidate_template='list'` must contain {problem}": dict(candidate_template="list"),
    "num_sketches=5` must be between 0 .* `num_generations=4`": dict(num_sketches=5),
    "num_sketches=3` must be between 0 .* `max_trajectories=2`": dict(num_sketches=3, max_trajectories=2),
    "parallel_sketches=0` must be at least 1": dict(parallel_sketches=0),
    "parallel_sketches=3` chains need a sketch each.*num_sketches` .now 2": dict(parallel_sketches=3, num_sketches=2),
    "parallel_sketches=2` has no meaning with `mode='agent'": dict(parallel_sketches=2, mode="agent"),
    "max_trajectories=5` must be between 0 .*`num_generations=4`": dict(max_trajectories=5),
    "max_trajectories=2` has no meaning with `mode='sequential'": dict(max_trajectories=2, mode="sequential"),
    "max_sketch_length=0` must be at least 1": dict(max_sketch_length=0),
    "max_sketch_length=128` and `max_completion_length=8` leave no room": dict(max_sketch_length=128),
    "off_policy_cap=0": dict(off_policy_cap=0),
    "off_policy_scope.*unknown value 'positive'": dict(off_policy_scope="positive"),
    "sketch_separator` must not be empty": dict(sketch_separator=""),
}


@pytest.mark.parametrize("message, options", ERRORS.items(), ids=ERRORS.keys())
def test_bad_input_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=message):
        make_trainer(SESATrainer, SESAConfig, tmp_path, **options)


@pytest.mark.slow
def test_the_example_runs_offline(tmp_path, monkeypatch):
    rows = [{"prompt": f"{i}+{i}=", "solution": str(2 * i % 10)} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {**TINY_RUN, "dataset_name": "data.jsonl", "model_name_or_path": saved_model(), "context_length": 2048}
    fields |= {"gradient_accumulation_steps": 1, "max_completion_length": 8, "max_sketch_length": 4}
    run_example("sesa.py", *as_flags(fields), folder=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "out" / "config.json").is_file()
