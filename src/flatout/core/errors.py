"""The two exceptions that cross layers."""


class UserError(ValueError):
    """A mistake the user can mend: one clear line with what to do next, exit code 2."""


class NotApplicable(Exception):  # noqa: N818  an answer, not an error
    """A technique has nothing to do here; the text says why. Not a failure."""
