"""Blocks in a graph: a whole one from router to sum, or where the proof of one broke, and what that was."""
