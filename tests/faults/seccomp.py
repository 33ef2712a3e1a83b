"""Having the kernel refuse a system call to this process, as containers do."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

__all__ = ["refuse_system_call", "without_huge_pages"]

# linux/prctl.h, linux/seccomp.h, linux/audit.h, linux/bpf_common.h
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_THP_DISABLE = 38, 22, 41
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


def refuse_system_call(number: int, code: int = errno.EPERM) -> None:
    """Make system call `number` fail with errno `code` from now on, in this process for good."""
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (_LOAD_WORD, 0, 0, 0),
            (_JUMP_EQUAL, 0, 1, number),
            (_RETURN, 0, 0, _REFUSE | code),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    memory = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described)


def without_huge_pages() -> None:
    """Give this process no transparent huge pages from now on."""
    _prctl(_PR_SET_THP_DISABLE, 1)


def _prctl(option: int, argument: int, pointer: bytes | None = None) -> None:
    assert platform.system() == "Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    third = zero if pointer is None else ctypes.c_char_p(pointer)
    if libc.prctl(option, ctypes.c_ulong(argument), third, zero, zero):
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")
