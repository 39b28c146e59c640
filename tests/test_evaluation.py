"""Evaluation: what is sampled and kept, what is graded, and the numbers that come out."""

import copy
import http.server
import json
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from world import make_dataset, make_model, make_tokenizer

from trl_explore.evaluation.completions import encode_prompts, read_completions
from trl_explore.evaluation.evaluate import NoRewardError, evaluate, parse_metrics
from trl_explore.evaluation.samplers import Sampling, ServerSampler, TransformersSampler, _vllm_rank
from trl_explore.rewards.checks import RewardError
from trl_explore.rows.rollouts import Continuation
from trl_explore.saving.records import FileRefusedError

ROWS = make_dataset().select(range(12))
TOKENIZER = make_tokenizer()
FOUR = Sampling(num_samples=4, max_new_tokens=8)


class Scripted:
    """A sampler that gives out known texts, counts whom it was asked for, and can be interrupted."""

    def __init__(self, texts, *, truncated=(), interrupted_at=None):
        self.texts, self.truncated, self.interrupted_at, self.asked = texts, truncated, interrupted_at, []

    def __call__(self, prompts, sampling):
        for index in sorted(prompts):
            if len(self.asked) == self.interrupted_at:
                raise KeyboardInterrupt
            self.asked.append(index)
            ids = [TOKENIZER(text=text)["input_ids"] + [TOKENIZER.eos_token_id] for text in self.texts[index]]
            finished = [text not in self.truncated for text in self.texts[index]]
            yield index, [Continuation(i, finished=done) for i, done in zip(ids, finished, strict=True)]


def exact(completions, answer, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


TEXTS = [["1", "1", "2", "3"], ["2", "2", "2", "2"], ["a", "b", "c", "d"], ["4", "5", "5", "5"]]
DATA = Dataset.from_dict({"prompt": ["1+0=", "1+1=", "1+2=", "1+3="], "answer": ["1", "2", "3", "4"]})


def run(model, dataset=DATA, **options):
    settings = {"processing_class": TOKENIZER, "reward_funcs": exact, "sampling": FOUR, "progress": False}
    return evaluate(model, dataset, **settings | options)


def values(result):
    return {name: estimate["value"] for name, estimate in result["metrics"].items()}


def test_the_metrics_of_known_completions():
    result = run(Scripted(TEXTS, truncated=("a", "3")), metrics=["pass@1", "pass@2", "maj@3"])
    # correct samples: 2, 4, 0, 1 of 4
    assert values(result) == pytest.approx(
        {
            "pass@1": (1 / 2 + 1 + 0 + 1 / 4) / 4,
            "pass@2": (5 / 6 + 1 + 0 + 1 / 2) / 4,
            # subsets of 3: {1,1,2} and {1,1,3} win, {1,2,3} twice by one in three; 4 never outvotes two 5s
            "maj@3": ((2 + 2 / 3) / 4 + 1 + 0 + 0) / 4,
        }
    )
    low, high = (result["metrics"]["pass@1"][end] for end in ("low", "high"))
    assert (low, high) == (0.125, 0.8125)  # of the 256 ways to draw 4 prompts, 2 % are below, 2 % above
    assert (result["num_prompts"], result["unscored"]) == (4, 0)
    assert (result["truncated"], result["unanswered"], result["tokens"]) == (2 / 16, 4 / 16, 32)
    assert result["settings"]["reward_funcs"] == ["exact"]


def test_other_rewards_and_thresholds_grade_differently():
    def half(completions, **kwargs):
        return [0.5] * len(completions)

    sampler = Scripted(TEXTS)
    assert values(run(sampler, reward_funcs=[exact, half], metrics=["pass@1"])) == {"pass@1": 1.75 / 4}
    assert values(run(sampler, reward_funcs=half, metrics=["pass@1"])) == {"pass@1": 0.0}
    assert values(run(sampler, reward_funcs=half, metrics=["pass@1"], success_threshold=0.5)) == {"pass@1": 1.0}


def test_prompts_without_any_reward_are_left_out_and_counted():
    def some(completions, answer, **kwargs):
        pairs = zip(completions, answer, strict=True)
        return [None if gold == "2" or text == "3" else float(text == gold) for text, gold in pairs]

    result = run(Scripted(TEXTS), reward_funcs=some, metrics=["pass@1"])
    assert result["unscored"] == 1
    assert values(result) == {"pass@1": pytest.approx((1 / 2 + 0 + 1 / 4) / 3)}  # a single missing one is a failure
    with pytest.raises(NoRewardError, match="gold answers"):
        run(Scripted(TEXTS), reward_funcs=lambda completions, **kwargs: [None] * len(completions))


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_functions_receive_what_they_receive_in_training(conversational):
    calls = []

    def spy(**kwargs):
        calls.append(kwargs)
        return [1.0] * len(kwargs["completions"])

    prompts = DATA["prompt"][:]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    data = Dataset.from_dict({"prompt": prompts, "answer": DATA["answer"], "level": [1, 2, 3, 4]})
    run(Scripted(TEXTS), data, reward_funcs=spy)
    first = calls[0]
    assert first["prompts"] == [data[0]["prompt"]] * 4
    assert first["answer"] == ["1"] * 4 and first["level"] == [1] * 4
    assert [len(ids) for ids in first["completion_ids"]] == [2] * 4
    expected = [[{"role": "assistant", "content": text}] for text in TEXTS[0]] if conversational else TEXTS[0]
    assert first["completions"] == expected


def test_a_reward_function_that_answers_too_little_is_named():
    def short(**kwargs):
        return [1.0]

    with pytest.raises(RewardError, match="'short' returned 1 rewards for 4 completions"):
        run(Scripted(TEXTS), reward_funcs=short)


def test_async_rewards_and_data_without_prompts_are_refused_before_anything_is_sampled():
    async def slow(completions, **kwargs):
        return [1.0] * len(completions)

    idle = Scripted(TEXTS)
    with pytest.raises(ValueError, match="synchronous"):
        run(idle, reward_funcs=slow)
    with pytest.raises(ValueError, match=r"4 rows with \['question', 'answer'\]"):
        run(idle, DATA.rename_column("prompt", "question"))
    assert idle.asked == []


def test_an_interrupted_evaluation_samples_nothing_twice_and_loses_nothing(tmp_path):
    whole = run(Scripted(TEXTS))
    stopped = Scripted(TEXTS, interrupted_at=2)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, output_dir=tmp_path)
    path = tmp_path / "completions.jsonl"
    with path.open("ab") as file:
        file.write(b'{"index": 2, "complet')  # as if killed while writing
    rest = Scripted(TEXTS)
    result = run(rest, output_dir=tmp_path)
    assert (stopped.asked, rest.asked) == ([0, 1], [2, 3])
    assert result["metrics"] == whole["metrics"]
    _, records = read_completions(path)
    assert [records[index]["completions"] for index in range(4)] == TEXTS
    assert len(path.read_text().splitlines()) == 5


def test_other_metrics_and_rewards_need_no_sampling(tmp_path):
    run(Scripted(TEXTS), output_dir=tmp_path)
    idle = Scripted(TEXTS)
    result = run(idle, output_dir=tmp_path, metrics=["pass@3"], reward_funcs=lambda **kwargs: [1.0] * 4)
    assert idle.asked == [] and values(result) == {"pass@3": 1.0}
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert scores[1] == {"index": 0, "rewards": [1.0] * 4, "answers": ["1", "1", "2", "3"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Sampling(num_samples=2, max_new_tokens=8)}, "num_samples=4, now 2"),
        ({"sampling": Sampling(num_samples=4, max_new_tokens=8, seed=1)}, "seed=0, now 1"),
        ({"dataset": DATA.select([0, 1, 3])}, r"num_prompts=4, now 3; other prompts \(data, limit"),
        ({"source": {"weights": "b", "engine": "x"}}, r"other weights \(the model\); engine=None, now 'x'"),
    ],
)
def test_completions_of_other_settings_are_refused(tmp_path, changes, message):
    options = {"output_dir": tmp_path, "source": {"weights": "a"}}
    run(Scripted(TEXTS), **options)
    before = (tmp_path / "completions.jsonl").read_bytes()
    with pytest.raises(FileRefusedError, match=rf"other settings: {message}.*Delete its folder"):
        run(Scripted(TEXTS), **options | changes)
    assert (tmp_path / "completions.jsonl").read_bytes() == before


def test_a_file_without_completions_binds_no_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(Scripted(TEXTS, interrupted_at=0), output_dir=tmp_path)
    run(Scripted(TEXTS), output_dir=tmp_path, sampling=Sampling(num_samples=4, seed=1))


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_a_model_samples_by_its_seed_and_is_left_as_it_was():
    model = make_model(attention_dropout=0.3).train()
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    sampler = TransformersSampler(model, TOKENIZER)
    prompts = dict(enumerate(encode_prompts(ROWS["prompt"], TOKENIZER)))
    first, second = (dict(sampler(prompts, FOUR)) for _ in range(2))
    assert first == second
    assert dict(sampler(prompts, replace(FOUR, seed=1))) != first
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_samples_follow_the_models_distribution(model):
    sampler = TransformersSampler(model, TOKENIZER, batch_size=500)
    ids = TOKENIZER(text="1+2=")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1] / 0.7
    counts = Counter()
    sampling = Sampling(num_samples=500, temperature=0.7, max_new_tokens=1)
    for _, samples in sampler(dict.fromkeys(range(4), ids), sampling):
        counts.update(sample.token_ids[0] for sample in samples)
    for token, probability in enumerate(logits.softmax(-1).tolist()):
        assert counts[token] / 2000 == pytest.approx(probability, abs=0.045)


def test_greedy_completions_are_the_most_likely_ones(model):
    prompts = dict(enumerate(encode_prompts(ROWS["prompt"], TOKENIZER)))
    sampler = TransformersSampler(model, TOKENIZER, batch_size=5)
    greedy = dict(sampler(prompts, Sampling(temperature=0, max_new_tokens=6)))
    for index, ids in prompts.items():
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6, eos_token_id=1)
        (sample,) = greedy[index]
        assert sample.token_ids == expected[0, len(ids) :].tolist()
        assert sample.finished == (sample.token_ids[-1] == 1)


def test_a_batch_that_was_cut_in_two_leaves_the_other_batches_alone(model):
    prompts = dict(enumerate(encode_prompts(ROWS["prompt"], TOKENIZER)))
    sampler = TransformersSampler(model, TOKENIZER, batch_size=16)
    whole = dict(sampler(prompts, FOUR))
    rest = dict(sampler({index: prompts[index] for index in range(5, 12)}, FOUR))
    assert {index: rest[index] for index in range(8, 12)} == {index: whole[index] for index in range(8, 12)}
    assert list(rest) == list(range(5, 12))


def test_completions_that_do_not_fit_the_model_are_refused(model):
    message = "has 4 tokens, .* context of 128 tokens; lower max_new_tokens to at most 124"
    with pytest.raises(ValueError, match=message):
        run(model, ROWS, sampling=Sampling(max_new_tokens=125))


def test_prompts_are_encoded_with_the_chat_template_or_joined():
    message = [{"role": "user", "content": "1+1="}]
    assert TOKENIZER.decode(encode_prompts([message], TOKENIZER)[0]) == "<u>1+1=<a>"
    plain = make_tokenizer()
    plain.chat_template = None
    both = [{"role": "system", "content": "abc"}, *message]
    newline = plain.unk_token_id
    assert encode_prompts(["1+1="], plain) == [plain(text="1+1=")["input_ids"]]
    joined = [*plain(text="abc")["input_ids"], newline, newline, *plain(text="1+1=")["input_ids"], newline]
    assert encode_prompts([both], plain) == [joined]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pas@1"], "unknown metric 'pas@1'; did you mean 'pass@1'?"),
        (["maj"], "unknown metric 'maj'"),
        (["pass@0"], "unknown metric 'pass@0'"),
        (["pass@5"], "pass@5 needs at least 5 samples per prompt, got num_samples=4"),
    ],
)
def test_unknown_metrics_are_named(names, message):
    with pytest.raises(ValueError) as error:
        parse_metrics(names, 4)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"seed": -1}, "seed=-1"),
        ({"temperature": 0.0, "num_samples": 2}, "set num_samples=1"),
    ],
)
def test_sampling_options_have_ranges(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does: every sample is the digit 1, and the first of each prompt is cut off."""

    requests: list = []

    def log_message(self, *args):
        pass

    def reply(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({"data": [{"id": "small", "max_model_len": 64}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(asked)
        ids = [*TOKENIZER(text="1")["input_ids"], 1]
        ends = ["length", *["stop"] * (asked["n"] - 1)]
        self.reply({"choices": [{"token_ids": ids, "finish_reason": end} for end in ends]})


@pytest.fixture
def server():
    FakeServer.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{fake.server_port}"
        fake.shutdown()


def test_a_server_is_asked_for_token_ids_of_every_prompt(server):
    sampling = Sampling(num_samples=3, temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=8, seed=2)
    result = run(ServerSampler(f"{server}/v1/", "small"), sampling=sampling, metrics=["pass@1"])
    assert result["truncated"] == pytest.approx(1 / 3) and result["tokens"] == 4 * 3 * 2
    prompts = [asked["prompt"] for asked in FakeServer.requests]
    assert sorted(prompts) == sorted(encode_prompts(DATA["prompt"], TOKENIZER))
    assert values(result) == {"pass@1": 0.25}
    expected = {"model": "small", "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 8}
    assert all(asked.items() >= (expected | {"return_token_ids": True}).items() for asked in FakeServer.requests)


def test_a_server_that_does_not_fit_is_named(server):
    with pytest.raises(ValueError, match="serves small, not large: .*vllm serve large"):
        ServerSampler(server, "large")
    with pytest.raises(ValueError, match="context of 64 tokens"):
        run(ServerSampler(server, "small"), sampling=Sampling(max_new_tokens=64))
    with pytest.raises(ConnectionError, match="no vLLM server answers at http://127.0.0.1:9/v1/models"):
        ServerSampler("http://127.0.0.1:9", "small")


@pytest.mark.parametrize(
    "rank, pattern, expected", [(4, None, 8), (16, {}, 16), (24, {"q": 40}, 64), (600, None, 600)]
)
def test_vllm_gets_a_rank_of_lora_that_it_accepts(rank, pattern, expected):
    assert _vllm_rank(LoraConfig(r=rank, rank_pattern=pattern or {})) == expected
