"""Says what a file is that is given for a recording and is none, by its first bytes."""

_BEGINS = (
    (b"\x1f\x8b", "it is compressed: unpack it first (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "it is compressed: unpack it first (zstd -d)"),
    (b"\xfd7zXZ", "it is compressed: unpack it first (unxz)"),
    (b"BZh", "it is compressed: unpack it first (bunzip2)"),
    (b"PK", "it is a ZIP archive or a checkpoint of torch.save; a recording is what torch.cuda.memory._dump_snapshot writes"),
    (b"version https://git-lfs", "it is a pointer of Git LFS, not the file itself: git lfs pull"),
    (b"<", "it is a web page, not the file that was to be downloaded"),
    (b"SQLite format 3", "it is a database"),
    (b"\x93NUMPY", "it is an array of numpy's"),
)  # fmt: skip


def kind_of(start: bytes) -> str | None:
    """A sentence on a file that begins with `start`; None where it may be a pickle."""
    if not start:
        return "it is empty"
    if start.startswith(b"PK") and b"head.npy" in start[:64]:
        return "it is a trace that --save-tape wrote: tightfit estimate, doctor, report and diff read it; --save-recording writes a recording"
    stripped = start.lstrip()
    return next((said for begin, said in _BEGINS if stripped.startswith(begin)), None)
