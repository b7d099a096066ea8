"""One job: its state in memory and in the database, and what that state is made of."""
