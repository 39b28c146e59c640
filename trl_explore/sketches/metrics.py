"""What is logged of a batch that SESA sampled: averages of what all processes counted."""

COLLAPSE_RATIO = 1.05  # Pass@G / Pass@1 below it: the samples of a prompt succeed or fail together


def group_metrics(total: dict[str, float], *, size: int) -> dict[str, float]:
    """Metrics by name, of sums over all groups of `size` rows; what a mode does not count has none."""
    told: dict[str, float] = {}
    groups = total["groups"]
    for name in ("distinct", "similarity", "empty"):
        told[f"sketch/{name}"] = total[name] / max(total["lists"], 1)
    if "trajectories" in total:
        told["agent/trajectories"] = total["trajectories"] / groups
        told["agent/decisions"] = total["lists"] / groups
        told["agent/duplicate_actions"] = total["duplicates"]
    for name in ("tokens", "sampled_tokens", "dropped", "too_long", "repeats", "fillers"):
        if name in total:
            told[f"sketch/{name}"] = total[name]
    if sketched := total.get("sketched"):
        told["sketch/success"] = total["sketched_correct"] / sketched
        told["sketch/group_success"] = total["sketched_solved"] / total["sketched_groups"]
    if "sketched" in total and (alone := groups * size - total["sketched"]):
        told["sketch/plain_success"] = (total["correct"] - total["sketched_correct"]) / alone
    told["sketch/token_ratio"] = total["tokens"] / max(total["sampled_tokens"], 1)
    if total["with_targets"]:
        told["sketch/coverage"] = total["covered"] / total["with_targets"]
    if total["correct"]:
        each = total["correct"] / (groups * size)
        ratio = total["solved"] / groups / each
        told["sketch/pass_ratio"] = ratio
        told["sketch/collapse_alarm"] = float(ratio < COLLAPSE_RATIO and each < 1 / COLLAPSE_RATIO)
    return told
