"""What a user can get wrong; leaf module."""


class InputError(ValueError):
    """Bad input from the user: the command line prints it as one line and exits with 2."""
