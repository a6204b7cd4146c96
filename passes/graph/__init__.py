"""Graphs as the analysis reads them: a functional view of a Dynamo graph, or a record of what ran."""
