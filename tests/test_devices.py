"""A machine without a GPU whose torch is built for one, as pip installs it."""

import pytest
import torch
from test_cli_eval import flags, results, workdir  # noqa: F401

from trl_explore.cli import main
from trl_explore.machine.devices import available_accelerator
from trl_explore.tasks import get_task
from trl_explore.tasks.warm_start import warm_start


@pytest.fixture
def no_gpu(monkeypatch):
    def built_for(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_an_accelerator_that_is_not_there_is_not_used(no_gpu):
    assert available_accelerator() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is there")
def test_a_warm_start_without_a_device_trains_on_the_cpu(no_gpu, tmp_path):
    folder = warm_start(get_task("doors"), seed=0, steps=1, device=None, cache_dir=tmp_path, progress=False)
    assert (folder / "model.safetensors").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is there")
def test_the_eval_command_runs_on_the_cpu(no_gpu, workdir):  # noqa: F811
    assert main(flags()) == 0 and results()["results"]["data"]["metrics"]
