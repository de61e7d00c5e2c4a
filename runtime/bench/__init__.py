"""Measures the engine and its operators without a server: cells of the results table, one JSON record each."""
