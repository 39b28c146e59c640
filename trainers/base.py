"""The class between TRL's `GRPOTrainer` and the methods. It overrides methods of TRL once, and delegates to parts.

Only this file, `saving.py`, `tool_loop.py`, `trl_state.py` and `serving/backend.py` name private attributes of TRL or
of transformers' trainer, and `tests/test_contract.py` pins each of them. `hooks.py` has the methods that a method of
this package overrides. `step.py` shows the order in which a generation batch is made.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig
from transformers.trainer_utils import HubStrategy
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from trl_explore.agents.forks import AgentForks
from trl_explore.agents.turns import Turns, TurnTokens, guarded_factories
from trl_explore.agents.watch import ToolWatch
from trl_explore.auto.explorer import AutoExplorer
from trl_explore.credit.part import Credit
from trl_explore.explorers.branch_explorer import BranchExplorer
from trl_explore.explorers.branching import Branching
from trl_explore.explorers.exploration import Exploration
from trl_explore.explorers.explorer import Explorer, PlainSampling
from trl_explore.explorers.resample import ResampleExplorer
from trl_explore.forks.engine import Forks
from trl_explore.gradients.feature_pass import FeaturePass
from trl_explore.methods import FromRow, Method
from trl_explore.names import shown
from trl_explore.packing.forward import PackedForward, unwrapped
from trl_explore.publishing.cards import citation
from trl_explore.publishing.publisher import Publisher
from trl_explore.rewards.success import check_success_reward
from trl_explore.rewards.threshold import ThresholdWatch
from trl_explore.rows.columns import prompts_of, row_columns
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Pass
from trl_explore.rows.printed import printed_visibly
from trl_explore.rows.ranks import Ranks
from trl_explore.rows.rollouts import Rollout, Rows
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict
from trl_explore.rows.table import CompletionsTable, empty_logs
from trl_explore.rows.training import StreamTraining
from trl_explore.sampling.adapters import keep_learned_prompt
from trl_explore.sampling.continued import counted_from_the_start
from trl_explore.sampling.count import TokenCount
from trl_explore.sampling.generation import generating_model
from trl_explore.sampling.positions import fixed_rotary_length
from trl_explore.sampling.sampler import Sampler
from trl_explore.selection.choice import PromptChoice
from trl_explore.selection.rounds import Rounds, rounds_of
from trl_explore.serving.backend import ServedGeneration, our_backend
from trl_explore.serving.session import Serving

from .config import ExplorationConfig, check_config_class, upgrade_config
from .explorer_options import OwnOptions, own_options
from .hooks import Hooks
from .replaced import Replaced
from .requires import Requires as Requires
from .requires import check_arguments, check_vision
from .saving import Saving
from .step import Step
from .tool_loop import TrainerToolLoop
from .trl_state import TRLState


def _paper_of(row: Method) -> Any:
    """Return the paper that a model card cites: the method's own, or GRPO's if the method has none."""
    if not row.paper:
        return GRPOTrainer._paper
    return {"citation": citation(row.card), **row.paper}


class ExplorationTrainer(Hooks, GRPOTrainer):
    """
    Base class of the exploration trainers. Used directly, it is [`~trl.GRPOTrainer`].

    A method overrides the hooks of [`~trl_explore.trainers.hooks.Hooks`] and uses parts (`sample`, `scorer`, `ranks`,
    ...). This class connects hooks and parts to TRL: it overrides each method of TRL that they need once, in the order
    in which TRL calls them. A run resumes bit for bit from its checkpoints, even from the middle of a generation
    batch.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` may be a plain [`~trl.GRPOConfig`], which gets
    the method's defaults. A subclass that samples rows itself refuses `rollout_func` and vision-language models. It
    also refuses tools and environments, unless it sets `Requires(tools=True)`.

    Raises:
        ValueError: If the method cannot work with a field, a data set or an option. Raised before the model is loaded.
        NotImplementedError: If the method does not support the sampling backend yet.
    """

    _name: Any = FromRow(lambda row: row.title)
    _tag_names: Any = FromRow(lambda row: [*row.tags])
    _paper: Any = FromRow(_paper_of)
    args: ExplorationConfig
    dataset_names: list[str] = []  # names of the training data, for the model card

    # Class-level defaults, so that an object made without `__init__` behaves as plain GRPO.
    hub_model_id: Any
    push_in_progress: Any
    vllm_generation: ServedGeneration
    environments: Any
    shaped_rewards: torch.Tensor  # of the main rows, `(N, F)`; set when the first batch is scored
    use_vllm = log_completions = False
    current: Pass | None = None  # the pass that runs now; None for the main rows and in evaluation
    _budget_spent: Callable[[], float] | None = None  # see `end_by_budget`
    _stream_tokens: dict[str, int] = {}  # number of tokens that each stream has seen, as TRL counts them
    # transformers sets these two at the start of `train`, and checkpoints save them.
    _tr_loss = torch.tensor(0.0)
    _globalstep_last_logged = 0

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{model_id.split('/')[-1]}-{self._name}")
        check_config_class(args, self.config_class, type(self).__name__)
        args = upgrade_config(args, self.config_class)
        self.check(args, tools=tools, environment_factory=environment_factory)
        requires = self.requirements(args)
        given = {
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
            "train_dataset": train_dataset,
            "samples_as_grpo": self.samples_as_grpo(args),
        }
        check_arguments(type(self).__name__, requires, args, **given)
        explorer_options: dict[str, OwnOptions] = {}
        if args.explores_unsolved:  # raise errors before the model is loaded
            is_agent = bool(tools) or environment_factory is not None
            explorer_options = own_options(args, is_agent=is_agent, train_dataset=train_dataset)
        self.watch = ToolWatch()
        if tools and requires.watched_tools:
            tools = [self.watch.watched(tool) for tool in tools]
        if requires.turns:
            environment_factory = guarded_factories(environment_factory)
        with our_backend(args):
            super().__init__(
                *(model, reward_funcs, args, train_dataset, eval_dataset, processing_class),
                *(reward_processing_classes, callbacks, optimizers, quantization_config, peft_config),
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        keep_learned_prompt(self.model)
        # Methods take random numbers from this generator, one per process. GRPO samples the main rows with the global
        # generator, so a method must not use that one.
        self.exploration_generator = torch.Generator().manual_seed(args.seed + 7919 * (args.process_index + 1))
        self.saving.attach()
        if self.serving is not None:
            self.serving.check(self.longest_prompt())
        if args.shared_prefix_training != "off":
            self.packing.enable(
                ref_model=self.ref_model,
                longest_prompt=self.longest_prompt,
                vision=self._is_vlm,
                router_loss=self.aux_loss_enabled,
            )
        check_success_reward(args.success_reward, self.reward_func_names)
        if self._is_vlm:
            is_supported = self.samples_as_grpo(args) and requires.vision
            check_vision(type(self).__name__, args, is_supported=is_supported)
        if requires.turns:
            loop, encode_answers = self._tool_call_loop, self._get_tool_suffix_ids
            self.turns = Turns(self, TrainerToolLoop(self, loop=loop, encode_answers=encode_answers))
        if requires.features:
            self.features = FeaturePass(self)
        self.replaced = Replaced(self, given)
        self.explorer = self.make_explorer()
        self.branch_explorer = self.make_branch_explorer()
        if self.branch_explorer is not None and not isinstance(self.branch_explorer, BranchExplorer):
            raise TypeError(
                f"{type(self).__name__}.make_branch_explorer returned {self.branch_explorer!r}: return a "
                "`BranchExplorer`, made with `(self, self.make_forks(), self.scorer)`."
            )
        if args.explores_unsolved:
            for own in explorer_options.values():
                own.follow(args)  # TRL may have changed fields
            forks = self._shared_forks(explorer_options)
            self.branch_explorer = AutoExplorer(self, forks, self.scorer, options=explorer_options)
        if args.explore == "resample":
            self.explorer = ResampleExplorer(self, self.sample, self.scorer)
        if self.explorer is not None and not isinstance(self.explorer, Explorer):
            raise TypeError(
                f"{type(self).__name__}.make_explorer returned {self.explorer!r}: return an `Explorer`, made "
                "with `(self, self.sample, self.scorer)`."
            )
        if self.explorer is not None and self.branch_explorer is not None and self.branch_explorer.samples_with_main:
            raise ValueError(
                f"{type(self).__name__} has two explorers that sample the main rows, {self.explorer.name!r} and "
                f"{self.branch_explorer.name!r}: with DEEP-GRPO, set `deferred_branching=False`."
            )
        self._check_rows_of_groups()
        self.setup()

    def _check_rows_of_groups(self) -> None:
        """Raise a ValueError if `trained_generations` would drop rows that an explorer credits."""
        explorer = self.branch_explorer
        if self.args.trained_generations is None or explorer is None or not explorer.credits_main_rows:
            return
        names = [explorer.name]
        if isinstance(explorer, AutoExplorer):
            names = [name for name, own in explorer.explorers.items() if own.credits_main_rows]
        raise ValueError(
            f"`trained_generations={self.args.trained_generations}` leaves out rows of a group, and "
            f"{type(self).__name__} with {', '.join(map(repr, names))} gives these rows credit together with others: "
            "leave `trained_generations` out."
        )

    # ------------------------------------------------------ parts, and the methods of `Policy` through which they work

    @cached_property
    def ranks(self) -> Ranks:
        """The processes of the run: sums and gathers over them."""
        return Ranks(self.accelerator)

    @cached_property
    def sample(self) -> Sampler:
        """Sampler of continuations of token prefixes."""
        return Sampler(self)

    @cached_property
    def scorer(self) -> Scorer:
        """Scorer of further rows, and of completions while a method still samples (`judge`)."""
        return Scorer(self)

    @cached_property
    def choice(self) -> PromptChoice | None:
        """Chooser of the prompts to explore. None if all prompts are explored."""
        return PromptChoice(self) if self.args.explores_some else None

    @cached_property
    def exploration(self) -> Exploration | None:
        """Link between the explorer and the main rows. None without an explorer."""
        if self.explorer is None:
            return None
        return Exploration(self, self.explorer, self.choice, self.sample, self.scorer)

    @cached_property
    def branching(self) -> Branching | None:
        """Link between the branch explorer and the training rows. None without a branch explorer."""
        if self.branch_explorer is None:
            return None
        # With `explores_unsolved`, the `AutoExplorer` itself chooses the prompts.
        choice = None if self.args.explores_unsolved else self.choice
        return Branching(self, self.branch_explorer, choice, self.scorer)

    @property
    def is_agent(self) -> bool:
        """True if completions have tools or environments. TRL makes `environments` with the first batch only."""
        return bool(self.tools or self.environments or self.environment_factories)

    def make_forks(self) -> Forks:
        """Return the engine that samples branches of completions of one turn, or of an agent's trajectories."""
        if self.is_agent:
            return self.make_agent_forks()
        return Forks(self, self.sample, self.scorer)

    def make_agent_forks(self, **options: Any) -> AgentForks:
        """Return the engine that samples branches of trajectories. It follows the main rows from now on. For the
        options, see [`~trl_explore.agents.forks.AgentForks`]."""
        if self.turns is None:
            raise ValueError(
                f"{type(self).__name__} samples branches of an agent, but does not follow its turns: set "
                "`requires = Requires(tools=True, turns=True)` in the class."
            )
        if self.forks is not None:
            raise TypeError(
                f"{type(self).__name__} makes two engines that sample an agent's branches: call `make_forks` or "
                "`make_agent_forks` once."
            )
        options.setdefault("environment_state", self.args.environment_state)
        self.forks = AgentForks(self, self.turns, self.sample, self.scorer, self.watch, **options)
        return self.forks

    def _shared_forks(self, options: Mapping[str, OwnOptions]) -> Forks:
        """Return the engine of all explorers of `explore="auto"`."""
        if not self.is_agent:
            return self.make_forks()
        # With several rounds, turn trees also fork their branches. For that, the engine must keep the states of the
        # branches' environments.
        return self.make_agent_forks(
            keep_states=any(getattr(one.args, "num_rounds", 1) > 1 for one in options.values())
        )

    @cached_property
    def threshold_watch(self) -> ThresholdWatch | None:
        """Watch that warns if every completion counts as a failure, or every one as a success. None if training does
        not use the success threshold."""
        args = self.args
        if not args.asks_about_success:
            return None
        return ThresholdWatch(
            threshold=args.resolved_success_threshold,
            success_reward=args.success_reward,
            warns=self.accelerator.is_main_process,
        )

    @cached_property
    def rounds(self) -> Rounds | None:
        """Dynamic sampling, and the choice of the prompts of a batch. None if the data loader chooses the prompts and
        all groups are trained."""
        data = self.train_dataset
        if self.args.remove_unused_columns:
            data = self._remove_unused_columns(data, "training")
        return rounds_of(self, self.scorer, data, shuffle=bool(self.shuffle_dataset))

    @cached_property
    def credit(self) -> Credit:
        """Advantages that replace GRPO's in the main rows if the configuration says so, for example `advantage`."""
        return Credit(self, self.scorer)

    @cached_property
    def stream_training(self) -> StreamTraining:
        """Training of the rows of streams."""
        return StreamTraining(
            self,
            together=self.packing.regroups,
            window=self.packing.window,
            trim_up_to=fixed_rotary_length(unwrapped(self, self.model).config),
        )

    @cached_property
    def table(self) -> CompletionsTable:
        """The completions table."""
        return CompletionsTable(self)

    @cached_property
    def packing(self) -> PackedForward:
        """Forward passes that compute the shared prefix of several rows only once."""
        return PackedForward(self)

    @cached_property
    def serving(self) -> Serving | None:
        """The vLLM backend. None if transformers samples."""
        return Serving(self, self.vllm_generation, self._sync_weights) if self.use_vllm else None

    @cached_property
    def saving(self) -> Saving:
        """Writing of checkpoints, and resuming from them."""
        return Saving(self)

    @cached_property
    def publisher(self) -> Publisher:
        """Model cards, and pushes to the Hub."""
        return Publisher(self, self.args)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def is_training(self) -> bool:
        """Return whether TRL samples rows for training. False in evaluation."""
        assert self.model is not None
        return self.model.training

    @property
    def training_progress(self) -> float:
        """Return the completed share of the training, from 0 to 1: the share of `max_steps`, or the share of the
        budget if that is larger (see [`end_by_budget`])."""
        share_of_steps = self.state.global_step / max(self.state.max_steps, 1)
        if self._budget_spent is None:
            return share_of_steps
        return max(share_of_steps, self._budget_spent())

    def end_by_budget(self, share_spent: Callable[[], float]) -> None:
        """
        Announce that a budget, for example of tokens, may end the training before `max_steps`.

        Fields that change over training (`explore_share_end`) then reach their final value when the budget is spent.

        Args:
            share_spent (`Callable`):
                Returns the spent share of the budget, from 0 to 1. It must return the same number on all processes.
        """
        self._budget_spent = share_spent

    def log_metric(self, name: str, value: float) -> None:
        """Log a training metric, named `noun/stat`. Pass the same value on all processes. The logs have the mean over
        the logging interval."""
        self._metrics["train"][name].append(float(value))

    def encode_prompts(self, prompts: list) -> list[list[int]]:
        """Return the tokens `[R][P_i]` of prompts, which are texts or conversations. TRL encodes the prompts of the
        data set in the same way."""
        return self._tokenize_prompts(prompts)[0] if prompts else []

    def longest_prompt(self, most: int = 10_000) -> int | None:
        """Return the number of tokens of the longest of the first `most` prompts. None if tools, environments or
        images add tokens to prompts, or if the data set is not a [`~datasets.Dataset`] with a column `prompt`."""
        data = self.train_dataset
        if self.tools or self.environment_factories is not None or self._is_vlm or not isinstance(data, Dataset):
            return None
        if not len(data) or "prompt" not in (row_columns(data) or []):
            return None
        prompts = prompts_of(data, most)
        # Encoding all prompts would be slow. The prompt with the most tokens is most likely among the longest texts.
        longest_texts = sorted(prompts, key=lambda prompt: len(str(prompt)))[-4:]
        return max(map(len, self.encode_prompts(longest_texts)))

    # The next methods, up to `running`, are documented in `rows/policy.py`.

    def generate(self, prefixes, max_new_tokens, parts=None):
        config = self.generation_config
        self.generation_config = copy.deepcopy(config)
        self.generation_config.max_new_tokens = max_new_tokens
        # A last chunk of one token would look like a sampling step to `sampling.generation.recorded`.
        self.generation_config.prefill_chunk_size = None
        model = self.accelerator.unwrap_model(self.model)
        counted = nullcontext() if parts is None else counted_from_the_start(model, prefixes, parts)
        try:
            with self.packing.own_attention(), counted:
                return super()._generate_single_turn(prefixes, None, {}, 1)[0]
        finally:
            self.generation_config = config

    @contextmanager
    def generating(self) -> Iterator[tuple[Any, GenerationConfig]]:
        with self.packing.own_attention(), generating_model(self, generation_kwargs=self.generation_kwargs) as model:
            yield model, self.generation_config

    def forward(self, model, ids, mask, width, **options):
        return self._get_per_token_logps_and_entropies(model, ids, mask, width, **options)[:2]

    def scored(self, rows: Rows) -> RowDict:
        return super()._generate_and_score_completions(with_prompts(rows.examples))

    def rewarded(self, rows: Rows) -> torch.Tensor:
        examples = with_prompts(rows.examples)
        prompts = [example["prompt"] for example in examples]
        # Let TRL decode the completions, so that reward functions get the same texts or messages as for main rows.
        completions = self._generate(prompts)[3]
        return self._calculate_rewards(examples, prompts, completions, rows.completion_ids)

    def loss(self, model: Any, rows: RowDict) -> torch.Tensor:
        return self._compute_loss(model, rows)

    def _sync_weights(self) -> None:
        """Send the weights to vLLM, unless vLLM already has the weights of this training step."""
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    @contextmanager
    def running(self, other: Pass) -> Iterator[Pass]:
        main = TRLState.of(self)
        other.logs = empty_logs(main.logs)
        in_pass = replace(
            main,
            logs=other.logs,
            metrics=other.metrics,
            pending_metrics=other.pending,
            pending_columns=other.columns,
            num_tokens_seen=self._stream_tokens.get(other.name or "", 0),
            # The loss of the main rows already has the entropy bonus and the router loss, which must not count twice.
            has_entropy_bonus=False,
            has_router_loss=False,
        )
        if other.rows is not None:
            in_pass.num_generations = other.rows.group_size
            # These rows are finished: TRL must reset no environment and call no tool for them.
            in_pass.tools, in_pass.environments, in_pass.environment_factories = [], other.environments, None
            # With a `rollout_func`, TRL samples nothing. It decodes and scores the rows that the function returns, and
            # takes `env_mask` as their loss mask.
            finished = {
                "prompt_ids": other.rows.prompt_ids,
                "completion_ids": other.rows.completion_ids,
                "logprobs": other.rows.logprobs if self.use_vllm else None,
                "env_mask": other.rows.loss_mask,
            }
            in_pass.rollout_func = lambda prompts, trainer: finished
        self.current, before = other, self.current
        in_pass.put_into(self)
        try:
            yield other
        finally:
            main.put_into(self)
            self.current = before
            # Add the metrics of a stream to the metrics of the main rows, under its name.
            if other.name is not None:
                for key, values in other.metrics.items():
                    main.metrics[f"{other.name}/{key}"].extend(values)
                if other.metrics["num_tokens"]:
                    self._stream_tokens = {**self._stream_tokens, other.name: other.metrics["num_tokens"][-1]}
        if other.keep_metrics:
            for key, values in other.pending.items():
                self._pending_metrics[key].extend(values)

    # ------------------------------------------------- seams into TRL, in the order in which TRL calls them: rollouts

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.packing.mode == "off" or self._buffered_inputs is before:  # no new generation batch
            return inputs
        self._buffered_inputs = self.packing.regrouped(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs):
        sample_and_score, logs = super()._generate_and_score_completions, self._logs
        if self.is_training:
            self.replaced.follow()
            if self.rounds is not None:  # the table must hold the rows of all rounds
                self._logs = self.table.begin(logs)
            return Step(self, sample_and_score, self._logs, self._metrics["train"]).run(inputs)
        if not self.log_completions:
            return sample_and_score(inputs)
        self._logs = self.table.of_evaluation(logs, self.state.global_step)
        try:
            output = sample_and_score(inputs)
            self.table.one_reward_per_name(self._logs, len(inputs))
            return output
        finally:
            self._logs = logs

    def _generate(self, prompts):
        # TRL returns `prompt_ids, completion_ids, tool_mask, completions, logprobs, ...`.
        if self.current is not None and self.current.rows is not None:
            result = super()._generate(prompts)
            self.packing.check_lengths(*result[:2])
            known = self.current.rows.completions
            if not any(known):
                return result
            # If the messages of a row are known, use them. TRL would decode messages from the tokens.
            completions = []
            for messages, decoded in zip(known, result[3], strict=True):
                completions.append(messages or decoded)
            return *result[:3], completions, *result[4:]
        training = self.is_training
        if self.forks is not None:
            self.forks.set_limit()
            if training:
                self.forks.begin(self.main_examples, self.given_examples, len(prompts))
        turns = self.turns if self.tools else None  # without tools, TRL runs no tool loop
        count_before = self.sample.tokens.own
        with nullcontext() if turns is None else turns.following(prompts):
            result = super()._generate(prompts)
        if training and self.rollout_func is not None and self.sample.tokens.own == count_before:
            # The `rollout_func` did not sample through the trainer, so count the tokens that it returned.
            self.sample.tokens.add_returned(*result[1:3])
        self.packing.check_lengths(*result[:2])
        if self.main_rollout is not None and self.main_rollout.loss_mask is not None:
            result = (*result[:2], self.main_rollout.loss_mask, *result[3:])
        if turns is not None:
            turns.note_failures()
        if self.forks is not None and training:
            self.forks.end(prompts, result[:5], save=self.saving.checkpoint_before_stopping)
        if self.features is not None and training:
            self.features.begin(*result[:3])
        return result

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        # With vLLM, TRL takes `num_generations` consecutive rows as one prompt. With a `budget`, prompts have
        # different numbers of rows, so pass each row as a prompt.
        size = 1 if self.rounds is not None and self.rounds.rows_of else num_generations
        sample_turn = partial(
            super()._generate_single_turn,
            images=images,
            multimodal_fields=multimodal_fields,
            num_generations=size,
            has_tool_images=has_tool_images,
        )
        plain = partial(self._plain_turn, sample_turn)
        if self.turns is None:
            return self._turn(prompt_ids, plain)
        turn_rows = self.turns.begin(prompt_ids)
        if not turn_rows.contexts:  # every row for which TRL asks must end
            return self.turns.end(turn_rows, ([], None))
        with self.turns.budgeted(turn_rows):
            sampled = self._turn(turn_rows.contexts, plain)
        return self.turns.end(turn_rows, sampled)

    def _plain_turn(self, sample_turn: Callable[[list[list[int]]], tuple], contexts: list[list[int]]) -> Rollout:
        """Sample one completion, or turn, for each context with TRL's `sample_turn`. In training, count the tokens and
        seconds."""
        start = time.perf_counter()
        with self.packing.own_attention():
            if self.features is None or not self.is_training:
                sampled = sample_turn(contexts)
            else:
                sampled = self.features.sampled(sample_turn, contexts)
        rollout = Rollout(*sampled)
        if self.is_training:
            self.sample.note_seconds("main", time.perf_counter() - start)
            self.sample.tokens.add(rollout.completion_ids)
        return rollout

    def _turn(self, contexts: list[list[int]], plain: PlainSampling) -> TurnTokens:
        """Return one completion, or turn, for each context. In training, the hook `rollout` samples the main rows, and
        `forks` continues branches. In evaluation, TRL samples."""
        if self.forks is not None and self.forks.in_branches:
            rollout = self.forks.continued(contexts)
        elif self.is_training:
            if self.forks is not None:
                self.forks.before_turn()
            self.main_rollout = rollout = self.rollout(contexts, plain)
        else:
            self.main_rollout, rollout = None, plain(contexts)
        logprobs = rollout.logprobs
        if logprobs is None and self.use_vllm:
            # The method reports no log-probabilities, for example because it sampled from another prompt. With None
            # for each token, TRL's importance sampling correction leaves the rows unchanged.
            logprobs = [[None] * len(ids) for ids in rollout.completion_ids]
        return rollout.completion_ids, logprobs

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, *args):
        if self.turns is not None:
            self.turns.loop_begins(prompts, prompt_ids, completion_ids)
        return super()._tool_call_loop(prompts, prompt_ids, completion_ids, *args)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        own = super()._get_per_token_logps_and_entropies
        arguments = (model, input_ids, attention_mask, logits_to_keep, *args)
        if self.features is not None and self.features.waits:  # it needs the rows one by one, so do not pack them
            return self.features.watched(partial(own, *arguments, **kwargs), logits_to_keep)
        if self.packing.mode == "off":
            result = own(*arguments, **kwargs)
        else:
            result = self.packing(own, *arguments, **kwargs)
        self.credit.penalise(result[0])
        return result

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # Reward functions may change their arguments, but the search continues from the tokens and messages. So give
        # the functions copies of the tokens. TRL logs the messages as the functions leave them, so keep a copy.
        token_copies = [[*ids] for ids in completion_ids_list]
        messages = own_copy(completions)
        known, extra = self._known_rewards()
        call = self.scorer.prepare_rewards(self.reward_funcs, known, extra, num_rows=len(prompts))
        functions, self.reward_funcs = self.reward_funcs, call.functions
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, token_copies)
        finally:
            self.reward_funcs = functions
        rewards, columns = self.scorer.merge_rewards(call, rewards)
        for column, values in columns.items():
            self._pending_extra_logs[column].extend(values)
        if self.current is not None:
            self.current.rewards_per_func = rewards
            return rewards
        if self.turns is not None:
            rewards = self.turns.void_rewards(rewards, self._metrics["train" if self.is_training else "eval"])
        if not self.is_training:
            return rewards
        if self.turns is not None:
            self.turns.stop_if_environments_died(self.saving.checkpoint_before_stopping)
        self.scorer.stop_if_unscored(rewards, inputs[0], group_size=self.num_generations or 1)
        self.scorer.rewards_per_func, self.main_completion_ids = rewards, completion_ids_list
        self.credit.completions = messages
        if self.threshold_watch is not None:
            for name, value in self.threshold_watch.look(self.scorer.success().tolist()).items():
                self.log_metric(name, value)
        self.shaped_rewards = self.shape_rewards(rewards.clone())
        return self.shaped_rewards

    def _known_rewards(self) -> tuple[list[list[float] | None] | None, Sequence[Mapping[str, Any]]]:
        """
        Return the rewards of rows that were scored during sampling, and the values that were logged with them.

        Returns:
            `tuple`: Rewards `[B][F]`, or None if no row was scored; and logged values by column, `[B]`.
        """
        if self.current is not None:
            assert self.current.rows is not None
            return self.current.rows.known_rewards, self.current.rows.extra
        known: list[list[float] | None] | None = None
        extra: Sequence[Mapping[str, Any]] = ()
        if self.main_rollout is not None and self.main_rollout.known_rewards is not None:
            known, extra = [*self.main_rollout.known_rewards], self.main_rollout.extra or ()
        if self.turns is not None:
            known = self.turns.known_rewards(known, num_rewards=len(self.reward_funcs))
        return known, extra

    # ------------------------------------------------------------------------------- seams into TRL: training, logging

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.is_training or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # Run the backward passes of streams here. TRL runs the backward pass of the main rows, with the returned loss.
        # The returned loss also contains the losses of streams, without gradient, so that the logged loss is the sum.
        accumulated = self.current_gradient_accumulation_steps
        extra = self.stream_training.backward(
            model, self._step % self.args.steps_per_generation, num_accumulated=accumulated
        )
        # Scale advantages and beta together: this scales the policy and KL terms, but not the entropy bonus and the
        # router loss.
        scale = self.stream_training.main_scale(inputs)
        before = self.beta, self.epsilon_low, self.epsilon_high
        if scale != 1.0:
            inputs = {**inputs, "advantages": inputs["advantages"] * scale}
        self.beta = self.beta * scale
        if "kl_cov" in inputs:  # the penalty of `kl_cov` replaces the clip
            self.epsilon_low = self.epsilon_high = math.inf
        try:
            with self.credit.loss_of(inputs, scale=scale) as rows:
                loss = super().compute_loss(model, rows, return_outputs, num_items_in_batch)
        finally:
            self.beta, self.epsilon_low, self.epsilon_high = before
        return loss if extra is None else loss + extra

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        before, writes_table = self._logs, self.log_completions
        if writes_table and self.accelerator.is_main_process:
            self._logs = self.table.whole(before, self.state.global_step)
            # A run that resumes from a checkpoint without rows may have none yet. TRL must not write an empty table
            # over the file of that step.
            self.log_completions = len(self._logs["prompt"]) > 0
        try:
            with printed_visibly():
                super().log(logs, start_time)
        finally:
            self._logs, self.log_completions = before, writes_table

    # ------------------------------------------------------------------------ seams into transformers: the run, saving

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        self.replaced.begin_run()
        checkpoint = self.saving.begin(resume_from_checkpoint)
        self.scorer.begin_run(resumed=bool(checkpoint))
        try:
            result = super().train(checkpoint, *args, **kwargs)
        finally:
            self.replaced.end_run()
        if self.state.global_step >= self.state.max_steps:
            self.scorer.stop_if_never_scored()
        if self.threshold_watch is not None:
            self.threshold_watch.end()
        if self.branch_explorer is not None:
            self.branch_explorer.end_run()
        return result

    def _get_train_sampler(self, dataset=None):
        self.saving.sampler = super()._get_train_sampler(dataset)
        if self.rounds is not None:
            data = self.train_dataset if dataset is None else dataset
            self.rounds.begin_run(data, shuffle=bool(self.shuffle_dataset), seed=self.args.seed)
        return self.saving.sampler

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, *args, **kwargs):
        found = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        return self.saving.first_batch(found, max_steps, num_update_steps_per_epoch)

    def _run_epoch(self, **arguments):  # type: ignore[override]  # transformers passes all arguments by name
        if self.saving.begin_epoch(arguments):
            super()._run_epoch(**arguments)

    def _save_checkpoint(self, model, trial):
        with self.saving.checkpoint(trial):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.saving.write(output_dir)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # Next, one process writes the file that marks the checkpoint as complete. All processes must be done by then.
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.saving.restore(checkpoint)

    def _save(self, output_dir=None, state_dict=None):
        # transformers pickles the arguments next to the weights. The token must not be in that file, and functions can
        # be impossible to pickle.
        token, advantage = self.args.hub_token, self.args.advantage
        self.args.hub_token, self.args.advantage = None, shown(advantage)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token, self.args.advantage = token, advantage

    # ------------------------------------------------------------------------------- seams into transformers: the Hub

    def init_hf_repo(self, token=None, private=None):
        """Create the repository as TRL does, and its branch. Raise `HubError` or `ValueError` if pushes to it would
        fail. With `push_dry_run`, do not contact the Hub."""
        if self.is_world_process_zero():
            if self.args.push_dry_run:
                self.publisher.name_repo()
            else:
                self.publisher.make_repo(super().init_hf_repo, token, private)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):  # type: ignore[override]  # as in TRL
        """Write `README.md` into `output_dir` as TRL does, and the pictures of the training curves."""
        if self.is_world_process_zero():
            self.publisher.write_card(model_name, dataset_name, tags, method_tags=self._tag_names, paper=self._paper)

    def push_to_hub(
        self,
        commit_message="End of training",
        blocking=True,
        token=None,
        revision=None,
        private=None,
        *,
        dry_run=False,
        **kwargs,
    ):
        """
        Save the model in `output_dir` and publish it with its card, as TRL does. Every process must call it.

        A missing branch is created. `revision` and `private` default to `args.hub_revision` and
        `args.hub_private_repo`.

        With `dry_run=True` or `args.push_dry_run`, this method sends nothing, and needs neither a token nor a network.
        It prints which files would be sent, and returns the list as a [`~trl_explore.publishing.hub.PushPlan`].

        Raises:
            HubError: If the push fails. The model is saved, and the message says how to send it.
        """
        dry_run = dry_run or self.args.push_dry_run
        if not dry_run:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if self.args.push_method_state:
            self.saving.write(self.args.output_dir)
            self.accelerator.wait_for_everyone()
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        if dry_run:
            return self.publisher.rehearse(revision, private, **kwargs)
        return self.publisher.push(commit_message, blocking, token, revision, private, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.args.hub_strategy == HubStrategy.END:
            return
        self.accelerator.wait_for_everyone()  # a checkpoint is complete when every process has written its part
        if self.is_world_process_zero():
            self.publisher.push_checkpoint(checkpoint_folder)


def with_prompts(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return the examples, with an empty user message as the prompt of examples without one.

    Data need no prompts if an environment defines the task. TRL adds this message when it resets environments, but it
    does not reset them for finished rows.
    """
    empty = [{"role": "user", "content": ""}]
    return [example if "prompt" in example else {**example, "prompt": empty} for example in examples]


def watch(trainer: Any, method: str, seen: Callable[..., None]) -> Callable[[], None]:
    """
    Call a function after each call of one method of a GRPO trainer.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of this class or a subclass.
        method (`str`):
            `"scored"` (rows with rewards and advantages), `"rewarded"`, `"loss"`, `"turn"` (completions, or turns of
            an agent) or `"rollout"` (whole completions, with the answers of tools).
        seen (`Callable`):
            Called with the positional arguments of TRL's method, followed by its result.

    Returns:
        `Callable`: Call it to end this watch. Other watches of the same method continue.
    """
    names = {
        "scored": "_generate_and_score_completions",
        "rewarded": "_calculate_rewards",
        "loss": "_compute_loss",
        "turn": "_generate_single_turn",
        "rollout": "_generate",
    }
    name = names[method]
    own = getattr(trainer, name)
    was_replaced = name in trainer.__dict__  # by an earlier watch, for example
    ended = False

    def watched(*args: Any, **options: Any) -> Any:
        result = own(*args, **options)
        if not ended:
            seen(*args, result)
        return result

    def end() -> None:
        nonlocal ended
        ended = True
        if trainer.__dict__.get(name) is not watched:
            return  # a later watch has replaced `watched`, and still calls it
        if was_replaced:
            setattr(trainer, name, own)
        else:
            delattr(trainer, name)  # the method of the class is visible again

    setattr(trainer, name, watched)
    return end


def count_sampled(trainer: Any) -> TokenCount:
    """
    Return the count of the tokens that a GRPO trainer samples in training.

    An [`ExplorationTrainer`] counts by itself, and its checkpoints hold the count. For any other trainer, counting
    starts now. It counts every completion or turn that TRL samples, and the tokens that a `rollout_func` returns.
    Every process must call this function.
    """
    if isinstance(trainer, ExplorationTrainer):
        return trainer.sample.tokens
    tokens, ranks = TokenCount(), Ranks(trainer.accelerator)
    count_before = 0  # the count at the end of the last rollout

    def after_turn(*arguments_and_result: Any) -> None:
        if trainer.model.training:
            completion_ids = arguments_and_result[-1][0]
            tokens.add(completion_ids)

    def after_rollout(*arguments_and_result: Any) -> None:
        nonlocal count_before
        if not trainer.model.training:
            return
        if tokens.own == count_before:  # TRL sampled no turn, so a `rollout_func` made the completions
            completion_ids, tool_mask = arguments_and_result[-1][1:3]
            tokens.add_returned(completion_ids, tool_mask)
        count_before = tokens.own
        tokens.sum_up(ranks)

    watch(trainer, "turn", after_turn)
    watch(trainer, "rollout", after_rollout)
    return tokens


def log_metric(trainer: Any, name: str, value: float) -> None:
    """Log a training metric in any GRPO trainer."""
    trainer._metrics["train"][name].append(value)
