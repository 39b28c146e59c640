"""
Imports every module of an installed trl-explore; `make test-wheel` runs it where only its dependencies are installed.

A module that needs an extra is named here, with what it says where the extra is missing.
"""

import importlib
import pkgutil

import trl_explore

NEED_AN_EXTRA = {
    "trl_explore.retrieval.server": "a retrieval server needs FastAPI and uvicorn: pip install 'trl-explore[serve]'",
    "trl_explore.serving.engine": "No module named 'vllm'",  # vLLM's side: nothing else imports it
}


def fail(name):
    raise AssertionError(f"{name}, which is a package, could not be imported")


names = [module.name for module in pkgutil.walk_packages(trl_explore.__path__, "trl_explore.", onerror=fail)]
assert "trl_explore.trainers.vllm_backend" in names and "site-packages" in trl_explore.__file__
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
assert failed == NEED_AN_EXTRA, f"these modules do not import with the declared dependencies alone: {failed}"
print(f"{len(names)} modules import with the declared dependencies alone, but those of extras: {sorted(failed)}")
