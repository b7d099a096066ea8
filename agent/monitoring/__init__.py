"""Who is alive, what each worker is doing, and how a console hears of it."""
