"""What is counted of two versions of TRL, on made-up ones."""

import pytest
from drift import Sources, covering, report

from trl_explore.compat import SEAMS

OLD = """
class Base:
    def log(self, logs, start_time=None):
        return logs


class GRPOTrainer(Base):
    @decorated
    def _generate(self, prompts):
        first = prompts
        return first
"""
NEW = OLD.replace("first = prompts", "first = list(prompts)").replace("(Base)", "(base.Base)")
NEW += "\n\ndef add_fused_lm_head(model):\n    return model\n"


@pytest.fixture
def versions(tmp_path):
    for name, text in {"old": OLD, "new": NEW}.items():
        (tmp_path / name / "experimental").mkdir(parents=True)
        (tmp_path / name / "grpo_trainer.py").write_text(text)
        (tmp_path / name / "experimental" / "other.py").write_text(
            "class GRPOTrainer:\n    def _generate(self): ...\n"
        )
    return [Sources(tmp_path / name) for name in ("old", "new")]


def test_the_report_has_a_row_for_each_seam_that_is_there(versions):
    rows = [row.strip("| ").split(" | ") for row in report(["1.0", "1.1"], versions).splitlines()]
    assert rows[0][:4] == ["seam", "named in", "lines in 1.1", "1.0 to 1.1"]
    found = {row[0]: row[2:4] for row in rows[2:]}
    assert found["`GRPOTrainer._generate`"] == ["4", "2"] and found["`GRPOTrainer.log`"] == ["2", "0"]
    assert found["`utils.add_fused_lm_head`"] == ["2", "new"] and len(found) == 4
    assert found["all"] == ["8", "4"]


def test_tests_are_found_by_names_that_are_like_no_other():
    assert "drift" in covering("trl.GRPOTrainer._generate") and "contract" not in covering("trl.GRPOTrainer._generate")
    assert covering("trl.GRPOTrainer.log") == covering("trl.GRPOTrainer.__init__") == []


def test_contributing_has_a_row_for_each_seam_of_trl():
    from commands import ROOT

    text = (ROOT / "CONTRIBUTING.md").read_text()
    functions = [seam.path for seam in SEAMS if seam.path.startswith("trl.") and (seam.takes or seam.uses)]
    assert all(f"`{'.'.join(path.split('.')[-2:])}`" in text for path in functions)
