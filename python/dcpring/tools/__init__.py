"""What looks at checkpoints and traces from outside, and what makes new ones of them.

``inspect`` lists, checks, compares and shows checkpoints, ``convert`` changes their format, ``keys`` shows their names,
``traces`` tells where the time of a save or load went, ``machine`` what works here and how fast. They return plain
data; ``cli`` prints, with one module a command.
"""
