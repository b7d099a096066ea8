"""The whole history of a job as a file: exported, checked, imported; and jobs deleted."""
