"""One call of a group's ranks: what its two directions have in common besides tensors."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.attention.agreement import Facts, Word, compare_calls, digest_of, telling
from harness.attention.ready import Ready, ready_plan
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of attention: all that a rank needs to run either direction.

    Attributes:
        strategy: Who computes what and who sends what.
        problem: The problem that all ranks' tensors describe.
        context: Facts of the cluster for the planner.
        owners: Who owns which query tokens, and which key tokens.
        rank: This rank in the group.
        group: The process group; None = this process is alone.
        lse: The forward plan ends with lse at the owners of the queries, too.
        beside: What ranks must have in common that no plan says.
    """

    strategy: Chosen
    problem: Problem
    context: Context
    owners: Owners
    rank: int
    group: dist.ProcessGroup | None
    lse: bool = False
    beside: Facts = ()

    def sharding(self, *, keys: bool) -> Sharding:
        """Return who owns which query tokens, or key tokens."""
        return self.owners[1 if keys else 0]

    def ready(self, direction: Direction, wider: int = 0) -> Ready:
        """Return the plan of all ranks, once they have found that it is the same. A collective.

        Args:
            direction: Which pass.
            wider: Columns that v, out and their gradients have besides their own.

        Raises:
            UnsupportedError: Autograd records the backward pass, for gradients of gradients; or the
                strategy cannot do this problem.
            PlanError: The ranks make other calls, or the plan is wrong.
        """
        with telling(self.group):
            if direction is Direction.BACKWARD:
                self._refuse_second_gradient()
            ready = self.planned(direction, wider)
        facts = (*ready.facts, *self.beside)
        compare_calls(
            self.group, Word.RUN, facts, digest_of(facts) if self.beside else ready.digest
        )
        return ready

    def planned(self, direction: Direction, wider: int = 0) -> Ready:
        """Return the plan as this rank makes it, proved; it is remembered. Communicates nothing.

        Raises:
            UnsupportedError, PlanError: As `ready`.
        """
        lse = self.lse and direction is Direction.FORWARD
        asked = (self.strategy, self.problem, direction, self.context, self.owners)
        return ready_plan(*asked, lse=lse, wider=wider) if lse or wider else ready_plan(*asked)

    def _refuse_second_gradient(self) -> None:
        if torch.is_grad_enabled():
            layer = self.problem.hidden is not None
            raise UnsupportedError(
                f"attention{'_layer' if layer else ''}: the gradient has no gradient of its own, "
                "and create_graph=True asks for one",
                ("create_graph=False", *(() if layer else ("attention written out, at cp = 1",))),
            )
