"""What others see of a save or load while it runs.

``phases`` takes the times of its steps: a ``Phases`` belongs to one save or load, and is in its run, where storage and
planner find it. Traced or profiled it is an ``Operation``, which takes spans too, and which
``trace_file`` writes out; such a file is one per path, as long as the process lives. ``progress`` is the bar and the
callback: a ``Meter`` belongs to one save or load, and its thread ends with it.

Storage, planners and what moves bytes tell this what they do; it decides nothing. ``tools.traces`` reads what it wrote.
"""
