"""The planner's version, as it goes into the fingerprints of what it made."""

from __future__ import annotations

# Raised when the same question may get another plan, or when stored catalogs change their form.
PLANNER_VERSION = "2"
