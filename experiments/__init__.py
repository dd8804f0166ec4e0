"""Runs that answer one question each: they import the library, never the reverse."""
