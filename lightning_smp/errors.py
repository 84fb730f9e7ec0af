"""The exceptions of lightning_smp: what the library raises on purpose is one of these."""

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "PartitionError",
    "SMPError",
    "ScheduleError",
    "UnsupportedError",
    "WorkerAborted",
]


class SMPError(RuntimeError):
    """Base of all errors raised by lightning_smp."""


class ConfigError(SMPError, ValueError):
    """The configuration is invalid; the message lists every problem with its smallest fix."""


class PartitionError(SMPError):
    """The model cannot be placed on the stages as asked."""


class ScheduleError(SMPError):
    """A schedule breaks a rule: a send without a receive, a deadlock, too many live activations."""


class CommunicationError(SMPError):
    """Ranks disagree, or a message between them did not arrive."""


class CheckpointError(SMPError):
    """A checkpoint cannot be written or read."""


class UnsupportedError(SMPError):
    """The operation cannot give the numbers of one device here, so it is refused by name."""


class WorkerAborted(SMPError):
    """Another rank failed; the message carries that rank's original error."""
