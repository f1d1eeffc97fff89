"""The two ways in which a run ends early: the user can mend it, or the training failed."""


class UserError(Exception):
    """A mistake that the user can mend: one line that names the key, the value and the fix."""


class TrainingError(Exception):
    """Training cannot go on (a loss that is not finite); what was saved is kept."""
