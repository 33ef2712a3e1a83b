"""What a faulty file system does wrong: rules, sent to its process as lines of JSON."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from dataclasses import dataclass

__all__ = ["Rule", "dump", "load"]


@dataclass(frozen=True)
class Rule:
    """One fault; the first rule that concerns an operation decides.

    Attributes
    ----------
    name : str
        Pattern for the file's name.
    op : str
        "read", "write", "open", "fsync" or "fallocate".
    begin : int
        Only operations that reach beyond this offset are concerned.
    direct : bool, optional
        Only those of descriptors with O_DIRECT, or only those without.
    error : int
        The errno to fail with. A write through the page cache moves what lies before `begin`.
    shorten : int
        Move at most so many bytes.
    multiple : int
        Refuse with EINVAL unless offset and size are multiples of this.
    stall : bool
        Do not answer while the rule stands.
    """

    name: str = "*"
    op: str = "read"
    begin: int = 0
    direct: bool | None = None
    error: int = 0
    shorten: int = 0
    multiple: int = 0
    stall: bool = False

    def concerns(self, name: str, op: str, direct: bool, end: int) -> bool:
        """Whether the rule is about an operation that ends at `end`."""
        return (
            op == self.op
            and fnmatch.fnmatchcase(name, self.name)
            and self.direct in (None, direct)
            and (op not in ("read", "write") or end > self.begin)
        )


def dump(rules: tuple[Rule, ...]) -> str:
    return json.dumps([dataclasses.asdict(rule) for rule in rules])


def load(line: str) -> tuple[Rule, ...]:
    return tuple(Rule(**fields) for fields in json.loads(line))
