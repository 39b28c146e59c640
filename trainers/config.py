"""Fields that all exploration trainers share, and their checks."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from trl import GRPOConfig

from trl_explore.agents.snapshots import STATES
from trl_explore.credit.checks import SCOPES, check_advantage, check_covariance
from trl_explore.credit.functions import advantage_parts, read_advantage
from trl_explore.names import explain_fields, shown, unknown_name
from trl_explore.publishing.hub import check_repo_id
from trl_explore.selection.budget import GAINS, check_budget
from trl_explore.selection.variance import check_trained_generations
from trl_explore.serving.agreement import WEIGHT_SYNCS

# Largest number of rows of one stage of sampling. No real run comes near it. A larger number is a typing mistake that
# would run for days.
MOST_STAGE_ROWS = 100_000
EXPLORERS = ("auto", "hints", "replay", "resample")  # values of `explore`
LARGEST = sys.float_info.max  # of the finite numbers
# Fields from which `__post_init__` derives the sizes of batches, so `upgrade_config` must not change them.
SIZES = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
C = TypeVar("C", bound="ExplorationConfig")
G = TypeVar("G", bound=GRPOConfig)
# Check of a configuration. It raises a ValueError that names the field, its value and the remedy.
Check = Callable[[G], None]


def one_of(name: str, choices: Sequence[str]) -> Check[GRPOConfig]:
    """Return a check that the value of a field is one of a few texts."""

    def check(args: GRPOConfig) -> None:
        value = getattr(args, name)
        if value not in choices:
            raise ValueError(f"`{name}`: {unknown_name('value', str(value), choices)}")

    return check


def within(
    *names: str,
    low: float = -LARGEST,
    above: float = -math.inf,
    high: float = LARGEST,
    optional: bool = False,
    words: str = "be a finite number",
) -> Check[GRPOConfig]:
    """Return a check that fields are finite numbers from `low` (or above `above`) to `high`. With `optional`, None is
    allowed, too. `words` complete the error message."""

    def check(args: GRPOConfig) -> None:
        for name in names:
            value = getattr(args, name)
            fits = optional
            if value is not None:
                try:
                    fits = above < value and low <= value <= high
                except TypeError:  # it is no number
                    fits = False
            if not fits:
                raise ValueError(f"`{name}={value!r}` must {words}.")

    return check


def at_least(low: int, *names: str, optional: bool = False, words: str = "") -> Check[GRPOConfig]:
    """Return a check that fields are numbers of at least `low`, finite or not. `words` end the error message."""
    return within(*names, low=low, high=math.inf, optional=optional, words=f"be at least {low}{words}")


def run_checks(args: G, checks: Iterable[Check[G]]) -> None:
    """Raise the error of the first check that fails."""
    for check in checks:
        check(args)


def check_explore(args: "ExplorationConfig") -> None:
    """Raise ValueError if `explore` is not the name of an explorer, or if `explore_prompts` does not fit it."""
    if args.explore_into == "add" and not args.explores_some:
        raise ValueError(
            "`explore_into='add'` is about prompts that GRPO samples first, and `explore_prompts='all'` leaves "
            "none of them: set `explore_prompts='unsolved'`, or leave it out."
        )
    if args.explore is None:
        return
    if args.explore not in EXPLORERS:
        raise ValueError(f"`explore`: {unknown_name('value', str(args.explore), EXPLORERS)}")
    if args.explore_prompts == "all" and args.explore == "resample":
        raise ValueError(
            f"`explore={args.explore!r}` samples a prompt once more, which for all prompts is only another batch of "
            "GRPO: set `explore_prompts='unsolved'`."
        )
    if args.max_completion_length is None:
        raise ValueError(f"`max_completion_length=None`: `explore={args.explore!r}` needs a limit. Set a number.")


def read_options(given: Any) -> Any:
    """Return `explorer_options` as a dictionary. The command line gives a text with JSON."""
    options = given
    if isinstance(given, str):
        try:
            options = json.loads(given)
        except json.JSONDecodeError:
            options = None
    if given is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"`explorer_options={given!r}` must be a dictionary by explorer, for example "
            '{"tree": {"expansion_width": 4}}.'
        )
    return options


def check_auto(args: "ExplorationConfig") -> None:
    """Raise ValueError if a field of `explore="auto"` has no effect, or another field contradicts it."""
    unused = []
    if args.explorers is not None and args.explore != "auto":
        unused.append("explorers")
    if args.explorer_options is not None and not args.explores_unsolved:
        unused.append("explorer_options")
    for name in unused:
        raise ValueError(
            f"`{name}={getattr(args, name)!r}` has no effect with `explore={args.explore!r}`: set `explore='auto'`, "
            "or leave it out."
        )
    if args.explores_unsolved and args.explore_share_end < 1:
        raise ValueError(
            f"`explore_share_end={args.explore_share_end}` has no effect with `explore={args.explore!r}`, which "
            "chooses the prompts by itself: leave it out."
        )
    if not isinstance(args.explorers, list | tuple | type(None)):
        raise ValueError(f"`explorers={args.explorers!r}` must be a list of names, for example ['tree', 'pivots'].")
    for name, options in args.options_by_explorer.items():
        if not isinstance(options, Mapping):
            raise ValueError(
                f"`explorer_options[{name!r}]` is {options!r}: give a dictionary of fields, for example "
                "{'tree': {'expansion_width': 4}}."
            )


TRAINING_CHECKS = (
    within(
        "temperature",
        above=0,
        words="be positive: completions of a group must be able to differ. For samples that are nearly greedy set 0.1",
    ),
    at_least(1, "max_completion_length", optional=True, words=" token"),
    within("top_p", above=0, high=1, words="be in (0, 1]; 1 samples from all tokens"),
    within("min_p", low=0, high=1, optional=True, words="be in [0, 1]; 0 samples from all tokens"),
)
CHECKS = (
    one_of("vllm_weight_sync", WEIGHT_SYNCS),
    one_of("shared_prefix_training", ("off", "on", "auto")),
    at_least(1, "packed_token_budget", optional=True, words=", or None for one sequence of any length"),
    at_least(1, "sampling_batch_size", optional=True, words=", or None for a single call"),
    at_least(0, "path_cache_tokens", words="; 0 keeps nothing"),
    one_of("dynamic_sampling", ("off", "filter", "refill")),
    at_least(1, "max_sampling_rounds", words=", the first round"),
    within("explore_threshold", low=0, high=1 - 1e-9, optional=True, words="be in [0, 1), or None to pass over none"),
    one_of("budget", ("uniform", *GAINS)),
    at_least(2, "min_generations", words=": one row has nothing to be compared with"),
    check_budget,
    check_trained_generations,
    check_explore,
    check_auto,
    within("explore_discount", above=0, high=1, words="be in (0, 1]; 1 forgets nothing"),
    within("explore_min_share", low=0, high=1, words="be in [0, 1]; 0 never forces a try"),
    within("explore_max_cost", low=0, optional=True, words="be a finite number of at least 0, or None for no limit"),
    one_of("environment_state", STATES),
    one_of("explore_prompts", ("all", "unsolved")),
    one_of("explore_into", ("replace", "add")),
    within("explore_share_end", low=0, high=1, words="be in [0, 1]: the share of prompts explored at the end"),
    at_least(1, "passk_k", words=" completion"),
    check_advantage,
    within("success_weight", low=0, words="be at least 0 and finite; 0 trains failures only"),
    within("unlikeliness_beta", low=0, high=1, words="be in [0, 1]; 0 discounts nothing"),
    within("count_bonus", low=0, words="be at least 0 (no bonus) and finite"),
    one_of("count_bonus_scope", SCOPES),
    within("clip_cov", "kl_cov", low=0, high=1, words="be a share of tokens in [0, 1]; 0 leaves all as they are"),
    within("clip_cov_low", "clip_cov_high"),
    within("kl_cov_coef", low=0, words="be at least 0, and finite"),
    check_covariance,
)


def check_training_values(args: GRPOConfig) -> None:
    """
    Check values that TRL accepts, but with which another library raises an error later in the run.

    Args:
        args ([`~trl.GRPOConfig`]):
            Any GRPO configuration.

    Raises:
        ValueError: If a value is wrong. The message names the field, its value and the remedy.
    """
    if not 0 <= float(args.learning_rate) < math.inf:  # it may be a text, which TRL reads later
        raise ValueError(f"`learning_rate={args.learning_rate}` must be a finite number, at least 0.")
    run_checks(args, TRAINING_CHECKS)
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        raise ValueError(
            "`max_completion_length=None`: `loss_type='dr_grpo'` divides by this number of tokens. Set a number, or "
            "another `loss_type`."
        )


@explain_fields
@dataclass
class ExplorationConfig(GRPOConfig):
    r"""
    Base of the exploration configurations: all fields of [`~trl.GRPOConfig`], and the fields that all methods share.

    Args:
        drop_zero_advantage (`bool`, *optional*, defaults to `False`):
            Remove rows with advantage 0 from the loss and from its normaliser, in all streams. Rows of a group whose
            rewards are all equal have advantage 0 here, even if rounding leaves a tiny advantage. `False` is TRL's
            convention.
        success_reward (`str`, *optional*):
            Name of the reward function that decides about success. None: the sum of all rewards decides. The value
            that the function returns, without its weight, is compared with `success_threshold`. A completion that the
            function does not score is neither a success nor a failure. Advantages still use the sum of all rewards.
        sampling_batch_size (`int`, *optional*):
            Rows per `generate` call for extra samples (transformers backend). None samples a whole stage in a single
            call. Lower it if that call runs out of memory.
        path_cache_tokens (`int`, *optional*, defaults to `65536`):
            Largest number of tokens whose keys and values are kept during a rollout. 0 keeps none. With this cache, a
            search or a chain of sketches encodes no token twice (transformers backend). The samples are the same up to
            rounding. The cache grows as needed. If it is full, it drops the tokens that were not used for the longest
            time.
        dynamic_sampling (`str`, *optional*, defaults to `"off"`):
            Treatment of groups whose rewards, before any shaping, are all equal: `"off"`, `"filter"` or `"refill"`.
            `"off"` is GRPO. `"filter"` removes these groups from the loss and its normaliser. `"refill"` replaces them
            by groups of other prompts, which are sampled in further rounds (as in DAPO). A group stays if an explorer
            gave one of its rows an advantage other than 0. Branches from removed groups are still trained.
        max_sampling_rounds (`int`, *optional*, defaults to `10`):
            Largest number of rounds of sampling per generation batch, including the first. Used with
            `dynamic_sampling="refill"`. Groups that are missing after the last round train nothing.
        trained_generations (`int`, *optional*):
            Number of rows of each group that are trained, from 2 to `num_generations`: the rows whose total rewards
            have the largest variance (PODS). Advantages compare only these rows. All other rows are only sampled.
            None: all rows are trained.
        explore_threshold (`float`, *optional*):
            Success rate above which a prompt is skipped, in [0, 1). None: no prompt is skipped. The rate is a running
            mean in which the newest group counts as much as all earlier groups together. Each time that a prompt is
            skipped, its rate decreases by 10 %.
        budget (`str`, *optional*, defaults to `"uniform"`):
            Distribution of a batch's rows over its prompts: `"uniform"`, `"knapsack"` or `"vip"`. `"uniform"` gives
            every prompt `num_generations` rows. The others depend on the running success rates of the prompts.
            `"knapsack"` gives more rows to prompts where contrast is likely and valuable, and `"vip"` to prompts where
            the gradient varies most. Prompts that were never sampled get `num_generations` rows. All prompts have the
            same weight in the loss.
        min_generations (`int`, *optional*, defaults to `2`):
            Smallest number of rows of a prompt with a `budget`, from 2 to `num_generations`.
        max_generations (`int`, *optional*):
            Largest number of rows of a prompt with a `budget`. None: twice `num_generations`.
        explore (`str`, *optional*):
            Explorer of [`ExplorationTrainer`] for unsolved prompts: `"auto"`, `"hints"`, `"replay"` or `"resample"`.
            None: it does not explore. `"auto"` chooses an explorer for each prompt while training. `"hints"` and
            `"replay"` are explorers that can also work alone. `"resample"` samples another plain group, and needs
            `explore_prompts="unsolved"`. Use it as the control of a method that searches: it spends tokens on the same
            prompts without a search. Trainers with their own way of exploring refuse this field.
        explorers (`list[str]`, *optional*):
            Explorers between which `explore="auto"` chooses. None: `["tree", "pivots"]`, and for agents
            `["tail_branches", "turn_trees"]`. Others are `"sketches"`, `"hints"` and `"replay"` for single turns, and
            `"resample"`; agents can also use `"pivots"`. With an empty list, the trainer is GRPO.
        explorer_options (`dict[str, Any] | str`, *optional*):
            Options of explorers, by name, for example `{"tree": {"expansion_width": 4}}`. They are the fields of the
            trainer with this explorer. On the command line, write JSON.
        explore_discount (`float`, *optional*, defaults to `0.9`):
            Factor by which `explore="auto"` multiplies the contrast and tokens of all sources (explorers, and GRPO's
            own rows) at the beginning of each generation batch, in (0, 1]. With a smaller factor, the estimates follow
            the policy faster. 1 forgets nothing.
        explore_min_share (`float`, *optional*, defaults to `0.05`):
            Share of the unsolved prompts that `explore="auto"` gives to a random explorer, in [0, 1]. It keeps the
            estimates current. Only explorers with credit are chosen (see `explore_max_cost`). With 1, every unsolved
            prompt is explored, and `explore_max_cost` has no effect.
        explore_max_cost (`float`, *optional*, defaults to `0.1`):
            Share of GRPO's tokens that `explore="auto"` gives to all explorers together as credit, at least 0. The
            tokens of an explorer are subtracted from its credit, and contrast that it finds adds to it. An explorer
            without credit is not used. So explorers that find no contrast use about this share of tokens, and more if
            GRPO's groups have hardly any contrast. 0 explores nothing. `None`, or `explore_min_share=1`: no limit.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            Way to restore an agent's environments for branches: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. A
            branch needs the state of an earlier turn. `"snapshot"` calls the environment's own `snapshot()` and
            `restore(state)`. `"copy"` calls `copy.deepcopy` after every turn. `"replay"` repeats the tool calls of the
            earlier turns, and the tools must answer them as before. `"auto"` uses the first of these three that is
            possible. It changes to `"replay"` if a copy shares state with the original. Without branches of an agent,
            this field has no effect.
        success_threshold (`float`, *optional*):
            Smallest reward that counts as a success. `explore_prompts`, `explore_threshold` and `budget` take None as
            1. With `advantage="passk"`, None allows only rewards of 0 and 1. Most methods set their own default.
        explore_prompts (`str`, *optional*, defaults to `"all"`):
            Prompts that the method explores (searches, sketches or branches): `"all"` or `"unsolved"`. With
            `"unsolved"`, all groups are first sampled as in GRPO. If no completion of a group reaches the method's
            `success_threshold`, its prompt is explored. All other prompts are sampled and credited as in GRPO.
        explore_into (`str`, *optional*, defaults to `"replace"`):
            Use of explored rows if their prompt was first sampled as in GRPO: `"replace"` or `"add"`. With
            `"replace"`, rows of a search or with sketches replace the failed group. With `"add"`, they are averaged
            with it. Branches of DEEP-GRPO, BranPO, TreeRL and AttnRL continue rows of the group, so they are always
            added.
        explore_share_end (`float`, *optional*, defaults to `1.0`):
            Share of the prompts that may be explored at the end of training, in [0, 1]. It falls linearly from 1.
            Each generation batch chooses these prompts at random.
        vllm_weight_sync (`str`, *optional*, defaults to `"auto"`):
            Transport of weights to a vLLM server: `"nccl"`, `"file"` or `"auto"`. `"nccl"` copies between GPUs (TRL's
            way). `"file"` uses files in `output_dir`, for servers on CPUs or without a common GPU network. `"auto"` is
            `"nccl"` if the trainer has a GPU, else `"file"`. The server's `--weight-transfer-config` must name the
            same transport.
        shared_prefix_training (`str`, *optional*, defaults to `"off"`):
            Compute the common start of several rows only once: `"on"`, `"off"` or `"auto"`. `"auto"` does so if the
            rows of a micro-batch share enough tokens. Results are the same up to rounding. With `"on"` and `"auto"`,
            rows of one tree go into one micro-batch of their optimizer step, unless TRL computes something from a
            micro-batch alone (`loss_type="bnpo"`, the entropy bonus, `top_entropy_quantile`).
        packed_token_budget (`int`, *optional*):
            Largest number of tokens of one sequence of packed rows. None: all rows of a micro-batch are one sequence.
            It must hold the longest prompt plus `max_completion_length`. If a micro-batch has more tokens (shared
            tokens count once), it becomes several sequences, each with its own forward pass.
        push_method_state (`bool`, *optional*, defaults to `False`):
            Also publish the method's state (`explore_state_<rank>.pt`), and the files that the method writes into
            `output_dir`. Some of these files, for example dumped trees, hold prompts and completions.
            [`~trl_explore.saving.checkpoints.load_state`] reads the state. Whole checkpoints
            (`hub_strategy="checkpoint"` or `"all_checkpoints"`) always contain the state.
        push_dry_run (`bool`, *optional*, defaults to `False`):
            Like `push_to_hub`, but send nothing: write the card, and show which files would be sent to which
            repository. It needs neither a token nor a network. The files are put into the folder `_hub` of
            `output_dir`.
        advantage (`Callable[..., Any] | str | list[Any]`, *optional*, defaults to `"grpo"`):
            Advantage of a main row. `"grpo"` is TRL's. `"maxrl"` divides by the group's mean instead of its deviation
            (rewards of at least 0). `"passk"` (rewards of 0 or 1) and `"pkpo"` (any rewards) reward the success of
            `passk_k` completions together, `"pkpo_loo"` with a baseline. `"unlikeliness"` reduces the rewards of
            completions that were likely under the policy. `"reinforce"` is `success_weight` for a success and -1 for a
            failure, so groups that all fail train. `scale_rewards` acts on `"grpo"` and `"unlikeliness"` only. A
            function `my_advantage(rewards)` or `my_advantage(rewards, batch)`, or its import path, gets total rewards
            `(P, G)`, NaN if a row has no reward. It returns advantages `(P, G)`, or one for each token of this
            process, `(B, T)`. A list adds its entries.
        advantage_weights (`list[float]`, *optional*):
            Weights of the entries of `advantage`, if `advantage` is a list. None: 1 for each.
        passk_k (`int`, *optional*, defaults to `4`):
            Number of completions that succeed together (k of pass@k). At most `num_generations`, and less with
            `"passk"`. With 1, `"passk"` is GRPO with the deviation of the population.
        unlikeliness_beta (`float`, *optional*, defaults to `0.25`):
            Largest share of a reward that `"unlikeliness"` removes, in [0, 1]. 0 is GRPO. The likeliest completion of
            a group loses nearly this share. Other completions lose less, by their rank. Acts on positive rewards.
        success_weight (`float`, *optional*, defaults to `0.1`):
            Advantage of a success with `"reinforce"`, at least 0. A failure has -1.
        count_bonus (`float`, *optional*, defaults to `0.0`):
            Weight of a bonus on the advantage of rare final answers, at least 0. 0: no bonus. Groups without success
            learn from it, too. Completions without a readable answer get no bonus.
        count_bonus_scope (`str`, *optional*, defaults to `"history"`):
            Answers with which an answer is compared: `"history"` or `"batch"`. `"history"` counts all answers to the
            prompt in earlier batches, and subtracts the group's mean. Checkpoints contain these counts. `"batch"`
            subtracts the share of the group's other answers that are the same.
        clip_cov (`float`, *optional*, defaults to `0.0`):
            Share of a generation batch's tokens that get advantage 0. 0: none. They are random tokens whose covariance
            of advantage and log-probability is between `clip_cov_low` and `clip_cov_high`. The authors use 2e-4.
        clip_cov_low (`float`, *optional*, defaults to `1.0`):
            Covariance above which a token may be clipped.
        clip_cov_high (`float`, *optional*, defaults to `5.0`):
            Covariance below which a token may be clipped.
        kl_cov (`float`, *optional*, defaults to `0.0`):
            Share of a generation batch's tokens that get a penalty on the change of their probability. 0: none. They
            are the tokens with the largest covariance. With `kl_cov`, no ratio is clipped. It needs several updates
            per generation batch. The authors use 2e-3 (7B) and 2e-4 (32B).
        kl_cov_coef (`float`, *optional*, defaults to `1.0`):
            Weight of the penalty of `kl_cov`, `|log ratio|`.
    """

    if TYPE_CHECKING:
        # TRL gives these fields their value in `__post_init__`, and reads text of the command line as JSON.
        output_dir: str = ""
        num_generations: int = 8
        steps_per_generation: int = 1
        generation_batch_size: int = 8
        generation_kwargs: dict[str, Any] | None = None
        gradient_checkpointing_kwargs: dict[str, Any] | None = None

    drop_zero_advantage: bool = False
    success_reward: str | None = None
    sampling_batch_size: int | None = None
    path_cache_tokens: int = 65_536
    dynamic_sampling: str = "off"
    max_sampling_rounds: int = 10
    trained_generations: int | None = None
    explore_threshold: float | None = None
    budget: str = "uniform"
    min_generations: int = 2
    max_generations: int | None = None
    explore: str | None = None
    explorers: list[str] | None = None
    explorer_options: dict[str, Any] | str | None = None
    explore_discount: float = 0.9
    explore_min_share: float = 0.05
    explore_max_cost: float | None = 0.1
    environment_state: str = "auto"
    success_threshold: float | None = None
    explore_prompts: str = "all"
    explore_into: str = "replace"
    explore_share_end: float = 1.0
    vllm_weight_sync: str = "auto"
    shared_prefix_training: str = "off"
    packed_token_budget: int | None = None
    push_method_state: bool = False
    push_dry_run: bool = False
    # The parser of the command line takes the type `str`, which must be the second one.
    advantage: Callable[..., Any] | str | list[Any] | None = "grpo"
    advantage_weights: list[float] | None = None
    passk_k: int = 4
    unlikeliness_beta: float = 0.25
    success_weight: float = 0.1
    count_bonus: float = 0.0
    count_bonus_scope: str = "history"
    clip_cov: float = 0.0
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov: float = 0.0
    kl_cov_coef: float = 1.0

    def __post_init__(self) -> None:
        self.validate()
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["advantage"] = shown(self.advantage)  # functions by their import path, for JSON
        return values

    def validate(self) -> None:
        """
        Check the method's own fields.

        Raises:
            ValueError: If a value is wrong. The message names the field, its value and the remedy.
        """
        check_training_values(self)
        if isinstance(self.shared_prefix_training, bool):  # what `on` and `off` are in YAML
            self.shared_prefix_training = "on" if self.shared_prefix_training else "off"
        if self.dynamic_sampling is False:
            self.dynamic_sampling = "off"
        self.explorer_options = read_options(self.explorer_options)
        self.advantage = read_advantage(self.advantage)
        run_checks(self, CHECKS)
        self._check_token_budget()
        if self.push_dry_run:
            if self.log_completions_hub_repo is not None:
                raise ValueError(
                    f"`log_completions_hub_repo={self.log_completions_hub_repo!r}` sends tables while training, and "
                    "`push_dry_run=True` is to send nothing: leave one of the two out."
                )
            self.push_to_hub = True  # a dry run takes every step of publishing but the last
        if self.push_to_hub:
            check_repo_id(self.hub_model_id, self.output_dir or "trainer_output")

    @property
    def orders_prompts(self) -> bool:
        """Return whether `PromptOrder` chooses the prompts, and not the data loader."""
        return self.dynamic_sampling == "refill" or self.explore_threshold is not None or self.budget != "uniform"

    @property
    def trains_some(self) -> bool:
        """Return whether fewer rows of a group are trained than sampled."""
        return self.trained_generations is not None and self.trained_generations != self.num_generations

    @property
    def asks_about_success(self) -> bool:
        """Return whether training compares rewards with a success threshold."""
        return (
            self.explore_prompts == "unsolved"
            or self.explore_threshold is not None
            or self.budget != "uniform"
            or any(part.name in ("passk", "reinforce") for part in advantage_parts(self))
            or self.explores_unsolved
        )

    @property
    def explores(self) -> bool:
        """Return False if fields switch off the method's exploration, such as `explorers=[]`. Else return True, even
        for a trainer without exploration."""
        return self.explorers != []

    @property
    def explores_unsolved(self) -> bool:
        """Return whether `explore` names explorers that add rows for unsolved prompts."""
        return self.explore not in (None, "resample")

    @property
    def options_by_explorer(self) -> Mapping[str, Any]:
        """Return `explorer_options`, or an empty mapping if it is None."""
        return self.explorer_options if isinstance(self.explorer_options, Mapping) else {}

    @property
    def resolved_success_threshold(self) -> float:
        """Return `success_threshold`, or its default of 1."""
        return 1.0 if self.success_threshold is None else self.success_threshold

    @property
    def explores_some(self) -> bool:
        """Return whether some prompts are only sampled as in GRPO."""
        return self.explore_prompts != "all" or self.explore_share_end < 1

    @property
    def rows_per_generation(self) -> int:
        """Return the number of completions of a generation batch: of all processes if `generation_batch_size` is set,
        else of this process."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.generation_batch_size or self.per_device_train_batch_size * steps

    @property
    def max_sampled_tokens(self) -> int | None:
        """Return the maximum number of tokens of a sampled completion. As in TRL, it is `max_new_tokens` in
        `generation_kwargs` if that is set, else `max_completion_length`. None means no limit."""
        limit: int | None = (self.generation_kwargs or {}).get("max_new_tokens", self.max_completion_length)
        return limit

    def check_stage(self, field: str, places: int) -> None:
        """Raise a ValueError if a stage of sampling would have more than `MOST_STAGE_ROWS` rows: `field` completions
        from each of `places` places."""
        number = getattr(self, field)
        if number * places > MOST_STAGE_ROWS:
            raise ValueError(
                f"`{field}={number}` can sample {number:,} completions from each of {places:,} places of a generation "
                f"batch at once, more than {MOST_STAGE_ROWS:,} in all: lower it to at most "
                f"{MOST_STAGE_ROWS // places}, or make the batch smaller."
            )

    def _check_token_budget(self) -> None:
        budget, completion = self.packed_token_budget, self.max_completion_length or 0
        if budget is None:
            return
        field = f"`packed_token_budget={budget}`"
        if self.shared_prefix_training == "off":
            raise ValueError(
                f"{field} splits packed rows, but `shared_prefix_training='off'` packs none: set that to 'on' or "
                "'auto', or leave `packed_token_budget` out."
            )
        if budget <= completion:  # a prompt has at least one token; its length is checked after tokenization
            raise ValueError(
                f"{field} cannot hold a prompt and `max_completion_length={completion}` tokens: set it to at least "
                f"{completion} plus the longest prompt, or lower `max_completion_length`."
            )


def check_config_class(args: GRPOConfig, config_class: type["ExplorationConfig"], trainer: str) -> None:
    """
    Raise ValueError if `args` is the configuration of another trainer, and this trainer would use other values without
    a word: it lacks fields of that configuration, or has other defaults. A plain `GRPOConfig` is accepted.
    """
    if not isinstance(args, ExplorationConfig):
        return
    specs = {spec.name: spec for spec in fields(config_class)}
    # Fields that a user's subclass adds are the user's affair.
    ours = next(parent for parent in type(args).__mro__ if parent.__module__.startswith(__package__))
    different = [spec.name for spec in fields(ours) if spec.name not in specs]
    defaults = {spec.name: spec.default for spec in fields(args)}
    for spec in fields(ExplorationConfig):
        # A field that the user did not set has the default of GRPO here, although the method has another default.
        not_set = getattr(args, spec.name) == spec.default == defaults[spec.name]
        if not_set and specs[spec.name].default != spec.default:
            different.append(spec.name)
    if different:
        names = ", ".join(f"`{name}`" for name in different[:3]) + (", ..." if len(different) > 3 else "")
        raise ValueError(
            f"`args` has the type `{type(args).__name__}`, but `{trainer}` has other fields or defaults ({names}): "
            f"use `{config_class.__name__}`."
        )


def upgrade_config(args: GRPOConfig, config_class: type[C]) -> C:
    """
    Return a plain `GRPOConfig` as the configuration of a method, with the method's defaults. If a field of
    `GRPOConfig` has GRPO's default, it gets the default of the method. `__post_init__` does not run again, because the
    values that it derives (batch sizes, devices) are already set.
    """
    if isinstance(args, config_class):
        return args
    values = dict(vars(args))
    if not isinstance(args, ExplorationConfig):
        own_defaults = {spec.name: spec.default for spec in fields(config_class)}
        for spec in fields(GRPOConfig):
            has_other_default = own_defaults[spec.name] != spec.default
            if has_other_default and values[spec.name] == spec.default and spec.name not in SIZES:
                values[spec.name] = own_defaults[spec.name]
    upgraded = object.__new__(config_class)
    for f in fields(config_class):
        if f.default is not MISSING:
            setattr(upgraded, f.name, f.default)
        elif f.default_factory is not MISSING:
            setattr(upgraded, f.name, f.default_factory())
    vars(upgraded).update(values)
    upgraded.validate()
    return upgraded
