"""Helpers shared by the tests: process launcher, comparisons."""
