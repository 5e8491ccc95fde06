"""Errors that a user can cause, and warnings that a user should read."""


class SpecKVError(Exception):
    """Bad input. The message is one line: what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2.
    """


class SpecKVWarning(UserWarning):
    """Something was skipped or looks wrong, and the work goes on."""
