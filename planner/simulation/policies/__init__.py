"""One policy per file. Those of `published` play measured tables; the others plan with a job's profile."""
