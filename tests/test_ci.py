"""What CI runs, with a stand-in for `make`, and what its job may do."""

import re
import shutil

import pytest
import yaml
from commands import ROOT, shell_calls

CHECKS = ["lint", "types", "test-slow", "test", "test-wheel"]


def run_ci(folder, *, fails=None, vllm="1"):
    """`.ci/run` in a folder of its own, because it removes environments; one target of `make` may fail."""
    (folder / ".ci").mkdir()
    (folder / "bin").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    make = f"sys.exit(2 if sys.argv[1] == {fails!r} else 0)"
    stubs = {"make": make, "chromium": "", "google-chrome": ""}
    done, calls = shell_calls(script, stubs, folder / "bin", TEST_VLLM=vllm)
    return done.returncode, [call[1] for call in calls]


def test_ci_runs_every_check(tmp_path):
    status, targets = run_ci(tmp_path)
    assert status == 0 and targets[0] == "install"
    assert [target for target in targets if target in CHECKS] == CHECKS
    assert ".venv-vllm/.installed" in targets and targets[-1] == "test-vllm"


def test_ci_without_vllm_waits_for_nothing(tmp_path):
    assert run_ci(tmp_path, vllm="0") == (0, ["install", *CHECKS])


@pytest.mark.parametrize("target", [".venv-vllm/.installed", *CHECKS, "test-vllm"])
def test_ci_fails_with_whatever_fails(tmp_path, target):
    status, targets = run_ci(tmp_path, fails=target)
    assert status == 2
    assert target in CHECKS or ("test-slow" in targets) == (target == "test-vllm")


def test_the_workflow_may_only_read_and_runs_actions_that_cannot_be_exchanged():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        used = [step["uses"] for step in steps if "uses" in step]
        assert used and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name) for name in used), path
