"""Lower bounds on the largest peak over all cuts, as a search asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.spec.models import Spec


class AnyFloors:
    """Floors of one model; nothing is known of a host whose bytes are not sums that are known without cuts."""

    def peak_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """Lower bound on peak memory over all cuts."""
        return 0

    def peak_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:  # noqa: ARG002
        """The same of a layout with a policy, whose spec is made only where it is needed."""
        return 0

    def shared_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """A smaller bound that takes less time."""
        return 0

    def least_on(self, mesh: LayoutChoice, policies: Sequence[MemoryPolicy], spec_of: SpecOf) -> int:  # noqa: ARG002
        """A smaller bound that takes less time, of the best of several policies, under any schedule."""
        return 0

    def kept_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """The bytes to order policies by: the thriftiest has the least."""
        return 0
