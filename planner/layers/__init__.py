"""Which stage has which layers, and which worker has which stage."""
