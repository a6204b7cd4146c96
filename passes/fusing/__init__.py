"""Puts the op in a proven block's place, and compares the two if asked to."""
