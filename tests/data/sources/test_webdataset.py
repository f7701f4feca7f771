import gzip
import io
import struct
import tarfile

import numpy as np
import pytest

import flatout.data
from flatout.data.sources import open_source
from flatout.data.sources.webdataset import expand
from flatout.data.verify import verify
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, packed, skipped_in, tar


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def sample(number):
    """Return the members of one sample."""
    return [
        (f"{number:04d}.jpg", file_bytes(number)),
        (f"{number:04d}.cls", str(number % 3).encode()),
        (f"{number:04d}.txt", f"a picture {number}".encode()),
        (f"{number:04d}.box.npy", npy(np.arange(4) + number)),
    ]


def members(*numbers):
    return [member for number in numbers for member in sample(number)]


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def test_members_of_one_name_are_one_sample(tmp_path):
    path = tar(tmp_path / "a.tar", members(*range(9)))

    header = packed(path, tmp_path / "a")
    data = flatout.data.open(tmp_path / "a", order="source", decode="bytes")

    assert header.samples == 9
    assert data[4]["jpg"] == file_bytes(4)
    assert (data[4]["cls"], data[4]["txt"]) == (1, "a picture 4")
    assert data[4]["box.npy"].tolist() == [4, 5, 6, 7]
    assert data.targets[:4] == [0, 1, 2, 0]


def test_several_tars_are_one_set_and_names_may_repeat_between_them(tmp_path):
    tar(tmp_path / "s-000.tar", members(0, 1))
    tar(tmp_path / "s-001.tar", members(0, 2, 3))

    for target in (tmp_path, tmp_path / "s-{000..001}.tar", tmp_path / "s-*.tar"):
        source = open_source(str(target), work=tmp_path / "work")

        assert len(source) == 5
        assert len({source.name(number) for number in range(5)}) == 5


@pytest.mark.parametrize("pattern", ["s-*.tar", "s-?.tar", "s-[0-9].tar", "[rs]-{0..1}.tar"])
def test_every_mark_of_a_pattern_finds_tars(tmp_path, pattern):
    tar(tmp_path / "s-0.tar", members(0))
    tar(tmp_path / "s-1.tar", members(1))

    assert len(open_source(str(tmp_path / pattern), work=tmp_path / "work")) == 2


def test_tars_of_one_name_and_names_in_capitals_are_of_the_set(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        tar(tmp_path / folder / "s.tar", members(0, 1))
    tar(tmp_path / "b/T.TAR", members(2))

    assert packed(tmp_path / "?/s.tar", tmp_path / "both").samples == 4
    assert len(set(flatout.data.open(tmp_path / "both").store.names)) == 4
    assert packed(tmp_path / "b", tmp_path / "capitals").samples == 3


def test_a_mark_in_the_name_of_a_tar_that_is_there_is_no_pattern(tmp_path):
    found = [tar(tmp_path / f"s[{number}].tar", members(number)) for number in range(2)]

    assert expand(str(tmp_path / "s[{0..1}].tar")) == found


def test_patterns_name_the_tars_of_a_range():
    assert [str(p) for p in expand("a{1..2}-{00..01}.tar")] == [
        "a1-00.tar",
        "a1-01.tar",
        "a2-00.tar",
        "a2-01.tar",
    ]


BAD_MEMBERS = {
    "outside": (("../evil.jpg", b"x"), "lies outside the archive"),
    "absolute": (("/etc/passwd.jpg", b"x"), "lies outside the archive"),
    "deep": (("a/../../b.jpg", b"x"), "lies outside the archive"),
    "symlink": (link("9.jpg", "/etc/passwd"), "is a link to /etc/passwd"),
    "hardlink": (link("9.jpg", "0000.jpg", tarfile.LNKTYPE), "is a link to 0000.jpg"),
    "device": (link("9.jpg", "", tarfile.CHRTYPE), "is a device"),
    "twice": (("0000.jpg", b"x"), "comes twice"),
}


@pytest.mark.parametrize("bad", BAD_MEMBERS)
def test_dangerous_and_double_members_are_refused_by_name_or_left_out(tmp_path, bad):
    member, reason = BAD_MEMBERS[bad]
    path = tar(tmp_path / "a.tar", [*members(0, 1), member])

    with pytest.raises(UserError, match=f"{reason}.*--on-bad skip"):
        packed(path, tmp_path / "a")
    header = packed(path, tmp_path / "b", on_bad="skip")

    assert (header.samples, header.skipped) == (2, 1)
    assert reason in skipped_in(tmp_path / "b")[0]["reason"]


def test_a_sample_without_one_of_its_parts_is_named(tmp_path):
    path = tar(tmp_path / "a.tar", [*members(0, 1), ("0002.jpg", file_bytes(2))])

    with pytest.raises(UserError, match=r"0002: has other parts than the first .*cls"):
        packed(path, tmp_path / "a")

    assert packed(path, tmp_path / "b", on_bad="skip").samples == 2


@pytest.mark.parametrize("length", [20_000, 20_480, 17_000])
def test_a_tar_that_is_cut_off_loses_its_last_samples_only(tmp_path, length):
    path = tar(tmp_path / "a.tar", members(*range(6)))
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(UserError, match="cut off"):
        packed(path, tmp_path / "a")
    header = packed(path, tmp_path / "b", on_bad="skip")

    assert 0 < header.samples < 6
    assert header.skipped > 0


def test_a_compressed_tar_is_refused_with_what_to_do(tmp_path):
    path = tar(tmp_path / "a.tar", members(0))
    path.write_bytes(gzip.compress(path.read_bytes()))

    with pytest.raises(UserError, match="unpack it to a plain"):
        packed(path, tmp_path / "a")


def test_a_label_that_is_no_number_is_a_bad_sample(tmp_path):
    path = tar(tmp_path / "a.tar", [*members(0, 1), *members(2)[:1], ("0002.cls", b"dog")])
    path = tar(tmp_path / "b.tar", [m for m in [*members(0), *members(1)] if m[0] != "0001.cls"])
    path = tar(tmp_path / "c.tar", [("0.cls", b"1"), ("1.cls", b"dog")])

    with pytest.raises(UserError, match="1: cls is no int"):
        packed(path, tmp_path / "a")


def test_a_packed_tar_equals_its_source(tmp_path):
    path = tar(tmp_path / "a.tar", members(*range(9)))
    packed(path, tmp_path / "a")

    source = open_source(str(path), work=tmp_path / "work")

    assert not verify(source, tmp_path / "a", tell=lambda _progress: None).num_problems


def archive():
    """Return an .npz, which is no array."""
    stream = io.BytesIO()
    np.savez(stream, x=np.arange(4))
    return stream.getvalue()


HEAD = b"{'descr': ("
NO_ARRAYS = {
    "empty": b"",
    "cut off": npy(np.arange(4))[:-3],
    "zip": archive(),
    "zip cut off": archive()[:40],
    "open bracket": b"\x93NUMPY\1\0" + struct.pack("<H", len(HEAD)) + HEAD,
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_an_array_that_cannot_be_read_is_a_bad_sample(tmp_path, kind):
    bad = [*sample(1)[:-1], ("0001.box.npy", NO_ARRAYS[kind])]
    path = tar(tmp_path / "a.tar", [*members(0), *bad, *members(2)])

    with pytest.raises(UserError, match=r"0001: box\.npy is no array: .*--on-bad skip"):
        packed(path, tmp_path / "a")

    assert packed(path, tmp_path / "b", on_bad="skip").samples == 2
    assert [row["name"] for row in skipped_in(tmp_path / "b")] == ["0001"]


@pytest.mark.parametrize("kind", NO_ARRAYS)
@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_first_array_that_cannot_be_read_is_named(tmp_path, kind, on_bad):
    bad = [*sample(0)[:-1], ("0000.box.npy", NO_ARRAYS[kind])]
    path = tar(tmp_path / "a.tar", [*bad, *members(1)])

    with pytest.raises(UserError, match=r"0000: box\.npy is no array: .*repair it"):
        packed(path, tmp_path / "a", on_bad=on_bad)


def test_arrays_of_the_other_byte_order_are_packed(tmp_path):
    path = tar(tmp_path / "a.tar", [("0.npy", npy(np.arange(4, dtype=">i4")))])

    packed(path, tmp_path / "a")

    assert flatout.data.open(tmp_path / "a")[0]["npy"].tolist() == [0, 1, 2, 3]


def test_a_damaged_member_in_the_middle_does_not_pass_for_the_end(tmp_path):
    path = tar(tmp_path / "a.tar", members(*range(6)))
    data = path.read_bytes()
    at = data.index(b"0002.jpg")
    path.write_bytes(data[:at] + b"X" + data[at + 1 :])

    with pytest.raises(UserError, match=r"damaged or cut off.*--on-bad skip"):
        packed(path, tmp_path / "a")

    assert packed(path, tmp_path / "b", on_bad="skip").samples == 2
    assert "damaged or cut off" in skipped_in(tmp_path / "b")[0]["reason"]


def test_a_header_that_makes_no_sense_is_damage(tmp_path):
    odd = tarfile.TarInfo("0002.jpg")
    odd.pax_headers = {"GNU.sparse.map": "no numbers"}
    path = tar(tmp_path / "a.tar", [*members(0, 1), (odd, b"")])

    with pytest.raises(UserError, match=r"damaged or cut off.*--on-bad skip"):
        packed(path, tmp_path / "a")

    assert packed(path, tmp_path / "b", on_bad="skip").samples == 2
