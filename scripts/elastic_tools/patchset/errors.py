"""The one exception that a user sees."""


class Refusal(Exception):
    """One sentence that says what is in the way; the tool prints it and exits with 1."""
