"""
Record a training run by what users can see of it: samples, rewards, trained rows, weights and random numbers.

The recorder patches functions of TRL and torch, and one of ours: `PathCache.complete`, which samples instead of TRL.
A record does not depend on the order and the number of calls between our code and TRL. Hashes are of whole numbers and
texts only, because another machine may round decimal numbers differently.
"""

import functools
import inspect
import random
import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_explore.agents.environments import guarded
from trl_explore.sampling.paths import PathCache

# Functions of torch.distributed, each with the argument that this process passes in.
COLLECTIVES = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": "obj",
    "all_reduce": "tensor",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": None,
    "broadcast": "tensor",
    "broadcast_object_list": "object_list",
    "gather": "tensor",
    "gather_object": "obj",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "scatter": "tensor",
    "scatter_object_list": "scatter_object_output_list",
}
# Ends of the names of metrics that TRL always logs together.
BUNDLES = [
    ["/low_mean", "/low_min", "/high_mean", "/high_max", "/region_mean"],
    [
        "/clipped_ratio",
        *["/mean_length", "/min_length", "/max_length"],
        *["/mean_terminated_length", "/min_terminated_length", "/max_terminated_length"],
    ],
    ["/mean", "/std"],
]
# Rows of the first hash of samples. Each further hash doubles the number of rows, so the first that differs shows
# roughly where two runs differ.
FIRST_ROWS = 8


def digest(value):
    """Return four hexadecimal digits that depend on a value without decimal numbers."""
    return f"{zlib.crc32(value if isinstance(value, bytes) else repr(value).encode()):08x}"[:4]


def number(value):
    """Return a number as text: whole numbers in full, others with four digits and always with a point. Numbers below
    one millionth come from rounding."""
    if value is None:
        return "none"
    if abs(value) < 1e-6:
        return "0"
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:#.4g}"


def is_time(name):
    """Return whether a metric is a measured time, or is computed from one."""
    return name.endswith(("seconds", "per_second", "runtime", "step_time"))


@dataclass(frozen=True)
class TrainedRow:
    """A row of TRL's loss without its padding."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    loss_mask: tuple[int, ...]  # 1 for trained tokens
    advantages: tuple[float, ...]  # of the trained tokens
    old_logprobs: tuple[float, ...] | None  # of the trained tokens, as are the next
    ref_logprobs: tuple[float, ...] | None

    @property
    def tokens(self):
        return self.prompt, self.completion, self.loss_mask

    def check(self):
        """Return the sum of the advantages with factors between -1 and 1 that depend on the row and the place, so
        that advantages that change places change the sum."""
        seed = zlib.crc32(repr(self.tokens).encode())
        total = 0.0
        for place, advantage in enumerate(self.advantages):
            total += advantage * ((seed + 7919 * place) % 2001 - 1000) / 1000
        return total


@dataclass
class Part:
    """One optimizer step, or one evaluation."""

    title: str = ""
    sampled: list = field(default_factory=list)  # prefix and new tokens of each row
    rewarded: list = field(default_factory=list)  # rows and rewards of each call of a reward function
    played: list = field(default_factory=list)  # calls of methods of the environments
    trained: list = field(default_factory=list)
    normalizers: set = field(default_factory=set)  # numbers of tokens that TRL's loss divides by
    weights: dict = field(default_factory=dict)
    logged: dict = field(default_factory=dict)
    random: dict = field(default_factory=dict)
    moved: list = field(default_factory=list)  # random generators whose state is not that of the part before

    def facts(self):
        """Return the lines of a file of pins, by label."""
        found = {}
        if self.sampled:
            found["sampled"] = self._sampled()
        if self.rewarded:
            found["rewarded"] = self._rewarded()
        if self.played:
            found["played"] = self._played()
        if self.trained:
            found["trained"] = self._trained()
        if self.weights:
            numbers = {**self.weights, "gradient": self.logged.get("grad_norm"), "loss": self.logged.get("loss")}
            found["weights"] = " ".join(f"{name} {number(value)}" for name, value in numbers.items())
        found["random"] = " ".join(f"{name} {self.random[name]}" for name in self.moved) or "as before"
        return found

    def exact(self):
        """Return hashes of what the facts are made of, with all digits of all numbers, by label."""
        values = {
            "sampled": self.sampled,
            "rewarded": self.rewarded,
            "played": self.played,
            "trained": (self._sorted_rows(), sorted(self.normalizers)),
            "weights": (self.weights, self.logged.get("grad_norm"), self.logged.get("loss")),
        }
        return {**{label: digest(value) for label, value in values.items()}, "random": self.random}

    def as_values(self):
        """Return the part as values that can be written as JSON."""
        logged = {name: repr(value) for name, value in self.logged.items() if not is_time(name)}
        return {"title": self.title, "facts": self.facts(), "exact": self.exact(), "logged": logged}

    def _sorted_rows(self):
        return sorted(self.trained, key=lambda row: (row.tokens, row.advantages))

    def _sampled(self):
        hashes, start = [], 0
        while start < len(self.sampled):
            end = start + max(start, FIRST_ROWS)
            prefixes, completions = zip(*self.sampled[start:end], strict=True)
            hashes.append(f"{digest(prefixes)}>{digest(completions)}")
            start = end
        tokens = sum(len(ids) for _, ids in self.sampled)
        return f"{len(self.sampled)} rows {tokens} tokens {' '.join(hashes)}"

    def _rewarded(self):
        rows, rewards, sizes = [], [], []
        for rows_of_call, rewards_of_call in self.rewarded:
            rows += rows_of_call
            rewards += rewards_of_call
            sizes.append(len(rows_of_call))
        hashes = f"{digest((sizes, rows))}>{digest(rewards)}"
        return f"{len(rows)} rows {len(sizes)} calls {hashes} sum {number(sum(rewards))}"

    def _played(self):
        texts = []
        for name in sorted({name for name, _ in self.played}):
            # Rows may take turns in any order, so the calls are sorted.
            calls = sorted(call for other, call in self.played if other == name)
            texts.append(f"{name} {len(calls)} {digest(calls)}")
        return " ".join(texts)

    def _trained(self):
        rows = self._sorted_rows()
        num_tokens = sum(len(row.advantages) for row in rows)
        sums = [sum(row.advantages) for row in rows]
        up, down = sum(total > 1e-6 for total in sums), sum(total < -1e-6 for total in sums)
        numbers = {
            "sizes": sum(sum(map(abs, row.advantages)) for row in rows),
            "check": sum(row.check() for row in rows),
        }
        if rows[0].old_logprobs is not None:
            numbers["old"] = sum(sum(row.old_logprobs or ()) for row in rows)
        if rows[0].ref_logprobs is not None:
            numbers["ref"] = sum(sum(row.ref_logprobs or ()) for row in rows)
        shown = " ".join(f"{name} {number(value)}" for name, value in numbers.items())
        divided_by = " ".join(map(str, sorted(self.normalizers)))
        hash_of_rows = digest([row.tokens for row in rows])
        return f"{len(rows)} rows {num_tokens} tokens {hash_of_rows} of {divided_by}; advantages +{up} -{down} {shown}"


class Recorder(TrainerCallback):
    """A record of one training: its parts in order, and the collectives that this process took part in."""

    def __init__(self):
        self.parts, self.collectives = [], []
        self._part, self._trainer, self._before = Part(), None, None

    def follow(self, trainer):
        """Begin to record a trainer. Call it before `train`."""
        self._trainer = trainer
        trainer.add_callback(self)

    def finish(self):
        """Give each part what was logged about it. Call it after `train`."""
        for part in self.parts:
            step = int(part.title.split()[-1])
            of_evaluation = part.title.startswith("evaluation")
            for entry in self._trainer.state.log_history:
                evaluation, training = "eval_loss" in entry, "loss" in entry
                if entry["step"] == step and (evaluation if of_evaluation else training):
                    part.logged = entry

    def metrics(self):
        """Return the mean of each logged metric over the run; a time is only named."""
        values = {}
        for entry in self._trainer.state.log_history:
            for name, value in entry.items():
                if name not in ("step", "epoch"):
                    values.setdefault(name, []).append(value)
        means = {}
        for name, logged in values.items():
            known = [value for value in logged if value is not None]
            means[name] = "time" if is_time(name) else number(sum(known) / len(known) if known else None)
        return bundled(means)

    # -------------------------------------------------------------------------------------------- where a part ends

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        assert not self._part.sampled, "sampled between two steps, and not in an evaluation"
        self._before = self._flat_weights()

    def on_step_end(self, args, state, control, **kwargs):
        moved = self._flat_weights() - self._before
        fixed = torch.cos(torch.arange(len(moved), dtype=moved.dtype))
        self._part.weights["moved"] = moved.norm().item()
        self._part.weights["along"] = (moved @ fixed / fixed.norm()).item()
        self._close(f"step {state.global_step}")

    def on_evaluate(self, args, state, control, **kwargs):
        self._close(f"evaluation after step {state.global_step}")

    def _close(self, title):
        states, before = self._random_states(), self.parts[-1].random if self.parts else {}
        self._part.title, self._part.random = title, states
        self._part.moved = [name for name, state in states.items() if before.get(name) != state]
        self.parts.append(self._part)
        self._part = Part()

    def _flat_weights(self):
        weights = [parameter.detach().flatten().double() for parameter in self._trainer.model.parameters()]
        return torch.cat(weights)

    def _random_states(self):
        _, keys, place, *_ = np.random.get_state()
        states = {
            "torch": digest(torch.get_rng_state().numpy().tobytes()),
            "numpy": digest(keys.tobytes() + repr(place).encode()),
            "python": digest(random.getstate()),
        }
        generator = getattr(self._trainer, "exploration_generator", None)
        if generator is not None:
            states["ours"] = digest(generator.get_state().numpy().tobytes())
        return states

    # ------------------------------------------------------------------------------------------ what a part is made of

    def watched(self, reward_function):
        """Return a reward function that records what it is asked about and what it returns."""

        @functools.wraps(reward_function)
        def asked(**columns):
            given = {name: value for name, value in columns.items() if isinstance(value, list)}
            if "environments" in given:
                given["environments"] = [tuple(environment.episode) for environment in given["environments"]]
            rows = [repr(row) for row in zip(*[given[name] for name in sorted(given)], strict=True)]
            rewards = reward_function(**columns)
            self._part.rewarded.append((rows, list(rewards)))
            return rewards

        return asked

    def _sampling(self, owner, name):
        """Patch a function that gets prefixes as its first argument and returns completions as its first result."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def sampled(sampler, prefixes, *args, **kwargs):
            found = function(sampler, prefixes, *args, **kwargs)
            lone_end = [self._trainer.processing_class.eos_token_id]
            for prefix, completion in zip(prefixes, found[0], strict=True):
                # A process without rows continues a lone end token, so that all processes call the model.
                if prefix != lone_end:
                    self._part.sampled.append((tuple(prefix), tuple(completion)))
            return found

        return patch.object(owner, name, sampled)

    def _losses(self):
        function = GRPOTrainer._compute_loss

        @functools.wraps(function)
        def trained(trainer, model, inputs):
            if model.training:
                self._part.trained += trained_rows(inputs)
                self._part.normalizers.add(int(inputs["num_items_in_batch"]))
            return function(trainer, model, inputs)

        return patch.object(GRPOTrainer, "_compute_loss", trained)

    def _environment(self, owner, name):
        function = getattr(owner, name)

        @functools.wraps(function)
        def called(environment, *args, **kwargs):
            state = kwargs["board"] if name == "reset" else (tuple(environment.episode), args, kwargs)
            self._part.played.append((name, repr(state)))
            return function(environment, *args, **kwargs)

        return patch.object(owner, name, called)

    def _collective(self, name, argument):
        function = getattr(torch.distributed, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def called(*args, **kwargs):
            value = signature.bind(*args, **kwargs).arguments.get(argument)
            if isinstance(value, torch.Tensor):
                shown = f"{tuple(value.shape)} {value.dtype}"
            else:
                shown = type(value).__name__
            self.collectives.append(f"{name} {shown}")
            return function(*args, **kwargs)

        return patch.object(torch.distributed, name, called)


def trained_rows(inputs):
    """Return the rows of a micro-batch that have trained tokens."""
    loss_mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        loss_mask = loss_mask * inputs["tool_mask"]
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(loss_mask.shape)
    rows = []
    for place, mask in enumerate(loss_mask):
        trained, real = mask.bool(), inputs["completion_mask"][place].bool()
        if not trained.any():
            continue
        logprobs = []
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            values = inputs.get(name)
            logprobs.append(None if values is None else tuple(values[place][trained].tolist()))
        rows.append(
            TrainedRow(
                tuple(inputs["prompt_ids"][place][inputs["prompt_mask"][place].bool()].tolist()),
                tuple(inputs["completion_ids"][place][real].tolist()),
                tuple(mask[real].tolist()),
                tuple(advantages[place][trained].tolist()),
                *logprobs,
            )
        )
    return rows


def bundled(metrics):
    """Return metrics with those that are always logged together as one: `completions=1,8,...`, in the order of
    [`BUNDLES`]. A bundle that lacks a name is left as it is."""
    found = dict(metrics)
    for bundle in BUNDLES:
        for name in metrics:
            beginning = name.removesuffix(bundle[0])
            names = [f"{beginning}{leaf}" for leaf in bundle]
            if name != beginning and all(other in metrics for other in names):
                found[beginning.removesuffix("/")] = ",".join(found.pop(other) for other in names)
    return found


@contextmanager
def recording(environment_class):
    """Yield a [`Recorder`]; it also records calls of the environments of a class, which has an `episode`."""
    recorder = Recorder()
    guarded(environment_class)()  # wraps methods of the class for good, so it must see the class without patches
    with ExitStack() as patches:
        patches.enter_context(recorder._sampling(GRPOTrainer, "_generate_single_turn"))
        patches.enter_context(recorder._sampling(PathCache, "complete"))
        patches.enter_context(recorder._losses())
        for name in ("reset", "move", "get_reward"):
            patches.enter_context(recorder._environment(environment_class, name))
        for name, argument in COLLECTIVES.items():
            patches.enter_context(recorder._collective(name, argument))
        yield recorder
