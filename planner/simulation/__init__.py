"""A training job's life under a failure trace: the cost of failures under each policy.

A `Trace` (`traces`) lists when workers come and go. The `engine` plays a policy (`policies`, `planned`) against it and
returns a `SimulationOutcome`. Nothing here has side effects, and nothing is random but generated traces, which are a
function of their seed.
"""
