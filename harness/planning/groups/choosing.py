"""Groups for the documents of a pack: solved for, of given sizes, or as Megatron chooses."""

from collections.abc import Callable, Sequence

from harness.errors import UnsupportedError
from harness.plan.dealing import separate_documents
from harness.plan.problem import Problem
from harness.planning.groups.grouping import Grouping, Shared
from harness.planning.groups.megatron import megatron_groups
from harness.planning.groups.prices import GroupPrices
from harness.planning.groups.solving import grouping_s, most_tokens, solved_groups

_JUDGED = 2  # groupings that a clock chooses from, Megatron's besides


def even_share(problem: Problem) -> int:
    """Return how many tokens a rank has, at most, where all have equally many."""
    return -(-problem.seqlen_q // problem.cp)


def predicted_groups(
    problem: Problem,
    most: int,
    prices: GroupPrices,
    clock: Callable[[Grouping], float] | None,
) -> Grouping:
    """Return the grouping of the least predicted time, Megatron's among those compared.

    Args:
        problem: The problem; one document, or keys of another number, is one group.
        most: Tokens of a rank, at most.
        prices: What documents cost by formula.
        clock: Seconds of a grouping's plans; None leaves the choice to the formula.

    Raises:
        UnsupportedError: The tokens do not fit.
    """
    if (whole := _one_group(problem)) is not None:
        return whole
    found = solved_groups(problem, most, prices)[:_JUDGED]
    rival = scheduled_groups(problem, even_share(problem))
    if most_tokens(rival, problem.cp) <= most:
        found.append(rival)
    if clock is None:
        found.sort(key=lambda each: grouping_s(problem, each, prices))
    elif len(found) > 1:
        found.sort(key=clock)
    return _first(found, problem, most)


def sized_groups(
    problem: Problem, most: int, prices: GroupPrices, sizes: Sequence[int]
) -> Grouping:
    """Return documents in groups of given sizes, which divide the ranks in their order.

    Raises:
        UnsupportedError: The sizes do not sum to the ranks, or the tokens do not fit.
    """
    if sum(sizes) != problem.cp:
        raise UnsupportedError(
            f"groups ({'+'.join(map(str, sizes))}) must have the {problem.cp} ranks of cp "
            f"together, and have {sum(sizes)}",
            (f"groups={'+'.join(['1'] * problem.cp)}",),
        )
    whole = _one_group(problem)
    if whole is not None and problem.seqlen_q != problem.seqlen_kv:
        return whole
    return _first(solved_groups(problem, most, prices, sizes), problem, most)


def scheduled_groups(problem: Problem, most: int) -> Grouping:
    """Return the groups that Megatron's scheduler chooses.

    Args:
        problem: The problem; one document, or keys of another number, is one group.
        most: Tokens of one document on a rank, at most.

    Raises:
        UnsupportedError: All ranks together cannot take the longest document.
    """
    if (whole := _one_group(problem)) is not None:
        return whole
    documents, ranks = separate_documents(problem.pattern), problem.cp
    longest = max(map(len, documents))
    if longest > most * ranks:
        raise UnsupportedError(
            f"most ({most}) must let {ranks} ranks hold a document of {longest} tokens",
            (f"most={-(-longest // ranks)}",),
        )
    members = megatron_groups([len(each) for each in documents], ranks, most)
    return tuple(map(Shared, documents, members))


def _one_group(problem: Problem) -> Grouping | None:
    """Return all tokens shared by all ranks, where there are no documents to tell apart.

    Keys of another number than queries have none.
    """
    if problem.seqlen_q == problem.seqlen_kv and len(separate_documents(problem.pattern)) > 1:
        return None
    return (Shared(range(problem.seqlen_q), tuple(range(problem.cp))),)


def _first(found: Sequence[Grouping], problem: Problem, most: int) -> Grouping:
    if found:
        return found[0]
    raise UnsupportedError(
        f"most ({most}) must leave room on {problem.cp} ranks for {problem.seqlen_q} tokens, whose "
        f"even share is {even_share(problem)}",
        (f"most={2 * max(even_share(problem), most)}",),
    )
