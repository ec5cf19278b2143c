"""Training data from a file of queries, and the planner's prompt.

:func:`build_data` makes verl's parquet of it; :func:`load_planner_prompt` gives the prompt that stands in every row.
"""

from rltr_verl.data.build import DataOptions, build_data
from rltr_verl.data.prompt_files import load_planner_prompt, load_planner_prompt_file, prompt_messages
from rltr_verl.data.query import FIELDS, Query
from rltr_verl.data.summary import Summary

__all__ = [
    "FIELDS",
    "DataOptions",
    "Query",
    "Summary",
    "build_data",
    "load_planner_prompt",
    "load_planner_prompt_file",
    "prompt_messages",
]
