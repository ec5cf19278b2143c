"""The tools a planner can call, one file each. A new file with a function under `@tool` is a new tool."""
