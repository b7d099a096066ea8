"""Solves one MathOpt model with HiGHS in a process of its own: `python milp_process.py SECONDS`.

Model (a serialized ModelProto) on standard input; one JSON object on standard output: `reason`,
`objective` and `bound` (null where there is none), `values` by variable id.

A process, because HiGHS takes no interruption through MathOpt, writes to standard output whatever
it is told, and may want more memory than its caller has to give.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    limit = datetime.timedelta(seconds=float(sys.argv[1]))
    model = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(sys.stdin.buffer.read()))
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(time_limit=limit))
    found = result.has_primal_feasible_solution()
    bound = result.termination.objective_bounds.dual_bound
    json.dump(
        {
            "reason": result.termination.reason.name,
            "objective": result.objective_value() if found else None,
            "bound": bound if math.isfinite(bound) else None,
            "values": {v.id: value for v, value in result.variable_values().items()} if found else {},
        },
        answer,
    )
    answer.close()


if __name__ == "__main__":
    main()
