"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """Bad input: one line that says what is wrong, where, and what to do.

    Commands print the line on stderr and exit with code 2; everything else that is raised is a
    fault of this code and keeps its traceback.
    """
