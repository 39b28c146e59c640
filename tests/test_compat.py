"""What is said of a TRL whose seams have moved, on a class that stands for one of its own."""

import logging
import subprocess
import sys

import pytest
import trl
from world import make_trainer

from trl_explore.compat import KNOWN_TRL, MIN_TRL, SEAMS, Seam, check_seams, difference, moved
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

HERE = f"{__name__}.Theirs"


class Theirs:
    def sample(self, prompts, images=None):
        self._step = {"ids": prompts}
        self.encode(prompts)
        return [self.score(prompt) for prompt in prompts], images

    def encode(self, prompts):
        return prompts

    def score(self, prompt):
        return prompt


@pytest.mark.parametrize(
    "facts,what",
    [
        (dict(takes=("prompts", "prompts images")), None),  # it fits
        (dict(uses="encode score _step"), None),  # also inside of a comprehension
        (dict(order="_step encode", keys="ids"), None),
        (dict(takes=("prompts",)), "takes (prompts, images)"),
        (dict(takes=("images prompts",)), "takes (prompts, images)"),
        (dict(uses="encode decode"), "does not use decode"),
        (dict(order="encode decode"), "does not use decode"),
        (dict(order="encode _step"), "uses encode _step in another order"),
        (dict(keys="ids mask"), "does not contain mask"),
    ],
)
def test_what_moved_is_said(facts, what):
    assert difference(Seam(f"{HERE}.sample", "here.py", **facts)) == what


def test_what_is_gone_is_said():
    for path in (f"{HERE}.gone", f"{__name__}.Gone.sample", "no_such_package.Class.method"):
        assert difference(Seam(path, "here.py")) == "is not there"


def test_what_somebody_put_in_its_place_is_let_be(monkeypatch):
    def others(*args, **kwargs): ...

    others.__module__ = "others"
    monkeypatch.setattr(Theirs, "sample", others)
    assert difference(Seam(f"{HERE}.sample", "here.py", takes=("prompts",), uses="encode")) is None


def test_a_moved_seam_is_refused_by_name_with_the_versions_that_work():
    seams = (Seam(f"{HERE}.sample", "here.py"), Seam(f"{HERE}.gone", "here.py", since="1.15.0"))
    with pytest.raises(ImportError) as refused:
        check_seams("", seams)
    message = str(refused.value)
    assert f"`{HERE}.gone` is not there" in message and f"`{HERE}.sample`" not in message
    assert f"trl {trl.__version__} with transformers" in message
    assert "Known to work: trl 1.15.0, 1.16.0: run `pip install 'trl==1.16.0'`." in message


def test_seams_that_nobody_needs_may_move():
    seams = (Seam(f"{HERE}.gone", "here.py", needed_by="use_vllm"),)
    check_seams("", seams)
    with pytest.raises(ImportError, match="gone` is not there"):
        check_seams("use_vllm", seams)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let another TRL seem to be installed."""

    def install(version):
        folder = tmp_path / f"trl-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    moved.cache_clear()


@pytest.mark.parametrize("version,lines", [("1.99.0", 1), (KNOWN_TRL[-1], 0), (MIN_TRL, 0)])
def test_a_version_that_nobody_has_tried_is_told_of_once(installed, caplog, version, lines):
    installed(version)
    seams = (Seam(f"{HERE}.sample", "here.py", takes=("prompts images",)),)
    with caplog.at_level(logging.WARNING, logger="trl_explore.compat"):
        check_seams("", seams)
        check_seams("", seams)
    told = [
        f"trl {version} is newer than {KNOWN_TRL[-1]}, the newest tested version; the parts that the trainers use are "
        "unchanged"
    ] * lines
    assert caplog.messages == told


def test_the_table_is_read_without_torch_or_trl():
    code = "import sys, trl_explore.compat; sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_trainer_looks_at_its_seams_before_anything_else(tmp_path):
    moved.cache_clear()
    make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path)
    before = moved.cache_info()
    make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path)
    after = moved.cache_info()
    assert (before.misses, after.misses, after.hits) == (1, 1, before.hits + 1)


def test_no_seam_stands_twice():
    assert len({(seam.path, seam.needed_by) for seam in SEAMS}) == len(SEAMS)
