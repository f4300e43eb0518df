"""What all suites share: generated examples have no time limit, for a busy machine is no defect."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
