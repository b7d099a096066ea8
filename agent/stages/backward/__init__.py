"""How a stage's backward is split into I and W, and what that is checked against."""
