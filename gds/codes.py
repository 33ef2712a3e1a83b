"""cuFile's error codes: what each means, and what the user can do about it.

kvikio raises a RuntimeError whose text holds the code's description and not its number, so the
table is looked up by number and by description.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BY_CODE", "BY_TEXT", "CufileCode"]


@dataclass(frozen=True, slots=True)
class CufileCode:
    """One of cuFile's error codes.

    Attributes
    ----------
    code : int
    name : str
        Of the enumeration in ``cufile.h``.
    text : str
        What libcufile says, and with it kvikio.
    cause : str
        What is usually behind it, if more than the text says.
    remedy : str
        What the user can do.
    """

    code: int
    name: str
    text: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        cause = f"; usually {self.cause}" if self.cause else ""
        return f"cuFile error {self.code} ({self.text}{cause})"


_HOST = "Use backend='aio', which needs no GPUDirect Storage"
_DRIVER = "Install or reload an nvidia-fs that matches this driver, or set use_pci_p2pdma"
_LOG = "See cufile.log, which libcufile writes to its working directory"
_AGAIN = "Close other users of GPUDirect Storage, or submit smaller batches"
_POINTER = "Keep the tensor alive, on the engine's device, until its transfer has ended"
_PINNED = (
    "Register less (option registered_bytes), raise max_device_pinned_mem_size_kb in cufile.json, "
    "or use a GPU with a larger BAR1"
)

# code, name, text, cause, remedy
_ROWS = (
    (
        5001,
        "DRIVER_NOT_INITIALIZED",
        "nvidia-fs driver is not loaded. Set allow_compat_mode to true in cufile.json file to "
        "enable compatible mode",
        "nvidia-fs is not loaded and compatibility mode is not allowed",
        "Load nvidia-fs, set use_pci_p2pdma, or set allow_compat_mode in cufile.json",
    ),
    (5002, "DRIVER_INVALID_PROPS", "invalid property", "", "Correct cufile.json"),
    (5003, "DRIVER_UNSUPPORTED_LIMIT", "property range error", "", "Correct cufile.json"),
    (5004, "DRIVER_VERSION_MISMATCH", "nvidia-fs driver version mismatch", "", _DRIVER),
    (5005, "DRIVER_VERSION_READ_ERROR", "nvidia-fs driver version read error", "", _DRIVER),
    (5006, "DRIVER_CLOSING", "driver shutdown in progress", "", "Close engines before the exit"),
    (
        5007,
        "PLATFORM_NOT_SUPPORTED",
        "GPUDirect Storage not supported on current platform",
        "",
        _HOST,
    ),
    (
        5008,
        "IO_NOT_SUPPORTED",
        "GPUDirect Storage not supported on current file",
        "the NVMe driver is not registered with nvidia-fs, or GPU and drive hang on different "
        "root complexes",
        "Install a patched NVMe driver or use P2PDMA; use a file system on a local NVMe drive",
    ),
    (
        5009,
        "DEVICE_NOT_SUPPORTED",
        "GPUDirect Storage not supported on current GPU",
        "the class of the GPU",
        _HOST,
    ),
    (
        5010,
        "NVFS_DRIVER_ERROR",
        "nvidia-fs driver ioctl error",
        "the GPU refused to pin memory",
        _DRIVER,
    ),
    (5011, "CUDA_DRIVER_ERROR", "CUDA Driver API error", "", "See the CUDA error beside it"),
    (5012, "CUDA_POINTER_INVALID", "invalid device pointer", "memory was freed", _POINTER),
    (
        5013,
        "CUDA_MEMORY_TYPE_INVALID",
        "invalid pointer memory type",
        "managed memory",
        "Use memory of cudaMalloc, cuMemAlloc, torch or CuPy",
    ),
    (
        5014,
        "CUDA_POINTER_RANGE_ERROR",
        "pointer range exceeds allocated address range",
        "memory was freed",
        _POINTER,
    ),
    (
        5015,
        "CUDA_CONTEXT_MISMATCH",
        "cuda context mismatch",
        "no context, or another device's",
        _POINTER,
    ),
    (5016, "INVALID_MAPPING_SIZE", "access beyond maximum pinned size", "", _PINNED),
    (5017, "INVALID_MAPPING_RANGE", "access beyond mapped size", "memory was freed", _POINTER),
    (5018, "INVALID_FILE_TYPE", "unsupported file type", "", "Use a regular file"),
    (5019, "INVALID_FILE_OPEN_FLAG", "unsupported file open flags", "", _HOST),
    (
        5020,
        "DIO_NOT_SET",
        "fd direct IO not set",
        "the file system has no O_DIRECT",
        "Use ext4 or XFS on a local NVMe drive",
    ),
    (5022, "INVALID_VALUE", "invalid arguments", "", _LOG),
    (
        5023,
        "MEMORY_ALREADY_REGISTERED",
        "device pointer already registered",
        "somebody else registered the same allocation",
        "Leave registering to one library of the process",
    ),
    (
        5024,
        "MEMORY_NOT_REGISTERED",
        "device pointer lookup failure",
        "memory was freed before it was deregistered",
        _POINTER,
    ),
    (
        5025,
        "PERMISSION_DENIED",
        "driver or file access error",
        "no access to /dev/nvidia-fs*",
        "Give this user access to /dev/nvidia-fs*, in a container too",
    ),
    (5026, "DRIVER_ALREADY_OPEN", "driver is already open", "", _LOG),
    (
        5027,
        "HANDLE_NOT_REGISTERED",
        "file descriptor is not registered",
        "udev knows no ID_FS_USAGE of the disk, as in containers without /run/udev",
        "Mount /run/udev into the container",
    ),
    (
        5028,
        "HANDLE_ALREADY_REGISTERED",
        "file descriptor is already registered",
        "somebody else registered the same file",
        "Open each file with one library of the process",
    ),
    (5029, "DEVICE_NOT_FOUND", "GPU device not found", "", "Make the GPU visible to this process"),
    (
        5030,
        "INTERNAL_ERROR",
        "internal error",
        "the volume's attributes could not be read, as in containers or on new file systems",
        "Mount /run/udev and /sys into the container, or use ext4 or XFS on a local NVMe drive",
    ),
    (
        5031,
        "GETNEWFD_FAILED",
        "failed to obtain new file descriptor",
        "the limit of open files",
        "Raise the limit of open files (ulimit -n)",
    ),
    (
        5033,
        "NVFS_SETUP_ERROR",
        "NVFS driver initialization error",
        "",
        f"{_DRIVER}; or force compatibility mode in cufile.json",
    ),
    (
        5034,
        "IO_DISABLED",
        "GPUDirect Storage disabled by config on current file",
        "",
        "Allow this mount in cufile.json",
    ),
    (5035, "BATCH_SUBMIT_FAILED", "failed to submit batch operation", "", _LOG),
    (
        5036,
        "GPU_MEMORY_PINNING_FAILED",
        "failed to allocate pinned GPU Memory",
        "BAR1 or the pinned memory allowed is used up",
        _PINNED,
    ),
    (5037, "BATCH_FULL", "queue full for batch operation", "", _AGAIN),
    (
        5038,
        "ASYNC_NOT_SUPPORTED",
        "cuFile stream operation not supported",
        "",
        "Set the option stream_ordered='no'",
    ),
    (5039, "INTERNAL_BATCH_SETUP_ERROR", "batch setup internal error - retry later", "", _AGAIN),
    (5040, "INTERNAL_BATCH_SUBMIT_ERROR", "batch submit internal error - retry later", "", _AGAIN),
    (
        5041,
        "INTERNAL_BATCH_GETSTATUS_ERROR",
        "batch get status internal error - retry later",
        "",
        _AGAIN,
    ),
    (5042, "INTERNAL_BATCH_CANCEL_ERROR", "batch cancel internal error - retry later", "", _AGAIN),
    (5043, "NOMEM_ERROR", "cufile no memory error - retry later", "", _AGAIN),
    (5044, "IO_ERROR", "cufile io error", "", "See the kernel's log for errors of the drive"),
    (5045, "INTERNAL_BUF_REGISTER_ERROR", "cufile buf registration error", "", _PINNED),
    (5046, "HASH_OPR_ERROR", "cufile hash operation error", "", _LOG),
    (5047, "INVALID_CONTEXT_ERROR", "cufile invalid context error", "", _POINTER),
    (5048, "NVFS_INTERNAL_DRIVER_ERROR", "nvfs internal driver error", "", _DRIVER),
    (
        5049,
        "BATCH_NOCOMPAT_ERROR",
        "compat mode off error",
        "",
        "Set allow_compat_mode in cufile.json",
    ),
    (5050, "IO_MAX_ERROR", "GPUDirect Storage Max Error", "", _LOG),
)

BY_CODE: dict[int, CufileCode] = {
    code: CufileCode(code, f"CU_FILE_{name}", text, cause, remedy)
    for code, name, text, cause, remedy in _ROWS
}
BY_TEXT: dict[str, CufileCode] = {entry.text: entry for entry in BY_CODE.values()}
