"""vLLM without a server: what is asked, what comes back, and what is said about servers that cannot be used.

What needs one is in `tests/served`.
"""

import copy
import json
import os
import subprocess
import sys
import threading
import types
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.generation import vllm_client
from trl.generation.vllm_generation import VLLMGeneration
from world import differ, make_model, make_trainer, never, parameters, tiny_methods

from trl_explore.serving import backend as vllm_backend
from trl_explore.serving.agreement import (
    check_server,
    check_vocabulary,
    hold,
    release,
    serve_command,
    wait_until_healthy,
)
from trl_explore.serving.backend import Answer, Request, ServedGeneration, ServerClient
from trl_explore.trainers import (
    AutoExploreConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    SESAConfig,
    SESATrainer,
)

METHODS = {
    "grpo": (ExplorationTrainer, ExplorationConfig, {}),
    **tiny_methods(deep_grpo=dict(num_branches=2), tree_grpo=dict(max_search_iterations=6), sesa=dict(num_sketches=2)),
    "lists": (SESATrainer, SESAConfig, dict(mode="sequential")),
}
METHODS["deferred"] = (*METHODS["deep_grpo"][:2], dict(METHODS["deep_grpo"][2], deferred_branching=True))
MEAN = "sampling/sampling_logp_difference/mean"


class Local(ServedGeneration):
    """Samples from the model in training, and says with which probabilities."""

    def _init_vllm(self):
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)
        self.max_served_length, self.syncs, self.asked = 128, 0, []

    def sync_weights(self):
        self.syncs += 1

    def complete(self, asked):
        self.check_lengths(asked)
        self.asked.append(asked)
        return [[self.sampled(request) for _ in range(request.num_samples)] for request in asked]

    @torch.no_grad()
    def sampled(self, request):
        ids, logprobs = list(request.prefix), []
        while len(logprobs) < request.max_new_tokens and ids[-1:] != [1]:
            distribution = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
            ids.append(int(distribution.exp().multinomial(1)))
            logprobs.append(distribution[ids[-1]].item())
        return Answer(ids[len(request.prefix) :], logprobs)


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setattr(vllm_backend, "ServedGeneration", Local)


def served(kind, folder, **options):
    trainer_class, config_class, knobs = METHODS[kind]
    options = {"use_vllm": True, "vllm_mode": "server", **knobs, **options}
    return make_trainer(trainer_class, config_class, folder, **options)


@pytest.mark.parametrize("kind", METHODS)
def test_rows_of_every_stream_carry_what_the_sampler_said(local, tmp_path, kind):
    trainer = served(kind, tmp_path, max_steps=2)
    before = parameters(trainer)
    trainer.train()
    assert differ(before, parameters(trainer)) and trainer.vllm_generation.syncs == 2
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert max(value for row in rows for key, value in row.items() if key.endswith(MEAN)) < 1e-5
    streams = {key.removesuffix(MEAN) for row in rows for key in row if key.endswith(MEAN)}
    if METHODS[kind][1] is AutoExploreConfig:  # a stream for each explorer that it chose
        assert len(streams) > 1 and all(stream.startswith("explored_") for stream in streams - {""})
        streams = {""}
    assert streams - {"branch/"} == ({"", "aux/"} if METHODS[kind][0] is DeepGRPOTrainer else {""})
    ratios = [value for row in rows for key, value in row.items() if "importance_sampling_ratio" in key]
    assert ratios and all(abs(ratio - 1) < 1e-4 for ratio in ratios)


def test_rows_trained_under_another_prompt_are_not_corrected(local, tmp_path):
    trainer = served("sesa", tmp_path, off_policy_mask_threshold=0.1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    real = output["completion_mask"].bool()
    assert output["sampling_per_token_logps"][real].isnan().all()
    assert (output["importance_sampling_ratio"] == 1).all()
    assert trainer._compute_loss(trainer.model, output).isfinite()


def test_branches_of_a_pivot_are_one_request(local, tmp_path):
    trainer = served("deep_grpo", tmp_path, max_steps=1, reward_funcs=never)
    trainer.train()
    main, branches = trainer.vllm_generation.asked
    assert Counter(request[1:] for request in main) == {(4, 8): 2}
    assert len(branches) == 8 and all(request.num_samples == 2 for request in branches)
    assert all(len(request.prefix) + request.max_new_tokens == len(main[0].prefix) + 8 for request in branches)


def test_a_request_that_vllm_does_not_take_names_the_command(local, tmp_path):
    message = "132 tokens, but vLLM takes 128. Restart the server with `.*--max-model-len 132.*` or lower|, or lower"
    ServedGeneration.command = staticmethod(lambda **options: serve_command("M", backend="file", **options))
    try:
        with pytest.raises(ValueError, match=message):
            served("grpo", tmp_path, max_completion_length=128)
    finally:
        del ServedGeneration.command


def unserved(cls, model, **options):
    class Unserved(cls):
        def _init_vllm(self):
            self.max_served_length = None

    from accelerate import Accelerator

    return Unserved(model, Accelerator(cpu=True), None, **options)


def test_answers_go_to_those_who_asked():
    backend = unserved(ServedGeneration, make_model(), mode="server", max_completion_length=5)
    calls = []

    def generate(prompts, *, n, max_tokens, **options):
        calls.append((prompts, n, max_tokens))
        ids = [[*prompt, place, max_tokens] for prompt in prompts for place in range(n)]
        return {"completion_ids": ids, "logprobs": [[[-1.0]] * len(i) for i in ids]}

    backend.vllm_client = SimpleNamespace(generate=generate)
    asked = [Request([7], 2, 3), Request([5, 6], 1, 4), Request([5], 2, 3), Request([9], 1, 4)]
    answers = backend.complete(asked)
    for request, of_request in zip(asked, answers, strict=True):
        expected = [[*request.prefix, place, request.max_new_tokens] for place in range(request.num_samples)]
        assert [answer.token_ids for answer in of_request] == expected
    assert sorted(calls) == [([[5], [7]], 2, 3), ([[5, 6], [9]], 1, 4)]  # neighbours share prefixes
    assert backend.complete([]) == []

    calls.clear()
    backend.budgets = {(9,): 2}
    prompts, ids, logprobs, _ = backend.generate([[8], [8], [9]], None, 4)
    assert sorted(calls) == [([[8]], 2, 5), ([[9]], 1, 2)]
    assert prompts == [[8], [8], [9]] and ids == [[8, 0, 5], [8, 1, 5], [9, 0, 2]] and logprobs[2] == [[-1.0]] * 3


def test_colocated_vllm_gets_parameters_per_prompt(monkeypatch):
    module = types.ModuleType("vllm")
    module.SamplingParams = lambda **options: options
    monkeypatch.setitem(sys.modules, "vllm", module)
    backend = unserved(ServedGeneration, make_model(), mode="colocate", temperature=0.5)
    token = SimpleNamespace(rank=1, logprob=-0.5)
    calls = []

    def generate(prompts, *, sampling_params, use_tqdm):
        calls.append((prompts, sampling_params))
        sample = SimpleNamespace(token_ids=(4, 1), logprobs=[{4: token}, {1: token}])
        return [SimpleNamespace(outputs=[sample] * given["n"]) for given in sampling_params]

    backend.llm = SimpleNamespace(generate=generate)
    answers = backend.complete([Request([7], 2, 3), Request([5, 6], 1, 4)])
    assert answers == [[Answer([4, 1], [-0.5, -0.5])] * 2, [Answer([4, 1], [-0.5, -0.5])]]
    ((prompts, given),) = calls
    assert prompts == [{"prompt_token_ids": [7]}, {"prompt_token_ids": [5, 6]}]
    numbers = [(p["n"], p["max_tokens"], p["temperature"], p["logprobs"]) for p in given]
    assert numbers == [(2, 3, 0.5, 0), (1, 4, 0.5, 0)]


def drift(cls, syncs=20):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(make_model().to(torch.bfloat16), config)
    before = copy.deepcopy(model.state_dict())
    backend = unserved(cls, model, mode="server")
    for _ in range(syncs):
        names = [name for name, _ in backend._iter_named_params()]
    assert "model.layers.0.self_attn.q_proj.weight" in names
    return max((before[name] - value).abs().max().item() for name, value in model.state_dict().items())


def test_syncing_an_adapter_leaves_the_frozen_weights_as_they_are():
    assert drift(ServedGeneration) == 0.0
    assert drift(VLLMGeneration) > 1e-4  # merged and unmerged in bfloat16, they move from sync to sync


INFO = {"model_config": {"model": "M"}, "weight_transfer_config": {"backend": "file"}}
NCCL = {"backend": "nccl"}
MODEL = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 16}


@pytest.mark.parametrize(
    ("info", "served_config", "message"),
    [
        (INFO, {**MODEL, "vocab_size": 99}, "model .'M'.: its `vocab_size` is 99, .* is 64. Restart .*vllm serve"),
        ({**INFO, "weight_transfer_config": None}, MODEL, "engine of the vLLM server at http://here is none"),
        ({**INFO, "weight_transfer_config": NCCL}, None, "is 'nccl'. Restart .* set `vllm_weight_sync`"),
    ],
)
def test_servers_that_do_not_fit_are_refused_with_a_command(info, served_config, message):
    command = serve_command("M", backend="file", port=1234)
    assert command.startswith("VLLM_SERVER_DEV_MODE=1 vllm serve M --port 1234 --weight-transfer-config '{")
    check_server(INFO, MODEL, MODEL, backend="file", url="http://here", command=command)
    with pytest.raises(ValueError, match=message):
        check_server(info, served_config, MODEL, backend="file", url="http://here", command=command)


def test_tokenizers_are_compared_by_what_tokens_mean():
    check_vocabulary("a b", "ab", url="here", command="serve")
    with pytest.raises(ValueError, match="it decodes the tokens of 'xd' to 'cd'. Restart it with `serve --tokenizer"):
        check_vocabulary("abxd", "abcd", url="here", command="serve")
    with pytest.raises(ValueError, match="it decodes the tokens of '' to 'cd'"):  # one is the beginning of the other
        check_vocabulary("ab", "abcd", url="here", command="serve")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        status, body = self.server.pages.get(self.path.split("?")[0], (404, {}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def stub():
    server = HTTPServer(("127.0.0.1", 0), Answers)
    server.pages = {"/health": (200, {}), "/v1/models": (200, {"data": [{"id": "M"}]})}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_that_is_none_is_told_from_one_that_is_not_there(stub):
    wait_until_healthy(stub.url, seconds=0, command="serve")
    del stub.pages["/health"]
    with pytest.raises(ConnectionError, match=r"is no vLLM server, or one that has failed \(status 404\). .*`serve`"):
        wait_until_healthy(stub.url, seconds=0, command="serve")
    with pytest.raises(ConnectionError, match="nothing answers there.*`vllm_server_port`"):
        wait_until_healthy("http://127.0.0.1:9", seconds=0, command="serve")


def test_missing_development_endpoints_and_lost_servers_are_told(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *args, **kw: True)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    client = ServerClient(stub.url, command="serve", weight_sync="file", folder=tmp_path)
    with pytest.raises(RuntimeError, match="development endpoints.* Restart it with `serve`"):
        client.get_server_info()
    with pytest.raises(ConnectionError, match="(?s)answered: Request failed: 501.*start it again with `serve`"):
        client.text_of([1])
    stub.shutdown()
    stub.server_close()
    with pytest.raises(ConnectionError, match="was lost .*`serve` and go on with `resume_from_checkpoint=True`"):
        client.text_of([1])


def test_a_server_belongs_to_one_process():
    url = "http://127.0.0.1:1"
    hold(url)
    hold("http://localhost:1/")
    code = f"from trl_explore.serving.agreement import hold; hold({url!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "RuntimeError: another trainer (process" in done.stderr and "vllm_server_port" in done.stderr
    release(url)
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_lock_of_a_server_lies_where_only_its_user_writes_and_is_no_link(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path))
    hold("http://127.0.0.1:2")
    release("http://127.0.0.1:2")
    (lock,) = (tmp_path / "locks").iterdir()
    assert (lock.parent.stat().st_mode & 0o777, lock.stat().st_mode & 0o777) == (0o700, 0o600)
    assert lock.read_text() == str(os.getpid())

    (tmp_path / "thesis").write_text("years of work")
    lock.unlink()
    lock.symlink_to(tmp_path / "thesis")
    with pytest.raises(RuntimeError, match="cannot hold the lock .*symbolic links.*TRL_EXPLORE_CACHE"):
        hold("http://127.0.0.1:2")
    assert (tmp_path / "thesis").read_text() == "years of work"


@pytest.mark.parametrize("kind", ["a link", "a file", "open to others", "of another user"])
def test_a_lock_folder_that_others_decide_about_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path))
    folder = tmp_path / "locks"
    if kind == "a link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to("theirs")
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o770 if kind == "open to others" else 0o700)
    if kind == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="cannot hold the lock of a vLLM server"):
        hold("http://127.0.0.1:2")
    assert not [path for path in folder.rglob("*")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(top_p=0.9, top_k=5), "`top_p=0.9`, `top_k=5`: .* every importance ratio is biased"),
        (dict(generation_kwargs={"top_k": 5, "min_p": 0.1}), "^`top_k=5`, `min_p=0.1`: .* every importance ratio"),
        (dict(top_p=0.9, generation_kwargs={"top_p": 0.8}), "^`top_p=0.8`: .* every importance ratio is biased"),
        (dict(generation_kwargs={"seed": 1}), "`seed=1`.* copies of each other"),
    ],
)
def test_harmful_options_are_told_once(local, tmp_path, options, message, recwarn):
    with pytest.warns(UserWarning, match=message) as found:
        served("grpo", tmp_path, **options)
    assert len([w for w in found if "vLLM" in str(w.message)]) == 1
    recwarn.clear()
    served("grpo", tmp_path, top_k=5, generation_kwargs={"top_k": -1})  # which undoes the cut
    served("grpo", tmp_path, top_k=5, generation_kwargs={"top_k": None})
    assert not [warning for warning in recwarn if "importance ratio" in str(warning.message)]


def test_rows_that_the_correction_drops_are_told_once(local, tmp_path):
    trainer = served("grpo", tmp_path, vllm_importance_sampling_clip_max=0.5)
    with pytest.warns(UserWarning, match="takes them out of the loss.*token_truncate") as found:
        trainer.train()
    assert len([w for w in found if "takes them" in str(w.message)]) == 1
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["sampling/masked_fraction"] for row in rows] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (NotImplementedError, dict(vllm_mode="colocate", vllm_tensor_parallel_size=2), "`vllm_mode='server'`"),
        (ValueError, dict(vllm_structured_outputs_regex="a*"), "samples from inside them"),
        (ValueError, dict(vllm_weight_sync="files"), "unknown value 'files'; did you mean 'file'"),
    ],
)
def test_what_cannot_be_sampled_right_is_refused(tmp_path, error, options, message):
    with pytest.raises(error, match=message):
        served("deep_grpo", tmp_path, **options)


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_without_vllm_the_package_is_named(tmp_path, mode):
    if "vllm" in sys.modules or vllm_backend.is_vllm_available():
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match="[Pp]lease install|pip install"):
        served("deep_grpo", tmp_path, vllm_mode=mode)
