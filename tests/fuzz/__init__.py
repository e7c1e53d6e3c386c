"""Hostile input for everything that reads a file: refused in one line, or used; never a traceback, a hang or a flood.

``python -m tests.fuzz --seed 1 --inputs 2000`` tries that many of every family and prints what came of them.
"""
