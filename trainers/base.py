"""The class between TRL's `GRPOTrainer` and the methods: it overrides each method of TRL once and asks a part.

This file, `saving.py` and `serving/backend.py` are the only ones that name private attributes of TRL or of
transformers' trainer; `tests/test_contract.py` pins each of them. `hooks.py` has what a method overrides, and
`step.py` the order in which a generation batch is made.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig
from transformers.trainer_utils import HubStrategy
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from trl_explore.agents.turns import Spoken, Turns, guarded_factories
from trl_explore.agents.watch import ToolWatch
from trl_explore.credit.part import Credit
from trl_explore.explorers.exploration import Exploration
from trl_explore.explorers.explorer import PlainSampling
from trl_explore.explorers.resample import ResampleExplorer
from trl_explore.gradients.feature_pass import FeaturePass
from trl_explore.methods import FromRow
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

from .config import upgrade_config
from .hooks import Hooks
from .replaced import Replaced
from .requires import Requires as Requires
from .requires import check_arguments, check_vision
from .saving import Saving
from .step import Step
from .tool_loop import TrainerToolLoop


class ExplorationTrainer(Hooks, GRPOTrainer):
    """
    Base class of the exploration trainers; used by itself it is [`~trl.GRPOTrainer`].

    A method overrides the hooks of [`~trl_explore.trainers.hooks.Hooks`] and works with parts (`sample`, `scorer`,
    `ranks`, ...). This class connects hooks and parts to TRL: it overrides each method of TRL that they need, once, in
    the order in which TRL calls them. Checkpoints hold what a bit-exact resume needs, also in the middle of a
    generation batch.

    The constructor takes what [`~trl.GRPOTrainer`] takes. `args` may be a plain [`~trl.GRPOConfig`], which gets the
    method's defaults. A subclass that samples rows itself refuses `rollout_func`, vision-language models, and, unless
    it says otherwise, tools and environments.

    Raises:
        ValueError: For a field, data set or option the method cannot work with, before any model work.
        NotImplementedError: For a sampling backend that the method does not support yet.
    """

    _name: Any = FromRow(lambda row: row.title)
    _tag_names: Any = FromRow(lambda row: [*row.tags])
    _paper: Any = FromRow(lambda r: {"citation": citation(r.card), **r.paper} if r.paper else GRPOTrainer._paper)
    dataset_names: list[str] = []  # of the training data, for the card

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    hub_model_id: Any
    push_in_progress: Any
    vllm_generation: ServedGeneration
    environments: Any
    shaped_rewards: torch.Tensor  # of the main rows, `(N, F)`, once there are any
    use_vllm = log_completions = False
    current: Pass | None = None  # the pass that is running; `None` for the main one and evaluation
    _rollout: Rollout | None = None
    _budget_spent: Callable[[], float] | None = None
    _stream_tokens: dict[str, int] = {}
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
        self.watch = ToolWatch()
        with our_backend(args):
            super().__init__(
                *(model, reward_funcs, args, train_dataset, eval_dataset, processing_class),
                *(reward_processing_classes, callbacks, optimizers, quantization_config, peft_config),
                tools=[self.watch.watched(tool) for tool in tools] if tools and requires.watched_tools else tools,
                rollout_func=rollout_func,
                environment_factory=guarded_factories(environment_factory) if requires.turns else environment_factory,
            )
        keep_learned_prompt(self.model)
        # One generator per process for everything a method draws; never the global one, which samples the main stream.
        self.exploration_generator = torch.Generator().manual_seed(args.seed + 7919 * (args.process_index + 1))
        self.saving.attach()
        if self.serving is not None:
            self.serving.check(self.longest_prompt())
        if args.shared_prefix_training != "off":
            refused = {"vision": self._is_vlm, "router_loss": self.aux_loss_enabled}
            self.packing.enable(ref_model=self.ref_model, longest_prompt=self.longest_prompt, **refused)
        check_success_reward(args.success_reward, self.reward_func_names)
        if self._is_vlm:
            check_vision(type(self).__name__, args, taken=self.samples_as_grpo(args) and requires.vision)
        if requires.turns:
            loop, encode_answers = self._tool_call_loop, self._get_tool_suffix_ids
            self.turns = Turns(self, TrainerToolLoop(self, loop=loop, encode_answers=encode_answers))
        if requires.features:
            self.features = FeaturePass(self)
        self.replaced = Replaced(self, given)
        self.explorer = self.make_explorer()
        if args.explore == "resample":
            self.explorer = ResampleExplorer(self, self.sample, self.scorer)
        self.setup()

    # ------------------------------------------------------------------------ parts, and what they see of the trainer

    @cached_property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return Ranks(self.accelerator)

    @cached_property
    def sample(self) -> Sampler:
        """Continues any prefixes, as often and as far as asked."""
        return Sampler(self)

    @cached_property
    def scorer(self) -> Scorer:
        """Scores further rows, and judges completions while they are sampled."""
        return Scorer(self)

    @cached_property
    def choice(self) -> PromptChoice | None:
        """Chooses the prompts that are explored. None if all are."""
        return PromptChoice(self) if self.args.explores_some else None

    @cached_property
    def exploration(self) -> Exploration | None:
        """Lets the explorer sample main rows. None if there is no explorer."""
        if self.explorer is None:
            return None
        return Exploration(self, self.explorer, self.choice, self.sample, self.scorer)

    @cached_property
    def threshold_watch(self) -> ThresholdWatch | None:
        """Warns if the success threshold tells no completions apart. None if training does not ask about success."""
        args = self.args
        if not args.asks_about_success:
            return None
        return ThresholdWatch(
            threshold=args.success_bar,
            success_reward=args.success_reward,
            warns=self.accelerator.is_main_process,
        )

    @cached_property
    def rounds(self) -> Rounds | None:
        """Chooses the prompts of batches; `None`: the data loader does, and all groups are trained."""
        data, args = self.train_dataset, self.args
        data = self._remove_unused_columns(data, "training") if args.remove_unused_columns else data
        return rounds_of(self, self.scorer, data, shuffle=bool(self.shuffle_dataset))

    @cached_property
    def credit(self) -> Credit:
        """Gives main rows their advantages where they are not GRPO's."""
        return Credit(self, self.scorer)

    @cached_property
    def streams(self) -> StreamTraining:
        """Trains the rows of further streams."""
        pooled = self.requires.pooled or (self.exploration is not None and self.exploration.joins)
        return StreamTraining(
            self,
            pooled=pooled,
            together=self.packing.regroups,
            window=self.packing.window,
            longest=fixed_rotary_length(unwrapped(self, self.model).config),
        )

    @cached_property
    def table(self) -> CompletionsTable:
        """The completions table."""
        return CompletionsTable(self)

    @cached_property
    def packing(self) -> PackedForward:
        """Computes shared prefixes once."""
        return PackedForward(self)

    @cached_property
    def serving(self) -> Serving | None:
        """The vLLM backend."""
        return Serving(self, self.vllm_generation, self._sync_weights) if self.use_vllm else None

    @cached_property
    def saving(self) -> Saving:
        """Checkpoints and the way back from them."""
        return Saving(self)

    @cached_property
    def publisher(self) -> Publisher:
        """Cards and pushes to the Hub."""
        return Publisher(self, self.args)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def is_training(self) -> bool:
        """Whether rows are sampled to be trained, and not to be evaluated."""
        assert self.model is not None
        return self.model.training

    @property
    def training_progress(self) -> float:
        """Share of the training that is over: of `max_steps`, or of the budget that ends it, whichever is larger."""
        steps = self.state.global_step / max(self.state.max_steps, 1)
        return steps if self._budget_spent is None else max(steps, self._budget_spent())

    def end_by_budget(self, share_spent: Callable[[], float]) -> None:
        """
        Tell the trainer that something else than `max_steps` ends the training, for example a budget of tokens.

        Fields that change over training (`explore_share_end`) then reach their end there.

        Args:
            share_spent (`Callable`):
                Returns the share of the budget that is spent, from 0 to 1; the same number on all processes.
        """
        self._budget_spent = share_spent

    def log_metric(self, name: str, value: float) -> None:
        """Log a training metric, `noun/stat`, averaged over the logging interval; equal on all processes."""
        self._metrics["train"][name].append(float(value))

    def encode_prompts(self, prompts: list) -> list[list[int]]:
        """Tokens `[R][P_i]` of prompts, plain or conversations, as TRL encodes those of the data set."""
        return self._tokenize_prompts(prompts)[0] if prompts else []

    def longest_prompt(self, most: int = 10_000) -> int | None:
        """Return the number of tokens of the longest of the first `most` prompts. None if tools, environments or
        images add to prompts, and for a stream."""
        data = self.train_dataset
        if self.tools or self.environment_factories is not None or self._is_vlm or not isinstance(data, Dataset):
            return None
        if not len(data) or "prompt" not in (row_columns(data) or []):
            return None
        prompts = prompts_of(data, most)
        longest = sorted(prompts, key=lambda prompt: len(str(prompt)))[-4:]
        return max(map(len, self.encode_prompts(longest)))

    def generate(self, prefixes, max_new_tokens, parts=None):
        config = self.generation_config
        self.generation_config = copy.deepcopy(config)
        self.generation_config.max_new_tokens = max_new_tokens
        self.generation_config.prefill_chunk_size = None  # one forward pass per recorded token
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
        # TRL's own decoding: what reward functions see of a completion depends on it.
        completions = self._generate(prompts)[3]
        return self._calculate_rewards(examples, prompts, completions, rows.completion_ids)

    def loss(self, model: Any, rows: RowDict) -> torch.Tensor:
        return self._compute_loss(model, rows)

    def _sync_weights(self) -> None:
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    @contextmanager
    def running(self, other: Pass) -> Iterator[Pass]:
        own = vars(self)
        names = ["current", "tools", "_logs", "_pending_extra_logs", "_pending_metrics", "_entropy_bonus_enabled"]
        names += ["aux_loss_enabled", "num_generations", "rollout_func", "environments", "environment_factories"]
        before, metrics = {name: own[name] for name in names if name in own}, self._metrics["train"]
        tokens_seen = self.state.num_input_tokens_seen
        other.logs = empty_logs(self._logs)
        self.current, self._metrics["train"], self._logs = other, other.metrics, other.logs
        self._pending_extra_logs, self._pending_metrics = other.columns, other.pending
        self.state.num_input_tokens_seen = self._stream_tokens.get(other.name or "", 0)
        # Entropy bonus and router loss are regularisers of the policy, not of a stream: the main stream has them once.
        self._entropy_bonus_enabled = self.aux_loss_enabled = False
        if other.rows is not None:
            rows = other.rows
            self.num_generations = rows.group_size
            # These rows have ended: no environment is reset for them, and no tool is called.
            self.environments, self.environment_factories, self.tools = other.environments, None, []
            # TRL's own slot for finished rollouts: it decodes and scores them, and takes their loss mask.
            self.rollout_func = lambda prompts, trainer: {
                "prompt_ids": rows.prompt_ids,
                "completion_ids": rows.completion_ids,
                "logprobs": rows.logprobs if self.use_vllm else None,
                "env_mask": rows.loss_mask,
            }
        try:
            yield other
        finally:
            self.current = None
            own.update(before)
            self._metrics["train"], self.state.num_input_tokens_seen = metrics, tokens_seen
            if other.name is not None:
                for key, values in other.metrics.items():
                    metrics[f"{other.name}/{key}"].extend(values)
                if other.metrics["num_tokens"]:
                    self._stream_tokens = {**self._stream_tokens, other.name: other.metrics["num_tokens"][-1]}
        if other.keep_metrics:
            for key, values in other.pending.items():
                self._pending_metrics[key].extend(values)

    # --------------------------------------------------------------- seams into TRL, in its calling order: rollouts

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.packing.mode == "off" or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = self.packing.regrouped(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs):
        own, logs = super()._generate_and_score_completions, self._logs
        if self.is_training:
            self.replaced.follow()
            self._logs = logs if self.rounds is None else self.table.begin(logs)
            return Step(self, own, self._logs, self._metrics["train"]).run(inputs)
        if not self.log_completions:
            return own(inputs)
        self._logs = self.table.of_evaluation(logs, self.state.global_step)
        try:
            output = own(inputs)
            self.table.one_reward_per_name(self._logs, len(inputs))
            return output
        finally:
            self._logs = logs

    def _generate(self, prompts):
        if self.current is not None and self.current.rows is not None:
            result = super()._generate(prompts)
            self.packing.check_lengths(*result[:2])
            completions = self.current.rows.completions
            if not any(completions):
                return result
            spoken = [ours or decoded for ours, decoded in zip(completions, result[3], strict=True)]
            return *result[:3], spoken, *result[4:]
        training = self.is_training
        if self.forks is not None:
            self.forks.set_limit()
            if training:
                self.forks.begin(self.main_examples, self.given_examples, len(prompts))
        turns = self.turns if self.tools else None
        num_sampled = self.sample.tokens.own
        with nullcontext() if turns is None else turns.of(prompts):
            result = super()._generate(prompts)
        if training and self.rollout_func is not None and self.sample.tokens.own == num_sampled:
            self.sample.tokens.add_returned(*result[1:3])
        self.packing.check_lengths(*result[:2])
        if self._rollout is not None and (mask := self._rollout.loss_mask) is not None:
            result = (*result[:2], mask, *result[3:])
        if turns is not None:
            turns.note_failures()
        if self.forks is not None and training:
            self.forks.end(prompts, result[:5], save=self.saving.checkpoint_before_stopping)
        if self.features is not None and training:
            self.features.begin(*result[:3])
        return result

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        size = 1 if self.rounds is not None and self.rounds.rows_of else num_generations
        sample_turn = super()._generate_single_turn
        options = (images, multimodal_fields, size, has_tool_images)

        def plain(ids: list[list[int]]) -> Rollout:
            start = time.perf_counter()
            with self.packing.own_attention():
                if self.features is None or not self.is_training:
                    found = sample_turn(ids, *options)
                else:
                    found = self.features.sampled(lambda contexts: sample_turn(contexts, *options), ids)
            rollout = Rollout(*found)
            if self.is_training:
                self.sample.note_seconds("main", time.perf_counter() - start)
                self.sample.tokens.add(rollout.completion_ids)
            return rollout

        if self.turns is None:
            return self._turn(prompt_ids, plain)
        speaking = self.turns.begin(prompt_ids)
        if not speaking.contexts:
            return self.turns.end(speaking, ([], None))
        with self.turns.budgeted(speaking):
            spoken = self._turn(speaking.contexts, plain)
        return self.turns.end(speaking, spoken)

    def _turn(self, contexts: list[list[int]], plain: PlainSampling) -> Spoken:
        """Return one completion, or turn, for each context: by the method in training, as in GRPO otherwise."""
        if self.forks is not None and self.forks.in_branches:
            rollout = self.forks.continued(contexts)
        elif self.is_training:
            if self.forks is not None:
                self.forks.before_turn()
            self._rollout = rollout = self.rollout(contexts, plain)
        else:
            self._rollout, rollout = None, plain(contexts)
        logprobs = rollout.logprobs
        if logprobs is None and self.use_vllm:
            # The rows were not sampled as they are trained, so TRL must not correct them.
            logprobs = [[None] * len(ids) for ids in rollout.completion_ids]
        return rollout.completion_ids, logprobs

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, *args):
        if self.turns is not None:
            self.turns.loop_begins(prompts, prompt_ids, completion_ids)
        return super()._tool_call_loop(prompts, prompt_ids, completion_ids, *args)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        own, arguments = super()._get_per_token_logps_and_entropies, (model, input_ids, attention_mask, logits_to_keep)
        if self.features is not None and self.features.waits:  # watched row by row: nothing is packed
            return self.features.watched(partial(own, *arguments, *args, **kwargs), logits_to_keep)
        if self.packing.mode == "off":
            found = own(*arguments, *args, **kwargs)
        else:
            found = self.packing(own, *arguments, *args, **kwargs)
        self.credit.penalise(found[0])
        return found

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # Reward functions may change their arguments, and the search continues from the tokens and messages. So give
        # the functions copies of the tokens, and keep a copy of the messages, because TRL logs the originals.
        token_copies = [[*ids] for ids in completion_ids_list]
        said = own_copy(completions)
        known, extra = self._known_rewards()
        question = self.scorer.question(self.reward_funcs, known, extra, num_rows=len(prompts))
        functions, self.reward_funcs = self.reward_funcs, question.functions
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, token_copies)
        finally:
            self.reward_funcs = functions
        rewards, columns = self.scorer.answered(question, rewards)
        for column, values in columns.items():
            self._pending_extra_logs[column].extend(values)
        if self.current is not None:
            self.current.rewards_per_func = rewards
            return rewards
        if self.turns is not None:
            rewards = self.turns.void_rewards(rewards, self._metrics["train" if self.is_training else "eval"])
        if not self.is_training:
            return rewards
        self.scorer.stop_if_unscored(rewards, inputs[0], group_size=self.num_generations or 1)
        self.scorer.rewards_per_func, self.main_completion_ids = rewards, completion_ids_list
        self.credit.completions = said
        if self.threshold_watch is not None:
            for name, value in self.threshold_watch.look(self.scorer.success().tolist()).items():
                self.log_metric(name, value)
        self.shaped_rewards = self.shape_rewards(rewards.clone())
        return self.shaped_rewards

    def _known_rewards(self) -> tuple[list[list[float] | None] | None, Sequence[Mapping[str, Any]]]:
        """
        Return rewards of rows that were scored before TRL asks, and what the reward functions logged with them.

        Returns:
            `tuple`: Rewards `[B][F]`, None if no row was scored before; and values by column, `[B]`.
        """
        if self.current is not None:
            assert self.current.rows is not None
            return self.current.rows.known_rewards, self.current.rows.extra
        known: list[list[float] | None] | None = None
        extra: Sequence[Mapping[str, Any]] = ()
        if self._rollout is not None and self._rollout.known_rewards is not None:
            known, extra = [*self._rollout.known_rewards], self._rollout.extra or ()
        if self.turns is not None:
            known = self.turns.known_rewards(known, num_rewards=len(self.reward_funcs))
        return known, extra

    # ------------------------------------------------------------------------------- seams into TRL: training, logging

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.is_training or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        accumulated = self.current_gradient_accumulation_steps
        extra = self.streams.backward(model, self._step % self.args.steps_per_generation, num_accumulated=accumulated)
        # With the advantages, beta scales what TRL sums over tokens, and neither entropy bonus nor router loss.
        scale, own = self.streams.main_scale(inputs), (self.beta, self.epsilon_low, self.epsilon_high)
        if scale != 1.0:
            inputs = {**inputs, "advantages": inputs["advantages"] * scale}
        self.beta = self.beta * scale
        if "kl_cov" in inputs:  # its penalty takes the place of the clip
            self.epsilon_low = self.epsilon_high = math.inf
        try:
            with self.credit.loss_of(inputs, scale=scale) as rows:
                loss = super().compute_loss(model, rows, return_outputs, num_items_in_batch)
        finally:
            self.beta, self.epsilon_low, self.epsilon_high = own
        return loss if extra is None else loss + extra

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        own, wanted = self._logs, self.log_completions
        if wanted and self.accelerator.is_main_process:
            self._logs = self.table.whole(own, self.state.global_step)
            # A run that goes on from a checkpoint without rows may have none yet: the file of that step stays.
            self.log_completions = len(self._logs["prompt"]) > 0
        try:
            with printed_visibly():
                super().log(logs, start_time)
        finally:
            self._logs, self.log_completions = own, wanted

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

    def _run_epoch(self, **told):  # type: ignore[override]  # all by name, as it is called
        if self.saving.begin_epoch(told):
            super()._run_epoch(**told)

    def _save_checkpoint(self, model, trial):
        with self.saving.checkpoint(trial):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.saving.write(output_dir)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # What tells that a checkpoint is whole is written next, by one process.
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.saving.restore(checkpoint)

    def _save(self, output_dir=None, state_dict=None):
        token, self.args.hub_token = self.args.hub_token, None  # the arguments are pickled beside the weights
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    # ------------------------------------------------------------------------------- seams into transformers: the Hub

    def init_hf_repo(self, token=None, private=None):
        """As in TRL; also makes the branch, and raises `HubError` or `ValueError` where nothing could be sent. With
        `push_dry_run`, the Hub is not asked."""
        if self.is_world_process_zero():
            if self.args.push_dry_run:
                self.publisher.name_repo()
            else:
                self.publisher.make_repo(super().init_hf_repo, token, private)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):  # type: ignore[override]  # as in TRL
        """As in TRL: `README.md` in `output_dir`, with the training curves beside it."""
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
        As in TRL: save the model in `output_dir` and publish it with its card; every process must call it. A branch
        that is missing is made; `revision` and `private` default to `args.hub_revision` and `args.hub_private_repo`.

        With `dry_run=True` or `args.push_dry_run`, it sends nothing, and needs neither a token nor a network. It then
        prints what would be sent, and returns that as a [`~trl_explore.publishing.hub.PushPlan`].

        Raises:
            HubError: If anything stands against it. The model is saved, and the message says how to send it.
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
        self.accelerator.wait_for_everyone()  # a checkpoint is whole when every process wrote its part
        if self.is_world_process_zero():
            self.publisher.push_checkpoint(checkpoint_folder)


def with_prompts(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the examples; those without a prompt get an empty user message as their prompt. TRL adds this message
    only when it resets environments, which it does not do for finished rows. Data without prompts are for environments
    that define the task."""
    empty = [{"role": "user", "content": ""}]
    return [example if "prompt" in example else {**example, "prompt": empty} for example in examples]


def watch(trainer: Any, method: str, seen: Callable[..., None]) -> Callable[[], None]:
    """
    Watch one method of any GRPO trainer.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of this class or a subclass.
        method (`str`):
            `"scored"` (rows with rewards and advantages), `"rewarded"`, `"loss"`, `"turn"` (completions, or turns of
            an agent) or `"rollout"` (whole completions, with what tools answered).
        seen (`Callable`):
            Gets TRL's positional arguments, and behind them what TRL made of them.

    Returns:
        `Callable`: Ends the watch.
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

    def watched(*args: Any, **options: Any) -> Any:
        result = own(*args, **options)
        seen(*args, result)
        return result

    vars(trainer)[name] = watched
    return lambda: vars(trainer).pop(name, None)


def count_sampled(trainer: Any) -> TokenCount:
    """
    Return the count of the tokens that a GRPO trainer samples in training.

    An [`ExplorationTrainer`] counts by itself, and the count goes with its checkpoints. Any other trainer is counted
    from now on: every completion or turn that TRL asks for, or what a `rollout_func` returns. Every process must call
    it.
    """
    if isinstance(trainer, ExplorationTrainer):
        return trainer.sample.tokens
    tokens, ranks = TokenCount(), Ranks(trainer.accelerator)
    before = 0  # when the last rollout ended

    def turn(*given: Any) -> None:
        if trainer.model.training:
            tokens.add(given[-1][0])

    def rollout(*given: Any) -> None:
        nonlocal before
        if not trainer.model.training:
            return
        if tokens.own == before:  # by a `rollout_func`, which asks for no turn
            tokens.add_returned(*given[-1][1:3])
        before = tokens.own
        tokens.sum_up(ranks)

    watch(trainer, "turn", turn)
    watch(trainer, "rollout", rollout)
    return tokens


def log_metric(trainer: Any, name: str, value: float) -> None:
    """Log a training metric with any GRPO trainer."""
    trainer._metrics["train"][name].append(value)
