"""The console itself: puts the features together, and is what the API and the pages call."""
