"""What is to be planned: a job, its op times, its limits; and errors, words and files that all use."""
