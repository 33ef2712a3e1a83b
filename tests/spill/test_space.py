"""Room on the drives: residues, stripes, scattering, growth."""

import pytest

from tensorspill.spill.space import RESIDUE_FROM, Piece, Space

BLOCK = 4096
MIB = 1 << 20


def spaces(
    count: int = 1, capacity: int | None = None, stripe: int = MIB, size: int = 64 * MIB
) -> Space:
    space = Space([(BLOCK, 512)] * count, capacity, stripe)
    for drive in range(count):
        space.grown(drive, space.first_size(size))
    return space


def take(space: Space, nbytes: int, address: int = 0) -> tuple[Piece, ...]:
    pieces = space.take(nbytes, address)
    assert pieces is not None
    assert sum(piece.nbytes for piece in pieces) == nbytes
    return pieces


@pytest.mark.parametrize("address", [0, 64, 511, 512, 4095])
@pytest.mark.parametrize("nbytes", [1, RESIDUE_FROM - 1, RESIDUE_FROM, RESIDUE_FROM + 1])
def test_large_tensors_start_at_their_residue(nbytes: int, address: int) -> None:
    (piece,) = take(spaces(), nbytes, address)
    assert piece.base % BLOCK == 0
    assert piece.offset - piece.base == (address % 512 if nbytes >= RESIDUE_FROM else 0)


def test_any_address_goes_direct_where_the_drive_takes_any() -> None:
    space = Space([(BLOCK, 1)], None, MIB)
    space.grown(0, 4 * MIB)
    (piece,) = take(space, 2 * MIB, 4095)
    assert piece.offset == piece.base


def test_small_tensors_go_to_each_drive_in_turn() -> None:
    space = spaces(3)
    drives = [take(space, 100)[0].drive for _ in range(6)]
    assert drives == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("nbytes", [2 * MIB, 3 * MIB + 1, 10 * MIB + 4097])
def test_large_tensors_are_striped(nbytes: int) -> None:
    pieces = take(spaces(3), nbytes, 64)
    assert len(pieces) == len({piece.drive for piece in pieces}) == min(3, nbytes // MIB)
    assert all(piece.nbytes % BLOCK == 0 for piece in pieces[:-1])
    assert max(p.nbytes for p in pieces) - min(p.nbytes for p in pieces) <= 3 * BLOCK
    assert all((piece.offset - piece.base) == 64 for piece in pieces if piece.nbytes >= MIB)


def test_a_capacity_holds_what_it_says_at_any_address() -> None:
    space = spaces(capacity=16 * MIB)
    taken = [take(space, MIB, 64) for _ in range(16)]
    assert space.free == 0
    assert space.take(1, 0) is None
    assert space.growth is None
    assert all(piece.offset % 512 == 64 for (piece,) in taken)
    assert take(space, 0) == ()


def test_a_tensor_is_scattered_over_holes() -> None:
    space = spaces(capacity=64 * BLOCK)
    taken = [take(space, BLOCK) for _ in range(64)]
    for pieces in taken[::2]:
        space.give_back(pieces, BLOCK)
    pieces = take(space, 32 * BLOCK)
    assert len(pieces) == 32
    space.give_back(pieces, 32 * BLOCK)
    for pieces in taken[1::2]:
        space.give_back(pieces, BLOCK)
    assert len(take(space, 64 * BLOCK)) == 1, "what is free is joined again"


def test_room_of_the_same_size_is_taken_in_the_order_it_had() -> None:
    space = spaces()
    first = [take(space, 5000) for _ in range(10)]
    for pieces in reversed(first):
        space.give_back(pieces, space.charge(5000))
    assert [take(space, 5000) for _ in range(10)] == first


def test_without_capacity_files_are_to_grow() -> None:
    space = spaces(size=BLOCK)
    take(space, BLOCK)
    assert space.take(200 * MIB, 64) is None
    assert space.growth is not None
    assert space.growth.needed == 200 * MIB + 2 * BLOCK
    space.grown(0, space.growth.needed)
    take(space, 200 * MIB, 64)


def test_where_one_drive_is_full_another_is_taken() -> None:
    space = spaces(2, size=4 * MIB)
    space.refuse([0, 1])
    take(space, 3 * MIB, 0)
    pieces = take(space, 4 * MIB, 0)
    assert {piece.drive for piece in pieces} == {0, 1}
    assert space.take(2 * MIB, 0) is None
    assert space.growth is None
    assert take(space, MIB)


def test_layout_in_room_that_was_made_for_another() -> None:
    space = spaces(capacity=4 * MIB)
    pieces = take(space, MIB + BLOCK, 0)
    laid = space.lay_out(pieces, MIB + 1, 100)
    assert laid is not None
    assert laid[0].offset == laid[0].base + 100
    tight = space.lay_out(pieces, MIB + BLOCK, 100)
    assert tight is not None
    assert tight[0].offset == tight[0].base, "without a residue it fits"
    assert space.lay_out(pieces, MIB + BLOCK + 1, 0) is None
