"""What every console does with its tables as it begins, done in the server that those of tests are forked from."""

from sqlalchemy.orm import configure_mappers

import openrecycle.db.models  # noqa: F401

configure_mappers()
