"""Ten thousand damaged and hostile pickles: each is read, or refused in one line, and never runs code, crashes, hangs or eats memory.

Every input is made from a small recording and the number of the input, so a failure can be made again: the number is in its message.
"""

import os
import pickle
import pickletools
import random
import resource
import subprocess
import sys
import time

import pytest

from tightfit.errors import RecordingError
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.units import MIB

ADDRESS = 0x7F0000000000
MAX_SECONDS = 2.0
MAX_BYTES = 300 * MIB


def frames(*lines):
    return [{"filename": "train.py", "line": line, "name": "step"} for line in lines]


def small_recording():
    shared, other = frames(3, 8, 13), frames(4)
    events = [
        ("segment_alloc", 0, 20 * MIB, shared),
        ("alloc", 0, 3 * MIB - 7, shared),
        ("alloc", 3 * MIB, MIB + 5, other),
    ]
    events += [("free_requested", 0, 3 * MIB - 7, list(shared)), ("free_completed", 0, 3 * MIB - 7, list(shared))]
    events += [("alloc", 0, 2 * MIB, []), ("snapshot", 0, 0, other)]
    blocks = [(2 * MIB, "active_allocated", shared), (MIB, "inactive", []), (MIB + 512, "active_allocated", other)]
    blocks += [(16 * MIB - 512, "inactive", [])]
    segment = {"device": 0, "address": ADDRESS, "total_size": 20 * MIB, "stream": 0, "segment_type": "large"}
    return {
        "segments": [
            segment
            | {"segment_pool_id": (0, 0), "is_expandable": False, "frames": shared}
            | {"blocks": [{"size": s, "requested_size": s - 1, "state": st, "frames": f} for s, st, f in blocks]}
        ],
        "device_traces": [
            [
                {"action": a, "addr": ADDRESS + at, "size": size, "stream": 0, "pool_id": (0, 0), "time_us": 5}
                | {"user_metadata": "", "compile_context": "N/A", "frames": stack}
                for a, at, size, stack in events
            ],
            [],
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "max_split_size": 64 * MIB},
        "external_annotations": [{"stage": "START", "name": "step", "device": 0, "time_us": 6}],
        "tightfit": {"schema": 1, "device": "h200", "spans": [["step 0", "step", 0, 6]], "categories": {"a": [1, 2.5]}},
    }


WHOLE = small_recording()
PICKLES = [pickle.dumps(WHOLE, protocol) for protocol in range(6)]
BOUNDARIES = [[at for _, _, at in pickletools.genops(data) if at] for data in PICKLES]
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def flipped(source):
    """A few bits the other way round."""
    data = bytearray(source.choice(PICKLES))
    for _ in range(source.randrange(1, 8)):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


def truncated(source):
    """Cut off anywhere."""
    data = source.choice(PICKLES)
    return data[: source.randrange(len(data))]


def rearranged(source):
    """Bytes exchanged, or a piece repeated, moved or left out."""
    data = bytearray(source.choice(PICKLES))
    at, end, to = sorted(source.randrange(len(data)) for _ in range(3))
    kind = source.randrange(4)
    if kind == 0:
        for _ in range(source.randrange(1, 40)):
            data[source.randrange(len(data))] = source.randrange(256)
    elif kind == 1:
        data[to:to] = data[at:end] * source.randrange(1, 20)
    elif kind == 2:
        data[at:to] = data[end:to] + data[at:end]
    else:
        del data[at:end]
    return bytes(data)


def inserted(source, pieces, number=1):
    """Pieces put between opcodes."""
    which = source.randrange(len(PICKLES))
    data = PICKLES[which]
    for at in sorted((source.choice(BOUNDARIES[which]) for _ in range(number)), reverse=True):
        data = data[:at] + source.choice(pieces) + data[at:]
    return data


def with_opcodes(source):
    """Opcodes of every kind where they have no business, with arguments of all sizes."""
    arguments = [
        b"",
        b"\x00",
        b"\x01\x02",
        source.randbytes(4),
        source.randbytes(8),
        b"12\n",
        b"x\n",
        b"-1\n",
        b"a\nb\n",
    ]
    pieces = [opcode + argument for opcode in source.sample(OPCODES, 6) for argument in source.sample(arguments, 2)]
    return inserted(source, pieces, source.randrange(1, 4))


def with_code(source, canary):
    """Every way that a pickle has to make a program run something: here, to make a folder."""
    name = canary.encode()
    text, arguments = b"X" + len(name).to_bytes(4, "little") + name, b"V" + name + b"\n"
    short = b"\x8c" + bytes([len(name)]) + name
    ways = [
        b"cos\nmkdir\n" + text + b"\x85R0",
        b"cos\nmkdir\n(" + arguments + b"tR0",
        b"\x8c\x02os\x8c\x05mkdir\x93" + short + b"\x85R0",
        b"(" + arguments + b"ios\nmkdir\n0",
        b"(cos\nmkdir\n" + text + b"o0",
        b"cos\nmkdir\n" + text + b"\x85\x81" + b"0",
        b"cos\nmkdir\n" + text + b"\x85}\x920",
        b"cbuiltins\neval\n" + text + b"\x85R0",
        b"}X\x0b\x00\x00\x00__setstate__cos\nmkdir\nsb",
        b"\x82\x01",
        b"\x83\x01\x01",
        b"\x84\x01\x00\x00\x00",
        b"Pos.mkdir\n",
        text + b"Q0",
        b"\x97\x98",
    ]
    return inserted(source, ways)


def with_sizes(source):
    """Lengths, memo numbers and figures far beyond the file."""
    huge = source.choice([1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    four, eight = (huge & 0xFFFFFFFF).to_bytes(4, "little"), huge.to_bytes(8, "little")
    digits = b"9" * source.choice([20, 99, 101, 5000])
    pieces = [b"B" + four, b"X" + four, b"\x8b" + four, b"\x8d" + eight, b"\x8e" + eight, b"\x96" + eight]
    pieces += [b"\x95" + eight, b"Nr" + four + b"0", b"j" + four, b"Np%d\n0" % huge, b"g%d\n" % huge, b"\x8a\xff"]
    pieces += [b"I" + digits + b"\n0", b"L" + digits + b"L\n0", b"F" + digits + b"\n0", b"V" + digits]
    return inserted(source, pieces, source.randrange(1, 3))


def bomb(source):
    """Lists in themselves, deep nests, and memos that double what they hold with every byte."""
    many = source.choice([10, 60, 900, 1100, 20_000])
    shared = source.choice([b"h\x00h\x00\x86q\x00", b"]q\x00(h\x00h\x00e", b"(h\x00h\x00tq\x00", b"(h\x00h\x00lq\x00"])
    nests = [
        b"]q\x00h\x00a",
        b"}q\x00X\x08\x00\x00\x00segmentsh\x00X\x0d\x00\x00\x00device_tracesh\x00u",
        b"]" * many + b"a" * (many - 1),
        b"(" * many + b"t" * many,
        b"N" + b"\x85" * many,
        b"}" + b"X\x01\x00\x00\x00k}" * many + b"s" * many,
        b"]q\x00" + shared * many + b"0" * (many - 1),
        b"})q\x00" + shared * min(many, 900) + b"Ns",
        b"](" + b"}q\x00X\x06\x00\x00\x00actionX\x05\x00\x00\x00allocs" + b"h\x00" * many + b"e",
        b"](" + b"]q\x00" + b"h\x00" * many + b"ee",
    ]
    nest = source.choice(nests)
    keys = ["segments", "device_traces", "allocator_settings", "external_annotations", "tightfit"]
    source.shuffle(keys)
    key = b"X" + len(keys[0]).to_bytes(4, "little") + keys[0].encode()
    rest = pickle.dumps({k: WHOLE[k] for k in keys[1:]}, 2)[2:-1]
    return b"\x80\x02" + source.choice([nest, rest + key + nest + b"s"]) + b"."


def replaced(source):
    """Sound pickles, in which a value is of another type or out of range."""
    others = [
        None,
        True,
        -1,
        1 << 63,
        1 << 80,
        0.5,
        float("nan"),
        "",
        "alloc",
        "\n",
        b"x",
        (),
        (1, 2),
        [],
        [[]],
        {},
        {"action": "alloc"},
    ]
    whole = pickle.loads(PICKLES[2])
    for _ in range(source.randrange(1, 3)):
        inner = whole
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = source.choice(keys)
            if not isinstance(inner[key], dict | list) or source.random() < 0.1:
                if source.random() < 0.2:
                    del inner[key]
                else:
                    inner[key] = source.choice(others)
                break
            inner = inner[key]
    return pickle.dumps(whole, source.randrange(6))


def noise(source):
    """No pickle at all."""
    return source.choice([b"", b"\x80\x04", b"PK\x03\x04", b"{}"]) + source.randbytes(source.randrange(200))


KINDS = {
    "bits flipped": (flipped, 2500),
    "cut off": (truncated, 1000),
    "rearranged": (rearranged, 1000),
    "opcodes": (with_opcodes, 1500),
    "code": (with_code, 1000),
    "sizes": (with_sizes, 1000),
    "bombs": (bomb, 500),
    "types": (replaced, 1300),
    "noise": (noise, 200),
}


def outcome(path):
    """None where the recording was read (and then every device of it replayed), or else the line that says why not."""
    try:
        recording = read_recording(path)
    except RecordingError as error:
        return str(error)
    for device in recording.devices:
        replay(recording, device=device.device)
        replay(recording, device=device.device, capacity_bytes=8 * MIB)
    return None


def test_there_are_ten_thousand():
    assert sum(number for _, number in KINDS.values()) == 10_000


def test_the_recordings_that_are_damaged_were_sound(tmp_path):
    for data in PICKLES:
        path = tmp_path / "sound.pickle"
        path.write_bytes(data)
        assert outcome(path) is None
        recording = read_recording(path)
        assert all(replay(recording, device=device).agrees for device in (0, 1))
        assert [len(recording.stacks[i]) for i in recording.devices[0].stack] == [3, 3, 1, 3, 3, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_file_holds_the_answer_is_a_recording_or_one_line(tmp_path, kind):
    make, number = KINDS[kind]
    canary, path = tmp_path / "made", tmp_path / "fuzzed.pickle"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = 0
    for seed in range(number):
        source = random.Random(f"{kind} {seed}")
        data = make(source, str(canary)) if make is with_code else make(source)
        path.write_bytes(data)
        began = time.process_time()
        line = outcome(path)
        assert time.process_time() - began < MAX_SECONDS, f"input {seed} takes too long"
        num_refused += line is not None
        assert line is None or (len(line.splitlines()) == 1 and str(path) in line and len(line) < 500), (
            f"input {seed}: {line}"
        )
        assert line is not None or make is not with_code, f"input {seed} holds code and was read"
        assert not canary.exists(), f"input {seed} ran code"
    assert num_refused > number // 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


def test_the_command_says_one_line_and_ends_with_3(tmp_path):
    for kind in ("bits flipped", "code", "bombs"):
        path, canary = tmp_path / "hostile.pickle", tmp_path / "made"
        for seed in range(100):
            make, source = KINDS[kind][0], random.Random(seed)
            path.write_bytes(make(source, str(canary)) if make is with_code else make(source))
            if outcome(path) is not None:
                break
        command = [sys.executable, "-m", "tightfit", "replay", str(path), "--json"]
        answer = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "1000"}, check=False
        )
        assert answer.returncode == 3
        assert not answer.stdout
        assert len(answer.stderr.strip().splitlines()) == 1
        assert "hostile.pickle" in answer.stderr
        assert not canary.exists()
