"""The rows of `METHODS`: cheap to read, and complete."""

import subprocess
import sys

from commands import ROOT
from trl import GRPOConfig, GRPOTrainer
from world import TINY

from trl_explore import trainers
from trl_explore.methods import METHODS

OURS = [row for row in METHODS.values() if row.name != "grpo"]
EXPLORING = [row for row in OURS if not row.plain]


def test_reading_the_rows_loads_neither_torch_nor_trl():
    code = "import sys, trl_explore.methods; sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_row_names_an_exported_trainer_and_its_configuration():
    for row in OURS:
        assert row.trainer_class is vars(trainers)[row.trainer] and row.trainer in trainers.__all__
        assert row.config_class is row.trainer_class.config_class and row.config in trainers.__all__
        assert row.trainer_class.method == row.name
    assert METHODS["grpo"].trainer_class is GRPOTrainer and METHODS["grpo"].config_class is GRPOConfig


def test_plain_grpo_is_there_as_trls_and_with_the_fields_that_all_methods_share():
    assert [row.name for row in METHODS.values() if row.plain] == ["exploration", "grpo"]
    assert METHODS["exploration"].trainer_class is trainers.ExplorationTrainer


def test_every_method_has_its_files_and_a_tiny_run():
    for row in EXPLORING:
        assert (ROOT / "trainers" / f"{row.name}.py").is_file() and (ROOT / "model_cards" / f"{row.card}.md").is_file()
        assert (ROOT / "tests" / f"test_{row.name}.py").is_file()
        assert row.name in TINY, f"{row.name} needs a row in TINY of tests/world.py"
