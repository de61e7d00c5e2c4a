"""Harmony: render, tokenise, parse and stream."""
