"""Everything that runs inside verl's rollout: the planner loop, the tool runner, a rollout engine."""
