"""Measurements: of programs compiled for an H200, and of programs that run on one."""
