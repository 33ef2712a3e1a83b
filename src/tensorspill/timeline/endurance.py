"""What the bytes written mean for a drive that is good for so many of them."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import parse_bytes

__all__ = ["Endurance", "Wear"]

_DAY = 86400.0
_YEAR = 365 * _DAY


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a drive is rated for.

    Attributes
    ----------
    nbytes : int
        That can be written to it in its life (its "TBW").
    written : int
        Of these, how many were before.
    """

    nbytes: int
    written: int = 0

    @classmethod
    def of(cls, rating: int | str, written: int | str = 0) -> Endurance:
        """Return the endurance of a rating such as "1200TB".

        Raises
        ------
        UnsupportedError
            These are no sizes.
        """
        nbytes = parse_bytes(rating)
        if nbytes < 1:
            raise UnsupportedError("An endurance rating must be positive")
        return cls(nbytes, parse_bytes(written))

    @classmethod
    def of_daily_writes(cls, capacity: int | str, per_day: float, years: float = 5) -> Endurance:
        """Return the endurance of a drive that may be written `per_day` times a day ("DWPD").

        Raises
        ------
        UnsupportedError
            A number is not positive.
        """
        if per_day <= 0 or years <= 0:
            raise UnsupportedError("An endurance rating must be positive")
        return cls.of(int(parse_bytes(capacity) * per_day * years * 365))

    def after(self, nbytes: int, seconds: float) -> Wear:
        """Return what `nbytes` more, written in `seconds`, mean."""
        return Wear(self, nbytes, seconds)


@dataclass(frozen=True, slots=True)
class Wear:
    """What a job did to a drive.

    Attributes
    ----------
    endurance : Endurance
    nbytes : int
        Written by the job, without what the file system and the drive add.
    seconds : float
        In which it was.
    """

    endurance: Endurance
    nbytes: int
    seconds: float

    @property
    def used_pct(self) -> float:
        """Per cent of the endurance that this job used."""
        return 100 * self.nbytes / self.endurance.nbytes

    @property
    def left_bytes(self) -> int:
        """Bytes that can still be written; 0 if the drive is beyond its rating."""
        return max(0, self.endurance.nbytes - self.endurance.written - self.nbytes)

    @property
    def days_left(self) -> float:
        """Days until the rating is used up if the job goes on like this."""
        rate = self.nbytes / self.seconds if self.seconds > 0 else 0.0
        return self.left_bytes / rate / _DAY if rate else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.nbytes / 1e12:.3f} TB written, {self.used_pct:.3f} % of the drive's rating; at "
            f"this rate the rest lasts {_duration(self.days_left * _DAY)}"
        )


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "for ever"
    if seconds >= 2 * _YEAR:
        return f"{seconds / _YEAR:.1f} years"
    return f"{seconds / _DAY:.1f} days"
