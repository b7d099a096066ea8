"""A package, so that one Chromium is there for all of these tests and for no others."""
