"""What a comparison in processes shows, and how its runs notice that their parent is gone."""

from multiprocessing import Pipe
from types import SimpleNamespace

from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl_explore.compare import workers
from trl_explore.compare.folder import ComparisonFolder
from trl_explore.compare.run import CostCallback, Curve
from trl_explore.compare.settings import Budget, read_comparison
from trl_explore.compare.workers import ArmLines, HangUpCallback, ProgressSender
from trl_explore.runs.workers import AT_WORK

DOCUMENT = {
    "task": "doors",
    "budget": {"tokens": 60_000},
    "seeds": [0, 1],
    "metrics": ["greedy_accuracy", "reward"],
    "arms": [{"method": "grpo"}, {"method": "deep_grpo"}, {"name": "[b]Tree", "method": "tree_grpo"}],
}
END = {"eval/greedy_accuracy": 0.5, "seconds": 9.0}


def test_every_arm_has_a_live_line(tmp_path):
    folder = ComparisonFolder(read_comparison(DOCUMENT), tmp_path)
    console = Console(width=100, force_terminal=True, record=True)
    lines = ArmLines(folder, console)
    grpo, deep, _ = folder.comparison.arms
    lines.at_work(grpo, 0, 30_000, "0.25")
    lines.done(deep, 0, END)
    with console.capture() as shown:
        console.print(lines.progress, no_wrap=True)
    first, second, third = [line for line in shown.get().splitlines() if "seeds" in line]
    assert "GRPO" in first and "25%" in first and "0/2 seeds, reward 0.25" in first
    assert "DEEP-GRPO" in second and "50%" in second and "1/2 seeds" in second
    assert "[b]Tree" in third and "0%" in third


def test_without_a_terminal_every_warm_start_and_every_finished_run_has_a_line(tmp_path):
    folder = ComparisonFolder(read_comparison(DOCUMENT), tmp_path)
    console = Console(width=60, force_terminal=False)
    lines = ArmLines(folder, console)
    with console.capture() as shown, lines.progress:
        lines.taught(1, 2)
        lines.at_work(folder.comparison.arms[0], 1, 30_000, "0.25")
        lines.done(folder.comparison.arms[0], 1, END)
    assert shown.get().splitlines() == [
        "1/2 warm starts",
        "1/6 GRPO, seed 1: greedy accuracy 50.0 %, 9 wall seconds of training",
    ]


def test_without_a_terminal_a_long_run_has_a_line_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_BETWEEN_LINES", 0)
    folder = ComparisonFolder(read_comparison(DOCUMENT), tmp_path)
    console = Console(width=60, force_terminal=False)
    lines = ArmLines(folder, console)
    with console.capture() as shown:
        lines.at_work(folder.comparison.arms[0], 1, 30_000, "0.25")
        monkeypatch.setattr(workers, "SECONDS_BETWEEN_LINES", 3600)
        lines.at_work(folder.comparison.arms[0], 1, 31_000, "0.35")
    assert shown.get().splitlines() == ["GRPO, seed 1: 50 % of its budget, reward 0.25"]


def test_a_run_tells_its_parent_what_it_has_spent():
    ours, theirs = Pipe()
    teller = ProgressSender(ours)
    teller.n = 500  # where it goes on
    teller.set_postfix(step=3, reward="0.25", refresh=False)
    teller.update(100)
    assert theirs.recv() == (AT_WORK, (600, "0.25"))


def test_a_batch_without_rewards_shows_a_dash():
    ours, theirs = Pipe()
    costs = CostCallback(Budget(steps=10))
    costs.cost.step = 3
    curve = Curve(costs, "step", 10, ProgressSender(ours))
    curve.on_log(None, SimpleNamespace(global_step=3), None, {"completions/mean_length": 4.0, "reward": None})
    assert theirs.recv() == (AT_WORK, (3, "-"))


def test_a_run_whose_parent_is_gone_is_saved_and_stops_at_its_next_step(tmp_path):
    ours, theirs = Pipe()
    teller, hang_up = ProgressSender(ours), HangUpCallback(ours)
    args, state = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerState()
    before = TrainerControl()
    hang_up.on_step_end(args, state, before)
    assert not before.should_save and not before.should_training_stop

    teller.update(100)
    theirs.close()  # with a message that it never read
    teller.update(100)
    control = TrainerControl()
    hang_up.on_step_end(args, state, control)
    assert control.should_save and control.should_training_stop and hang_up.interrupted
    teller.update(100)
