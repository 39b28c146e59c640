"""What a run does at TRL's level, line by line: the seams it enters, the random numbers it draws, its collectives."""

import functools
import inspect
import random
import zlib
from contextlib import ExitStack, contextmanager
from itertools import groupby
from unittest.mock import patch

import numpy as np
import torch
from transformers import GenerationMixin, Qwen2Model, Trainer
from trl import GRPOTrainer

# Functions of TRL and transformers, each with those of its arguments that the record shows.
SEAMS = {
    GRPOTrainer: {
        "__init__": [],
        "get_train_dataloader": [],
        "_get_train_sampler": [],
        "get_eval_dataloader": [],
        "_get_eval_sampler": [],
        "_get_per_token_logps_and_entropies": ["input_ids", "logits_to_keep", "batch_size", "compute_entropy"],
        "training_step": [],
        "_prepare_inputs": [],
        "_calculate_rewards": ["prompts", "completions", "completion_ids_list"],
        "_tokenize_prompts": ["prompts"],
        "_generate_single_turn": ["prompt_ids", "num_generations"],
        "_get_tool_suffix_ids": ["tool_messages"],
        "_tool_call_loop": ["prompt_ids", "completion_ids"],
        "_generate": ["prompts"],
        "_generate_and_score_completions": ["inputs"],
        "compute_loss": ["num_items_in_batch"],
        "_compute_loss": ["inputs"],
        "prediction_step": [],
        "log": [],
        "_save_checkpoint": [],
        "_load_optimizer_and_scheduler": ["checkpoint"],
    },
    Trainer: {
        "train": [],
        "_init_training_state": [],
        "_prepare_for_training": [],
        "_run_epoch": ["epoch", "epochs_trained", "steps_trained_in_current_epoch"],
        "_finalize_training": [],
        "_maybe_log_save_evaluate": [],
        "evaluate": [],
        "evaluation_loop": [],
        "log": [],
        "_save_checkpoint": [],
        "_save_optimizer_and_scheduler": [],
        "_save_rng_state": [],
        "save_model": [],
        "_load_from_checkpoint": [],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "_load_rng_state": ["checkpoint"],
        "_push_from_checkpoint": [],
    },
    # What the seams lead to, and what is computed without them.
    GenerationMixin: {"generate": ["inputs", "input_ids"]},
    Qwen2Model: {"forward": ["input_ids"]},
}
# Functions of torch.distributed, each with the argument that says what this process hands in.
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


def checksum(value):
    return f"{zlib.crc32(value if isinstance(value, bytes) else repr(value).encode()):08x}"[:4]


def shown(value):
    """Sizes, and for whole numbers and texts a short hash; no number that rounding could change."""
    match value:
        case torch.Tensor() if value.is_floating_point():
            return f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")
        case torch.Tensor():
            return f"{tuple(value.shape)}#{checksum(value.tolist())}"
        case dict():
            return shown(value["completion_ids"]) if "completion_ids" in value else "{}"
        case [dict(), *_] if "role" not in value[0]:  # rows of a data set, which may hold anything
            return f"[{len(value)}]"
        case list():
            return f"[{len(value)}]#{checksum(value)}"
        case str():
            return "..."
        case _:
            return str(value)


class Recorder:
    """The lines of a record. What happens in a function is indented; `~` is a generator that others advanced."""

    def __init__(self):
        self.found, self.depth, self.states, self.silent, self.metrics = [], 0, {}, False, set()

    @property
    def lines(self):
        """The record; where a line follows itself, once with their number."""
        counted = ((line, len(list(same))) for line, same in groupby(self.found))
        return [line if times == 1 else f"{line}  x{times}" for line, times in counted]

    def write(self, line):
        self.found.append(" " * self.depth + line)

    def draws(self):
        """One line per generator that has moved since the last event."""
        _, keys, place, *_ = np.random.get_state()
        states = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": (keys.tobytes(), place),
            "random": random.getstate(),
        }
        for name, state in states.items():
            if self.states.get(name, state) != state:
                # As text only where it moved: numpy takes longer for that than a tiny model for a step.
                state = repr((keys, place)).encode() + keys.tobytes() if name == "numpy" else state
                self.write(f"~ {name} {checksum(state)}")
        self.states = states

    @contextmanager
    def event(self, line):
        self.draws()
        self.write(line)
        self.depth += 1
        try:
            yield
        except BaseException as error:
            self.write(f"raised {type(error).__name__}")
            raise
        finally:
            self.draws()
            self.depth -= 1

    def seam(self, owner, name, arguments):
        function = owner.__dict__[name]
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recorded(*args, **kwargs):
            if self.silent:  # a model that generates takes as many steps as the longest of its answers
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            named = given.arguments | given.arguments.get("kwargs", {})
            values = {key: named.get(key) for key in arguments}
            told = [f"{key}={shown(value)}" for key, value in values.items() if value is not None]
            if (owner, name) == (Trainer, "log"):
                self.metrics |= given.arguments["logs"].keys()
            with self.event(" ".join([f"{owner.__name__}.{name}", *told])):
                self.silent = name == "generate"
                try:
                    return function(*args, **kwargs)
                finally:
                    self.silent = False

        return patch.object(owner, name, recorded)

    def collective(self, name, argument):
        function = getattr(torch.distributed, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recorded(*args, **kwargs):
            value = signature.bind(*args, **kwargs).arguments.get(argument)
            tensor = f" {tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else None
            self.draws()
            self.write(f"* {name}{tensor or (argument and f' {type(value).__name__}') or ''}".replace("torch.", ""))
            return function(*args, **kwargs)

        return patch.object(torch.distributed, name, recorded)


@contextmanager
def recording():
    """A `Recorder` of what is done inside."""
    recorder = Recorder()
    with ExitStack() as patches:
        for owner, functions in SEAMS.items():
            for name, arguments in functions.items():
                patches.enter_context(recorder.seam(owner, name, arguments))
        for name, argument in COLLECTIVES.items():
            patches.enter_context(recorder.collective(name, argument))
        yield recorder
