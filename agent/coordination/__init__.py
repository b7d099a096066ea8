"""Who is in the job, who is lost, and which generation opens next: one pure state machine (`coordinator.step`), driven
by a console, or by a launcher that has none (`local`)."""
