"""The guard: one short-lived process between the trainer and a program. Standard library only; quick to start.

A fresh interpreter, which knows this package as ``guard``, calls ``start.main`` with PLAN TIMEOUT CPU MEMORY OUTPUT
PROCESSES DISK LENGTH (seconds and bytes). It reads ``LENGTH`` bytes of program text from stdin and answers on stdout,
once: a line ``rltr-guard REASON VALUE HEAD TOTAL``, then the first HEAD bytes of the program's output and its last ones
(TOTAL is the size of all of it). Stdin stays open as a lifeline: when its other end closes, for whatever reason, the
program and all that it started are killed.
"""
