"""Tests of coat_jax, one file a module."""
