"""Loads: what a plan wants, from files into the planner's tensors.

``loader.load`` is one call of ``read_data``, in its thread: it is given a ``task``, and what is ``wanted``. There is
one way to read tensors (``executor``): boxes of stored tensors go straight into their memory, or through windows of
host memory. What is unpickled is read whole (``records``). ``peers`` reads once what several ranks need.
``targets`` checks the tensors that are filled, and ``explain`` says what has failed.
"""
