"""Tasks with multi-hop questions whose demonstrations nearly always end with a wrong answer."""

from trl_explore.tasks.multihop import MultiHopTask

# Successes are rare at the start of training.
RARE_HOP = MultiHopTask(name="rare_hop", right_probabilities=(0.2, 0.1, 0.05, 0.02), warm_start_steps=700)
# Longer trajectories, of five to eight turns. The mistakes are in the last turns.
LATE_HOP = MultiHopTask(
    name="late_hop",
    hops=(5, 6),
    max_searches=7,
    right_probabilities=(0.2, 0.1, 0.05, 0.02),
    warm_start_steps=700,
)
