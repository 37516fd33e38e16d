"""Loads: the items of a plan, from files into the planner's tensors.

A ``loader.Loader`` is of one call of ``read_data``, and of its thread. It finds out what each item is, and has three
ways for them: ``matched`` for a compact plan, whose items never become objects of Python (``landing`` brings them to
accelerators, ``handon`` reads once what several ranks need), ``tensors`` for the other plain tensors, ``records`` for
what is unpickled. ``wanted`` says what an item wants, ``boxes`` where a tensor's elements lie; ``task`` has what a
load is to do, ``inputs`` its files, ``reads`` calls the core for all of them, and ``explain`` has the words for what
goes wrong.
"""
