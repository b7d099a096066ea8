"""The planning question: a job, its op times and its limits. Also the errors and the wording that all rooms use."""
