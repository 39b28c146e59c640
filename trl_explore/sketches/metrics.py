"""What is logged of a batch that SESA sampled: averages of what all processes counted."""

COLLAPSE_RATIO = 1.05  # Pass@G / Pass@1 below it: the samples of a prompt succeed or fail together


def group_metrics(total: dict[str, float], *, size: int) -> dict[str, float]:
    """Metrics by name, of sums over all groups of `size` rows; what a mode does not count has none."""
    metrics: dict[str, float] = {}
    groups = total["groups"]
    for name in ("distinct", "similarity", "empty"):
        metrics[f"sketch/{name}"] = total[name] / max(total["lists"], 1)
    if "trajectories" in total:
        metrics["agent/trajectories"] = total["trajectories"] / groups
        metrics["agent/decisions"] = total["lists"] / groups
        metrics["agent/duplicate_actions"] = total["duplicates"]
    for name in ("tokens", "sampled_tokens", "dropped", "too_long", "repeats", "fillers"):
        if name in total:
            metrics[f"sketch/{name}"] = total[name]
    if sketched := total.get("sketched"):
        metrics["sketch/success"] = total["sketched_correct"] / sketched
        metrics["sketch/group_success"] = total["sketched_solved"] / total["sketched_groups"]
    if "sketched" in total and (alone := groups * size - total["sketched"]):
        metrics["sketch/plain_success"] = (total["correct"] - total["sketched_correct"]) / alone
    metrics["sketch/token_ratio"] = total["tokens"] / max(total["sampled_tokens"], 1)
    if total["with_targets"]:
        metrics["sketch/coverage"] = total["covered"] / total["with_targets"]
    if total["correct"]:
        each = total["correct"] / (groups * size)
        ratio = total["solved"] / groups / each
        metrics["sketch/pass_ratio"] = ratio
        metrics["sketch/collapse_alarm"] = float(ratio < COLLAPSE_RATIO and each < 1 / COLLAPSE_RATIO)
    return metrics
