"""Rules about the code itself."""
