"""Multi-hop questions whose demonstrations nearly always end badly."""

from trl_explore.tasks.multihop import MultiHopTask

# A first success is hard to come by.
RARE_HOP = MultiHopTask(name="rare_hop", right_probabilities=(0.2, 0.1, 0.05, 0.02), warm_start_steps=700)
# Five to eight turns, of which the last ones go wrong.
LATE_HOP = MultiHopTask(
    name="late_hop",
    hops=(5, 6),
    max_searches=7,
    right_probabilities=(0.2, 0.1, 0.05, 0.02),
    warm_start_steps=700,
)
