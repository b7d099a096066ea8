"""A process of its own for long work on histories: `python -m openrecycle.app.history export JOB OUT`, or
`import FILE ACTOR [ID]`. The database is DATABASE_URL. The console runs it; people use `python -m app`.

It says what came of it as one line of JSON; status 2: refused, with a sentence under `error`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from openrecycle.app.history.archive import export
from openrecycle.app.history.importing import import_history
from openrecycle.app.history.reading import HistoryError
from openrecycle.db.session import Database, DatabaseError

# A file that asks for more memory than any history needs ends this process, and harms no other.
MOST_MEMORY = 8 * 2**30


def main(arguments: list[str]) -> int:
    os.nice(5)  # heartbeats go first
    database = Database(os.environ["DATABASE_URL"])
    try:
        if arguments[0] == "export":
            manifest = export(database, arguments[1], Path(arguments[2]))
            print(json.dumps({"found": manifest is not None}))
        else:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            new_id = arguments[3] if len(arguments) > 3 else None
            print(json.dumps(asdict(import_history(database, Path(arguments[1]), actor=arguments[2], new_id=new_id))))
    except (HistoryError, DatabaseError) as error:
        print(json.dumps({"error": str(error)}))
        return 2
    finally:
        database.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
