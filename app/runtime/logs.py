"""How the console and its planning process log."""

from __future__ import annotations

import logging
import os
import sys

import structlog

from openrecycle.planner.jobs.words import printable

LEVEL = "OPENRECYCLE_LOG"
"""Environment variable: `warning` for less, `debug` for more. Processes started from here inherit it."""


def _in_print(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What comes from outside may hold what terminals obey, or line breaks, after which a line seems to be another."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def configure_logging() -> None:
    """One line per event on stderr. Nothing that is logged holds a token or a password."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, "info").upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _in_print,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
