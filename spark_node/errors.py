"""The errors a user can cause and mend. Each message is one line: what is wrong, and what to do."""


class UserError(Exception):
    """Bad input. The command line prints the message and exits with 2."""


class ConfigError(UserError):
    """A setting that is unknown, out of range, or contradicts another."""


class DataError(UserError):
    """A dataset or partition that is missing, corrupt, or does not fit the run."""


class OutOfMemory(Exception):
    """There is no memory left for what a process was doing. One line: what that was, what is kept, what takes less."""
