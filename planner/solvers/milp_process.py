"""Solves one MathOpt model with HiGHS in a process of its own: `python milp_process.py DEADLINE`.

It reads the model (a serialized ModelProto) from standard input, and writes one JSON object to standard output:
`reason`, and `values` by variable id. DEADLINE is a time of the machine's monotonic clock, since the imports take some
of the time available.

The solver needs its own process because HiGHS can't be interrupted through MathOpt, writes to standard output whatever
it is told, and may want more memory than its caller has. The process belongs to the caller's process group, has the
same niceness and limits, and is killed with it. It imports the solver alone, in 0.3 s, and nothing of the script that
plans.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    model = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(sys.stdin.buffer.read()))
    limit = datetime.timedelta(seconds=max(0.0, float(sys.argv[1]) - time.monotonic()))
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(time_limit=limit))
    found = result.has_primal_feasible_solution()
    json.dump(
        {
            "reason": result.termination.reason.name,
            "values": {v.id: value for v, value in result.variable_values().items()} if found else {},
        },
        answer,
    )
    answer.close()


if __name__ == "__main__":
    main()
