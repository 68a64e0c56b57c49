"""The one exception that means "the user can fix this", and what raises it for a choice."""


class UserError(Exception):
    """Bad input: one line that says what is wrong, where, and what to do.

    Commands print the line on stderr and exit with code 2; everything else that is raised is a
    fault of this code and keeps its traceback.
    """


class Terminated(Exception):
    """SIGTERM came and everything has been saved; the message says what."""


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value outside `choices`, by name."""
    if value not in choices:
        raise UserError(f"{name}={value!r}: must be one of {', '.join(choices)}")
