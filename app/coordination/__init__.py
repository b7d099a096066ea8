"""Parts of the coordinator: what it knows, and what follows from each kind of event. Pure."""
