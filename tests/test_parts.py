"""The parts of a trainer, with a stand-in for it: none of them knows TRL's trainer."""

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from trl_explore.agents.environments import guarded
from trl_explore.agents.turns import Turns
from trl_explore.rewards.checks import RewardError
from trl_explore.rows.ranks import Ranks
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import kept_randomness, loss_mask
from trl_explore.rows.table import CompletionsTable
from trl_explore.rows.training import StreamTraining
from trl_explore.sampling.sampler import Sampler
from trl_explore.serving.backend import Answer
from trl_explore.serving.session import Serving
from trl_explore.trainers.tool_loop import TrainerToolLoop

ARGS = dict(
    sampling_batch_size=None,
    use_transformers_continuous_batching=True,
    generation_kwargs=None,
    temperature=1.0,
    per_device_train_batch_size=2,
    steps_per_generation=2,
    generation_batch_size=4,
    log_completions=False,
    multi_objective_aggregation="sum_then_normalize",
    scale_rewards="group",
    success_reward=None,
    loss_type="grpo",
    beta=0.0,
    top_entropy_quantile=1.0,
    drop_zero_advantage=False,
    max_completion_length=8,
    vllm_importance_sampling_mode="sequence_mask",
)
END = 1


class StandIn:
    """A policy that goes on counting: behind 5 it says 6, 7, 8, ... and ends at 9."""

    def __init__(self, **options):
        self.args = SimpleNamespace(**{**ARGS, **options})
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            distributed_type=None,
            unwrap_model=lambda model: model,
            gradient_state=SimpleNamespace(sync_gradients=True, _set_sync_gradients=lambda value: None),
            no_sync=lambda model: contextmanager(lambda: (yield))(),
            backward=lambda loss: loss.backward(),
        )
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.tokenizer = SimpleNamespace(pad_token_id=0)
        self.ranks, self.serving = Ranks(self.accelerator), None
        self.eos_token_ids, self.exploration_generator = [END], torch.Generator().manual_seed(0)
        self.calls, self.logged, self.passes = [], defaultdict(list), []
        self.log_completions = False
        self.reward_func_names, self.reward_weights = ["reward_0"], torch.ones(1)

    def generate(self, prefixes, max_new_tokens):
        self.calls.append((prefixes, max_new_tokens))
        torch.rand(1)
        return [([*range(p[-1] + 1, 9), END])[:max_new_tokens] for p in prefixes]

    @contextmanager
    def running(self, other):
        self.passes.append(other)
        other.metrics["num_tokens"] = [100]
        yield other

    def rewarded(self, rows):
        return torch.tensor([[float(len(ids))] for ids in rows.completion_ids])

    def scored(self, rows):
        self.passes[-1].rewards_per_func = self.rewarded(rows)
        return {"advantages": torch.arange(1.0, len(rows) + 1)}

    def loss(self, model, rows):
        return model.weight.sum() * (rows["advantages"] * loss_mask(rows)[:, 0]).mean()

    def log_metric(self, name, value):
        self.logged[name].append(value)


def rows_of(*completion_ids, group_size=1, **more):
    return Rows(
        examples=[{"prompt": "p"} for _ in completion_ids],
        prompt_ids=[[5] for _ in completion_ids],
        completion_ids=list(completion_ids),
        loss_mask=[[1] * len(ids) for ids in completion_ids],
        group_size=group_size,
        **more,
    )


# ------------------------------------------------------------------------------------------------------ the sampler


def test_a_single_process_makes_no_numbers_on_its_device():
    """Apple's MPS devices have no float64. Here, `meta` stands for such a device: its tensors have no values."""
    accelerator = SimpleNamespace(device=torch.device("meta"), num_processes=1, process_index=0)
    ranks = Ranks(accelerator)
    assert ranks.gathered(2).tolist() == [2.0] and ranks.most(3) == 3
    assert ranks.summed({"rows": 2, "share": 0.1}) == {"rows": 2.0, "share": 0.1}
    assert ranks.summed({}) == {}


def test_the_random_state_of_an_mps_device_is_kept(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: "before")
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: calls.append(state))
    monkeypatch.setattr(torch.mps, "manual_seed", calls.append)
    with kept_randomness(torch.device("mps"), seed=3):
        assert calls == [3]
    assert calls == [3, "before"]


def test_every_prefix_gets_its_samples_within_its_budget():
    found = Sampler(StandIn())([[5], [6]], [2, 1], [3, 9])
    assert [[c.token_ids for c in group] for group in found] == [[[6, 7, 8]] * 2, [[7, 8, END]]]
    assert [group[0].finished for group in found] == [False, True]


def test_a_stage_is_sampled_in_parts_with_neighbours_of_one_budget():
    policy = StandIn(sampling_batch_size=2)
    found = Sampler(policy)([[5], [6], [7]], 1, [4, 1, 2])
    assert policy.calls == [([[6], [7]], 2), ([[5]], 4)]
    assert [group[0].token_ids for group in found] == [[6, 7, 8, END], [7], [8, END]]


@pytest.mark.parametrize("main_stream", [True, False])
def test_only_samples_of_the_main_stream_draw_from_the_global_generator(main_stream):
    policy, before = StandIn(), torch.get_rng_state()
    Sampler(policy)([[5]], 1, 2, main_stream=main_stream)
    assert torch.equal(torch.get_rng_state(), before) != main_stream


def test_a_server_answers_instead_of_the_model():
    policy = StandIn()
    policy.serving = SimpleNamespace(complete=lambda asked: [[Answer([7, END], [-0.1, -0.2])] for _ in asked])
    [[found]] = Sampler(policy)([[5, 6]], 1, 4)
    assert (found.token_ids, found.logprobs, found.finished) == ([7, END], [-0.1, -0.2], True)
    assert policy.calls == []


# ------------------------------------------------------------------------------------------------------- the scorer


def scorer(policy=None):
    return Scorer(policy or StandIn())


def test_rows_are_scored_in_a_pass_of_their_own():
    policy = StandIn()
    assert scorer(policy).score("aux", rows_of()) is None and policy.passes == []  # without a row, nothing is scored
    scored = scorer(policy).score("aux", rows_of([6, END], [6, 7, END], group_size=2))
    assert [p.name for p in policy.passes] == ["aux"] and scored.rewards.tolist() == [2.0, 3.0]
    assert scored.rows["advantages"].tolist() == [1.0, 2.0] and scored.real.all()
    # Judged completions belong to no stream.
    rewards, extra = scorer(policy).judge([{"prompt": "p"}] * 2, [[6], [6, 7]], prompt_ids=[[5], [5]])
    assert (rewards, extra) == ([[1.0], [2.0]], [{}, {}]) and policy.passes[1].name is None


def test_groups_of_one_reward_have_no_advantage_whatever_rounding_makes_of_it():
    scored = scorer().score("aux", rows_of([6, END], [7, END], group_size=2))
    assert scored.rows["advantages"].tolist() == [0.0, 0.0]


def test_known_rewards_are_not_asked_for_again():
    asked = []

    def count(completions, **columns):
        asked.append(completions)
        return [1.0] * len(completions)

    part = scorer()
    call = part.prepare_rewards([count], [[5.0], None], num_rows=2)
    given = {"completions": ["a", "b"], "log_extra": lambda name, values: None}
    found = torch.tensor([[value] for value in call.functions[0](**given)])
    rewards, columns = part.merge_rewards(call, found)
    assert rewards.tolist() == [[5.0], [1.0]] and columns == {}
    assert asked == [["b"]]


NONE, SOME = torch.full((4, 1), torch.nan), torch.ones(4, 1)


def fed(*batches, resumed=False):
    """A scorer that has seen these rewards, two rows per prompt."""
    part = scorer()
    part.begin_run(resumed=resumed)
    for rewards in batches:
        part.stop_if_unscored(rewards, {"prompt": 0}, group_size=2)
    return part


@pytest.mark.parametrize("first", [[], [SOME]])
def test_a_run_stops_after_eight_prompts_in_a_row_without_a_reward(first):
    part = fed(*first, NONE, NONE, NONE)
    with pytest.raises(RewardError, match="None of the completions of 8 prompt"):
        part.stop_if_unscored(NONE, {"prompt": 0}, group_size=2)


def test_a_large_first_batch_without_a_reward_stops_the_run_at_once():
    with pytest.raises(RewardError, match="of 16 prompt"):
        fed(torch.full((32, 1), torch.nan))


def test_a_run_too_short_for_eight_prompts_stops_at_its_end_unless_it_had_a_reward():
    with pytest.raises(RewardError, match="of 2 prompt"):
        fed(NONE).stop_if_never_scored()
    fed(SOME, NONE).stop_if_never_scored()
    fed(NONE, resumed=True).stop_if_never_scored()


def test_the_scorer_reads_weights_that_were_replaced():
    policy = StandIn()
    part = scorer(policy)
    policy.reward_weights = torch.tensor([3.0])
    assert part.totals(torch.ones(2, 1)).tolist() == [3.0, 3.0]


# ----------------------------------------------------------------------------------------------- streams and the table


def trained(advantages):
    size = len(advantages)
    ones = torch.ones(size, 2, dtype=torch.long)
    rows = {f"{part}_{kind}": ones for part in ("prompt", "completion") for kind in ("ids", "mask")}
    return {**rows, "advantages": torch.tensor(advantages), "num_items_in_batch": torch.tensor(1.0)}


def stream(*advantages):
    """Scored rows with these advantages."""
    real = torch.ones(len(advantages), dtype=torch.bool)
    return ScoredRows(trained([*advantages]), real, real, real)


def prepared(**streams):
    """A policy of the weight 1, the main row 0 and these streams, and the sum of two backward passes."""
    policy = StandIn()
    policy.model.weight.data.fill_(1.0)
    part = StreamTraining(policy, together=False)
    part.prepare(trained([0.0]), streams)
    sums = [part.backward(policy.model, step, num_accumulated=1) for step in range(2)]
    return policy, part, sums


def test_a_stream_is_a_mean_over_its_own_rows():
    policy, _, sums = prepared(aux=(stream(1.0, 2.0, 3.0), 0.5))
    # The optimiser step averages over two micro-batches, so that their sum is twice the mean of the three rows.
    assert sum(sums).item() == pytest.approx(0.5 * 2 * 2.0, abs=1e-6)
    assert policy.model.weight.grad.item() == pytest.approx(sum(sums).item()) and policy.passes[0].name == "aux"
    _, part, sums = prepared(aux=(stream(1.0), 0.0))  # with the weight zero, it is not trained
    assert part.prepared == {} and sums == [None, None]


def test_a_stream_with_the_weight_none_shares_a_mean_with_the_main_rows_only():
    _, part, sums = prepared(joined=(stream(1.0, 2.0, 3.0), None), own=(stream(5.0, 7.0), 0.5))
    # 4: one main row and three joined rows
    assert sum(sums).item() == pytest.approx(2 * (6.0 / 4 + 0.5 * 12.0 / 2), abs=1e-6)
    assert part.main_scale(trained([0.0])) == pytest.approx(2 / 4)


def logs(*prompts):
    columns = {"prompt": list(prompts), "completion": ["c"] * len(prompts), "advantages": [0.0] * len(prompts)}
    return {**columns, "images": [], "rewards": {"r": [1.0] * len(prompts)}, "extra": {}}


def test_rows_of_streams_stand_behind_the_main_rows_also_after_a_resume():
    part = CompletionsTable(StandIn())
    part.streams = {"aux": logs("b")}
    whole = part.whole(logs("a"), step=3)
    assert whole["prompt"] == ["a", "b"] and whole["extra"]["stream"] == ["main", "aux"]
    again, back = CompletionsTable(StandIn()), {**logs(), "rewards": defaultdict(list), "extra": defaultdict(list)}
    again.load_state(part.state(logs("a"), step=3), back, step=3)
    assert again.whole(back, step=3)["prompt"] == ["a", "b"]


# ----------------------------------------------------------------------------------------------------- agents, vLLM


class Broken:
    def reset(self, **columns):
        return None

    def move(self):
        raise OSError("gone")


def test_a_row_whose_environment_raised_gets_no_further_turn():
    environments = [guarded(Broken)() for _ in range(2)]
    with pytest.warns(UserWarning, match="an environment raised OSError: gone"):
        trainer = SimpleNamespace(tools=[1], environments=environments)
        world = TrainerToolLoop(trainer, loop=None, encode_answers=None)
        turns = Turns(StandIn(), world)
        asked = []
        with turns.following([["p"], ["p"]]):

            def speak(contexts):
                turn_rows = turns.begin(contexts)
                asked.append(turn_rows.contexts)
                return turns.end(turn_rows, ([[6] for _ in turn_rows.contexts], None))

            assert speak([[5], [5]]) == ([[6], [6]], None)
            prompts = [[{"role": "user"}], [{"role": "user"}]]
            turns.loop_begins(prompts, [[5], [5]], [[6], [6]])
            try:
                environments[0].move()
            except OSError:
                pass
            for prompt in prompts:
                prompt.append({"role": "tool", "content": "?"})
            assert speak([[5, 6, 7], [5, 6, 7]]) == ([[], [6]], None)
            turns.note_failures()
    assert asked == [[[5], [5]], [[5, 6, 7]]] and turns.failed == [True, False]
    assert turns.known_rewards(None, num_rewards=2) == [[0.0, 0.0], None]


def test_rows_that_the_correction_takes_out_are_counted_and_told_once():
    policy = StandIn()
    part = Serving(policy, None, lambda: None)
    output = {**trained([1.0, 1.0]), "importance_sampling_ratio": torch.tensor([[0.0], [1.0]])}
    with pytest.warns(UserWarning, match="50% of the rows") as found:
        part.watch_correction(output)
        part.watch_correction(output)
    assert len(found) == 1 and policy.logged["sampling/masked_fraction"] == [0.5, 0.5]
