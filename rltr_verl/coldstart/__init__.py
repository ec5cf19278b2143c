"""RLTR's stage A: a teacher's trajectories, the best of them, and what verl's SFT trainer learns from (RLTR 3.1).

sample -> select -> export, each with its files in one folder (:class:`rltr_verl.coldstart.store.Folder`):

* :mod:`rltr_verl.coldstart.sampling` lets a teacher play each query n times through the planner's own loop and tools.
* :mod:`rltr_verl.coldstart.select` drops what is malformed, has a judge score the rest and keeps the best of n.
* :mod:`rltr_verl.coldstart.export` writes parquet for the planner, for an end-to-end agent and for a summarizer;
  :mod:`rltr_verl.coldstart.answer_writer` has the answers written.
"""
