"""From what a person gave (a model, data, options) to a job that runs."""
