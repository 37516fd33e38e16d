"""Traces of saves and loads, read and explained."""
