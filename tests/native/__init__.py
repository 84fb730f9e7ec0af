"""Tests of the native parts."""
