"""How each worker and the whole job is, as people are told."""
