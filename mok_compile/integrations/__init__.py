"""Bridges to other libraries. Nothing here imports one: each bridge waits until the user has imported it."""
