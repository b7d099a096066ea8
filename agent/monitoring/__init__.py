"""Who is alive, what each worker is at, and how a console hears of it."""
