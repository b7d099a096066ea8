"""The pure state machine that decides which workers are in the job, which are lost, and which generation opens next
(`coordinator.step`). A console drives it, or a launcher without a console (`local`)."""
