"""Where Lightning meets the engine."""
