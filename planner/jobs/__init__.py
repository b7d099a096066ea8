"""What is to be planned: a job, its op times, its limits; and errors and words that all use."""
