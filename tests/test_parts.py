"""The parts of a trainer, with a stand-in for it: none of them knows TRL's trainer."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from trl_explore.rewards.checks import RewardError
from trl_explore.rows.ranks import Ranks
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import kept_randomness, loss_mask
from trl_explore.rows.training import StreamTraining
from trl_explore.sampling.sampler import Sampler

ARGS = dict(
    use_transformers_continuous_batching=True,
    generation_kwargs=None,
    temperature=1.0,
    per_device_train_batch_size=2,
    steps_per_generation=2,
    success_reward=None,
    loss_type="grpo",
    beta=0.0,
    top_entropy_quantile=1.0,
    drop_zero_advantage=False,
    max_completion_length=8,
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
        self.model.weight.data.fill_(1.0)
        self.ranks, self.serving = Ranks(self.accelerator), None
        self.eos_token_ids, self.exploration_generator = [END], torch.Generator().manual_seed(0)
        self.calls, self.reward_func_names, self.reward_weights = [], ["reward_0"], torch.ones(1)

    def generate(self, prefixes, max_new_tokens):
        self.calls.append((prefixes, max_new_tokens))
        return [([*range(p[-1] + 1, 9), END])[:max_new_tokens] for p in prefixes]

    @contextmanager
    def running(self, other):
        yield other

    def loss(self, model, rows):
        return model.weight.sum() * (rows["advantages"] * loss_mask(rows)[:, 0]).mean()

    def log_metric(self, name, value):
        pass


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


def test_a_stage_is_sampled_in_parts_with_neighbours_of_one_budget():
    policy = StandIn(sampling_batch_size=2)
    found = Sampler(policy)([[5], [6], [7]], 1, [4, 1, 2])
    assert policy.calls == [([[6], [7]], 2), ([[5]], 4)]
    assert [group[0].token_ids for group in found] == [[6, 7, 8, END], [7], [8, END]]


def test_a_run_too_short_for_eight_prompts_stops_at_its_end_unless_it_was_resumed():
    first, resumed = Scorer(StandIn()), Scorer(StandIn())
    first.begin_run(resumed=False)
    resumed.begin_run(resumed=True)
    for part in (first, resumed):
        part.stop_if_unscored(torch.full((4, 1), torch.nan), {"prompt": 0}, group_size=2)
    resumed.stop_if_never_scored()
    with pytest.raises(RewardError, match="of 2 prompt"):
        first.stop_if_never_scored()


def trained(advantages):
    size = len(advantages)
    ones = torch.ones(size, 2, dtype=torch.long)
    rows = {f"{part}_{kind}": ones for part in ("prompt", "completion") for kind in ("ids", "mask")}
    return {**rows, "advantages": torch.tensor(advantages), "num_items_in_batch": torch.tensor(1.0)}


def stream(*advantages):
    """Scored rows with these advantages."""
    real = torch.ones(len(advantages), dtype=torch.bool)
    return ScoredRows(trained([*advantages]), real, real, real)


def test_a_stream_with_the_weight_none_shares_a_mean_with_the_main_rows_only():
    part = StreamTraining(StandIn(), together=False)
    part.prepare(trained([0.0]), dict(joined=(stream(1.0, 2.0, 3.0), None), own=(stream(5.0, 7.0), 0.5)))
    sums = [part.backward(part.policy.model, step, num_accumulated=1) for step in range(2)]
    # 4: one main row and three joined rows
    assert sum(sums).item() == pytest.approx(2 * (6.0 / 4 + 0.5 * 12.0 / 2), abs=1e-6)
    assert part.main_scale(trained([0.0])) == pytest.approx(2 / 4)
