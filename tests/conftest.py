import os

# Before any import of the libraries: no test reaches a network, and no progress bar hides a failure.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from few_cases import mark_slow_cases
from quick import quicken

# Tests and files name tasks of the benchmarks as `examples.benchmarks.tasks:VAULT`. The root comes last, so that tests
# of an installed package see that one.
sys.path.append(str(Path(__file__).resolve().parent.parent))

# A shell that starts the suite in the background has it ignore Ctrl-C; the tests of Ctrl-C, and the processes they
# start, need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    # Warm starts are trained once for all tests and workers (which inherit the variable), and anew in every run.
    if "TRL_EXPLORE_CACHE" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="warm-starts-")
        config.add_cleanup(cache.cleanup)
        os.environ["TRL_EXPLORE_CACHE"] = cache.name


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(items):
    mark_slow_cases(items)


def pytest_collection_finish():
    quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """
    Tiny models run fastest on one thread, and results do not depend on the machine's core count.

    Fixtures of a module also train models. They are set up after this hook, but before the fixture `one_thread`.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    """The command line, which fixtures of a module call, chooses the number of threads by itself."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def skip_without_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def sentence_model(tmp_path_factory):
    """A random BERT over letters, saved as sentence-transformers saves models."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz:"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder / "core")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(tokens), max_position_embeddings=64, **sizes)).save_pretrained(folder / "core")
    transformer = Transformer(str(folder / "core"))
    model = SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")
    model.save(str(folder / "model"))
    return str(folder / "model")
