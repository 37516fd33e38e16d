"""What looks at checkpoints and traces from outside, and what makes new ones of them.

``inspect`` lists, checks, compares and draws checkpoints, ``convert`` changes their format, ``keys`` shows their names,
``trace`` explains how long a save or load took, ``machine`` what works here and how fast; ``picture`` is what all of
them draw with. They return plain data; ``cli`` prints, with one module a command.
"""
