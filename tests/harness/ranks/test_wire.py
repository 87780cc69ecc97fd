"""Values that travel between ranks: they arrive as they went, and broken bytes are refused."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import pytest
import torch

from harness.calibrate import measure_machine
from harness.check.cell import group_run
from harness.commands.parts.machine_facts import add_ranks
from harness.measure.cell import RankSample, Refusal, rank_job
from harness.peers.run import peer_job
from harness.plan.tasks import Piece, Place, Resident, Tensor
from harness.ranks.job import Member
from harness.ranks.wire import answer_type, pack, pack_call, unpack, unpack_call

JOBS: tuple[Callable[..., object], ...] = (
    rank_job,
    peer_job,
    group_run,
    add_ranks,
    *(getattr(measure_machine, name) for name in vars(measure_machine) if name.endswith("_times")),
)


class Colour(StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: int
    label: str | None = None


@dataclass(frozen=True)
class Whole:
    points: tuple[Point, ...]
    by_colour: Mapping[Colour, list[float]]
    either: int | Point | None


POINT = Point(4)
WHOLE = Whole(
    points=(Point(-3, "a\ud800\x00"), Point(2**70)),
    by_colour={Colour.RED: [0.1, -0.0, 1e-320, math.inf, -math.inf]},
    either=Point(1),
)
TENSORS = (
    torch.arange(30, dtype=torch.float64).reshape(2, 3, 5).transpose(0, 2),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.empty(2, 0, 7, dtype=torch.float16),
    torch.tensor([[True], [False]]),
    torch.tensor([math.nan, -0.0]),
)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit."""
    parts = [x.contiguous().reshape(-1).view(torch.uint8).tolist() for x in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and parts[0] == parts[1]


def test_values_arrive_as_they_went() -> None:
    assert unpack(Whole, pack(Whole, WHOLE)) == WHOLE
    (number,) = unpack(tuple[float], pack(tuple[float], (math.nan,)))
    assert math.isnan(number)
    assert unpack(bytes, pack(bytes, b"\0\xff")) == b"\0\xff"


def test_tensors_arrive_to_the_bit_whatever_their_strides() -> None:
    kind = tuple[torch.Tensor, ...]
    for went, came in zip(TENSORS, unpack(kind, pack(kind, TENSORS)), strict=True):
        assert same(went, came)


def test_the_answer_of_a_measured_cell_arrives() -> None:
    resident = Resident(Place(1), Piece(Tensor.OUT, (0, 2), 5))
    went = RankSample((0.5, 0.25), 0.1, 7, {resident: TENSORS[0]}, plans="{}")
    came = unpack(RankSample | Refusal, pack(RankSample | Refusal, went))
    assert came.results.keys() == went.results.keys()
    assert same(came.results[resident], TENSORS[0])
    assert (came.samples_s, came.sent_bytes, came.plans) == ((0.5, 0.25), 7, "{}")
    assert unpack(RankSample | Refusal, pack(RankSample | Refusal, Refusal("no"))) == Refusal("no")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, "1"),
        (int, 1.5),
        (str, None),
        (tuple[int, int], (1, 2, 3)),
        (int | str, 1.5),
        (dict[str, int], {1: 1}),
        (Point, (1, None)),
        (object, 1),
        (Callable[[], None], print),
    ],
)
def test_what_is_not_of_its_declared_type_is_not_sent(kind: object, value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        pack(kind, value)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_types_of_every_job_travel(job: Callable[..., object]) -> None:
    """An empty answer of each declared type is refused by its value, not by its type."""
    with pytest.raises(TypeError, match="cannot be sent"):
        pack(answer_type(job), object())


def test_the_arguments_of_a_call_arrive_by_parameter() -> None:
    def job(member: Member, number: int, *, point: Point = POINT, name: str = "x") -> None:
        del member, number, point, name

    assert unpack_call(job, pack_call(job, (3,), {"name": "y"})) == {
        "number": 3,
        "point": POINT,
        "name": "y",
    }
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"other": 1}), (("1",), {})):
        with pytest.raises(TypeError):
            pack_call(job, args, kwargs)


def test_broken_messages_are_refused_and_nothing_else_happens() -> None:
    kind = tuple[Whole, torch.Tensor, bytes]
    good = pack(kind, (WHOLE, TENSORS[0], b"blob"))
    draw = random.Random(7)
    refused = 0
    for _ in range(600):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 40)]
                case _:
                    data[at:at] = draw.choice((b"0", b"[", b"9" * 30, b"NaN", b"\0" * 9, b"-1"))
        try:
            unpack(kind, bytes(data))
        except ValueError:
            refused += 1
    assert refused > 300  # the others changed a digit, a letter or the content of a tensor
    for claim in (2**63, 2**28 + 1):  # longer than it is, longer than a text may be
        with pytest.raises(ValueError, match="must lie within"):
            unpack(kind, claim.to_bytes(8, "big") + good[8:])
    with pytest.raises(ValueError, match="broken"):
        unpack(list[int], pack(str, "[" * 100_000)[:8] + b"[" * 100_012)
