"""A strategy with its options: how it is spelled, and its plans of attention or of whole layers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import without_collection
from harness.plan.tasks import Scope
from harness.planning.checkpoint import Checkpoint, checkpointed, fetching, offloaded, recomputing
from harness.planning.closed_forms import Volume
from harness.planning.layers.layer import as_layer, check_layer, with_summed_gradients
from harness.planning.options import LAYER_OPTIONS, Common, options_of, shown
from harness.planning.strategy import Context, Strategy


@dataclass(frozen=True, slots=True)
class Chosen:
    """A strategy with its options, as a user spelled it.

    Attributes:
        strategy: The strategy.
        options: Its own options, of the class of its defaults.
        common: The options that every strategy takes.
    """

    strategy: Strategy[Any]
    options: Any
    common: Common = Common()

    @property
    def text(self) -> str:
        """Canonical spelling: the name, then the options that differ from the defaults."""
        own = list(_changed(self.options, self.strategy.defaults, self.strategy.mesh))
        common = list(_changed(self.common, Common()))
        # How long a search looks comes last; plans and records are named so.
        parts = own + common if self.strategy.report is None else common + own
        return self.strategy.name + (":" + ",".join(parts) if parts else "")

    @property
    def needs_layer(self) -> bool:
        """Whether the strategy, or an option that is set, applies to whole layers only."""
        return self.strategy.layers_only or self._has_layer_options

    @property
    def _has_layer_options(self) -> bool:
        return any(getattr(self.common, n) != getattr(Common(), n) for n in LAYER_OPTIONS)

    def resolved(
        self, problem: Problem, direction: Direction, context: Context | None = None
    ) -> "Chosen":
        """Fill in the options that are left to the strategy, as its plan does.

        Raises:
            UnsupportedError: The strategy cannot do this problem.
        """
        resolve = self.strategy.resolve
        if resolve is None:
            return self
        filled = resolve(self._asked(problem), direction, self.options, context or Context())
        return replace(self, options=filled)

    def volume(
        self, problem: Problem, direction: Direction, context: Context | None = None
    ) -> Volume | None:
        """Return the bytes that each rank receives, by formula; None without a closed form."""
        known = self.strategy.volume
        if known is None:
            return None
        return known(self._asked(problem), direction, self.options, context or Context())

    def plan(self, problem: Problem, direction: Direction, context: Context | None = None) -> Plan:
        """Plan a problem; see `Strategy.plan`.

        A problem with a model width is a layer: where the strategy plans attention alone, its
        projections are planned around it.
        """
        context = self._told(context)
        layer = problem.hidden is not None
        problem = self._asked(problem)
        if self._has_layer_options and not layer:
            raise UnsupportedError(
                f"{self.text}: {', '.join(LAYER_OPTIONS)} only apply to whole layers",
                ("--scope layer",),
            )
        with without_collection():
            if not layer:
                return self.strategy.plan(problem, direction, self.options, context, self.text)
            check_layer(problem, self.text)
            if direction is Direction.FORWARD:
                return self._forward(problem, context)
            return self._backward(problem, context)

    def _told(self, context: Context | None) -> Context:
        """The context, with what the options say of it."""
        context, align = context or Context(), self.common.align
        return context if context.align == align else replace(context, align=align)

    def _asked(self, problem: Problem) -> Problem:
        """The problem, with what the options say of it."""
        return replace(problem, round_sent=self.common.round_sent)

    def _layer(self, problem: Problem, direction: Direction, context: Context) -> Plan:
        plan = self.strategy.plan(problem, direction, self.options, context, self.text)
        return as_layer(plan) if plan.scope is Scope.ATTENTION else plan

    def _forward(self, problem: Problem, context: Context) -> Plan:
        """Plan a layer that saves what the options say, where they say."""
        plan = self._layer(problem, Direction.FORWARD, context)
        plan = checkpointed(plan, self.common.checkpoint)
        return offloaded(plan) if self.common.offload else plan

    def _backward(self, problem: Problem, context: Context) -> Plan:
        """Plan the backward of a layer from what was saved, and sum what is to be summed."""
        common, plan = self.common, self._layer(problem, Direction.BACKWARD, context)
        if common.checkpoint is not Checkpoint.NONE:
            forward = self._layer(problem, Direction.FORWARD, context)
            plan = recomputing(forward, plan, common.checkpoint)
        if common.offload:
            plan = fetching(plan)
        return with_summed_gradients(plan) if common.sum_gradients else plan


def _changed(
    options: object, defaults: object, mesh: tuple[str, str] | None = None
) -> Iterator[str]:
    """Spell the options that differ from the defaults; a mesh first, as it is typed."""
    degrees = [getattr(options, name) for name in mesh or ()]
    together = all(degrees) and mesh is not None
    if together:
        yield "x".join(map(str, degrees))
    for name in options_of(options):
        value = getattr(options, name)
        if value != getattr(defaults, name) and not (together and name in (mesh or ())):
            yield f"{name}={shown(value)}"
