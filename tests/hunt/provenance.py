"""A second proof, by another way: run a plan on sets of contributions instead of numbers.

Every value is looked at position by position and head by head. A value that is complete (q, out,
dk, ...) is there or not; a partial result is the set of contributions that it holds: key positions
in out, lse and dq, (query position, query head) in dk and dv, heads in y, (projection, head) in dx
and positions in a weight's gradient. A plan is right if nothing is read that was not written, no
contribution comes twice, results are made of all of them, and edges put every reader after what it
reads. Shares no code with `harness.verify`, `harness.execute` and the readiness rule.
"""

from collections.abc import Iterable, Iterator

from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import (
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    LinearOp,
    Memory,
    Merge,
    Piece,
    Place,
    Task,
    Tensor,
    Tile,
    Transfer,
)
from tests.hunt.truth import allowed_of

Spot = tuple[int, int]
"""(position, head)."""
Key = tuple[Place, Tensor, int]
"""(place, tensor, version)."""

T = Tensor
PARTS = {t for t in T if t.value.endswith("_part")}
BY_KEYS = {T.K, T.V, T.DK, T.DV, T.DK_PART, T.DV_PART}
WEIGHTS = {t for t in T if "w_" in t.value}
WEIGHTS_OF_KEYS = {t for t in WEIGHTS if t.value.removesuffix("_part")[-1] in "kv"}
HEADLESS = {T.X, T.Y, T.DX, T.DY, T.Y_PART, T.DX_PART}
STARTS = {
    (False, Direction.FORWARD): {T.Q, T.K, T.V},
    (False, Direction.BACKWARD): {T.Q, T.K, T.V, T.OUT, T.LSE, T.DELTA, T.DOUT},
    (True, Direction.FORWARD): {T.X, T.W_Q, T.W_K, T.W_V, T.W_O},
    (True, Direction.BACKWARD): {
        *(T.X, T.DY, T.W_Q, T.W_K, T.W_V, T.W_O, T.Q, T.K, T.V, T.OUT, T.LSE, T.DELTA)
    },
}
ENDS = {
    (False, Direction.FORWARD): (T.OUT,),
    (False, Direction.BACKWARD): (T.DQ, T.DK, T.DV),
    (True, Direction.FORWARD): (T.Y,),
    (True, Direction.BACKWARD): (T.DX, T.DW_Q, T.DW_K, T.DW_V, T.DW_O),
}
PROJECTIONS = {
    (T.X, T.W_Q): T.Q,
    (T.X, T.W_K): T.K,
    (T.X, T.W_V): T.V,
    (T.DY, T.W_O): T.DOUT,
}
TO_MODEL = {
    (T.OUT, T.W_O): T.Y_PART,
    (T.DQ, T.W_Q): T.DX_PART,
    (T.DK, T.W_K): T.DX_PART,
    (T.DV, T.W_V): T.DX_PART,
}
OF_WEIGHTS = {
    (T.X, T.DQ): T.DW_Q_PART,
    (T.X, T.DK): T.DW_K_PART,
    (T.X, T.DV): T.DW_V_PART,
    (T.OUT, T.DY): T.DW_O_PART,
}


class Wrong(Exception):  # noqa: N818  # a verdict
    """The plan computes something else, or reads what nobody wrote."""


def verdict(plan: Plan) -> str:
    """Say what is wrong with a plan; empty if it is right."""
    try:
        _Run(plan).run()
    except Wrong as reason:
        return str(reason) or "wrong"
    return ""


def _that(holds: object, reason: str) -> None:
    if not holds:
        raise Wrong(reason)


def _bits(number: int) -> list[int]:
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]


class _Run:
    def __init__(self, plan: Plan) -> None:
        problem = plan.problem
        self.plan, self.problem = plan, problem
        self.layer = problem.hidden is not None
        self.allowed = allowed_of(problem).tolist()
        self.held: dict[Key, dict[Spot, set[object]]] = {}
        self.index = -1
        self.before: list[int] = []  # per task, a bit set of all that come before it
        self.last: dict[tuple[Key, Spot], int] = {}  # who wrote it
        self.readers: dict[tuple[Key, Spot], list[int]] = {}

    def run(self) -> None:
        self.tables()
        starts = STARTS[self.layer, self.plan.direction]
        found = {piece.tensor for _, piece in self.plan.initial}
        _that(found <= starts, "starts from what it should compute")
        _that(self.layer == (T.X in found), "a layer starts from x, attention does not")
        for place, piece in self.plan.initial:
            self.create(place, piece.tensor, piece.version, self.spots(place, piece))
        for index, task in enumerate(self.plan.tasks):
            self.index = index
            _that(all(0 <= edge < index for edge in task.after), "waits for what is not before it")
            before = 0
            for edge in task.after:
                before |= self.before[edge] | 1 << edge
            self.before.append(before)
            self.task(task)
        self.end()

    def tables(self) -> None:
        for table, tokens in (
            (self.plan.q_chunks, self.problem.seqlen_q),
            (self.plan.kv_chunks, self.problem.seqlen_kv),
        ):
            listed = [position for chunk in table for position in chunk]
            _that(sorted(listed) == list(range(tokens)), "chunks are no cut of the sequence")
        _that(not self.layer or self.plan.q_chunks == self.plan.kv_chunks, "a layer cut twice")

    # What is where --------------------------------------------------------------------------

    def spots(self, place: Place, piece: Piece) -> list[Spot]:
        """Positions x heads of a piece in its storage order."""
        tensor, chunks, heads, _ = piece
        _that(0 <= place.rank < self.problem.cp, "lies on no rank")
        on_kv = tensor in BY_KEYS
        table = self.plan.kv_chunks if on_kv else self.plan.q_chunks
        if tensor in WEIGHTS:
            table, on_kv = (range(1),), tensor in WEIGHTS_OF_KEYS
        count = 1 if tensor in HEADLESS else self.heads(on_kv)
        _that(0 < heads < 1 << count, "names heads that are not there")
        _that(chunks and all(0 <= c < len(table) for c in chunks), "names no chunks")
        _that(len(set(chunks)) == len(chunks), "names a chunk twice")
        return [(at, head) for chunk in chunks for at in table[chunk] for head in _bits(heads)]

    def heads(self, on_kv: bool) -> int:
        return self.problem.heads_kv if on_kv else self.problem.heads_q

    def create(
        self, place: Place, tensor: Tensor, version: int, spots: Iterable[Spot], **of: object
    ) -> None:
        key = (place, tensor, version)
        cells = self.held.setdefault(key, {})
        values = of.get("values")
        for number, spot in enumerate(spots):
            _that(spot not in cells, f"{tensor} arrives over itself")
            cells[spot] = values[number] if isinstance(values, list) else set()
            self.last[key, spot] = self.index
            self.readers.pop((key, spot), None)

    def after(self, index: int) -> None:
        _that(index < 0 or self.before[self.index] >> index & 1, f"does not wait for task {index}")

    def look(self, place: Place, piece: Piece) -> list[Spot]:
        """Read a piece that is complete."""
        key, spots = (place, piece.tensor, piece.version), self.spots(place, piece)
        cells = self.held.get(key, {})
        for spot in spots:
            _that(spot in cells, f"{piece.tensor} is read where it is not")
            self.after(self.last[key, spot])
            self.readers.setdefault((key, spot), []).append(self.index)
        return spots

    def take(self, place: Place, piece: Piece, *, tolerant: bool = False) -> list[set[object]]:
        key, spots = (place, piece.tensor, piece.version), self.spots(place, piece)
        cells, found = self.held.get(key, {}), []
        for spot in spots:
            _that(tolerant or spot in cells, f"{piece.tensor} is taken where it is not")
            if spot in cells:
                self.after(self.last[key, spot])
                for reader in self.readers.get((key, spot), ()):
                    self.after(reader)
            found.append(cells.pop(spot, set()))
        return found

    def add(self, place: Place, tensor: Tensor, spot: Spot, more: set[object]) -> None:
        key = (place, tensor, 0)
        cells = self.held.setdefault(key, {})
        if spot in cells:
            if self.last[key, spot] != self.index:
                self.after(self.last[key, spot])
            _that(not cells[spot] & more, f"{tensor} gets a contribution twice")
        cells[spot] = cells.get(spot, set()) | more
        self.last[key, spot] = self.index

    # Tasks ----------------------------------------------------------------------------------

    def task(self, task: Task) -> None:
        match task:
            case Transfer():
                self.legs((task.leg,))
                return
            case Collective():
                self.legs(task.legs)
                return
            case Free():
                _that(task.pieces, "frees nothing")
                for piece in task.pieces:
                    _that(piece.tensor not in PARTS, "drops a partial result")
                    self.take(task.place, piece)
                return
        _that(task.place.memory is Memory.DEVICE, "computes on a host")
        match task:
            case Tile():
                self.tile(task)
            case Merge():
                self.merge(task)
            case Finish():
                self.finish(task)
            case Delta():
                self.delta(task)
            case Linear():
                self.linear(task)

    def legs(self, legs: tuple[Leg, ...]) -> None:
        _that(legs, "a transfer of nothing")
        coming: list[tuple[Leg, Piece, list[Spot], list[set[object]] | None]] = []
        for leg in legs:
            devices = leg.src.memory is Memory.DEVICE is leg.dst.memory
            _that(devices or leg.src.rank == leg.dst.rank, "reaches another rank's host")
            _that(leg.pieces, "a leg moves nothing")
            for piece in leg.pieces:
                if piece.tensor in PARTS:
                    values = self.take(leg.src, piece)
                    coming.append((leg, piece, self.spots(leg.src, piece), values))
                else:
                    coming.append((leg, piece, self.look(leg.src, piece), None))
        for leg, piece, spots, values in coming:
            _that(0 <= leg.dst.rank < self.problem.cp, "arrives on no rank")
            self.create(leg.dst, piece.tensor, leg.version, spots, values=values)

    def tile(self, tile: Tile) -> None:
        forward = tile.direction is Direction.FORWARD
        _that(tile.direction is self.plan.direction or (forward and self.layer), "the other way")
        reads = [piece.tensor for piece in tile.reads]
        own = [T.Q, T.K, T.V] + ([] if forward else [T.LSE, T.DOUT])
        last = [[]] if forward else [[T.OUT], [T.DELTA]]
        _that(reads in [own + end for end in last], "a tile reads other tensors")
        made = [T.OUT_PART, T.LSE_PART] if forward else [T.DQ_PART, T.DK_PART, T.DV_PART]
        _that([piece.tensor for piece in tile.writes] == made, "a tile writes other tensors")
        q, k = self.spots(tile.place, tile.reads[0]), self.spots(tile.place, tile.reads[1])
        _that({h // self.problem.group for _, h in q} == {h for _, h in k}, "other key heads")
        for piece in tile.reads:
            spots = self.look(tile.place, piece)
            _that(spots == (k if piece.tensor in BY_KEYS else q), "a tile's reads differ")
        for piece in tile.writes:
            spots = self.spots(tile.place, piece)
            _that(spots == (k if piece.tensor in BY_KEYS else q), "a tile's writes differ")
            _that(piece.version == 0, "a tile writes a copy")
        rows, columns = (list(dict.fromkeys(at for at, _ in side)) for side in (q, k))
        pairs = [(i, j) for i in rows for j in columns if self.allowed[i][j]]
        _that(pairs and len(pairs) == tile.area, "a tile's area is another")
        self.attend(tile.place, q, columns, pairs, forward=forward)

    def attend(
        self,
        place: Place,
        q: list[Spot],
        columns: list[int],
        pairs: list[tuple[int, int]],
        *,
        forward: bool,
    ) -> None:
        keys: dict[int, set[object]] = {}
        queries: dict[int, set[int]] = {}
        for i, j in pairs:
            keys.setdefault(i, set()).add(j)
            queries.setdefault(j, set()).add(i)
        heads = {head for _, head in q}
        for i, head in q:
            if forward:
                self.weighed(place, (i, head))
            for tensor in (T.OUT_PART, T.LSE_PART) if forward else (T.DQ_PART,):
                self.add(place, tensor, (i, head), keys.get(i, set()))
        if not forward:
            group = self.problem.group
            for j in columns:
                met = queries.get(j, set())
                for kv in {head // group for head in heads}:
                    more = {(i, head) for head in heads if head // group == kv for i in met}
                    self.add(place, T.DK_PART, (j, kv), set(more))
                    self.add(place, T.DV_PART, (j, kv), set(more))

    def weighed(self, place: Place, spot: Spot) -> None:
        """An output that grows is weighed by its own lse."""
        out = self.held.get((place, T.OUT_PART, 0), {}).get(spot)
        lse = self.held.get((place, T.LSE_PART, 0), {}).get(spot)
        _that(out == lse, "an output is weighed by the lse of another")

    def merge(self, task: Merge) -> None:
        _that(task.sources, "merges nothing")
        pieces = list(task.sources)
        _that(all(p.tensor in PARTS and p.version for p in pieces), "merges what did not arrive")
        while pieces:
            piece = pieces.pop(0)
            spots, values = self.spots(task.place, piece), self.take(task.place, piece)
            tensors = [piece.tensor]
            if piece.tensor in (T.OUT_PART, T.LSE_PART):
                other = pieces.pop(0) if pieces else piece
                pair = (piece.tensor, other.tensor) == (T.OUT_PART, T.LSE_PART)
                _that(pair and self.spots(task.place, other) == spots, "out without its lse")
                _that(self.take(task.place, other) == values, "weighed by the lse of another")
                tensors.append(other.tensor)
            for spot, more in zip(spots, values, strict=True):
                if len(tensors) > 1:
                    self.weighed(task.place, spot)
                for tensor in tensors:
                    self.add(task.place, tensor, spot, more)

    def wanted(self, tensor: Tensor, spot: Spot) -> set[object]:
        at, head = spot
        problem = self.problem
        if tensor in (T.OUT_PART, T.LSE_PART, T.DQ_PART):
            return {j for j, met in enumerate(self.allowed[at]) if met}
        if tensor in (T.DK_PART, T.DV_PART):
            heads = range(head * problem.group, (head + 1) * problem.group)
            return {(i, h) for h in heads for i, row in enumerate(self.allowed) if row[at]}
        if tensor is T.Y_PART:
            return set(range(problem.heads_q))
        if tensor is T.DX_PART:
            counts = {T.DQ: problem.heads_q, T.DK: problem.heads_kv, T.DV: problem.heads_kv}
            return {(of, h) for of, count in counts.items() for h in range(count)}
        return set(range(problem.seqlen_q))

    def finish(self, task: Finish) -> None:
        _that(task.parts, "finishes nothing")
        for piece in task.parts:
            _that(piece.tensor in PARTS, "finishes what is complete")
            spots = self.spots(task.place, piece)
            values = self.take(task.place, piece, tolerant=True)
            for spot, found in zip(spots, values, strict=True):
                _that(found == self.wanted(piece.tensor, spot), f"{piece.tensor} is not complete")
            self.create(task.place, T(piece.tensor.value[:-5]), piece.version, spots)

    def delta(self, task: Delta) -> None:
        _that((task.out.tensor, task.dout.tensor) == (T.OUT, T.DOUT), "delta of other tensors")
        spots = self.look(task.place, task.out)
        _that(self.look(task.place, task.dout) == spots, "delta of other rows")
        self.create(task.place, T.DELTA, task.out.version, spots)

    def linear(self, task: Linear) -> None:
        _that((len(task.reads), len(task.writes)) == (2, 1), "a product of other operands")
        left, right = task.reads
        pair, (made,) = (left.tensor, right.tensor), task.writes
        turns = {T.Q, T.K, T.DQ, T.DK} & {*pair, made.tensor}
        rotary = bool(turns) and self.problem.rotary is not None
        _that(task.rotary == rotary, "a product that is not rotated as its problem")
        spots = {piece: self.look(task.place, piece) for piece in task.reads}
        spots[made] = self.spots(task.place, made)
        tokens = {tuple(p.chunks) for p in spots if p.tensor not in WEIGHTS}
        heads = {p.heads for p in spots if p.tensor not in HEADLESS}
        _that(len(tokens) == len(heads) == 1, "a product of other rows")
        at = {position for p in spots if p.tensor not in WEIGHTS for position, _ in spots[p]}
        _that(made.tensor not in PARTS or made.version == 0, "a product adds to a copy")
        (bits,) = heads
        match task.op:
            case LinearOp.PROJECT | LinearOp.INPUT_GRAD if pair in PROJECTIONS:
                _that(PROJECTIONS[pair] is made.tensor, "a projection to another tensor")
                _that((made.tensor is T.DOUT) == (task.op is LinearOp.INPUT_GRAD), "another op")
                self.create(task.place, made.tensor, made.version, spots[made])
            case LinearOp.OUTPUT | LinearOp.INPUT_GRAD if pair in TO_MODEL:
                _that(TO_MODEL[pair] is made.tensor, "a product to another tensor")
                _that((made.tensor is T.Y_PART) == (task.op is LinearOp.OUTPUT), "another op")
                of = left.tensor
                more = {h if of is T.OUT else (of, h) for h in _bits(bits)}
                for spot in spots[made]:
                    self.add(task.place, made.tensor, spot, set(more))
            case LinearOp.WEIGHT_GRAD if pair in OF_WEIGHTS:
                _that(OF_WEIGHTS[pair] is made.tensor, "a gradient of another weight")
                for spot in spots[made]:
                    self.add(task.place, made.tensor, spot, set(at))
            case _:
                raise Wrong("no product of a layer")

    # The end --------------------------------------------------------------------------------

    def end(self) -> None:
        promised: dict[tuple[Key, Spot], int] = {}
        for place, piece in self.plan.outputs:
            for spot in self.spots(place, piece):
                key = ((place, piece.tensor, piece.version), spot)
                promised[key] = promised.get(key, 0) + 1
        for place, piece in (*self.plan.outputs, *self.plan.saved):
            cells = self.held.get((place, piece.tensor, piece.version), {})
            _that(set(self.spots(place, piece)) <= cells.keys(), f"{piece.tensor} is not there")
        for result in ENDS[self.layer, self.plan.direction]:
            self.result(result, promised)
        for key, cells in self.held.items():
            for spot in cells:
                _that(key[1] not in PARTS or (key, spot) in promised, f"{key[1]} is left over")

    def result(self, result: Tensor, promised: dict[tuple[Key, Spot], int]) -> None:
        part = T(result.value + "_part")
        for spot in self.whole(result):
            ends = [n for ((_, t, _), at), n in promised.items() if t is result and at == spot]
            sums = [
                (n, self.held[key][at])
                for (key, at), n in promised.items()
                if key[1] is part and at == spot
            ]
            if not sums:
                _that(ends == [1], f"{result} does not end once")
                continue
            _that(not ends and result in WEIGHTS, f"{result} ends whole and in parts")
            found = [contribution for n, value in sums for contribution in list(value) * n]
            _that(len(found) == len(set(found)), f"{result} has a contribution twice")
            _that(set(found) == self.wanted(part, spot), f"{result} is not complete")

    def whole(self, tensor: Tensor) -> Iterator[Spot]:
        problem = self.problem
        on_kv = tensor in BY_KEYS | WEIGHTS_OF_KEYS
        tokens = problem.seqlen_kv if on_kv else problem.seqlen_q
        heads = 1 if tensor in HEADLESS else self.heads(on_kv)
        for at in range(1 if tensor in WEIGHTS else tokens):
            yield from ((at, head) for head in range(heads))
