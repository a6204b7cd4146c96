"""Loops over experts that no graph could hold: cut out of their function, proven from one turn, made one call."""
