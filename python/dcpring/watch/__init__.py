"""What others see of a save or load while it runs.

``events`` is the list of what happens: an ``Events`` belongs to one save or load, and is in its run, where storage and
planner find it. Reports and metrics read it, and ``trace_file`` writes it out; such a file is one per path, as long as
the process lives. ``progress`` is the bar and the
callback: a ``Meter`` belongs to one save or load, and its thread ends with it.

Storage, planners and what moves bytes tell this what they do; it decides nothing. ``tools.traces`` reads what it wrote.
"""
