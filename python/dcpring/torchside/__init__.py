"""Every private name of torch that dcpring uses, and what differs between versions of torch.

Nothing outside of this package imports or reaches into a private name of torch; tests/test_torchside.py checks that.
Each is looked up (``versions``) so that one which is gone is an error with torch's version and the cure in it.
"""
