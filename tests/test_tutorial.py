"""The tour with data of your own in docs/quick-tour.md, as it is written but for smaller numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from commands import ROOT

SMALLER = {
    "steps=400": "steps=20",
    "--max_steps 20": "--max_steps 2",
    "completions_00020": "completions_00002",
    "evaluation_set(32)": "evaluation_set(4)",
    "--num_samples 8": "--num_samples 2",
    "--metrics pass@1 pass@8": "--metrics pass@1 pass@2",
    "tokens: 2e4": "tokens: 1e3",
    "evaluations: 2": "evaluations: 1",
}


@pytest.mark.slow
def test_the_tutorial_runs_from_an_empty_folder(tmp_path):
    page = (ROOT / "docs" / "quick-tour.md").read_text()
    script = "".join(re.findall(r"^<!-- run by tests/test_tutorial.py -->\n```bash\n(.*?)```", page, re.M | re.DOTALL))
    for written, smaller in SMALLER.items():
        assert written in script
        script = script.replace(written, smaller)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "five-minutes"
    rows = pd.read_parquet(folder / "out/completions/completions_00002.parquet")
    assert set(rows["stream"]) == {"main", "aux"} and set(rows["right_digit"]) <= {0.0, 1.0}
    assert "prefix_tokens" in done.stdout and "# out" in done.stdout  # the branches and the card were shown
    assert "pass@2" in (folder / "out/eval/results.json").read_text()
    assert (folder / "out/compare/curves.png").stat().st_size > 0
    assert len((folder / "data.jsonl").read_text().splitlines()) == 12
