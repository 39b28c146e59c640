"""Row of `explore="auto"` in the table of methods. This module must load neither torch nor TRL."""

from typing import Any

from trl_explore.method_row import OURS, Method, is_agent
from trl_explore.pivots.method import pivot_options
from trl_explore.sketches.method import sketch_options
from trl_explore.trees.method import tree_options

SHARED_OPTIONS = ("sampling_batch_size",)  # options of an explorer that are fields of every trainer
# Explorers of `explore="auto"`. They are defined in `trl_explore.auto.explorer_table`, which loads torch.
EXPLORERS = ("tree", "pivots", "sketches", "resample", "hints", "replay", "tail_branches", "turn_trees")

# Metrics of `explore="auto"`, `"hints"` and `"replay"`. Several names end with the name of an explorer.
_METRICS = {
    "explore/contrast_per_token/plain": "groups with contrast per generated token, for GRPO's own rows. Each group "
    "counts with the share of its rows that failed. Both sums are discounted by `explore_discount`",
    "explore/contrast_per_token/...": "the same for each explorer that was used: rows with an advantage, in units of "
    "`num_generations`, per generated token, or per trained token if more tokens are trained",
    "explore/credit/...": "tokens that each explorer may still use; it is not used while this is 0 or less. Not "
    "logged without a limit (`explore_max_cost`)",
    "explore/share/...": "share of the batch's prompts that each explorer got",
    "explore/sampled_tokens/...": "tokens that an explorer sampled in a batch, including discarded completions",
    "explore/solved/...": "share of an explorer's prompts for which it found a success",
    "hints/solved_fraction": "`hints`: share of the prompts that a hint solved",
    "hints/mean_level": "`hints`: mean number of the hint that solved a prompt; 0 is the weakest",
    "replay/stored": "`replay`: number of stored completions",
    "tree/...": "`tree`: metrics of TreeGRPO",
    "pivots/...": "`pivots`: metrics of DEEP-GRPO",
    "sketch/...": "`sketches`: metrics of SESA",
    "branch/...": "`tail_branches`, `turn_trees`: metrics of BranPO and of Tree-GRPO for agents",
    "agent/turns": "`tail_branches`, `turn_trees`: responses per trajectory of an explored prompt",
    "agent/environment_errors": "agents: trajectories and branches that ended because their environment raised",
    **{f"explored_{name}/...": f"metrics that TRL logs for rows, for the rows of `{name}`" for name in EXPLORERS},
}


def _options(task: Any) -> dict[str, Any]:
    """Return options of explorers that fit a task."""
    options = {"pivots": pivot_options(task) or {}}
    if not is_agent(task):
        options["tree"] = tree_options(task) or {}
        sketches = dict(sketch_options(task) or {})
        # The explorer `sketches` always works in the mode `two_stage`, so options for another mode do not fit it.
        if sketches.pop("mode", "two_stage") == "two_stage":
            options["sketches"] = sketches
    shared: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for name, of_explorer in options.items():
        own[name] = {}
        for option, value in of_explorer.items():
            target = shared if option in SHARED_OPTIONS else own[name]
            target[option] = value
    return {**shared, "explorer_options": own}


AUTO = Method(
    "auto",
    "Auto",
    "AutoExploreTrainer",
    "AutoExploreConfig",
    tags=(*OURS, "auto-explore"),
    paper={  # GRPO's: the choice between explorers has no paper
        "title": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "id": "2402.03300",
    },
    card="auto",
    metrics=_METRICS,
    card_metrics=("explore/contrast_per_token/...", "explore/share/..."),
    options=_options,
)
