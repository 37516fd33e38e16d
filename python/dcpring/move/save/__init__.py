"""Saves: the items of a plan, from the planner's tensors into files.

A ``saving.Saving`` is of one call of ``write_data``, and of its thread. ``items`` says what they are: DCP's
WriteItems, or rows of a compact plan, of which no object of Python is made. ``results`` is what
ranks report, and what the coordinator makes of it.
"""
