"""Keys of services: they come from the environment, and go into requests and nowhere else."""

from __future__ import annotations

import os

from lightrl.errors import UserError


def read_key(variable: str | None, setting: str) -> str | None:
    """The value of the environment variable that the config's `setting` names; None where it names none.

    UserError for a variable that is not set, or a value that no header can hold. The value is in no message.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"{setting}: the environment has no {variable}: export it on every rank, or drop this")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{setting}: the value of {variable} cannot be sent: it is not printable ASCII")
    return key
