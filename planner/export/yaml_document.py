"""The plan document as YAML, for people: one op a line. `parse_yaml` gives an equal plan back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.plan import Plan, PlanError, first_problem

if TYPE_CHECKING:
    import yaml

# PyYAML takes 0.1 ms per op to write and as much to read.
MAX_OPS = 50_000


def to_yaml(plan: Plan) -> str:
    """Raises PlannerError for a plan above MAX_OPS ops: YAML is read by people."""
    ops = plan.op_count
    if ops > MAX_OPS:
        raise PlannerError(f"the plan has {ops:,} ops and YAML is written for at most {MAX_OPS:,}; use json or csv")
    import yaml

    class Dumper(yaml.SafeDumper):
        """Leaves on one line. Text that begins with a digit is quoted: YAML 1.2 readers take more
        of it for numbers (12e34) than YAML 1.1's PyYAML does."""

        def ignore_aliases(self, data: Any) -> bool:
            return True  # equal tuples are written out, since people read them

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if value[:1].isdigit() else None)

    Dumper.add_representer(str, text)
    return yaml.dump(
        plan.model_dump(mode="json"),
        Dumper=Dumper,
        sort_keys=False,
        default_flow_style=None,
        width=1_000_000,
        allow_unicode=True,
    )


def parse_yaml(text: str | bytes, *, source: str = "plan") -> Plan:
    """Raises PlanError when `text` is not a plan; aliases are refused, since they can blow up."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not accepted")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            if len(found) < len(node.value):
                keys = [str(key.value) for key, _ in node.value]
                twice = next((key for key in keys if keys.count(key) > 1), "")
                raise yaml.YAMLError(f"the key {twice[:80]!r} is there twice in one object")
            return found

    try:
        document = yaml.load(text, Loader=Loader)
    # PyYAML lets through what its own constructors raise: of the date 2021-13-45, or `!!bool x`.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise PlanError(f"{source} is not YAML: {' '.join(str(error).split())[:200]}") from None
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        raise PlanError(f"{source} is not a plan: {first_problem(error)}") from None
