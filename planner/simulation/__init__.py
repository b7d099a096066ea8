"""A training job's life under a failure trace: what failures cost, by policy.

A `Trace` (`traces`) says when workers come and go. The `engine` plays a policy (`policies`, `planned`) against it and
returns an `Outcome`. Nothing here has side effects, and nothing is random but generated traces, which are a function of
their seed.
"""
