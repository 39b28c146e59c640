"""Tell whether TRL trains a completion, or masks it because of `mask_truncated_completions`."""

from collections.abc import Sequence

from trl_explore.rows.policy import Policy


def is_trained(policy: Policy, completion_ids: Sequence[int]) -> bool:
    """Return whether TRL trains a completion. With `mask_truncated_completions`, it masks the whole completion if a
    limit cut it off."""
    end_tokens = (*policy.eos_token_ids, policy.tokenizer.pad_token_id)
    return not policy.args.mask_truncated_completions or completion_ids[-1] in end_tokens
