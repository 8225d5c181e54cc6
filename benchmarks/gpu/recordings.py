"""Recordings of torch's allocator made small: what a replay needs, without stacks and times, compressed, many in one archive.

A dozen runs of some ten thousand events each come to a few hundred kilobytes, which a repository can hold as test data.
"""

import lzma
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Read by everybody's viewer too (pytorch issue #183842).
_PROTOCOL = 4
_EVENT_KEYS = ("action", "addr", "device_free", "size", "stream", "pool_id")
_SEGMENT_KEYS = (
    *("device", "address", "total_size", "stream", "segment_type", "segment_pool_id", "is_expandable"),
    *("allocated_size", "active_size", "requested_size"),
)
_BLOCK_KEYS = ("address", "size", "requested_size", "state")


def compact(recording: Mapping[str, Any]) -> dict[str, Any]:
    """The recording without what a replay does not read."""
    return {
        "segments": [
            {
                **{key: segment[key] for key in _SEGMENT_KEYS if key in segment},
                "blocks": [{key: block[key] for key in _BLOCK_KEYS if key in block} for block in segment["blocks"]],
            }
            for segment in recording["segments"]
        ],
        "device_traces": [
            [{key: event[key] for key in _EVENT_KEYS if key in event} for event in trace]
            for trace in recording["device_traces"]
        ],
        "allocator_settings": recording.get("allocator_settings", {}),
    }


def add(archive: Path, name: str, recording: Path) -> int:
    """Adds the compacted recording to `archive` as `NAME.pickle.xz`; the bytes that it takes there."""
    with recording.open("rb") as file:
        content = pickle.load(file)
    packed = lzma.compress(pickle.dumps(compact(content), protocol=_PROTOCOL), preset=9)
    with zipfile.ZipFile(archive, "a", compression=zipfile.ZIP_STORED) as out:
        out.writestr(f"{name.replace(' ', '_')}.pickle.xz", packed)
    return len(packed)


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Writes every recording of `archive` to `folder` as plain pickles that `tightfit replay` reads."""
    written = []
    with zipfile.ZipFile(archive) as packed:
        for name in packed.namelist():
            path = folder / Path(name).name.removesuffix(".xz")
            path.write_bytes(lzma.decompress(packed.read(name)))
            written.append(path)
    return written
